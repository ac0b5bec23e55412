// The functions of src/backends/cuda/device/ptx.cuh where kernel code is compiled for the host, with the
// memory orders that their names say. Include what stands in for CUDA itself before.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "layout/device_signals.hpp"
#include "protocol/on_host/accesses.hpp"

namespace ferry::cuda {

inline std::uint64_t load_flag(const Flag* flag, std::memory_order order) {
  on_host::step();
  on_host::access_widths.note(flag, 8);
  return std::atomic_ref(const_cast<Flag*>(flag)->value).load(order);
}
inline void store_flag(Flag* flag, std::uint64_t value, std::memory_order order) {
  on_host::step();
  on_host::access_widths.note(flag, 8);
  std::atomic_ref(flag->value).store(value, order);
}

inline std::uint64_t load_acquire_sys(const Flag* flag) {
  return load_flag(flag, std::memory_order_acquire);
}
inline std::uint64_t load_relaxed_sys(const Flag* flag) {
  return load_flag(flag, std::memory_order_relaxed);
}
inline std::uint64_t load_acquire_gpu(const Flag* flag) {
  return load_flag(flag, std::memory_order_acquire);
}
inline void store_release_sys(Flag* flag, std::uint64_t value) {
  store_flag(flag, value, std::memory_order_release);
}
inline void store_relaxed_sys(Flag* flag, std::uint64_t value) {
  store_flag(flag, value, std::memory_order_relaxed);
}
inline void store_two_relaxed_sys(Flag* flags, std::uint64_t value) {
  store_relaxed_sys(flags + 1, value);
  store_relaxed_sys(flags, value);
}
inline void store_release_gpu(Flag* flag, std::uint64_t value) {
  store_flag(flag, value, std::memory_order_release);
}
inline void raise_release_gpu(Flag* flag, std::uint64_t value) {
  on_host::step();
  std::atomic_ref at(flag->value);
  std::uint64_t seen = at.load(std::memory_order_relaxed);
  while (seen < value && !at.compare_exchange_weak(seen, value, std::memory_order_release)) {
  }
}
inline void fence_acq_rel_sys() {
  __threadfence();
}
#ifndef FERRY_CLOCK_OF_FIBERS  // otherwise whoever includes this has it
inline std::uint64_t global_nanoseconds() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}
#endif

inline std::mutex packet_access;  // keeps the two words of a packet together
inline void store_packet_relaxed_sys(LLPacket* packet, LLPacket value) {
  on_host::step();
  on_host::access_widths.note(packet, 16);
  const std::lock_guard lock(packet_access);
  *packet = value;
}
inline LLPacket load_packet_relaxed_sys(const LLPacket* packet) {
  on_host::step();
  on_host::access_widths.note(packet, 16);
  const std::lock_guard lock(packet_access);
  return *packet;
}

inline std::uint32_t load_acquire_block(const std::uint32_t* word) {
  return std::atomic_ref(*const_cast<std::uint32_t*>(word)).load(std::memory_order_acquire);
}
inline void store_release_block(std::uint32_t* word, std::uint32_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}
inline std::uint32_t count_in_block(std::uint32_t* counter) {
  return std::atomic_ref(*counter).fetch_add(1);
}

}  // namespace ferry::cuda
