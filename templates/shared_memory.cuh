// Shared memory of one block, as one struct. `place.shared_bytes` computes the same size.
#pragma once
#include "slices.cuh"

namespace mkc {

constexpr int kWordsPerParcel = 8;       // 16 bf16 values
constexpr int kMergeDims = 32;           // values of a head that one merge task takes
constexpr int kPartialWords = kMergeDims + 2;  // of one split: maximum, sum, values
constexpr int kRoutingTables = 3;        // two in turn for routed layers, one for dense layers
constexpr int kDenseTable = 2;
constexpr int kOwnedTiles = (kHiddenTiles + kSms - 1) / kSms;
constexpr int kStateWords = 4 * (kHeadTiles + 1) * 32;  // of a split's running softmax, as the lanes hold it

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Scratch of one consumer warp in 32-bit words: the largest of its uses, and room for 16 k-blocks of each row.
__host__ __device__ constexpr int scratch_words(int rows) { return max_of(kStateWords, 16 * rows * kWordsPerParcel); }

// Which experts the rows chose, in the order in which all SMs walk them. A member is a row that chose an expert; members
// are numbered by expert, then by row.
template <int ROWS>
struct Routing {
  uint32_t chosen[ROWS][kMaxExperts / 32];  // one bit for each expert that a row chose
  float weight[ROWS][kMaxSlots];            // of a row's experts, ascending by id
  int active;                               // experts that any row chose
  uint8_t expert[kMaxExperts];              // their ids, ascending
  uint8_t rows[kMaxExperts];                // one bit for each row that chose this one
  uint8_t slot[kMaxExperts][ROWS];          // this one's place among a row's own
  uint8_t first_member[kMaxExperts + 4];    // of this one; of active ones and one more
  uint8_t member_row[ROWS * kMaxSlots], member_slot[ROWS * kMaxSlots];
};

// One warp's part of a tile's sums, on its way to the warp that finishes the tile.
template <int ROWS>
struct Deposit {
  static constexpr int kPairs = ROWS <= 2 ? 1 : ROWS <= 4 ? 2 : 4;  // pairs of rows: lanes with a larger j have nothing
  float4 sums[2][8][kPairs];  // as lanes (i, j) have them; the second for gate and up
  float squares[8];           // of each row of the layer input, this warp's slice
};

template <int ROWS, int SLOTS>
struct SharedMemory {
  uint8_t ring[SLOTS][kChunkBytes];                              // chunks of weights and pages
  uint32_t layer_input[kHiddenTiles][ROWS][kWordsPerParcel];     // bf16 pairs, ready as B fragments; each warp has its slice
  uint32_t scratch[kConsumerWarps][scratch_words(ROWS)];
  Deposit<ROWS> deposits[2][kConsumerWarps];                      // of this tile and the next
  float4 residual[kOwnedTiles][32];                              // of the tiles this SM owns, as accumulators lie
  float slice_squares[kConsumerWarps][8];                        // sum of squares of each warp's slice of the layer input, by row
  float merged[kHelperWarps][kMergeDims];                        // what a helper warp merges
  uint32_t norm_words[8];                                        // weights of the norm that an owned tile goes through next
  float2 best[kConsumerWarps][8];                                // of the logits that a warp has seen: value and token of each row
  float2 rotation[ROWS][kHeadTiles * 8];                         // cosine and sine of each rotated pair
  Routing<ROWS> routing[kRoutingTables];
  uint64_t full[SLOTS], empty[SLOTS];                            // barriers of the ring's slots: landed, given back
  uint64_t deposited[2], collected[2];                           // barriers of the deposits
  int position[ROWS];                                            // of each row's new token, or kIdleRow
  int issued;                                                    // chunks that the producer has sent for
  int routed_layers;                                             // routed layers whose table is ready
  int begun_layers[kConsumerWarps + 1];                          // layers that each consumer warp and the producer have begun
  int lent[kConsumerWarps], taken[kConsumerWarps];               // number of the last split whose state a warp lent to another; and that was read
};

}  // namespace mkc
