// Attention: splits over pages, and their merge. The query heads of a KV head are the n side of the mma, so K and V are
// read once for all of them. A page of K holds 16-token tiles by k-blocks of the head, a page of V holds 16-token blocks
// by 16-value tiles of the head, both as A fragments (see docs/format.md).
#pragma once
#include "consumer.cuh"

namespace mkc {

constexpr float kLog2e = 1.4426950408889634f;

// Puts a packet of the new token's K, of k-block `tile`, in place `slot` of a page or of a chunk that holds it.
__device__ __forceinline__ void write_key(uint8_t* keys, int slot, int tile, int part, uint4 packet) {
  uint32_t* words = reinterpret_cast<uint32_t*>(keys) + ((slot / 16 * kHeadTiles + tile) * 32 + slot % 8 * 4 + part) * 4 + slot % 16 / 8;
  words[0] = packet.x, words[2] = packet.y;
}
// The same for V: four values of tile `tile`.
__device__ __forceinline__ void write_value(uint8_t* values, int slot, int tile, int part, uint4 packet) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(values) + ((slot / 16 * kHeadTiles + tile) * 32 + part * 8 + slot % 8 / 2) * 8 + slot % 16 / 8 * 4 + slot % 2;
  halves[0] = uint16_t(packet.x), halves[2] = uint16_t(packet.x >> 16);
  halves[32] = uint16_t(packet.y), halves[34] = uint16_t(packet.y >> 16);
}

// Running softmax of one split: lane (i, j) has heads 2j and 2j + 1 of the group. Scores are in units of log2.
struct SoftmaxState {
  float maximum[2] = {-infinity(), -infinity()};
  float sum[2] = {};                 // this lane's tokens only
  float values[kHeadTiles][4] = {};  // of dimensions 2i and 2i + 1 of each tile, not yet divided by the sum
};

// 16-token tiles that are attended to at once.
constexpr int kBlockTiles = kTileChunk < 2 ? kTileChunk : 2;

// A block of tokens from `token` on, of which those in [oldest, position] are seen: some tiles of a chunk of K, and the
// same tokens' of V.
__device__ __forceinline__ void attend_block(SoftmaxState& state, const uint2 (&query)[kHeadTiles], const uint4* keys, const uint4* values, int token, int oldest, int position) {
  const int lane = fresh_thread_index() % 32, i = lane / 4, j = lane % 4;
  float score[kBlockTiles][4];
#pragma unroll
  for (int tile = 0; tile < kBlockTiles; tile++) {
    float partial[2][4] = {};
#pragma unroll
    for (int base = 0; base < kHeadTiles; base += 4) {
      uint4 a[4];
#pragma unroll
      for (int u = 0; u < 4; u++) a[u] = load_fragment(keys + (tile * kHeadTiles + base + u) * 32 + lane);
#pragma unroll
      for (int u = 0; u < 4; u++) mma_16x8x16(partial[u % 2], a[u], query[base + u]);
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const int at = token + tile * 16 + i + q / 2 * 8;
      score[tile][q] = at < oldest || at > position ? -infinity() : partial[0][q] + partial[1][q];
    }
  }

  const float scale = kLog2e * rsqrtf(float(kHeadDim));
  float shrink[2];
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float maximum = -infinity();
#pragma unroll
    for (int tile = 0; tile < kBlockTiles; tile++) maximum = fmaxf(maximum, fmaxf(score[tile][c], score[tile][c + 2]));
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, offset));
    const float before = state.maximum[c];
    state.maximum[c] = fmaxf(before, maximum * scale);
    shrink[c] = exp2_approx(before - state.maximum[c]);
    state.sum[c] *= shrink[c];
  }
  uint2 probability[kBlockTiles];
#pragma unroll
  for (int tile = 0; tile < kBlockTiles; tile++) {
    float p[4];
#pragma unroll
    for (int q = 0; q < 4; q++) p[q] = exp2_approx(score[tile][q] * scale - state.maximum[q % 2]);
    state.sum[0] += p[0] + p[2], state.sum[1] += p[1] + p[3];
    probability[tile] = make_uint2(transpose_8x8(pack_bf16(p[0], p[1])), transpose_8x8(pack_bf16(p[2], p[3])));
  }
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; tile++)
#pragma unroll
    for (int q = 0; q < 4; q++) state.values[tile][q] *= shrink[q % 2];

#pragma unroll
  for (int block = 0; block < kBlockTiles; block++) {
    uint32_t mask[2] = {};  // keeps tokens of this lane's columns that are seen: what was never written must not count
#pragma unroll
    for (int half = 0; half < 4; half++) {
      const int at = token + block * 16 + half / 2 * 8 + 2 * j + half % 2;
      if (at >= oldest && at <= position) mask[half / 2] |= half % 2 ? 0xffff0000u : 0xffffu;
    }
#pragma unroll
    for (int base = 0; base < kHeadTiles; base += 4) {
      uint4 a[4];
#pragma unroll
      for (int u = 0; u < 4; u++) a[u] = load_fragment(values + (block * kHeadTiles + base + u) * 32 + lane);
#pragma unroll
      for (int u = 0; u < 4; u++) {
        a[u].x &= mask[0], a[u].y &= mask[0], a[u].z &= mask[1], a[u].w &= mask[1];
        mma_16x8x16(state.values[base + u], a[u], probability[block]);
      }
    }
  }
}

// Hands this warp's part of a split to the warp that finishes it, through scratch, as the lanes hold it.
template <class Warp>
__device__ __forceinline__ void lend_state(Warp& self, const SoftmaxState& state, int split) {
  float4* words = reinterpret_cast<float4*>(self.scratch());
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; tile++) words[tile * 32 + self.lane] = make_float4(state.values[tile][0], state.values[tile][1], state.values[tile][2], state.values[tile][3]);
  words[kHeadTiles * 32 + self.lane] = make_float4(state.maximum[0], state.maximum[1], state.sum[0], state.sum[1]);
  __syncwarp();
  if (self.lane == 0) store_release(&self.shared.lent[self.warp], split);
  __syncwarp();
}
// Adds the part that another warp lends.
template <class Warp>
__device__ __forceinline__ void absorb_state(Warp& self, SoftmaxState& state, int split, int lender) {
  self.patience.wait(kWaitWarps, [&] { return load_acquire(&self.shared.lent[lender]) == split; });
  const uint4* words = reinterpret_cast<const uint4*>(self.shared.scratch[lender]);
  const uint4 other = words[kHeadTiles * 32 + self.lane];
  float own_scale[2], other_scale[2];
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const float other_maximum = __uint_as_float(c ? other.y : other.x), maximum = fmaxf(state.maximum[c], other_maximum);
    own_scale[c] = exp2_approx(state.maximum[c] - maximum), other_scale[c] = exp2_approx(other_maximum - maximum);
    state.maximum[c] = maximum;
    state.sum[c] = state.sum[c] * own_scale[c] + __uint_as_float(c ? other.w : other.z) * other_scale[c];
  }
#pragma unroll
  for (int base = 0; base < kHeadTiles; base += 4) {
    uint4 value[4];
#pragma unroll
    for (int u = 0; u < 4; u++) value[u] = load_fragment(words + (base + u) * 32 + self.lane);
#pragma unroll
    for (int u = 0; u < 4; u++) {
      float* sums = state.values[base + u];
      sums[0] = sums[0] * own_scale[0] + __uint_as_float(value[u].x) * other_scale[0];
      sums[1] = sums[1] * own_scale[1] + __uint_as_float(value[u].y) * other_scale[1];
      sums[2] = sums[2] * own_scale[0] + __uint_as_float(value[u].z) * other_scale[0];
      sums[3] = sums[3] * own_scale[1] + __uint_as_float(value[u].w) * other_scale[1];
    }
  }
  __syncwarp();
  if (self.lane == 0) store_release(&self.shared.taken[lender], split);
}

// One split of one row under one KV head: `pairs` pairs of chunks, the first with number `number` and for `first_warp`,
// the next for the warps after it. The warp of the last pair, which has the new token if any has, finishes the split.
template <class Warp>
__device__ __forceinline__ void attend(Warp& self, const Entry& entry, const AttentionUnit& unit, const ChunkSpan& chunks, int number, int first_warp) {
  const int pairs = chunks.end - chunks.begin, mine = (self.warp - first_warp) & (kConsumerWarps - 1);
  if (mine >= pairs) return;
  const int split = entry.layer * kMaxRows + unit.row + 1;  // numbers this SM's splits of a step in order
  const bool finishes = ((first_warp + pairs - 1 - self.warp) & (kConsumerWarps - 1)) == 0, has_fresh = finishes && unit.is_last;
  const Layer& layer = kLayerTable[entry.layer];
  const int position = self.shared.position[unit.row], lane = self.lane, epoch = self.epoch(entry.layer);
  // A packet of the queries is what a lane takes of a B fragment; its columns are the heads of the group.
  uint2 query[kHeadTiles];
#pragma unroll
  for (int k = 0; k < kHeadTiles; k++) query[k] = make_uint2(0, 0);
  gather_packets<kHeadTiles>(
      self.patience, epoch,
      [&](int u) { return self.i < kGroup ? qkv_packet(entry.layer, (unit.kv_head * kGroup + self.i) * kHeadTiles + u, unit.row) + self.j : -1; },
      [&](int u, uint4 packet) { query[u] = make_uint2(packet.x, packet.y); });

  SoftmaxState state;
  const int oldest = first_token(position, layer.window);
#pragma unroll 1
  for (int pair = mine; pair < pairs; pair += kConsumerWarps) {
    const int first = (chunks.begin + pair) * kChunkTokens, chunk = number + 2 * pair;
    const uint4 *keys = self.ring.wait(chunk), *values = self.ring.wait(chunk + 1);
    if (has_fresh && pair == pairs - 1) {
      // The page has the new token only from the next step on: into the chunk it goes now, and into the page.
      const KvGroup& group = self.step.kv[layer.kv_group];
      uint8_t* page = page_address(self.step, layer, group.table[unit.row * group.pitch + position / kPageTokens], unit.kv_head, 0);
      constexpr int kTokenLoads = (2 * kHeadTiles * kParcelPackets + 31) / 32;
      gather_packets<kTokenLoads>(
          self.patience, epoch,
          [&](int u) {
            const int tile = u * 8 + self.i, first_tile = (kQueryHeads + unit.kv_head) * kHeadTiles;
            return tile < 2 * kHeadTiles ? qkv_packet(entry.layer, first_tile + tile + (tile < kHeadTiles ? 0 : (kKvHeads - 1) * kHeadTiles), unit.row) + self.j : -1;
          },
          [&](int u, uint4 packet) {
            const int tile = u * 8 + self.i;
            uint8_t* chunk = reinterpret_cast<uint8_t*>(const_cast<uint4*>(tile < kHeadTiles ? keys : values));
            if (tile < kHeadTiles) {
              write_key(chunk, position % kChunkTokens, tile, self.j, packet);
              write_key(page, position % kPageTokens, tile, self.j, packet);
            } else {
              write_value(chunk, position % kChunkTokens, tile - kHeadTiles, self.j, packet);
              write_value(page + kPageBytes, position % kPageTokens, tile - kHeadTiles, self.j, packet);
            }
          });
      async_proxy_fence();
      __syncwarp();
    }
#pragma unroll 1
    for (int tile = 0; tile < kTileChunk; tile += kBlockTiles) {
      const int token = first + tile * 16;
      if (token + kBlockTiles * 16 > oldest && token <= position) attend_block(state, query, keys + tile * kHeadTiles * 32, values + tile * kHeadTiles * 32, token, oldest, position);
    }
    self.ring.release(chunk, kConsumerWarps);
    self.ring.release(chunk + 1, kConsumerWarps);
  }

#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    state.sum[0] += __shfl_xor_sync(kAllLanes, state.sum[0], offset);
    state.sum[1] += __shfl_xor_sync(kAllLanes, state.sum[1], offset);
  }
  if (!finishes) {
    lend_state(self, state, split);
    return;
  }
#pragma unroll 1
  for (int n = min(pairs, kConsumerWarps) - 1; n > 0; n--) absorb_state(self, state, split, (self.warp - n) & (kConsumerWarps - 1));
  // Through scratch, head by head, to packets: of each head and part its maximum, its sum and 32 values.
  static_assert(kGroup * (kHeadDim + 2) <= kStateWords, "scratch does not hold a split");
  uint32_t* words = self.scratch();
  float* split_words = reinterpret_cast<float*>(words);
  __syncwarp();
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float* head = split_words + (2 * self.j + c) * (kHeadDim + 2);
    if (2 * self.j + c < kGroup) {
      if (self.i == 0) *reinterpret_cast<float2*>(head) = make_float2(state.maximum[c], state.sum[c]);
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; tile++) *reinterpret_cast<float2*>(head + 2 + tile * 16 + 2 * self.i) = make_float2(state.values[tile][c], state.values[tile][2 + c]);
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int n = lane; n < kGroup * kMergeParts * kPartialPackets; n += 32) {
    const int head = n / (kMergeParts * kPartialPackets), part = n / kPartialPackets % kMergeParts, at = n % kPartialPackets;
    const uint32_t* word = words + head * (kHeadDim + 2) + (at ? part * kMergeDims : 0) + at * 3;
    const uint32_t third = at ? word[2] : words[head * (kHeadDim + 2) + part * kMergeDims + 2];
    const bool full = at < kPartialPackets - 1;  // the last packet holds one value
    store_packet(self.step, partial_packet(entry.layer, unit.row, unit.kv_head * kGroup + head, part, unit.split) + at, word[0], full ? word[1] : 0, full ? third : 0, epoch);
  }
  __syncwarp();
}

// ATTENTION: this SM's splits of all rows.
template <class Warp>
__device__ __forceinline__ void attention(Warp& self, const Entry& entry) {
  int first_warp = entry.warp;
  for_attention_units(entry.tile, self.shared.position, self.step.rows, kLayerTable[entry.layer].window, [&](const AttentionUnit& unit) {
    const ChunkSpan chunks = chunk_span(unit, self.shared.position[unit.row], kLayerTable[entry.layer].window);
    attend(self, entry, unit, chunks, self.ring.next, first_warp);
    self.ring.next += 2 * (chunks.end - chunks.begin);
    first_warp += chunks.end - chunks.begin;
  });
}

}  // namespace mkc
