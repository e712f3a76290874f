// The ring: slots of shared memory that chunks land in, set up once and never stopped. The producer sends for chunks
// in program order, over task and layer boundaries; the consumer warps that a chunk belongs to take it by its number
// and give it back.
#pragma once
#include "shared_memory.cuh"

namespace mkc {

// The state of lane 0 of the producer warp, which alone sends for chunks. A chunk must not take it longer than the memory
// takes to bring one, so all that it needs are addresses that move from slot to slot.
template <int ROWS, int SLOTS>
struct RingProducer {
  static_assert(kWindowChunks <= SLOTS, "the window must fit the ring");
  SharedMemory<ROWS, SLOTS>& shared;
  Patience& patience;
  const uint64_t policy = evict_first_policy();
  const uint32_t first_full;                   // address of the first slot's barrier
  uint32_t slot, full, oldest;                 // addresses: of the next slot and of its barrier; of the barrier of the chunk a window before
  uint32_t round = 0, oldest_round = 1;        // of these, modulo 2; a barrier that was never used counts as the end of round 1
  int issued = 0;                              // chunks sent for

  __device__ RingProducer(SharedMemory<ROWS, SLOTS>& s, Patience& p)
      : shared(s), patience(p), first_full(kept_shared_address(s.full)), slot(kept_shared_address(s.ring)), full(first_full), oldest(first_full + 8 * (SLOTS - kWindowChunks)) {}

  // Sends for `bytes` at `source`. Waits while the ring is full, and while the window is: more bytes in flight than
  // bandwidth times latency only lengthen the queue that packets wait in.
  __device__ __forceinline__ void issue(const uint8_t* source, int bytes) {
    patience.wait(kWaitSlot, [&] {
      const bool is_free = barrier_try_wait(full + 8 * SLOTS, round ^ 1), has_landed = barrier_try_wait(oldest, oldest_round);
      return is_free & has_landed;
    });
    if (patience.over()) return;
    barrier_expect_bytes(full, bytes);
    bulk_copy(slot, source, bytes, full, policy);
    store_relaxed(&shared.issued, ++issued);
    slot += kChunkBytes, full += 8, oldest += 8;
    if (full == first_full + 8 * SLOTS) full = first_full, slot -= SLOTS * kChunkBytes, round ^= 1;
    if (oldest == first_full + 8 * SLOTS) oldest = first_full, oldest_round ^= 1;
  }
  // All chunks of a tile.
  __device__ __forceinline__ void issue_tile(const uint8_t* source, const Slicing& slicing) {
    const int run = slicing.run();
    int left = slicing.fragments, left_of_run = run;
#pragma unroll 1
    while (left > 0) {
      const int fragments = min(min(left_of_run, kChunkFragments), left);
      issue(source, fragments * kFragmentBytes);
      source += fragments * kFragmentBytes, left -= fragments, left_of_run -= fragments;
      if (left_of_run == 0) left_of_run = run;
    }
  }
};

template <int ROWS, int SLOTS>
struct RingConsumer {
  SharedMemory<ROWS, SLOTS>& shared;
  Patience& patience;
  int next = 0;    // number of the first chunk of the entry at hand
  int issued = 0;  // chunks that the producer has sent for, when this warp last looked

  // The fragments of chunk `number`, once they have landed; lane l's part of fragment f is at [32 f + l].
  __device__ __forceinline__ const uint4* wait(int number) {
    const int slot = number % SLOTS;
    // A barrier's parity tells two rounds apart, not more: first see that the chunk was sent for. The barrier itself
    // orders the bytes. Chunks take longer to land than a warp sleeps.
    patience.wait(kWaitChunk, [&] {
      if (issued > number) return barrier_try_wait(&shared.full[slot], number / SLOTS & 1);
      issued = load_relaxed(&shared.issued);
      if (issued <= number) __nanosleep(50);
      return false;
    });
    return reinterpret_cast<const uint4*>(shared.ring[slot]);
  }
  // This warp has read chunk `number`; `arrivals` is kConsumerWarps over the warps that share the chunk.
  __device__ __forceinline__ void release(int number, int arrivals) {
    __syncwarp();
    if (fresh_thread_index() % 32 == 0) barrier_arrive(&shared.empty[number % SLOTS], arrivals);
  }
};

}  // namespace mkc
