// Wrappers of the PTX instructions that kernels use. A name says the memory order and the scope: sys (all
// devices and the host), gpu (one device), block.
#pragma once

#include <cstdint>

#include "layout/device_signals.hpp"

namespace ferry::cuda {

// --- flags -----------------------------------------------------------------------------------------------

__device__ __forceinline__ std::uint64_t load_acquire_sys(const Flag* flag) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ std::uint64_t load_relaxed_sys(const Flag* flag) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_sys(Flag* flag, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(Flag* flag, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Sets two flags, flags[0] and flags[1], by one instruction; `flags` is a multiple of 16 bytes. For the
// memory model a vector store is a store of 8 bytes for each flag.
__device__ __forceinline__ void store_two_relaxed_sys(Flag* flags, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %1};" ::"l"(flags), "l"(value) : "memory");
}

__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ std::uint64_t load_acquire_gpu(const Flag* flag) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_gpu(Flag* flag, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Raises a flag to `value`; a flag that is higher stays as it is.
__device__ __forceinline__ void raise_release_gpu(Flag* flag, std::uint64_t value) {
  asm volatile("red.release.gpu.global.max.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Nanoseconds on a clock that all blocks of a GPU share. Its resolution is coarse.
__device__ __forceinline__ std::uint64_t global_nanoseconds() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

// --- LL packets: a call number and a word in one access of 16 bytes --------------------------------------

// Relaxed: a packet arrives whole or not at all, and orders no other access.
__device__ __forceinline__ void store_packet_relaxed_sys(LLPacket* packet, LLPacket value) {
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "mov.b128 both, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], both;\n"
      "}" ::"l"(packet),
      "l"(value.call), "l"(value.word)
      : "memory");
}

__device__ __forceinline__ LLPacket load_packet_relaxed_sys(const LLPacket* packet) {
  LLPacket value;
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "ld.relaxed.sys.global.b128 both, [%2];\n"
      "mov.b128 {%0, %1}, both;\n"
      "}"
      : "=l"(value.call), "=l"(value.word)
      : "l"(packet)
      : "memory");
  return value;
}

// Loads a word of a kernel's arguments by an ordinary load. The constant cache serves one address at a time,
// so threads that load different words would wait for each other.
__device__ __forceinline__ std::uint64_t load_argument_word(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.u64 %0, [%1];" : "=l"(value) : "l"(word));
  return value;
}

// --- words in shared memory, among the warps of a block -------------------------------------------------

__device__ __forceinline__ std::uint32_t load_acquire_block(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(value)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(word)))
               : "memory");
  return value;
}

__device__ __forceinline__ void store_release_block(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(word))),
               "r"(value)
               : "memory");
}

// Adds one and returns the previous count. Acquire and release: orders this thread's accesses before the
// addition ahead of the later accesses of threads that see it.
__device__ __forceinline__ std::uint32_t count_in_block(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(counter)))
               : "memory");
  return before;
}

// Adds to a word, without a result. atomicAdd would first find out which memory the word is in, which takes
// hundreds of cycles.
__device__ __forceinline__ void add_in_block(std::int32_t* word, std::int32_t value) {
  asm volatile("red.relaxed.cta.shared::cta.add.s32 [%0], %1;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(word))),
               "r"(value)
               : "memory");
}

// --- asynchronous loads into shared memory ---------------------------------------------------------------

// Copies 16 bytes; both addresses are multiples of 16. This thread may read them after wait_async_but().
__device__ __forceinline__ void load_async(void* shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(from)
               : "memory");
}

// Ends a group of this thread's asynchronous loads; it may be empty.
__device__ __forceinline__ void commit_async() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all groups of this thread but its `kLatest` latest have arrived.
template <int kLatest>
__device__ __forceinline__ void wait_async_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
}

// --- barriers among some warps of a block ------------------------------------------------------------------

// [warps] All `threads` threads, a multiple of 32, call it with the same `barrier` (1 to 15).
__device__ __forceinline__ void sync_threads_of(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- conversions -----------------------------------------------------------------------------------------

// Rounds two values to bf16 or fp16: nearest, ties to even, denormals kept; NaN becomes 7FFF.
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

// The larger magnitude of each pair, with either sign; NaN only where both are NaN. One instruction, where
// clearing the operands' signs would take two more.
__device__ __forceinline__ std::uint32_t max_magnitude_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
__device__ __forceinline__ std::uint32_t max_magnitude_fp16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// The smaller of each pair; NaN only where both are NaN.
__device__ __forceinline__ std::uint32_t min_fp16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t smaller;
  asm("min.f16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}

// Sums rounded to nearest, ties to even.
__device__ __forceinline__ std::uint32_t add_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
__device__ __forceinline__ std::uint32_t add_fp16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// Exact.
__device__ __forceinline__ float value_of_fp16(std::uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Rounds two values to e4m3: nearest, ties to even, saturating to finite values; NaN becomes 7F.
__device__ __forceinline__ std::uint32_t two_to_e4m3(float low, float high) {
  std::uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

// Exact.
__device__ __forceinline__ float value_of_e4m3(std::uint8_t bits) {
  float value;
  asm("{\n"
      ".reg .b32 both;\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.f16x2.e4m3x2 both, %1;\n"
      "mov.b32 {low, high}, both;\n"
      "cvt.f32.f16 %0, low;\n"
      "}"
      : "=f"(value)
      : "h"(std::uint16_t{bits}));
  return value;
}

// Bytes 0 to 3 are those of `low`, 4 to 7 those of `high`; each digit of the selector chooses one. The result
// has FF where the chosen byte's highest bit is 1, otherwise 0.
template <std::uint32_t kSelector>
__device__ __forceinline__ std::uint32_t signs_of_bytes(std::uint32_t low, std::uint32_t high) {
  std::uint32_t signs;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(low), "r"(high), "n"(kSelector | 0x8888));
  return signs;
}

}  // namespace ferry::cuda
