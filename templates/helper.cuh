// Helper warps: what an SM does beside streaming. They follow the SM's program too, and take from it the layers' routing
// and the merges of attention splits, row by row in turn, so that neither holds up a warp that streams.
#pragma once
#include "routing.cuh"
#include "rules.cuh"

namespace mkc {

// MERGE: 32 values of one head of one row, from all splits: each is scaled to the common maximum and added in order.
// Lane s * 12 + n holds packet n of splits s, s + 2, ...; packet 0 begins with the split's maximum and sum.
__device__ __forceinline__ void merge_row(const Step& step, Patience& patience, const Entry& entry, int row, int position, float* merged) {
  const int head = entry.tile / kMergeParts, part = entry.tile % kMergeParts, lane = fresh_thread_index() % 32;
  const int splits = split_count(position, kLayerTable[entry.layer].window);
  const uint32_t epoch = step.epoch + entry.layer;
  const int side = lane / kPartialPackets, at = lane % kPartialPackets;
  constexpr int kAtOnce = 4;  // pairs of splits on their way at once
  float maximum = -infinity(), sum = 0, value[3] = {};
#pragma unroll 1
  for (int base = 0; base < splits; base += 2 * kAtOnce) {
    uint4 packet[kAtOnce];
    const int count = min(kAtOnce, (splits - base + 1) / 2);
    patience.wait(kWaitPackets, [&] {
      bool here = true;
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const int split = base + 2 * u + side;
        packet[u] = make_uint4(__float_as_uint(-infinity()), 0, 0, 0);
        if (u < count && side < 2 && split < splits) {
          packet[u] = load_word16(step.packets + partial_packet(entry.layer, row, head, part, split) + at);
          here = here && packet[u].w == epoch;
        }
      }
      return __all_sync(kAllLanes, here || step.free_run);
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
#pragma unroll
  for (int q = 0; q < 3; q++) {
    const float other = __shfl_sync(kAllLanes, value[q], partner);
    const int dimension = at * 3 + q - 2;
    if (lane < kPartialPackets && dimension >= 0 && dimension < kMergeDims) merged[dimension] = (value[q] * own_scale + other * other_scale) * inverse;
  }
  __syncwarp();
  if (lane < kMergeDims / 4) {
    const float* value = merged + 4 * lane;
    const int tile = head * kHeadTiles + part * (kMergeDims / 16) + lane / kParcelPackets;
    store_packet(step, merged_packet(entry.layer, tile, row) + lane % kParcelPackets, pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]), 0, epoch);
  }
  __syncwarp();
}

// The routing of a layer, as every SM works it out for itself. `routed_layers` counts it.
template <int ROWS, int SLOTS>
__device__ __forceinline__ void route(const Step& step, SharedMemory<ROWS, SLOTS>& shared, Patience& patience, int helper, int index, int routed_layers) {
  const Layer& layer = kLayerTable[index];
  const int lane = fresh_thread_index() % 32;
  Routing<ROWS>& table = shared.routing[routed_layers & 1];
#pragma unroll 1
  for (int row = helper; row < step.rows; row += kHelperWarps) {
    LogitKeys logits;
    const bool live = shared.position[row] != kIdleRow;
    if (live)
      gather_packets<kRouterLoads>(
          patience, step.epoch + index, [&](int u) { return u * 32 + lane < (layer.experts + 15) / 16 * kRouterPackets ? router_packet(index, row, 0) + u * 32 + lane : -1; },
          [&](int u, uint4 packet) {
            const uint32_t word[2] = {packet.x, packet.y};
#pragma unroll
            for (int h = 0; h < 2; h++)
              if (LogitKeys::expert_of(u * 2 + h, lane) < layer.experts) logits.key[u * 2 + h] = max(1u, ordered(word[h]));
          });
    // This table was last used two routed layers ago: everyone on this SM must be past that layer.
    patience.wait(kWaitStage, [&] { return __all_sync(kAllLanes, load_acquire(&shared.begun_layers[min(lane, kConsumerWarps)]) >= index); });
    choose_experts(table, row, logits, live ? layer.slots : 0);
  }
  if (ROWS > 1) named_barrier_sync<2>(32 * kHelperWarps);
  else __syncwarp();
  if (helper == 0) {
    list_active(table, step.rows);
    __syncwarp();
    if (lane == 0) store_release(&shared.routed_layers, routed_layers);
  }
}

template <int ROWS, int SLOTS>
__device__ __forceinline__ void help(const Step& step, SharedMemory<ROWS, SLOTS>& shared, int helper) {
  Patience patience(step);
  Program program(step);
  int routed_layers = 0;
  while (true) {
    const uint32_t word = program.next();
    patience.begin(word);
    const Entry entry = decode_entry(word);
    if (entry.kind == END) return;
    if (entry.kind == STAGE && entry.layer < kLayers && kLayerTable[entry.layer].routed) route(step, shared, patience, helper, entry.layer, ++routed_layers);
    if (entry.kind == MERGE)
#pragma unroll 1
      for (int row = 0; row < step.rows; row++)
        if ((entry.warp + row) % kHelperWarps == helper) merge_row(step, patience, entry, row, shared.position[row], shared.merged[helper]);
  }
}

}  // namespace mkc
