// PTX that CUDA C++ has no words for, one wrapper each. Nothing here knows of models or plans.
#pragma once
#include <cuda_bf16.h>

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

namespace mkc {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// The same as a value that the compiler keeps in a register and does not work out anew at each use.
__device__ __forceinline__ uint32_t kept_shared_address(const void* pointer) {
  uint32_t address;
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(shared_address(pointer)));
  return address;
}

// ---- barriers in shared memory --------------------------------------------------------------
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, int arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether the phase of this parity has completed; may wait a little for it.
__device__ __forceinline__ bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}
__device__ __forceinline__ bool barrier_try_wait(uint64_t* barrier, uint32_t parity) { return barrier_try_wait(shared_address(barrier), parity); }
template <int kBarrier>
__device__ __forceinline__ void named_barrier_sync(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}

// ---- streaming ------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Copies `bytes` (a multiple of 16) to shared memory and counts them on the barrier.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// A lane's part of a fragment, read where it stands: read earlier, fragments would crowd out everything else.
__device__ __forceinline__ uint4 load_fragment(const uint4* fragment) {
  uint4 a;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w) : "r"(shared_address(fragment)));
  return a;
}

// Orders this thread's writes to a slot before those of the copy engine.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- words that warps of one block hand to each other ------------------------------------------
__device__ __forceinline__ int load_acquire(const int* pointer) {
  int value;
  asm volatile("ld.acquire.cta.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(shared_address(pointer)) : "memory");
  return value;
}
__device__ __forceinline__ int load_relaxed(const int* pointer) {
  int value;
  asm volatile("ld.relaxed.cta.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(shared_address(pointer)) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(int* pointer, int value) {
  asm volatile("st.relaxed.cta.shared::cta.b32 [%0], %1;" ::"r"(shared_address(pointer)), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release(int* pointer, int value) {
  asm volatile("st.release.cta.shared::cta.b32 [%0], %1;" ::"r"(shared_address(pointer)), "r"(value) : "memory");
}

// ---- 16-byte words in global memory, read and written whole -------------------------------------
__device__ __forceinline__ uint4 load_word16(const uint4* pointer) {
  uint64_t low, high;
  asm volatile("{\n.reg .b128 word;\nld.relaxed.gpu.global.b128 word, [%2];\nmov.b128 {%0, %1}, word;\n}"
               : "=l"(low), "=l"(high) : "l"(pointer) : "memory");
  return make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
}
__device__ __forceinline__ void store_word16(uint4* pointer, uint4 value) {
  const uint64_t low = value.x | uint64_t(value.y) << 32, high = value.z | uint64_t(value.w) << 32;
  asm volatile("{\n.reg .b128 word;\nmov.b128 word, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(pointer), "l"(low), "l"(high) : "memory");
}

// ---- arithmetic -----------------------------------------------------------------------------
// sums[16 x 8] += a[16 x 16] b[16 x 8]; lane l has rows l/4 and l/4 + 8, columns 2(l%4) and the next.
__device__ __forceinline__ void mma_16x8x16(float (&sums)[4], uint4 a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
// Transposes an 8 x 8 matrix of 16-bit values; lane l has row l/4, columns 2(l%4) and the next.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t word) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float bf16_low(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// Registers of each thread of the four warps that call it together (128 threads from a multiple of 128 on).
template <int kRegisters>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// The thread's number, as a value that the compiler takes to be new each time: what follows from it is worked out where
// it is used, not kept in registers over the whole program.
__device__ __forceinline__ int fresh_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(index));
  return index;
}
// Nanoseconds of a clock that all SMs share, modulo 2^32.
__device__ __forceinline__ uint32_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return uint32_t(time);
}

}  // namespace mkc
