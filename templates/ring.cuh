// The ring: slots of shared memory that chunks land in, set up once and never stopped. The producer sends for chunks
// in program order, over task and layer boundaries; the consumer warp whose task a chunk belongs to takes it by its
// number and frees the slot.
#pragma once
#include "shared_memory.cuh"

namespace mkc {

template <int ROWS, int SLOTS>
struct RingProducer {
  SharedMemory<ROWS, SLOTS>& shared;
  Patience& patience;
  uint64_t policy = evict_first_policy();
  int issued = 0;

  // Sends for `bytes` at `source`. Waits while the ring is full, and while the window is: more bytes in flight than
  // bandwidth times latency only lengthen the queue that packets wait in.
  __device__ __forceinline__ void issue(const uint8_t* source, int bytes) {
    const int slot = issued % SLOTS;
    const uint32_t round = issued / SLOTS;
    patience.wait(kWaitSlot, [&] { return barrier_try_wait(&shared.empty[slot], (round & 1) ^ 1); });
    if (kWindowChunks < SLOTS && issued >= kWindowChunks) {
      const int oldest = issued - kWindowChunks;
      patience.wait(kWaitSlot, [&] { return barrier_try_wait(&shared.full[oldest % SLOTS], oldest / SLOTS & 1); });
    }
    if ((fresh_thread_index() % 32) == 0 && !patience.over) {
      async_proxy_fence();
      barrier_expect_bytes(&shared.full[slot], bytes);
      bulk_copy(shared.ring[slot], source, bytes, &shared.full[slot], policy);
      store_relaxed(&shared.issued, issued + 1);
    }
    issued++;
  }

  // A run of `fragments` fragments, in chunks of which the last may be short.
  __device__ __forceinline__ void issue_fragments(const uint8_t* source, int fragments) {
    for (; fragments > 0; fragments -= kChunkFragments) {
      issue(source, min(fragments, kChunkFragments) * kFragmentBytes);
      source += kChunkBytes;
    }
  }
};

template <int ROWS, int SLOTS>
struct RingConsumer {
  SharedMemory<ROWS, SLOTS>& shared;
  Patience& patience;
  int next = 0;  // number of the first chunk of the entry at hand

  // The fragments of chunk `number`, once they have landed; lane l's part of fragment f is at [32 f + l].
  __device__ __forceinline__ const uint4* wait(int number) {
    const int slot = number % SLOTS;
    // A barrier's parity tells two rounds apart, not more: first see that the slot's round has begun. The barrier itself
    // orders the bytes.
    patience.wait(kWaitChunk, [&] { return load_relaxed(&shared.issued) > number; });
    patience.wait(kWaitChunk, [&] { return barrier_try_wait(&shared.full[slot], number / SLOTS & 1); });
    return reinterpret_cast<const uint4*>(shared.ring[slot]);
  }
  // This warp has read chunk `number`.
  __device__ __forceinline__ void release(int number) {
    __syncwarp();
    if ((fresh_thread_index() % 32) == 0) barrier_arrive(&shared.empty[number % SLOTS]);
  }
};

}  // namespace mkc
