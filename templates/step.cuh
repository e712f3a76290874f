// What the host passes to a step, and what the whole kernel calls things.
#pragma once
#include "model.cuh"
#include "ptx.cuh"

namespace mkc {

constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = kConsumerWarps * 32;
constexpr int kFragmentBytes = 512;
constexpr int kPageTokens = 64;
constexpr int kHeadDim = kHeadTiles * 16;
constexpr int kPageFragments = kPageTokens / 16 * kHeadTiles;
constexpr int kPageBytes = kPageFragments * kFragmentBytes;
constexpr int kChunkBytes = kChunkFragments * kFragmentBytes;
constexpr int kMaxExperts = 128;
constexpr int kMaxSlots = 8;
constexpr int kIdleRow = -1;  // the position of a row that takes no part in the step

constexpr __host__ __device__ int chunks_of(int fragments) { return (fragments + kChunkFragments - 1) / kChunkFragments; }

// Kinds of program entry; the numbers are the format of the program table.
enum EntryKind : uint32_t { END, EMBED, STAGE, ROUTER, QKV, ATTENTION, FFN_UP, MERGE, OUT, FFN_DOWN, RESIDUAL, HEAD, SAMPLE };

// One entry of an SM's program. `warp` is the consumer warp of its first task; the next tasks follow round robin.
struct Entry {
  EntryKind kind;
  int warp, layer, tile;
};
__device__ __forceinline__ Entry decode_entry(uint2 word) {
  return {EntryKind(word.x & 0xff), int(word.x >> 8 & 0xff), int(word.x >> 16), int(word.y)};
}

// The pages of the layers that share an attention window. table[row * pitch + page] is a block of the pool.
struct KvGroup {
  uint8_t* pool;
  const int* table;
  uint64_t pitch;
};

struct Step {
  const uint8_t* arena;    // packed weights
  uint4* packets;
  const uint2* programs;   // [sm][pitch]
  KvGroup kv[kKvGroups];
  int* tokens;             // [row] in: the token to feed; out: the token chosen
  int* positions;          // [row] in: the fed token's position; out: one more
  int* active;             // [row] 0 once a row has stopped
  const int* limits;       // [row] position at which a row stops
  const int* stop_tokens;
  int* emitted;            // [row] this step's tokens, -1 for idle rows
  float* logits;           // [row][vocabulary]
  float* layer_outputs;    // [layer][row][hidden], or null
  uint64_t* fault;         // the first wait that ran past the limit, see Patience::report; 0 if none did
  uint32_t epoch;          // of this step's first packets; one more for each layer
  int program_pitch, rows, stop_count;
  uint32_t poll_limit;     // of one wait
  int free_run;            // 1: every wait for packets is answered at once, to measure the card's ceiling
};

enum WaitCode { kWaitPackets = 1, kWaitChunk = 2, kWaitSlot = 3, kWaitRouting = 4, kWaitStage = 5 };

// Waits that end: past the limit the wait is reported, and this warp waits no more.
struct Patience {
  const Step& step;
  Entry entry{};
  bool over = false;

  __device__ explicit Patience(const Step& s) : step(s) {}

  // Calls ready() until it holds. ready() must give the same answer to the whole warp.
  template <class Ready>
  __device__ __forceinline__ void wait(int code, Ready ready) {
    for (uint32_t polls = 0; !over && !ready();)
      if (++polls > step.poll_limit) over = true, report(code);
  }
  // code | kind << 4 | warp << 8 | sm << 16 | layer << 28 | tile << 40, in one word so that the first report stays whole.
  __device__ __forceinline__ void report(int code) {
    const int thread = fresh_thread_index();
    const uint64_t where = uint64_t(code | entry.kind << 4 | thread / 32 << 8) | uint64_t(blockIdx.x) << 16 | uint64_t(entry.layer) << 28 | uint64_t(entry.tile) << 40;
    if (thread % 32 == 0) atomicCAS(step.fault, 0ull, where);
  }
};

}  // namespace mkc
