// Every PTX instruction the kernels use, once, under a name that says its order and scope.
#pragma once

#include <cstdint>

namespace ferry::cuda {

// --- flags -----------------------------------------------------------------------------------------------

__device__ __forceinline__ std::uint64_t load_acquire_sys(const std::uint64_t* flag) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_sys(std::uint64_t* flag, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(std::uint64_t* flag, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ std::uint64_t load_acquire_gpu(const std::uint64_t* flag) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_gpu(std::uint64_t* flag, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ std::uint32_t load_relaxed_sys(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_sys(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Nanoseconds since some start, the same for all blocks of a GPU. Ticks coarsely.
__device__ __forceinline__ std::uint64_t global_nanoseconds() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

// Adds one and returns the count before, ordering what this block's threads have stored before their own
// additions ahead of what the caller does next.
__device__ __forceinline__ std::uint32_t count_in_block(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(counter)))
               : "memory");
  return before;
}

// --- barriers among some warps of a block ------------------------------------------------------------------

// `threads` is a multiple of 32; all of them call it with the same `barrier` (1 to 15).
__device__ __forceinline__ void sync_threads_of(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- bulk copies: global -> shared -> global, whole rows by one thread -------------------------------------

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// A phase of the word is over after `count` arrivals and all announced bytes.
__device__ __forceinline__ void arrival_init(std::uint64_t* arrival, std::uint32_t count = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(arrival)), "r"(count)
               : "memory");
}

// Release, among the threads of the block.
__device__ __forceinline__ void arrive(std::uint64_t* arrival) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(arrival))
               : "memory");
}

// Makes initialised arrival words visible to the copy engine.
__device__ __forceinline__ void fence_arrival_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The thread expects `bytes` of bulk loads on this arrival word.
__device__ __forceinline__ void arrival_expect(std::uint64_t* arrival, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)),
               "r"(bytes)
               : "memory");
}

// Returns when the phase of `parity` is over: the loaded bytes may be read by this thread (acquire).
__device__ __forceinline__ void arrival_wait(std::uint64_t* arrival, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(shared_address(arrival)),
      "r"(parity)
      : "memory");
}

// Addresses and sizes are multiples of 16.
__device__ __forceinline__ void bulk_load(void* to_shared, const void* from, std::uint32_t bytes,
                                          std::uint64_t* arrival) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to_shared)),
      "l"(from), "r"(bytes), "r"(shared_address(arrival))
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from_shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from_shared)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The thread's bulk stores have read their shared memory: it may be overwritten.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The thread's bulk stores are done: their writes are visible to this thread, so a release that follows
// covers them.
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The same for all but the last group committed.
__device__ __forceinline__ void bulk_wait_read_but_last() {
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait_written_but_last() {
  asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
}

// Two values to bf16 or fp16: nearest, ties to even, denormals kept; NaN is 7FFF.
__device__ __forceinline__ std::uint32_t two_to_bf16(float low, float high) {
  std::uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ std::uint32_t two_to_fp16(float low, float high) {
  std::uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Two values to e4m3: nearest, ties to even, saturating to finite; NaN is 7F.
__device__ __forceinline__ std::uint32_t two_to_e4m3(float low, float high) {
  std::uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

// Orders this thread's ordinary accesses before bulk copies it issues afterwards: what a flag has made
// visible to ordinary loads may be read by the copy engine, what was written to shared memory may be stored
// by it.
__device__ __forceinline__ void fence_before_bulk() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace ferry::cuda
