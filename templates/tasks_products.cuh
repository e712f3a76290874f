// Tasks that multiply the layer input: router, QKV, gate and up, LM head. All warps share each tile; the code that
// multiplies is the same for all four, so that a layer's instructions stay in the cache.
#pragma once
#include "consumer.cuh"

namespace mkc {

// ROUTER: 16 experts' logits.
template <class Warp>
__device__ __forceinline__ void finish_router(Warp& self, const Entry& entry, const Totals& totals) {
  const float4 logits = totals.first;
  const int row = 2 * self.j, packet = router_packet(entry.layer, row, entry.tile) + self.i, next_row = router_packet(0, 1, 0) - router_packet(0, 0, 0);
  if (row < self.step.rows) store_packet(self.step, packet, __float_as_uint(logits.x * totals.inverse_rms.x), __float_as_uint(logits.z * totals.inverse_rms.x), 0, self.epoch(entry.layer));
  if (row + 1 < self.step.rows) store_packet(self.step, packet + next_row, __float_as_uint(logits.y * totals.inverse_rms.y), __float_as_uint(logits.w * totals.inverse_rms.y), 0, self.epoch(entry.layer));
}

// QKV: 16 rows of one head of Q, K or V. The rows of a tile lie so that a lane has both values of a rotated pair.
template <class Warp>
__device__ __forceinline__ void finish_qkv(Warp& self, const Entry& entry, const Totals& totals) {
  float4 y = totals.first;
  const float2 inverse = totals.inverse_rms;
  y.x *= inverse.x, y.z *= inverse.x, y.y *= inverse.y, y.w *= inverse.y;
  constexpr int kFirstValueTile = (kQueryHeads + kKvHeads) * kHeadTiles;
  if (kLayerTable[entry.layer].rope && entry.tile < kFirstValueTile) {
    const int pair = entry.tile % kHeadTiles * 8 + self.i, row = 2 * self.j, rows = self.step.rows;
    const float2 even = self.shared.rotation[row < rows ? row : 0][pair], odd = self.shared.rotation[row + 1 < rows ? row + 1 : 0][pair];
    y = make_float4(y.x * even.x - y.z * even.y, y.y * odd.x - y.w * odd.y, y.z * even.x + y.x * even.y, y.w * odd.x + y.y * odd.y);
  }
  send_parcels(self.step, pack_bf16(y.x, y.z), pack_bf16(y.y, y.w), 0, self.epoch(entry.layer), [&](int row) { return qkv_packet(entry.layer, entry.tile, row); });
}

__device__ __forceinline__ float silu_times(float gate, float up) { return __fdividef(gate * up, 1.0f + __expf(-gate)); }

// FFN_UP: 16 hidden values of an active expert, for all rows that chose the expert.
template <class Warp>
__device__ __forceinline__ void finish_up(Warp& self, const Entry& entry, const Totals& totals, int active, int tile) {
  const Layer& layer = kLayerTable[entry.layer];
  const auto& routing = self.routing(layer);
  const float4 first = totals.first, second = totals.second;  // hidden values 2i and 2i + 1: gate and up of two rows
  uint32_t word[2];
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int row = 2 * self.j + c, slot = row < self.step.rows ? routing.slot[active][row] : kMaxSlots;
    const float weight = slot < kMaxSlots ? routing.weight[row][slot] : 0.0f, inverse = c ? totals.inverse_rms.y : totals.inverse_rms.x;
    const float gate0 = c ? first.y : first.x, up0 = c ? first.w : first.z, gate1 = c ? second.y : second.x, up1 = c ? second.w : second.z;
    word[c] = pack_bf16(silu_times(gate0 * inverse, up0 * inverse) * weight, silu_times(gate1 * inverse, up1 * inverse) * weight);
  }
  send_parcels(self.step, word[0], word[1], 0, self.epoch(entry.layer), [&](int row) {
    const int slot = routing.slot[active][row];
    return slot < kMaxSlots ? hidden_packet(entry.layer, row, slot * layer.width_tiles + tile) : -1;
  });
}

// The largest logit so far of one row, ties to the lower id.
struct Best {
  float value = -infinity();
  int token = 0x7fffffff;
  __device__ __forceinline__ void offer(float v, int t) {
    if (v > value || (v == value && t < token)) value = v, token = t;
  }
};

// HEAD: 16 tokens' logits. The best so far of each row and warp lies in shared memory.
template <class Warp>
__device__ __forceinline__ void finish_head(Warp& self, const Totals& totals, int task) {
  const int token = task * 16 + 2 * self.i;  // this lane's two: the next one too
  const float4 y = totals.first;
  const float scale[2] = {totals.inverse_rms.x * kLogitScale, totals.inverse_rms.y * kLogitScale};
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int row = 2 * self.j + c;
    const float logit[2] = {(c ? y.y : y.x) * scale[c], (c ? y.w : y.z) * scale[c]};
    Best best;
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (row < self.step.rows && token + h < kVocabulary) {
        best.offer(logit[h], token + h);
        self.step.logits[size_t(row) * kVocabulary + token + h] = logit[h];
      }
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) best.offer(__shfl_xor_sync(kAllLanes, best.value, offset), __shfl_xor_sync(kAllLanes, best.token, offset));
    if (self.i == 0) {
      float2& kept = self.shared.best[self.warp][row];
      best.offer(kept.x, __float_as_int(kept.y));
      kept = make_float2(best.value, __int_as_float(best.token));
    }
  }
  __syncwarp();
}

// ROUTER, QKV: one tile. FFN_UP: this SM's tiles of the active experts. HEAD: this SM's tiles of the vocabulary.
template <class Warp>
__device__ __forceinline__ void products(Warp& self, const Entry& entry) {
  const bool is_pair = entry.kind == FFN_UP;
  const Slicing slicing = is_pair ? kGateUpSlicing : kRowSlicing;
  const Layer& layer = kLayerTable[min(entry.layer, kLayers - 1)];
  const int end = is_pair ? self.routing(layer).active * layer.width_tiles : entry.kind == HEAD ? kVocabularyTiles : entry.tile + 1;
  int active = 0, begin = 0;  // the active expert of an FFN_UP tile, and its first tile
#pragma unroll 1
  for (int tile = entry.tile, task = 0; tile < end; tile += kSms, task++) {
    self.multiply_layer_input(self.ring.next, slicing, is_pair);
    self.ring.next += slicing.chunks;
    if (is_pair)
      while (tile - begin >= layer.width_tiles) begin += layer.width_tiles, active++;
    if (!self.takes(entry, task)) continue;
    const Totals totals = self.collect(is_pair);
    switch (entry.kind) {
      case ROUTER: finish_router(self, entry, totals); break;
      case QKV: finish_qkv(self, entry, totals); break;
      case FFN_UP: finish_up(self, entry, totals, active, tile - begin); break;
      default: finish_head(self, totals, tile); break;
    }
  }
}

// SAMPLE: the greedy choice. Every SM sends its best token of each row; SM 0 takes the best of all and moves the row on.
template <class Warp>
__device__ __forceinline__ void sample(Warp& self, const Entry& entry) {
  self.sync();
  const Step& step = self.step;
  if (self.warp == 0 && self.lane < step.rows) {
    Best row_best;
    for (int w = 0; w < kConsumerWarps; w++) {
      const float2 cell = self.shared.best[w][self.lane];
      row_best.offer(cell.x, __float_as_int(cell.y));
    }
    store_packet(step, candidate_packet(self.lane, blockIdx.x), __float_as_uint(row_best.value), row_best.token, 0, self.epoch(entry.layer + 1));
  }
  const int row = self.warp;
  if (blockIdx.x != 0 || row >= step.rows) return;
  Best row_best;
  gather_packets<(kSms + 31) / 32>(
      self.patience, self.epoch(entry.layer + 1), [&](int u) { return u * 32 + self.lane < kSms ? candidate_packet(row, u * 32 + self.lane) : -1; },
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
