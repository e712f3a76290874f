// Products of streamed fragments with values in shared memory. The batch's rows are the n side of the mma: up to eight
// cost what one costs.
#pragma once
#include "ring.cuh"

namespace mkc {

// Sums of one 16-row tile (or of a gate tile and its up tile) in four chains, so that the mma of one does not wait for
// the one before. Lane (i, j) has tile rows i and i + 8, batch rows 2j and 2j + 1.
struct Accumulator {
  float chain[4][4] = {};

  // Sums of one tile: all four chains, in a fixed order.
  __device__ __forceinline__ float4 total() const {
    float sum[4];
#pragma unroll
    for (int q = 0; q < 4; q++) sum[q] = (chain[0][q] + chain[1][q]) + (chain[2][q] + chain[3][q]);
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  // Sums of tile `which` of a pair whose fragments alternate.
  __device__ __forceinline__ float4 total_of_pair(int which) const {
    float sum[4];
#pragma unroll
    for (int q = 0; q < 4; q++) sum[q] = chain[which][q] + chain[which + 2][q];
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
};

__device__ __forceinline__ void add(float4& sum, float4 part) { sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w; }

// Where this lane finds its B fragments: two words of every k-block, `pitch` words apart; zero for lanes beyond the
// batch. Values lie as [k-block][row][8 words].
struct BatchFragments {
  const uint32_t* words;
  int pitch;
  bool live;

  __device__ __forceinline__ static BatchFragments of(const uint32_t* values, int rows_apart, int row, bool live) {
    return {values + (live ? row * kWordsPerParcel : 0) + fresh_thread_index() % 4 * 2, rows_apart * kWordsPerParcel, live};
  }
  __device__ __forceinline__ uint2 operator[](int k_block) const {
    uint2 b = make_uint2(0, 0);
    if (live) b = *reinterpret_cast<const uint2*>(words + k_block * pitch);
    return b;
  }
};

// sums += fragments [count] x values. PER_K fragments share a k-block: 1 for plain tiles, 2 for gate and up.
template <int PER_K>
__device__ __forceinline__ void multiply_chunk(Accumulator& sums, const uint4* fragments, int count, BatchFragments values, int first_k_block) {
  const int lane = fresh_thread_index() % 32;
  constexpr int kStep = 8;  // fragments on their way to registers at once
  if (count == kChunkFragments && kChunkFragments % kStep == 0) {
#pragma unroll
    for (int base = 0; base < kChunkFragments; base += kStep) {
      uint4 a[kStep];
      uint2 b[kStep / PER_K];
#pragma unroll
      for (int u = 0; u < kStep; u++) a[u] = fragments[(base + u) * 32 + lane];
#pragma unroll
      for (int u = 0; u < kStep / PER_K; u++) b[u] = values[first_k_block + base / PER_K + u];
#pragma unroll
      for (int u = 0; u < kStep; u++) mma_16x8x16(sums.chain[u % 4], a[u], b[u / PER_K]);
    }
    return;
  }
  for (int base = 0; base < count; base += 4) {
#pragma unroll
    for (int u = 0; u < 4; u++)
      if (base + u < count) mma_16x8x16(sums.chain[u], fragments[(base + u) * 32 + lane], values[first_k_block + (base + u) / PER_K]);
  }
}

// sums += one whole tile of `fragments` fragments, whose first chunk has number `number`.
template <int PER_K, class Ring>
__device__ __forceinline__ void multiply_tile(Accumulator& sums, Ring& ring, int number, int fragments, BatchFragments values) {
  for (int done = 0; done < fragments; done += kChunkFragments, number++) {
    const uint4* chunk = ring.wait(number);
    multiply_chunk<PER_K>(sums, chunk, min(fragments - done, kChunkFragments), values, done / PER_K);
    ring.release(number);
  }
}

}  // namespace mkc
