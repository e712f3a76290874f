// Attention: splits over pages, and their merge. The query heads of a KV head are the n side of the mma, so K and V are
// read once for all of them. A page of K holds 16-token tiles by k-blocks of the head, a page of V holds 16-token blocks
// by 16-value tiles of the head, both as A fragments (see docs/format.md).
#pragma once
#include "consumer.cuh"

namespace mkc {

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ uint8_t* page_address(const Step& step, const Layer& layer, int block, int kv_head, int is_value) {
  return step.kv[layer.kv_group].pool + uint64_t(block) * layer.kv_block_bytes + layer.kv_offset + (kv_head * 2 + is_value) * kPageBytes;
}

// The new token's K and V, which come as packets: the page has them only from the next step on.
struct NewToken {
  const uint32_t *key, *value;  // words of their parcels, in scratch
  int slot;                     // in its page

  // Puts the key into a fragment of the page, as if it had been read from there.
  __device__ __forceinline__ void patch_key(uint4& a, int tile, int k_block, int i, int j) const {
    if (slot % kChunkTokens / 16 != tile || slot % 8 != i) return;
    const uint2 words = *reinterpret_cast<const uint2*>(key + k_block * kWordsPerParcel + 2 * j);
    if (slot % 16 < 8) a.x = words.x, a.z = words.y;
    else a.y = words.x, a.w = words.y;
  }
  __device__ __forceinline__ void patch_value(uint4& a, int block, int tile, int i, int j) const {
    if (slot % kChunkTokens / 16 != block || slot % 8 / 2 != j) return;
    const uint32_t word = value[tile * kWordsPerParcel + i];
    const uint32_t keep = slot % 2 ? 0xffffu : 0xffff0000u, low = slot % 2 ? word << 16 : word & 0xffffu, high = slot % 2 ? word & 0xffff0000u : word >> 16;
    if (slot % 16 < 8) a.x = (a.x & keep) | low, a.y = (a.y & keep) | high;
    else a.z = (a.z & keep) | low, a.w = (a.w & keep) | high;
  }
  // Writes both into the page, for later steps.
  __device__ __forceinline__ void write(uint8_t* key_page, uint8_t* value_page, int lane) const {
    uint32_t* keys = reinterpret_cast<uint32_t*>(key_page);
    for (int n = lane; n < kHeadTiles * 4; n += 32) {
      const int k_block = n / 4, j = n % 4;
      uint32_t* words = keys + ((slot / 16 * kHeadTiles + k_block) * 32 + slot % 8 * 4 + j) * 4 + slot % 16 / 8;
      words[0] = key[k_block * kWordsPerParcel + 2 * j], words[2] = key[k_block * kWordsPerParcel + 2 * j + 1];
    }
    uint16_t* values = reinterpret_cast<uint16_t*>(value_page);
    for (int n = lane; n < kHeadTiles * 8; n += 32) {
      const int tile = n / 8, i = n % 8;
      uint16_t* halves = values + ((slot / 16 * kHeadTiles + tile) * 32 + i * 4 + slot % 8 / 2) * 8 + slot % 16 / 8 * 4 + slot % 2;
      const uint32_t word = value[tile * kWordsPerParcel + i];
      halves[0] = uint16_t(word), halves[2] = uint16_t(word >> 16);
    }
  }
};

// Running softmax of one split: lane (i, j) has heads 2j and 2j + 1 of the group. Scores are in units of log2.
struct SoftmaxState {
  float maximum[2] = {-infinity(), -infinity()};
  float sum[2] = {};                 // this lane's tokens only
  float values[kHeadTiles][4] = {};  // of dimensions 2i and 2i + 1 of each tile, not yet divided by the sum
};

// One chunk of K and the same tokens' chunk of V, numbers `number` and the next. EDGE: some of its tokens are outside of
// [oldest, position], or the new one is among them.
template <bool EDGE, class Warp>
__device__ __forceinline__ void attend_chunk(Warp& self, SoftmaxState& state, const uint2 (&query)[kHeadTiles], int number, int first, int oldest, int position, const NewToken& fresh, bool has_fresh) {
  const int i = self.i, j = self.j, lane = self.lane;
  float score[kTileChunk][4];
  const uint4* keys = self.ring.wait(number);
#pragma unroll
  for (int tile = 0; tile < kTileChunk; tile++) {
    float partial[2][4] = {};
#pragma unroll
    for (int k = 0; k < kHeadTiles; k++) {
      uint4 a = keys[(tile * kHeadTiles + k) * 32 + lane];
      if (EDGE && has_fresh) fresh.patch_key(a, tile, k, i, j);
      mma_16x8x16(partial[k % 2], a, query[k]);
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
      score[tile][q] = partial[0][q] + partial[1][q];
      if (EDGE) {
        const int token = first + tile * 16 + i + q / 2 * 8;
        if (token < oldest || token > position) score[tile][q] = -infinity();
      }
    }
  }
  self.ring.release(number);

  const float scale = kLog2e * rsqrtf(float(kHeadDim));
  float shrink[2];
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float maximum = -infinity();
#pragma unroll
    for (int tile = 0; tile < kTileChunk; tile++) maximum = fmaxf(maximum, fmaxf(score[tile][c], score[tile][c + 2]));
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, offset));
    const float before = state.maximum[c];
    state.maximum[c] = fmaxf(before, maximum * scale);
    shrink[c] = exp2_approx(before - state.maximum[c]);
    state.sum[c] *= shrink[c];
  }
  uint2 probability[kTileChunk];
#pragma unroll
  for (int tile = 0; tile < kTileChunk; tile++) {
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

  const uint4* values = self.ring.wait(number + 1);
#pragma unroll
  for (int block = 0; block < kTileChunk; block++) {
    uint32_t mask[2] = {};  // keeps tokens of this lane's columns that may be seen: what was never written must not count
    if (EDGE) {
#pragma unroll
      for (int half = 0; half < 4; half++) {
        const int token = first + block * 16 + half / 2 * 8 + 2 * j + half % 2;
        if (token >= oldest && token <= position) mask[half / 2] |= half % 2 ? 0xffff0000u : 0xffffu;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; tile++) {
      uint4 a = values[(block * kHeadTiles + tile) * 32 + lane];
      if (EDGE) {
        if (has_fresh) fresh.patch_value(a, block, tile, i, j);
        a.x &= mask[0], a.y &= mask[0], a.z &= mask[1], a.w &= mask[1];
      }
      mma_16x8x16(state.values[tile], a, probability[block]);
    }
  }
  self.ring.release(number + 1);
}

// One split of one row under one KV head; its first chunk has number `number`.
template <class Warp>
__device__ __forceinline__ void attend(Warp& self, const Entry& entry, const AttentionUnit& unit, int number) {
  const Layer& layer = kLayerTable[entry.layer];
  const int position = self.shared.position[unit.row], lane = self.lane, epoch = self.epoch(entry.layer);
  uint32_t* words = self.scratch();
  constexpr int kQueryPackets = kGroup * kHeadTiles * kParcelPackets, kFreshPackets = 2 * kHeadTiles * kParcelPackets;
  const auto keep = [&](int parcel, int part, uint4 packet) {
    uint32_t* word = words + parcel * kWordsPerParcel + part * 3;
    word[0] = packet.x, word[1] = packet.y;
    if (part < 2) word[2] = packet.z;
  };
  gather_packets<(kQueryPackets + 31) / 32>(
      self.patience, epoch,
      [&](int n) { return n < kQueryPackets ? qkv_packet(entry.layer, unit.kv_head * kGroup * kHeadTiles + n / kParcelPackets, unit.row) + n % kParcelPackets : -1; },
      [&](int n, uint4 packet) { keep(n / kParcelPackets, n % kParcelPackets, packet); });
  if (unit.is_last)
    gather_packets<(kFreshPackets + 31) / 32>(
        self.patience, epoch,
        [&](int n) {
          const int tile = n / kParcelPackets, key_tile = kQueryHeads * kHeadTiles + unit.kv_head * kHeadTiles + tile;
          return n < kFreshPackets ? qkv_packet(entry.layer, key_tile + (tile < kHeadTiles ? 0 : (kKvHeads - 1) * kHeadTiles), unit.row) + n % kParcelPackets : -1;
        },
        [&](int n, uint4 packet) { keep(kGroup * kHeadTiles + n / kParcelPackets, n % kParcelPackets, packet); });
  __syncwarp();
  uint2 query[kHeadTiles];
#pragma unroll
  for (int k = 0; k < kHeadTiles; k++) {
    query[k] = make_uint2(0, 0);
    if (self.i < kGroup) query[k] = *reinterpret_cast<const uint2*>(words + (self.i * kHeadTiles + k) * kWordsPerParcel + 2 * self.j);
  }
  const uint32_t* key = words + kGroup * kHeadTiles * kWordsPerParcel;
  const NewToken fresh{key, key + kHeadTiles * kWordsPerParcel, position % kPageTokens};

  SoftmaxState state;
  const int oldest = first_token(position, layer.window);
  const ChunkSpan chunks = chunk_span(unit, position, layer.window);
  for (int chunk = chunks.begin; chunk < chunks.end; chunk++, number += 2) {
    const int first = chunk * kChunkTokens;
    const bool has_fresh = chunk == position / kChunkTokens;
    if (first < oldest || has_fresh) attend_chunk<true>(self, state, query, number, first, oldest, position, fresh, has_fresh);
    else attend_chunk<false>(self, state, query, number, first, oldest, position, fresh, false);
  }
  if (unit.is_last) {
    const KvGroup& group = self.step.kv[layer.kv_group];
    const int block = group.table[unit.row * group.pitch + position / kPageTokens];
    fresh.write(page_address(self.step, layer, block, unit.kv_head, 0), page_address(self.step, layer, block, unit.kv_head, 1), lane);
  }

#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    state.sum[0] += __shfl_xor_sync(kAllLanes, state.sum[0], offset);
    state.sum[1] += __shfl_xor_sync(kAllLanes, state.sum[1], offset);
  }
  constexpr int kPitch = 3 * kPartialPackets;
#pragma unroll
  for (int part = 0; part < kMergeParts; part++) {
    __syncwarp();
#pragma unroll
    for (int c = 0; c < 2; c++) {
      uint32_t* word = words + (2 * self.j + c) * kPitch;
      if (self.i == 0) word[0] = __float_as_uint(state.maximum[c]), word[1] = __float_as_uint(state.sum[c]);
#pragma unroll
      for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int h = 0; h < 2; h++) word[2 + tile * 16 + 2 * self.i + h] = __float_as_uint(state.values[2 * part + tile][2 * h + c]);
    }
    __syncwarp();
    for (int n = lane; n < kGroup * kPartialPackets; n += 32) {
      const int head = n / kPartialPackets, at = n % kPartialPackets;
      const uint32_t* word = words + head * kPitch + at * 3;
      const bool full = at < kPartialPackets - 1;  // the last packet holds one value
      store_packet(self.step, partial_packet(entry.layer, unit.row, unit.kv_head * kGroup + head, part, unit.split) + at, word[0], full ? word[1] : 0, full ? word[2] : 0, epoch);
    }
  }
  __syncwarp();
}

// ATTENTION: this SM's splits of all rows, one warp each.
template <class Warp>
__device__ __forceinline__ void attention(Warp& self, const Entry& entry) {
  for_attention_units(entry.tile, self.shared.position, self.step.rows, kLayerTable[entry.layer].window, [&](const AttentionUnit& unit) {
    if (self.takes(entry, unit.row)) attend(self, entry, unit, self.ring.next);
    const ChunkSpan chunks = chunk_span(unit, self.shared.position[unit.row], kLayerTable[entry.layer].window);
    self.ring.next += 2 * (chunks.end - chunks.begin);
  });
}

// MERGE: 32 values of one head of one row, from all splits: each is scaled to the common maximum and added in order.
// Lane s * 12 + n holds packet n of splits s, s + 2, ...; packet 0 begins with the split's maximum and sum.
template <class Warp>
__device__ __forceinline__ void merge_row(Warp& self, const Entry& entry, int row) {
  const Layer& layer = kLayerTable[entry.layer];
  const int head = entry.tile / kMergeParts, part = entry.tile % kMergeParts, lane = self.lane;
  const int splits = split_count(self.shared.position[row], layer.window);
  const int side = lane / kPartialPackets, at = lane % kPartialPackets;
  constexpr int kAtOnce = 9;  // pairs of splits on their way at once
  float maximum = -infinity(), sum = 0, value[3] = {};
  for (int base = 0; base < splits; base += 2 * kAtOnce) {
    uint4 packet[kAtOnce];
    const int count = min(kAtOnce, (splits - base + 1) / 2);
    self.patience.wait(kWaitPackets, [&] {
      bool here = true;
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const int split = base + 2 * u + side;
        packet[u] = make_uint4(__float_as_uint(-infinity()), 0, 0, 0);
        if (u < count && side < 2 && split < splits) {
          packet[u] = load_word16(self.step.packets + partial_packet(entry.layer, row, head, part, split) + at);
          here = here && packet[u].w == self.epoch(entry.layer);
        }
      }
      return __all_sync(kAllLanes, here || self.step.free_run);
    });
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int source = side < 2 ? side * kPartialPackets : 0;
      const float split_maximum = __shfl_sync(kAllLanes, __uint_as_float(packet[u].x), source);
      const float split_sum = __shfl_sync(kAllLanes, __uint_as_float(packet[u].y), source);
      const int split = base + 2 * u + side;
      if (u >= count || side >= 2 || split >= splits) continue;
      const float next = fmaxf(maximum, split_maximum), old_scale = exp2_approx(maximum - next), scale = exp2_approx(split_maximum - next);
      maximum = next, sum = sum * old_scale + split_sum * scale;
      value[0] = value[0] * old_scale + __uint_as_float(packet[u].x) * scale;
      value[1] = value[1] * old_scale + __uint_as_float(packet[u].y) * scale;
      value[2] = value[2] * old_scale + __uint_as_float(packet[u].z) * scale;
    }
  }
  const int partner = lane < kPartialPackets ? lane + kPartialPackets : lane;
  const float other_maximum = __shfl_sync(kAllLanes, maximum, partner), other_sum = __shfl_sync(kAllLanes, sum, partner);
  const float next = fmaxf(maximum, other_maximum);
  // A side without splits has a maximum of minus infinity: its scale is 0, and an idle row's values are all 0.
  const float own_scale = maximum == -infinity() ? 0.0f : exp2_approx(maximum - next), other_scale = other_maximum == -infinity() ? 0.0f : exp2_approx(other_maximum - next);
  const float total = sum * own_scale + other_sum * other_scale, inverse = total > 0 ? 1.0f / total : total;
  float* merged = reinterpret_cast<float*>(self.scratch());
#pragma unroll
  for (int q = 0; q < 3; q++) {
    const float other = __shfl_sync(kAllLanes, value[q], partner);
    const int dimension = at * 3 + q - 2;
    if (lane < kPartialPackets && dimension >= 0 && dimension < kMergeDims) merged[dimension] = (value[q] * own_scale + other * other_scale) * inverse;
  }
  __syncwarp();
  if (lane < 2 * kParcelPackets) {
    const int parcel = lane / kParcelPackets, piece = lane % kParcelPackets;
    uint32_t word[3] = {};
#pragma unroll
    for (int q = 0; q < 3; q++) {
      const int index = piece * 3 + q;
      if (index < kWordsPerParcel) word[q] = pack_bf16(merged[parcel * 16 + 2 * index], merged[parcel * 16 + 2 * index + 1]);
    }
    store_packet(self.step, merged_packet(entry.layer, head * kHeadTiles + 2 * part + parcel, row) + piece, word[0], word[1], word[2], self.epoch(entry.layer));
  }
  __syncwarp();
}

template <class Warp>
__device__ __forceinline__ void merge(Warp& self, const Entry& entry) {
  for (int row = 0; row < self.step.rows; row++)
    if (self.takes(entry, row)) merge_row(self, entry, row);
}

}  // namespace mkc
