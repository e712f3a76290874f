// Tasks of a residual tile's owner: the out projection and FFN down add to one sum, which never leaves the SM before it is whole and becomes the next
// layer's input. All consumer warps share a tile, each taking some of its chunks along K.
#pragma once
#include "consumer.cuh"

namespace mkc {

constexpr int kOutChunks = chunks_of(kAttentionTiles);

// Brings `tiles` parcels each of `rows` rows to scratch as [tile][row][8 words]; address(tile, row) is a parcel's packet.
template <class Warp, class Address>
__device__ __forceinline__ void gather_values(Warp& self, int layer, int tiles, int rows, Address address) {
  constexpr int kAtOnce = 6;
  const int packets = tiles * rows * kParcelPackets;
  uint32_t* words = self.scratch();
  __syncwarp();
  for (int base = 0; base < packets; base += kAtOnce * 32)
    gather_packets<kAtOnce>(
        self.patience, self.epoch(layer),
        [&](int n) {
          const int parcel = (base + n) / kParcelPackets;
          return base + n < packets ? address(parcel / rows, parcel % rows) + (base + n) % kParcelPackets : -1;
        },
        [&](int n, uint4 packet) {
          const int part = (base + n) % kParcelPackets;
          uint32_t* word = words + (base + n) / kParcelPackets * kWordsPerParcel + part * 3;
          word[0] = packet.x, word[1] = packet.y;
          if (part < 2) word[2] = packet.z;
        });
  __syncwarp();
}

// OUT: the out projection over the merged attention output of all heads.
template <class Warp>
__device__ __forceinline__ void out_tile(Warp& self, const Entry& entry) {
  const uint32_t norm_words = self.norm_words(entry.layer + 1, entry.tile);
  Accumulator sums;
  for (int chunk = self.warp; chunk < kOutChunks; chunk += kConsumerWarps) {
    const int first = chunk * kChunkFragments, count = min(kAttentionTiles - first, kChunkFragments), rows = self.step.rows;
    gather_values(self, entry.layer, count, rows, [&](int tile, int row) { return merged_packet(entry.layer, first + tile, row); });
    const uint4* fragments = self.ring.wait(self.ring.next + chunk);
    multiply_chunk<1>(sums, fragments, count, BatchFragments::of(self.scratch(), rows, self.i, self.i < rows), 0);
    self.ring.release(self.ring.next + chunk);
  }
  self.shared_sum() = sums.total();
  if (self.warp == 0 && self.j == 0) self.shared.norm_words[self.i] = norm_words;
  self.ring.next += kOutChunks;
}

// FFN_DOWN: for each active expert, its down tile over the hidden values of the rows that chose it. The expert's weight
// is in the hidden values already, so all experts add to the same sum.
template <class Warp>
__device__ __forceinline__ void ffn_down(Warp& self, const Entry& entry) {
  const Layer& layer = kLayerTable[entry.layer];
  const auto& routing = self.routing(layer);
  const int chunks = chunks_of(layer.width_tiles);
  Accumulator sums;
  for (int active = 0; active < routing.active; active++) {
    const uint32_t rows = routing.rows[active];
    const int count_rows = __popc(rows), own = __popc(rows & ((1u << self.i) - 1));
    const int expert = routing.expert[active];
    for (int chunk = 0; chunk < chunks; chunk++) {
      if (ffn_down_warp(expert, chunk, chunks) != self.warp) continue;
      const int number = self.ring.next + active * chunks + chunk;
      const int first = chunk * kChunkFragments, count = min(layer.width_tiles - first, kChunkFragments);
      gather_values(self, entry.layer, count, count_rows, [&](int tile, int n) {
        uint32_t left = rows;
        for (; n > 0; n--) left &= left - 1;
        const int row = __ffs(left) - 1;
        return hidden_packet(entry.layer, row, routing.slot[active][row] * layer.width_tiles + first + tile);
      });
      const uint4* fragments = self.ring.wait(number);
      multiply_chunk<1>(sums, fragments, count, BatchFragments::of(self.scratch(), count_rows, own, rows >> self.i & 1), 0);
      self.ring.release(number);
    }
  }
  add(self.shared_sum(), sums.total());
  self.ring.next += routing.active * chunks;
}

// RESIDUAL: the tile's sum is added to its residual rows and sent to all SMs as the next layer's input.
template <class Warp>
__device__ __forceinline__ void residual(Warp& self, const Entry& entry) {
  const float4 sum = self.reduce_to_first_warp();
  if (self.warp != 0) return;
  float4& kept = self.shared.residual[entry.tile / kSms][self.lane];
  float4 x = kept;
  add(x, sum);
  kept = x;
  self.publish(entry.layer + 1, entry.tile, x, self.shared.norm_words[self.i]);
  if (self.step.layer_outputs) {
    const int row = 2 * self.j;
    float* out = self.step.layer_outputs + (size_t(entry.layer) * self.step.rows + row) * kHiddenTiles * 16 + entry.tile * 16 + 2 * self.i;
    if (row < self.step.rows) out[0] = x.x, out[1] = x.z;
    out += kHiddenTiles * 16;
    if (row + 1 < self.step.rows) out[0] = x.y, out[1] = x.w;
  }
}

}  // namespace mkc
