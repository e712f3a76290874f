// Shared memory of one block, as one struct. `place.fixed_shared_bytes` computes the same size.
#pragma once
#include "step.cuh"

namespace mkc {

constexpr int kWordsPerParcel = 8;       // 16 bf16 values
constexpr int kMergeDims = 32;           // values of a head that one merge task takes
constexpr int kPartialWords = kMergeDims + 2;  // of one split: maximum, sum, values
constexpr int kRoutingTables = 3;        // two in turn for routed layers, one for dense layers
constexpr int kDenseTable = 2;
constexpr int kOwnedTiles = (kHiddenTiles + kSms - 1) / kSms;

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Scratch of one consumer warp in 32-bit words: the largest of its uses.
__host__ __device__ constexpr int scratch_words(int rows) {
  return max_of(max_of((kGroup + 2) * kHeadTiles * kWordsPerParcel, 8 * (kPartialWords + 2)), kChunkFragments * rows * kWordsPerParcel);
}

// Which experts the rows chose, in the order in which all SMs walk them.
template <int ROWS>
struct Routing {
  uint32_t chosen[ROWS][kMaxExperts / 32];  // one bit for each expert that a row chose
  float weight[ROWS][kMaxSlots];            // of a row's experts, ascending by id
  int active;                               // experts that any row chose
  uint8_t expert[kMaxExperts];              // their ids, ascending
  uint8_t rows[kMaxExperts];                // one bit for each row that chose this one
  uint8_t slot[kMaxExperts][ROWS];          // this one's place among a row's own
};

template <int ROWS, int SLOTS>
struct SharedMemory {
  uint8_t ring[SLOTS][kChunkBytes];                              // chunks of weights and pages
  uint32_t layer_input[kHiddenTiles][ROWS][kWordsPerParcel];     // bf16 pairs, ready as B fragments
  uint32_t scratch[kConsumerWarps][scratch_words(ROWS)];
  float4 sums[2][kConsumerWarps][32];                            // warps' accumulators of a shared tile: the router's, an owned tile's
  float4 residual[kOwnedTiles][32];                              // of the tiles this SM owns, as accumulators lie
  float squares[ROWS][kHiddenTiles];                             // sum of squares of each tile of the layer input
  float inverse_rms[kConsumerWarps][8];                          // of each row of the layer input at hand
  uint32_t norm_words[8];                                        // weights of the norm that an owned tile goes through next
  float2 rotation[ROWS][kHeadTiles * 8];                         // cosine and sine of each rotated pair
  Routing<ROWS> routing[kRoutingTables];
  uint64_t full[SLOTS], empty[SLOTS];                            // barriers of the ring's slots
  int position[ROWS];                                            // of each row's new token, or kIdleRow
  int issued;                                                    // chunks that the producer has sent for
  int routed_layers;                                             // routed layers whose table is ready
  int staged_layers;                                             // layers that all consumer warps have begun
  int streamed_layers;                                           // layers that the producer has begun
};

}  // namespace mkc
