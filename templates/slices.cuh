// How the consumer warps share a product: along K. Warp w multiplies slice w, an eighth of K, of every tile. So it needs
// an eighth of every input only, all warps work on the chunks that are landing, and their sums meet once for each tile.
#pragma once
#include "step.cuh"

namespace mkc {

// The fragments of a tile, PER_K for each k-block (two where a gate tile goes with its up tile), as slices and as chunks.
// A chunk holds whole slices; a slice that is larger than a chunk takes several.
struct Slicing {
  int fragments;      // of the tile
  int slice;          // fragments of a slice; the last ones may be short or empty
  int sharers_shift;  // a chunk holds 1 << sharers_shift slices: 1, 2, 4 or 8
  int chunks;         // of the tile

  // Chunks of one slice: 1 unless it is larger than a chunk.
  __host__ __device__ constexpr int chunks_of_slice() const { return (slice + kChunkFragments - 1) / kChunkFragments; }
  // Fragments of a run of chunks that is as long as its slices: of all but the last run.
  __host__ __device__ constexpr int run() const { return slice << sharers_shift; }
};

__host__ __device__ constexpr Slicing slicing_of(int k_blocks, int per_k) {
  Slicing slicing{k_blocks * per_k, (k_blocks + kConsumerWarps - 1) / kConsumerWarps * per_k, 3, 0};
  static_assert(kConsumerWarps == 1 << 3, "a chunk for all warps has eight slices");
  while (slicing.sharers_shift > 0 && slicing.run() > kChunkFragments) slicing.sharers_shift--;
  const int whole = slicing.fragments / slicing.run(), rest = slicing.fragments % slicing.run();
  slicing.chunks = whole * slicing.chunks_of_slice() + (rest + kChunkFragments - 1) / kChunkFragments;
  return slicing;
}

// One warp's slice of a tile.
struct Slice {
  int begin, size;  // fragments of the tile: the first, and how many
  int chunk;        // the tile's chunk that it begins in; -1 if there is none
  int offset;       // of its first fragment in that chunk
  int arrivals;     // on a chunk's barrier with which this warp gives it back; all sharers' together are kConsumerWarps
};

__device__ __forceinline__ Slice slice_of(const Slicing& slicing, int warp) {
  const int run = warp >> slicing.sharers_shift, first = run * slicing.run();
  const int begin = min(warp * slicing.slice, slicing.fragments);
  return {begin, min(slicing.slice, slicing.fragments - begin), first < slicing.fragments ? run * slicing.chunks_of_slice() : -1, begin - first, kConsumerWarps >> slicing.sharers_shift};
}

constexpr Slicing kRowSlicing = slicing_of(kHiddenTiles, 1);     // of 16 rows with K = hidden size
constexpr Slicing kGateUpSlicing = slicing_of(kHiddenTiles, 2);  // of a gate tile and its up tile
constexpr Slicing kOutSlicing = slicing_of(kAttentionTiles, 1);
constexpr int kInputSlice = kRowSlicing.slice;                   // k-blocks of the layer input that a warp has

}  // namespace mkc
