// The dynamic choices of a step as pure functions of values that every SM sees; `compiler/rules.py` states the same.
#pragma once
#include "shared_memory.cuh"

namespace mkc {

__device__ __forceinline__ int first_token(int position, int window) { return max(0, position - window + 1); }

struct PageSpan {
  int first, count;
};
__device__ __forceinline__ PageSpan page_span(int position, int window) {
  const int first = first_token(position, window) / kPageTokens;
  return {first, position / kPageTokens - first + 1};
}
// Splits of each KV head of a row: one for each page, at most kMaxSplits.
__device__ __forceinline__ int split_count(int position, int window) {
  return position == kIdleRow ? 0 : min(page_span(position, window).count, kMaxSplits);
}

// One split of one row's attention under one KV head: pages [page, end_page).
struct AttentionUnit {
  int row, kv_head, split, page, end_page;
  bool is_last;  // holds the new token
};

// K and V are streamed in chunks of whole 16-token tiles, K and V of the same tokens in turn. Consumer warps take such
// pairs of chunks in turn.
constexpr int kTileChunk = kChunkFragments / kHeadTiles < kPageTokens / 16 ? kChunkFragments / kHeadTiles : kPageTokens / 16;
constexpr int kChunkTokens = kTileChunk * 16;
static_assert(kTileChunk > 0 && kPageTokens % kChunkTokens == 0, "a page must be whole chunks of whole token tiles");

// The chunks of a split that hold a token the row may see, counted from the row's first token.
struct ChunkSpan {
  int begin, end;
};
__device__ __forceinline__ ChunkSpan chunk_span(const AttentionUnit& unit, int position, int window) {
  constexpr int kPageChunks = kPageTokens / kChunkTokens;
  return {max(unit.page * kPageChunks, first_token(position, window) / kChunkTokens), min(unit.end_page * kPageChunks, position / kChunkTokens + 1)};
}

// Calls visit(unit) for the splits that the SM of this rank works on, in ring order. Splits are dealt to consecutive
// ranks, each row going on where the last one ended; a rank has at most one split of a row.
template <int ROWS, class Visit>
__device__ __forceinline__ void for_attention_units(int rank, const int (&position)[ROWS], int rows, int window, Visit visit) {
  for (int row = 0; row < rows; row++) {
    const int splits = split_count(position[row], window), unit = rank;
    rank -= kKvHeads * splits;  // counted from the rank that the next row begins with
    if (rank < 0) rank += kSms;
    if (unit >= kKvHeads * splits) continue;
    const PageSpan span = page_span(position[row], window);
    const int kv_head = unit / splits, split = unit % splits;
    visit(AttentionUnit{row, kv_head, split, span.first + split * span.count / splits, span.first + (split + 1) * span.count / splits, split == splits - 1});
  }
}

}  // namespace mkc
