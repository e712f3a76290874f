// Tasks of a residual tile's owner: the out projection and FFN down add to one sum, which never leaves the SM before it
// is whole and becomes the next layer's input.
#pragma once
#include "consumer.cuh"

namespace mkc {

// Brings `parcels` parcels to scratch, eight words each, one behind the other; address(parcel) is its first packet.
template <class Warp, class Address>
__device__ __forceinline__ void gather_values(Warp& self, int layer, int parcels, Address address) {
  constexpr int kAtOnce = 6, kParcelsAtOnce = kAtOnce * 32 / kParcelPackets;
  uint32_t* words = self.scratch() + self.lane * 2;
  __syncwarp();
#pragma unroll 1
  for (int base = 0; base < parcels; base += kParcelsAtOnce)
    gather_packets<kAtOnce>(
        self.patience, self.epoch(layer),
        [&](int u) {
          const int parcel = base + u * 8 + self.i;
          return parcel < parcels ? address(parcel) + self.j : -1;
        },
        [&](int u, uint4 packet) { *reinterpret_cast<uint2*>(words + base * kWordsPerParcel + u * 64) = make_uint2(packet.x, packet.y); });
  __syncwarp();
}

// OUT: the out projection of all live rows over the merged attention output of all heads. FFN_DOWN: for each active
// expert, its down tile over the hidden values of its members, the rows that chose it; the expert's weight is in the
// hidden values already, so all experts add to the same sum, in order of their ids. For OUT the "expert" is one that all
// live rows chose, as it is for a dense FFN.
template <class Warp>
__device__ __forceinline__ void add_products(Warp& self, const Entry& entry) {
  const Layer& layer = kLayerTable[entry.layer];
  const bool is_out = entry.kind == OUT;
  const uint32_t norm_words = is_out ? self.norm_words(entry.layer + 1, entry.tile) : 0;
  const auto& routing = is_out ? self.shared.routing[kDenseTable] : self.routing(layer);
  const Slicing slicing = slicing_of(is_out ? kAttentionTiles : layer.width_tiles, 1);
  const Slice slice = slice_of(slicing, self.warp);
  // A parcel of hidden values, and of the merged attention output.
  const int packets = is_out ? merged_packet(entry.layer, slice.begin, 0) : hidden_packet(entry.layer, 0, slice.begin);
  const int row_pitch = is_out ? kParcelPackets : kHiddenParcels * kParcelPackets, block_pitch = is_out ? kMaxRows * kParcelPackets : kParcelPackets;
  Accumulator sums;
#pragma unroll 1
  for (int active = 0, end; active < routing.active; active = end) {
    // As many experts as scratch has room for, or one of which it has room for a part of the slice at a time: a whole
    // number of steps of `multiply_fragments`, so that the order of the sum does not depend on how many members there are.
    const int first_member = routing.first_member[active];
    for (end = active + 1; end < routing.active && (routing.first_member[end + 1] - first_member) * slicing.slice <= Warp::kScratchParcels;) end++;
    const int members = routing.first_member[end] - first_member;
    const int most = members * slicing.slice <= Warp::kScratchParcels ? slicing.slice : Warp::kScratchParcels / members / kStep * kStep;
    int from = 0;
    do {
      const int to = min(from + most, slice.size), count = to - from;
      const float inverse_count = 1.0f / count;
      gather_values(self, entry.layer, members * count, [&](int parcel) {
        const int member = int((parcel + 0.5f) * inverse_count), block = from + parcel - member * count;
        return packets + routing.member_row[first_member + member] * row_pitch + (routing.member_slot[first_member + member] * layer.width_tiles + block) * block_pitch;
      });
#pragma unroll 1
      for (int expert = active; expert < end; expert++) {
        const uint32_t rows = routing.rows[expert];
        const int own = routing.first_member[expert] - first_member + __popc(rows & ((1u << self.i) - 1));
        const bool is_member = rows >> self.i & 1;
        const uint32_t* values = self.shared.scratch[self.warp] + (is_member ? own * count * kWordsPerParcel : 0) + 2 * self.j;
        multiply_slice<1, kWordsPerParcel>(sums, self.ring, self.ring.next + expert * slicing.chunks, slice, from, to, values, !is_member);
      }
      from = to;
    } while (from < slice.size);
  }
  self.ring.next += routing.active * slicing.chunks;
  auto& deposit = self.open_deposit();
  if (self.j < deposit.kPairs) {
    float4 total = sums.total_of_pair(0), &sum = deposit.sums[0][self.i][self.j];
    add(total, sums.total_of_pair(1));
    if (!is_out) add(total, sum);
    sum = total;
  }
  if (is_out && self.takes(entry, 0) && self.j == 0) self.shared.norm_words[self.i] = norm_words;
}

// RESIDUAL: the tile's sum is added to its residual rows and sent to all SMs as the next layer's input.
template <class Warp>
__device__ __forceinline__ void residual(Warp& self, const Entry& entry) {
  self.close_deposit();
  if (!self.takes(entry, 0)) return;
  float4& kept = self.shared.residual[entry.tile / kSms][self.lane];
  float4 x = kept;
  add(x, self.collect(false).first);
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
