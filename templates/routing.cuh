// Routing warps: every SM works out for itself which experts the rows chose, one warp for each row.
#pragma once
#include "packets.cuh"

namespace mkc {

// Logits as unsigned numbers in the same order.
__device__ __forceinline__ uint32_t ordered(uint32_t bits) { return bits & 0x80000000u ? ~bits : bits | 0x80000000u; }
__device__ __forceinline__ float unordered(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

constexpr int kRouterLoads = max_of(1, (kRouterTiles * kRouterPackets + 31) / 32);

// This lane's share of a row's logits: two of each packet it holds, as ordered keys; 0 stands for none.
struct LogitKeys {
  uint32_t key[kRouterLoads * 2] = {};

  __device__ __forceinline__ static int expert_of(int slot, int lane) { return (slot / 2 * 32 + lane) * 2 + slot % 2; }
};

// One row's experts: the largest logits, ties to the lower id; their weights in order of id.
template <int ROWS>
__device__ __forceinline__ void choose_experts(Routing<ROWS>& table, int row, const LogitKeys& logits, int count) {
  const int lane = threadIdx.x & 31;
  uint32_t left[kRouterLoads * 2];
#pragma unroll
  for (int s = 0; s < kRouterLoads * 2; s++) left[s] = logits.key[s];
  int expert = kMaxExperts;  // lane n keeps the n-th choice
  uint32_t key = 0;
  for (int n = 0; n < count; n++) {
    uint32_t best = 0;
    int best_expert = kMaxExperts;
#pragma unroll
    for (int s = 0; s < kRouterLoads * 2; s++) {
      const int id = LogitKeys::expert_of(s, lane);
      if (left[s] > best || (left[s] == best && left[s] && id < best_expert)) best = left[s], best_expert = id;
    }
    const uint32_t top = __reduce_max_sync(kAllLanes, best);
    const int winner = __reduce_min_sync(kAllLanes, uint32_t(best == top ? best_expert : kMaxExperts));
#pragma unroll
    for (int s = 0; s < kRouterLoads * 2; s++)
      if (left[s] && LogitKeys::expert_of(s, lane) == winner) left[s] = 0;
    if (lane == n) expert = winner, key = top;
  }
#pragma unroll
  for (int w = 0; w < kMaxExperts / 32; w++) {
    const uint32_t word = __reduce_or_sync(kAllLanes, expert / 32 == w ? 1u << expert % 32 : 0u);
    if (lane == 0) table.chosen[row][w] = word;
  }
  int place = 0;
#pragma unroll
  for (int n = 0; n < kMaxSlots; n++) place += __shfl_sync(kAllLanes, expert, n) < expert;
  if (lane < count) table.weight[row][place] = 1.0f / (1.0f + expf(-unordered(key)));
}

// The list of active experts with their rows, from what each row chose. One warp; lane l looks after experts l, l + 32, ...
template <int ROWS>
__device__ __forceinline__ void list_active(Routing<ROWS>& table, int rows) {
  const int lane = threadIdx.x & 31;
  const uint32_t below = (1u << lane) - 1;
  int active = 0;
  int row_base[ROWS] = {};
#pragma unroll
  for (int w = 0; w < kMaxExperts / 32; w++) {
    uint32_t any = 0, chosen[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      chosen[row] = row < rows ? table.chosen[row][w] : 0;
      any |= chosen[row];
    }
    if (any >> lane & 1) {
      const int at = active + __popc(any & below);
      uint32_t members = 0;
      int member = 0;  // members of experts before this one
#pragma unroll
      for (int row = 0; row < ROWS; row++) member += row_base[row] + __popc(chosen[row] & below);
      table.first_member[at] = member;
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        const bool is_member = chosen[row] >> lane & 1;
        const int slot = row_base[row] + __popc(chosen[row] & below);
        table.slot[at][row] = is_member ? slot : kMaxSlots;
        if (!is_member) continue;
        members |= 1u << row;
        table.member_row[member] = row, table.member_slot[member] = slot;
        member++;
      }
      table.expert[at] = w * 32 + lane;
      table.rows[at] = members;
    }
    active += __popc(any);
#pragma unroll
    for (int row = 0; row < ROWS; row++) row_base[row] += __popc(chosen[row]);
  }
  if (lane == 0) {
    int members = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++) members += row_base[row];
    table.active = active, table.first_member[active] = members;
  }
}

// A dense FFN is one matrix that every live row uses with weight 1.
template <int ROWS>
__device__ __forceinline__ void fill_dense_table(Routing<ROWS>& table, const int (&position)[ROWS], int rows) {
  table.active = 0, table.expert[0] = 0, table.rows[0] = 0, table.first_member[0] = 0;
  int members = 0;
  for (int row = 0; row < ROWS; row++) {
    const bool live = row < rows && position[row] != kIdleRow;
    table.slot[0][row] = live ? 0 : kMaxSlots;
    table.weight[row][0] = 1.0f;
    if (!live) continue;
    table.active = 1, table.rows[0] |= 1 << row;
    table.member_row[members] = row, table.member_slot[members] = 0;
    members++;
  }
  table.first_member[1] = members;
}

}  // namespace mkc
