// The kernel: one block on each SM for the whole step. Eight consumer warps work through the SM's program, one producer
// warp streams for them, and up to three routing warps choose experts.
#pragma once
#include "producer.cuh"
#include "routing.cuh"

namespace mkc {

constexpr int kProducerWarp = kConsumerWarps, kFirstRoutingWarp = kConsumerWarps + 1;

__host__ __device__ constexpr int threads_of(int rows) { return (kConsumerWarps + 1 + routing_warps(rows)) * 32; }

template <int ROWS, int SLOTS>
__device__ __forceinline__ void consume(const Step& step, SharedMemory<ROWS, SLOTS>& shared) {
  Patience patience(step);
  RingConsumer<ROWS, SLOTS> ring{shared, patience};
  Consumer<ROWS, SLOTS> self(step, shared, patience, ring);
  const uint2* program = step.programs + size_t(blockIdx.x) * step.program_pitch;
  const int lane = threadIdx.x % 32;
  uint2 words = program[lane];  // 32 entries at a time, the next 32 on their way
  uint2 next_words = 32 + lane < step.program_pitch ? program[32 + lane] : make_uint2(END, 0);
  for (int index = 0;; index++) {
    if (index && index % 32 == 0) {
      words = next_words;
      next_words = index + 32 + lane < step.program_pitch ? program[index + 32 + lane] : make_uint2(END, 0);
    }
    const Entry entry = decode_entry(make_uint2(__shfl_sync(kAllLanes, words.x, index % 32), __shfl_sync(kAllLanes, words.y, index % 32)));
    switch (entry.kind) {
      case EMBED: self.embed(self.begin(entry)); break;
      case STAGE: self.stage(self.begin(entry)); break;
      case ROUTER: route_tile(self, self.begin(entry)); break;
      case QKV: qkv_tile(self, self.begin(entry)); break;
      case ATTENTION: attention(self, self.begin(entry)); break;
      case FFN_UP: ffn_up(self, self.begin(entry)); break;
      case MERGE: merge(self, self.begin(entry)); break;
      case OUT: out_tile(self, self.begin(entry)); break;
      case FFN_DOWN: ffn_down(self, self.begin(entry)); break;
      case RESIDUAL: residual(self, self.begin(entry)); break;
      case HEAD: head_tiles(self, self.begin(entry)); break;
      case SAMPLE: sample(self, self.begin(entry)); break;
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
    barrier_init(&shared.empty[threadIdx.x], 1);
    barrier_init_fence();
  }
  if (threadIdx.x >= 64 && threadIdx.x < 64 + ROWS) {
    const int row = threadIdx.x - 64;
    shared.position[row] = row < step.rows && step.active[row] ? step.positions[row] : kIdleRow;
  }
  if (threadIdx.x == 96) shared.issued = shared.routed_layers = shared.staged_layers = shared.streamed_layers = 0;
  __syncthreads();
  if (threadIdx.x == 0) fill_dense_table(shared.routing[kDenseTable], shared.position, step.rows);
  for (int n = threadIdx.x; n < step.rows * kHeadTiles * 8; n += threads_of(ROWS)) {
    const int row = n / (kHeadTiles * 8), pair = n % (kHeadTiles * 8);
    shared.rotation[row][pair] = rotation_of(max(shared.position[row], 0), kInverseFrequencies[pair]);
  }
  __syncthreads();
  if (warp < kConsumerWarps) consume(step, shared);
  else if (warp == kProducerWarp) produce(step, shared);
  else route(step, shared, warp - kFirstRoutingWarp);
}

}  // namespace mkc
