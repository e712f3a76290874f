// Hand-off from SM to SM: a packet is up to three words of values and the number of the step and layer that wrote it, in
// one 16-byte access. Who sees the number sees the values, so there is no fence, no flag and nothing to reset.
#pragma once
#include "shared_memory.cuh"

namespace mkc {

constexpr int kParcelPackets = 4;   // 16 bf16 values: packet p has what lanes with j = p hold of a B fragment
constexpr int kRouterPackets = 8;   // 16 float logits, two in each
constexpr int kPartialPackets = (kPartialWords + 2) / 3;

// ---- where each packet lies -----------------------------------------------------------------------
__device__ __forceinline__ int layer_input_packet(int layer, int tile, int row) {
  return kLayerInputPackets + ((layer * kHiddenTiles + tile) * kMaxRows + row) * kParcelPackets;
}
__device__ __forceinline__ int router_packet(int layer, int row, int tile) {
  return kRouterLogitsPackets + ((layer * kMaxRows + row) * kRouterTiles + tile) * kRouterPackets;
}
__device__ __forceinline__ int qkv_packet(int layer, int tile, int row) {
  return kQkvPackets + ((layer * kQkvTiles + tile) * kMaxRows + row) * kParcelPackets;
}
// Two buffers in turn: a layer's partials are merged before the layer after the next can write.
__device__ __forceinline__ int partial_packet(int layer, int row, int head, int part, int split) {
  return kPartialsPackets + (((((layer & 1) * kMaxRows + row) * kQueryHeads + head) * kMergeParts + part) * kMaxSplits + split) * kPartialPackets;
}
__device__ __forceinline__ int merged_packet(int layer, int tile, int row) {
  return kMergedPackets + ((layer * kAttentionTiles + tile) * kMaxRows + row) * kParcelPackets;
}
__device__ __forceinline__ int hidden_packet(int layer, int row, int parcel) {
  return kHiddenPackets + ((layer * kMaxRows + row) * kHiddenParcels + parcel) * kParcelPackets;
}
__device__ __forceinline__ int candidate_packet(int row, int sm) { return kCandidatesPackets + row * kSms + sm; }

// ---- reading ----------------------------------------------------------------------------------------
// Brings up to LOADS packets to each lane, all of their loads in flight at once. address(u) is the index of the lane's
// packet u, or -1 for none; take(u, packet) is called once for each that there is.
// The warp polls in step: lanes that leave a loop one by one would make each round as slow as all of them together.
template <int LOADS, class Address, class Take>
__device__ __forceinline__ void gather_packets(Patience& patience, uint32_t epoch, Address address, Take take) {
  const Step& step = patience.step;
  int index[LOADS];
#pragma unroll
  for (int u = 0; u < LOADS; u++) index[u] = address(u);
  uint32_t missing = (1u << LOADS) - 1;
  patience.wait(kWaitPackets, [&] {
    uint4 packet[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      packet[u] = (missing >> u & 1) && index[u] >= 0 ? load_word16(step.packets + index[u]) : make_uint4(0, 0, 0, epoch);
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      if (missing >> u & 1) {
        const bool here = packet[u].w == epoch || step.free_run;
        if (__all_sync(kAllLanes, here)) {
          if (index[u] >= 0) take(u, packet[u]);
          missing &= ~(1u << u);
        }
      }
    return missing == 0;
  });
}

// ---- writing ----------------------------------------------------------------------------------------
__device__ __forceinline__ void store_packet(const Step& step, int index, uint32_t a, uint32_t b, uint32_t c, uint32_t epoch) {
  store_word16(step.packets + index, make_uint4(a, b, c, epoch));
}

// Sends the values of one 16-row tile as parcels. Lane (i, j) has word i of rows 2j (`even`) and 2j + 1 (`odd`) of the
// batch; of two lanes with neighbouring i, one sends their packet of the even row, the other that of the odd row. `extra`
// is what the lane's packet has beside its values. address(row) is a parcel's first packet, or -1.
template <class Address>
__device__ __forceinline__ void send_parcels(const Step& step, uint32_t even, uint32_t odd, float extra, uint32_t epoch, Address address) {
  const int lane = fresh_thread_index() % 32, i = lane / 4, row = lane % 4 * 2 + (i & 1);
  const uint32_t other = __shfl_xor_sync(kAllLanes, i & 1 ? even : odd, 4);
  const int index = row < step.rows ? address(row) : -1;
  if (index >= 0) store_packet(step, index + i / 2, i & 1 ? other : even, i & 1 ? odd : other, __float_as_uint(extra), epoch);
}

}  // namespace mkc
