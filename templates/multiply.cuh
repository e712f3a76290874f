// Products of streamed fragments with values in shared memory. The batch's rows are the n side of the mma: up to eight
// cost what one costs.
#pragma once
#include "ring.cuh"

namespace mkc {

// Sums of one 16-row tile (or of a gate tile and its up tile) in four chains, so that the mma of one does not wait for
// the one before. Lane (i, j) has tile rows i and i + 8, batch rows 2j and 2j + 1.
struct Accumulator {
  float chain[4][4] = {};

  // Sums of the fragments of even or of odd number: of one tile of a pair, or a half of a single tile's.
  __device__ __forceinline__ float4 total_of_pair(int which) const {
    float sum[4];
#pragma unroll
    for (int q = 0; q < 4; q++) sum[q] = chain[which][q] + chain[which + 2][q];
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
};

__device__ __forceinline__ void add(float4& sum, float4 part) { sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w; }

constexpr int kStep = 8;  // fragments on their way to registers at once

// sums += fragments [count] x values. Lane (i, j) finds the two words of its B fragment of k-block n at values + n * PITCH.
// PER_K fragments share a k-block. Lanes with `is_zero` take zeros for their column.
template <int PER_K, int PITCH>
__device__ __forceinline__ void multiply_fragments(Accumulator& sums, const uint4* fragments, int count, const uint32_t* values, bool is_zero) {
  const auto value = [&](int k_block) { return is_zero ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(values + k_block * PITCH); };
  fragments += fresh_thread_index() % 32;
#pragma unroll 1
  for (; count >= kStep; count -= kStep, fragments += kStep * 32, values += kStep / PER_K * PITCH) {
    uint4 a[kStep];
    uint2 b[kStep / PER_K];
#pragma unroll
    for (int u = 0; u < kStep; u++) a[u] = load_fragment(fragments + u * 32);
#pragma unroll
    for (int u = 0; u < kStep / PER_K; u++) b[u] = value(u);
#pragma unroll
    for (int u = 0; u < kStep; u++) mma_16x8x16(sums.chain[u % 4], a[u], b[u / PER_K]);
  }
  if (count == 0) return;
  // The rest: past the last fragment, it again, times zeros.
  uint4 a[kStep - 1];
  uint2 b[kStep / PER_K];
#pragma unroll
  for (int u = 0; u < kStep - 1; u++) a[u] = load_fragment(fragments + min(u, count - 1) * 32);
#pragma unroll
  for (int u = 0; u < kStep / PER_K; u++) b[u] = u * PER_K < count ? value(u) : make_uint2(0, 0);
#pragma unroll
  for (int u = 0; u < kStep - 1; u++) mma_16x8x16(sums.chain[u % 4], a[u], b[u / PER_K]);
}

// sums += fragments [from, to) of this warp's slice x values, for a tile whose first chunk has number `number`; `values`
// has the slice's k-blocks from `from` on. Chunks are given back once the warp has read its last fragment of them, so a
// slice must be read in order, to its end. Sharers of a chunk wait for it even if they have nothing in it: whoever gives
// it back must not be a round of the ring ahead.
template <int PER_K, int PITCH, class Ring>
__device__ __forceinline__ void multiply_slice(Accumulator& sums, Ring& ring, int number, const Slice& slice, int from, int to, const uint32_t* values, bool is_zero) {
  if (slice.chunk < 0) return;
  number += slice.chunk;
  do {
    // Of a slice in several chunks, as much as lies in one.
    const int at = slice.offset + from, chunk = at / kChunkFragments, stop = min(to, (chunk + 1) * kChunkFragments - slice.offset);
    const uint4* fragments = ring.wait(number + chunk) + at % kChunkFragments * 32;
    multiply_fragments<PER_K, PITCH>(sums, fragments, stop - from, values, is_zero);
    if (stop == slice.size || (slice.offset + stop) % kChunkFragments == 0) ring.release(number + chunk, slice.arrivals);
    values += (stop - from) / PER_K * PITCH;
    from = stop;
  } while (from < to);
}

}  // namespace mkc
