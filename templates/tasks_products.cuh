// Tasks that multiply the layer input: router, QKV, gate and up, LM head.
#pragma once
#include "consumer.cuh"

namespace mkc {

constexpr int kRowChunks = chunks_of(kHiddenTiles);         // of a 16-row tile with K = hidden size
constexpr int kGateUpChunks = chunks_of(2 * kHiddenTiles);  // of a gate tile and its up tile

// ROUTER: 16 experts' logits. All warps share the tile, since every SM waits for it.
template <class Warp>
__device__ __forceinline__ void route_tile(Warp& self, const Entry& entry) {
  Accumulator sums;
  for (int chunk = self.warp; chunk < kRowChunks; chunk += kConsumerWarps) {
    const int number = self.ring.next + chunk, done = chunk * kChunkFragments;
    multiply_chunk<1>(sums, self.ring.wait(number), min(kHiddenTiles - done, kChunkFragments), self.layer_input(), done);
    self.ring.release(number);
  }
  self.ring.next += kRowChunks;
  self.shared_sum() = sums.total();
  const float4 logits = self.reduce_to_first_warp();
  if (self.warp != 0) return;
  const float2 inverse = self.inverse_rms();
  constexpr int kPitch = 3 * kRouterPackets;
  float* words = reinterpret_cast<float*>(self.scratch());
  const int row = 2 * self.j, rows = self.step.rows;
  if (row < rows) words[row * kPitch + 2 * self.i] = logits.x * inverse.x, words[row * kPitch + 2 * self.i + 1] = logits.z * inverse.x;
  if (row + 1 < rows) words[(row + 1) * kPitch + 2 * self.i] = logits.y * inverse.y, words[(row + 1) * kPitch + 2 * self.i + 1] = logits.w * inverse.y;
  __syncwarp();
  for (int n = self.lane; n < rows * kRouterPackets; n += 32) {
    const int r = n / kRouterPackets, part = n % kRouterPackets;
    const uint32_t* word = self.scratch() + r * kPitch + part * 3;
    store_packet(self.step, router_packet(entry.layer, r, entry.tile) + part, word[0], part < 5 ? word[1] : 0, part < 5 ? word[2] : 0, self.epoch(entry.layer));
  }
  __syncwarp();
}

// QKV: 16 rows of one head of Q, K or V. The rows of a tile lie so that a lane has both values of a rotated pair.
template <class Warp>
__device__ __forceinline__ void qkv_tile(Warp& self, const Entry& entry) {
  if (self.takes(entry, 0)) {
    Accumulator sums;
    multiply_tile<1>(sums, self.ring, self.ring.next, kHiddenTiles, self.layer_input());
    float4 y = sums.total();
    const float2 inverse = self.inverse_rms();
    y.x *= inverse.x, y.z *= inverse.x, y.y *= inverse.y, y.w *= inverse.y;
    constexpr int kFirstValueTile = (kQueryHeads + kKvHeads) * kHeadTiles;
    if (kLayerTable[entry.layer].rope && entry.tile < kFirstValueTile) {
      const int pair = entry.tile % kHeadTiles * 8 + self.i, row = 2 * self.j, rows = self.step.rows;
      const float2 even = self.shared.rotation[row < rows ? row : 0][pair], odd = self.shared.rotation[row + 1 < rows ? row + 1 : 0][pair];
      y = make_float4(y.x * even.x - y.z * even.y, y.y * odd.x - y.w * odd.y, y.z * even.x + y.x * even.y, y.w * odd.x + y.y * odd.y);
    }
    self.parcels().put(self.step.rows, pack_bf16(y.x, y.z), pack_bf16(y.y, y.w));
    self.parcels().send(self.step, self.step.rows, self.epoch(entry.layer), [&](int row) { return qkv_packet(entry.layer, entry.tile, row); });
  }
  self.ring.next += kRowChunks;
}

__device__ __forceinline__ float silu_times(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// FFN_UP: all of this SM's tiles of 16 hidden values of the active experts, each for all rows that chose the expert.
template <class Warp>
__device__ __forceinline__ void ffn_up(Warp& self, const Entry& entry) {
  const Layer& layer = kLayerTable[entry.layer];
  const auto& routing = self.routing(layer);
  const int tiles = routing.active * layer.width_tiles;
  const int tasks = entry.tile < tiles ? (tiles - entry.tile + kSms - 1) / kSms : 0;
  const float2 inverses = self.inverse_rms();
  for (int task = (self.warp - entry.warp) & (kConsumerWarps - 1); task < tasks; task += kConsumerWarps) {
    const int index = entry.tile + task * kSms, active = index / layer.width_tiles, tile = index % layer.width_tiles;
    Accumulator sums;
    multiply_tile<2>(sums, self.ring, self.ring.next + task * kGateUpChunks, 2 * kHiddenTiles, self.layer_input());
    const float4 first = sums.total_of_pair(0), second = sums.total_of_pair(1);  // hidden values 2i and 2i + 1
    const auto slot_of = [&](int row) { return row < self.step.rows ? int(routing.slot[active][row]) : kMaxSlots; };
    uint32_t word[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int row = 2 * self.j + c, slot = slot_of(row);
      const float weight = slot < kMaxSlots ? routing.weight[row][slot] : 0.0f, inverse = c ? inverses.y : inverses.x;
      const float gate0 = c ? first.y : first.x, up0 = c ? first.w : first.z, gate1 = c ? second.y : second.x, up1 = c ? second.w : second.z;
      word[c] = pack_bf16(silu_times(gate0 * inverse, up0 * inverse) * weight, silu_times(gate1 * inverse, up1 * inverse) * weight);
    }
    self.parcels().put(self.step.rows, word[0], word[1]);
    self.parcels().send(self.step, self.step.rows, self.epoch(entry.layer), [&](int row) {
      return slot_of(row) < kMaxSlots ? hidden_packet(entry.layer, row, slot_of(row) * layer.width_tiles + tile) : -1;
    });
  }
  self.ring.next += tasks * kGateUpChunks;
}

// The largest logit so far of one row, ties to the lower id.
struct Best {
  float value = -infinity();
  int token = 0x7fffffff;
  __device__ __forceinline__ void offer(float v, int t) {
    if (v > value || (v == value && t < token)) value = v, token = t;
  }
};

// HEAD: this SM's tiles of the vocabulary. Leaves each warp's best token of each row in shared memory.
template <class Warp>
__device__ __forceinline__ void head_tiles(Warp& self, const Entry& entry) {
  Best best[2];
  const int tasks = (kVocabularyTiles - entry.tile + kSms - 1) / kSms;
  const float2 inverse = self.inverse_rms();
  const float scale[2] = {inverse.x * kLogitScale, inverse.y * kLogitScale};
  for (int task = self.warp; task < tasks; task += kConsumerWarps) {
    const int token = (entry.tile + task * kSms) * 16 + 2 * self.i;  // this lane's two: the next one too
    Accumulator sums;
    multiply_tile<1>(sums, self.ring, self.ring.next + task * kRowChunks, kHiddenTiles, self.layer_input());
    const float4 y = sums.total();
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int row = 2 * self.j + c;
      const float logit[2] = {(c ? y.y : y.x) * scale[c], (c ? y.w : y.z) * scale[c]};
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (row < self.step.rows && token + h < kVocabulary) {
          best[c].offer(logit[h], token + h);
          self.step.logits[size_t(row) * kVocabulary + token + h] = logit[h];
        }
    }
  }
  self.ring.next += tasks * kRowChunks;
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2)
#pragma unroll
    for (int c = 0; c < 2; c++)
      best[c].offer(__shfl_xor_sync(kAllLanes, best[c].value, offset), __shfl_xor_sync(kAllLanes, best[c].token, offset));
  // Lane j holds batch rows 2j and 2j + 1.
  if (self.i == 0) self.shared_sum() = make_float4(best[0].value, __int_as_float(best[0].token), best[1].value, __int_as_float(best[1].token));
}

// SAMPLE: the greedy choice. Every SM sends its best token of each row; SM 0 takes the best of all and moves the row on.
template <class Warp>
__device__ __forceinline__ void sample(Warp& self, const Entry& entry) {
  self.sync();
  const Step& step = self.step;
  if (self.warp == 0 && self.lane < step.rows) {
    Best row_best;
    for (int w = 0; w < kConsumerWarps; w++) {
      const float4 cell = self.shared.sums[self.half][w][self.lane / 2];
      row_best.offer(self.lane % 2 ? cell.z : cell.x, __float_as_int(self.lane % 2 ? cell.w : cell.y));
    }
    store_packet(step, candidate_packet(self.lane, blockIdx.x), __float_as_uint(row_best.value), row_best.token, 0, self.epoch(entry.layer + 1));
  }
  const int row = self.warp;
  if (blockIdx.x != 0 || row >= step.rows) return;
  Best row_best;
  gather_packets<(kSms + 31) / 32>(
      self.patience, self.epoch(entry.layer + 1), [&](int n) { return n < kSms ? candidate_packet(row, n) : -1; },
      [&](int, uint4 packet) { row_best.offer(__uint_as_float(packet.x), packet.y); });
#pragma unroll
  for (int offset = 16; offset; offset /= 2)
    row_best.offer(__shfl_xor_sync(kAllLanes, row_best.value, offset), __shfl_xor_sync(kAllLanes, row_best.token, offset));
  if (self.lane != 0) return;
  const int position = self.shared.position[row < sizeof(self.shared.position) / 4 ? row : 0];
  if (position == kIdleRow) {
    step.emitted[row] = -1;
    return;
  }
  // No logit was a number: -2 says so, and the row ends.
  const int token = row_best.token < kVocabulary ? row_best.token : -2;
  bool stop = token < 0 || position + 1 >= step.limits[row];
  for (int s = 0; s < step.stop_count; s++) stop |= token == step.stop_tokens[s];
  step.emitted[row] = token;
  step.tokens[row] = max(token, 0);
  step.positions[row] = position + 1;
  if (stop) step.active[row] = 0;
}

}  // namespace mkc
