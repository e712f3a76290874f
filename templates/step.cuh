// What the host passes to a step, and what the whole kernel calls things.
#pragma once
#include "model.cuh"
#include "ptx.cuh"

namespace mkc {

constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = kConsumerWarps * 32;
constexpr int kHelperWarps = 3;  // they route and merge
constexpr int kWarps = kConsumerWarps + 1 + kHelperWarps;
constexpr int kFragmentBytes = 512;
constexpr int kPageTokens = 64;
constexpr int kHeadDim = kHeadTiles * 16;
constexpr int kPageFragments = kPageTokens / 16 * kHeadTiles;
constexpr int kPageBytes = kPageFragments * kFragmentBytes;
constexpr int kChunkBytes = kChunkFragments * kFragmentBytes;
constexpr int kMaxExperts = 128;
constexpr int kMaxSlots = 8;
constexpr int kIdleRow = -1;  // the position of a row that takes no part in the step

// Kinds of program entry; the numbers are the format of the program table.
enum EntryKind : uint32_t { END, EMBED, STAGE, ROUTER, QKV, ATTENTION, FFN_UP, MERGE, OUT, FFN_DOWN, RESIDUAL, HEAD, SAMPLE };

// One entry of an SM's program. `warp` is the consumer warp that finishes its first task; the next tasks follow round robin.
struct Entry {
  EntryKind kind;
  int warp, layer, tile;
};
__device__ __forceinline__ Entry decode_entry(uint32_t word) {
  return {EntryKind(word & 0xf), int(word >> 4 & 0x7), int(word >> 7 & 0xff), int(word >> 15)};
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
  const uint32_t* programs;  // [sm][pitch] entries, END after the last
  KvGroup kv[kKvGroups];
  int* tokens;             // [row] in: the token to feed; out: the token chosen
  int* positions;          // [row] in: the fed token's position; out: one more
  int* active;             // [row] 0 once a row has stopped
  const int* limits;       // [row] position at which a row stops
  const int* stop_tokens;
  int* emitted;            // [row] this step's tokens, -1 for idle rows
  float* logits;           // [row][vocabulary]
  float* layer_outputs;    // [layer][row][hidden], or null
  uint64_t* fault;         // the first wait that ran past the limit, see Patience::begin; 0 if none did
  uint32_t epoch;          // of this step's first packets; one more for each layer
  int program_pitch, rows, stop_count;
  uint32_t poll_limit;     // of one wait
  int free_run;            // 1: every wait for packets is answered at once, to measure the card's ceiling
  uint4* trace;            // of a kernel that traces: [sm][warp][entry] encoded entry, nanoseconds of start, ready and end
};

// An SM's program as one warp reads it: lane l holds entry l of 32, and of the next 32, which are on their way meanwhile.
struct Program {
  const uint32_t* entries;
  int end, index = 0;
  uint32_t words, next_words;

  __device__ explicit Program(const Step& step) : entries(step.programs + size_t(blockIdx.x) * step.program_pitch), end(step.program_pitch) {
    words = load(0), next_words = load(32);
  }
  __device__ __forceinline__ uint32_t load(int first) const {
    const int at = first + fresh_thread_index() % 32;
    return at < end ? entries[at] : uint32_t(END);
  }
  // The entry after the one given out last, where this warp has it at hand; END otherwise.
  __device__ __forceinline__ uint32_t peek() const { return index < 32 ? __shfl_sync(kAllLanes, words, index) : uint32_t(END); }
  // The next entry, still encoded.
  __device__ __forceinline__ uint32_t next() {
    if (index == 32) {
      index = 0, entries += 32, end -= 32;
      words = next_words, next_words = load(32);
    }
    return __shfl_sync(kAllLanes, words, index++);
  }
};

// A page of K or of V.
__device__ __forceinline__ uint8_t* page_address(const Step& step, const Layer& layer, int block, int kv_head, int is_value) {
  return step.kv[layer.kv_group].pool + uint64_t(block) * layer.kv_block_bytes + layer.kv_offset + (kv_head * 2 + is_value) * kPageBytes;
}

enum WaitCode { kWaitPackets = 1, kWaitChunk = 2, kWaitSlot = 3, kWaitRouting = 4, kWaitStage = 5, kWaitWarps = 6, kReported = -1 };

// What a kernel that traces keeps of the entry at hand.
struct Trace {
  uint32_t start = 0, ready = 0;  // ready: when the last packets or the routing that the entry needs were there
  int entries = 0;

  // The entry is over, and the next begins.
  __device__ __forceinline__ void turn(const Step& step, uint32_t entry) {
    const uint32_t now = nanoseconds();
    const int thread = fresh_thread_index();
    if (thread % 32 == 0 && entries) step.trace[size_t(blockIdx.x * kWarps + thread / 32) * step.program_pitch + entries - 1] = make_uint4(entry, start, ready, now);
    start = ready = now;
    entries++;
  }
};

// Waits that end: past the limit this warp waits no more, and says so when it begins its next entry.
struct Patience {
  const Step& step;
  uint32_t entry = 0;  // the one at hand, encoded
  int given_up = 0;    // what it waited for too long, or kReported
  Trace trace;

  __device__ explicit Patience(const Step& s) : step(s) {}
  __device__ __forceinline__ bool over() const { return given_up != 0; }

  // Calls ready() until it holds. ready() must give the same answer to all lanes that wait.
  template <class Ready>
  __device__ __forceinline__ void wait(int code, Ready ready) {
    for (uint32_t polls = 0; !over() && !ready();)
      if (++polls > step.poll_limit) given_up = code;
    if (kTrace && (code == kWaitPackets || code == kWaitRouting)) trace.ready = nanoseconds();
  }
  // Turns to the next entry. A fault is one word, so that the first stays whole: entry | code << 32 | warp << 36 | sm << 44.
  __device__ __forceinline__ void begin(uint32_t next) {
    if (given_up > 0) {
      const int thread = fresh_thread_index();
      if (thread % 32 == 0) atomicCAS(step.fault, 0ull, entry | uint64_t(given_up | thread / 32 << 4 | blockIdx.x << 12) << 32);
      given_up = kReported;
    }
    if (kTrace) trace.turn(step, entry);
    entry = next;
  }
};

}  // namespace mkc
