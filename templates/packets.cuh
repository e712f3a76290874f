// Hand-off from SM to SM: a packet is three words of values and the number of the step and layer that wrote it, in
// one 16-byte access. Who sees the number sees the values, so there is no fence, no flag and nothing to reset.
#pragma once
#include "shared_memory.cuh"

namespace mkc {

constexpr int kParcelPackets = 3;   // 16 bf16 values in eight words, and one float
constexpr int kRouterPackets = 6;   // 16 float logits
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
// Brings up to 32 * LOADS packets to this warp, all of their loads in flight at once. Packet i of the warp goes to
// lane i % 32; address(i) is its index or -1 for none; take(i, packet) is called once for each that there is.
// The warp polls in step: lanes that leave a loop one by one would make each round as slow as all of them together.
template <int LOADS, class Address, class Take>
__device__ __forceinline__ void gather_packets(Patience& patience, uint32_t epoch, Address address, Take take) {
  const Step& step = patience.step;
  const int lane = fresh_thread_index() % 32;
  int index[LOADS];
#pragma unroll
  for (int u = 0; u < LOADS; u++) index[u] = address(u * 32 + lane);
  uint32_t missing = (1u << LOADS) - 1, polled = missing;
  patience.wait(kWaitPackets, [&] {
    uint4 packet[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      packet[u] = (polled >> u & 1) && index[u] >= 0 ? load_word16(step.packets + index[u]) : make_uint4(0, 0, 0, epoch);
    const uint32_t before = missing;
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      if (polled >> u & 1) {
        const bool here = packet[u].w == epoch || step.free_run;
        if (__all_sync(kAllLanes, here)) {
          if (index[u] >= 0) take(u * 32 + lane, packet[u]);
          missing &= ~(1u << u);
        }
      }
    // While nothing arrives, one load is enough to notice when something does.
    polled = missing != before ? missing : missing & -missing;
    return missing == 0;
  });
}

// ---- writing ----------------------------------------------------------------------------------------
__device__ __forceinline__ void store_packet(const Step& step, int index, uint32_t a, uint32_t b, uint32_t c, uint32_t epoch) {
  store_word16(step.packets + index, make_uint4(a, b, c, epoch));
}

// The values of one 16-row tile, packed in pairs, on their way from accumulators to parcels. Lane (i, j) = (l / 4, l % 4)
// has word i of rows 2j and 2j + 1 of the batch; a parcel's ninth word is a float beside the values.
struct ParcelScratch {
  static constexpr int kPitch = 9;
  uint32_t* words;

  __device__ __forceinline__ void put(int rows, uint32_t even, uint32_t odd) const {
    const int lane = fresh_thread_index() % 32, i = lane / 4, row = lane % 4 * 2;
    if (row < rows) words[row * kPitch + i] = even;
    if (row + 1 < rows) words[(row + 1) * kPitch + i] = odd;
  }
  __device__ __forceinline__ void put_extra(int row, float value) const { words[row * kPitch + 8] = __float_as_uint(value); }

  // Sends each row's parcel to address(row), a packet index or -1.
  template <class Address>
  __device__ __forceinline__ void send(const Step& step, int rows, uint32_t epoch, Address address) const {
    __syncwarp();
    const int lane = fresh_thread_index() % 32, row = lane / kParcelPackets, part = lane % kParcelPackets;
    if (row < rows) {
      const int index = address(row);
      const uint32_t* word = words + row * kPitch + part * 3;
      if (index >= 0) store_packet(step, index + part, word[0], word[1], word[2], epoch);
    }
    __syncwarp();
  }
};

}  // namespace mkc
