// The kernel: one block on each SM for the whole step. Eight consumer warps work through the SM's program, one producer
// warp streams for them, and three helper warps choose experts and merge attention splits.
#pragma once
#include "producer.cuh"
#include "helper.cuh"
#include "tasks_attention.cuh"
#include "tasks_owner.cuh"
#include "tasks_products.cuh"

namespace mkc {

constexpr int kProducerWarp = kConsumerWarps, kFirstHelperWarp = kConsumerWarps + 1;

// Groups of four warps can trade registers: consumers are two groups, the other warps a third. With three groups an SM has
// 168 registers for each thread; the third needs fewer and leaves the rest to the first two.
constexpr int kThreads = kWarps * 32;
constexpr int kConsumerRegisters = 208, kOtherRegisters = 88;
static_assert(2 * (kConsumerRegisters - 168) <= 168 - kOtherRegisters, "the third group gives less than the others take");

template <int ROWS, int SLOTS>
__device__ __forceinline__ void consume(const Step& step, SharedMemory<ROWS, SLOTS>& shared) {
  Patience patience(step);
  RingConsumer<ROWS, SLOTS> ring{shared, patience};
  Consumer<ROWS, SLOTS> self(step, shared, patience, ring);
  Program program(step);
  while (true) {
    const Entry entry = self.begin(program.next());
    switch (entry.kind) {
      case EMBED: self.embed(entry); break;
      case STAGE: self.stage(entry); break;
      case ROUTER:
      case QKV:
      case FFN_UP:
      case HEAD: products(self, entry); break;
      case ATTENTION: attention(self, entry); break;
      case MERGE: break;  // for the helper warps
      case OUT:
      case FFN_DOWN: add_products(self, entry); break;
      case RESIDUAL: residual(self, entry); break;
      case SAMPLE: sample(self, entry); break;
      case END: return;
    }
  }
}

// Cosine and sine of position * frequency as float32 has the product, at any position.
__device__ __forceinline__ float2 rotation_of(int position, float inverse_frequency) {
  const double turns = double(float(position) * inverse_frequency) * 0.15915494309189535;  // 1 / 2 pi
  const float half_turns = float(2.0 * (turns - rint(turns)));
  return make_float2(cospif(half_turns), sinpif(half_turns));
}

template <int ROWS, int SLOTS>
__device__ __forceinline__ void decode_step(const Step& step) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedMemory<ROWS, SLOTS>& shared = *reinterpret_cast<SharedMemory<ROWS, SLOTS>*>(shared_bytes);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < SLOTS) {
    barrier_init(&shared.full[threadIdx.x], 1);
    barrier_init(&shared.empty[threadIdx.x], kConsumerWarps);
    barrier_init_fence();
  }
  if (threadIdx.x >= 32 && threadIdx.x < 34) {
    barrier_init(&shared.deposited[threadIdx.x - 32], kConsumerWarps);
    barrier_init(&shared.collected[threadIdx.x - 32], 1);
    barrier_init_fence();
  }
  if (threadIdx.x >= 64 && threadIdx.x < 64 + ROWS) {
    const int row = threadIdx.x - 64;
    shared.position[row] = row < step.rows && step.active[row] ? step.positions[row] : kIdleRow;
  }
  if (threadIdx.x >= 96 && threadIdx.x <= 96 + kConsumerWarps) shared.begun_layers[threadIdx.x - 96] = 0;
  if (threadIdx.x >= 128 && threadIdx.x < 128 + kConsumerWarps) shared.lent[threadIdx.x - 128] = shared.taken[threadIdx.x - 128] = 0;
  if (threadIdx.x >= 192 && threadIdx.x < 192 + kConsumerWarps * 8) shared.best[threadIdx.x / 8 - 24][threadIdx.x % 8] = make_float2(-infinity(), __int_as_float(0x7fffffff));
  if (threadIdx.x == 160) shared.issued = shared.routed_layers = 0;
  __syncthreads();
  if (threadIdx.x == 0) fill_dense_table(shared.routing[kDenseTable], shared.position, step.rows);
  for (int n = threadIdx.x; n < step.rows * kHeadTiles * 8; n += kThreads) {
    const int row = n / (kHeadTiles * 8), pair = n % (kHeadTiles * 8);
    shared.rotation[row][pair] = rotation_of(max(shared.position[row], 0), kInverseFrequencies[pair]);
  }
  __syncthreads();
  if (warp < kConsumerWarps) {
    take_registers<kConsumerRegisters>();
    consume(step, shared);
  } else {
    give_registers<kOtherRegisters>();
    if (warp == kProducerWarp) produce(step, shared);
    else help(step, shared, warp - kFirstHelperWarp);
  }
}

}  // namespace mkc
