// Checks that kernels can use the caller's pointers. A kernel that accesses pageable host memory destroys the
// CUDA context.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "ferry/types.hpp"

namespace ferry::cuda {

struct CallPointer {
  const char* name;  // of the argument, in messages
  const void* address;
  std::int64_t alignment;  // bytes; a power of two
};

// The pointers of a call that its kernels may read or write. Null pointers are left out.
class CallPointers {
 public:
  void add(const char* name, const void* address, std::int64_t alignment) {
    if (address != nullptr) pointers_[count_++] = {name, address, alignment};
  }
  operator std::span<const CallPointer>() const { return {pointers_.data(), count_}; }

 private:
  static constexpr std::size_t kMost = 2 * kMaxParts + 15;  // of a dispatch
  std::array<CallPointer, kMost> pointers_{};
  std::size_t count_ = 0;
};

// The memory that a pointer points to.
struct MemoryFound {
  enum class Kind { pageable, pinned, device } kind;
  int device = -1;          // of device memory
  bool accessible = false;  // from the exchange's device
};

// Checks the pointers of one lane's calls, or of one thread's.
//
// A query is a call of the driver, so the check remembers addresses that it has accepted: calls that pass the
// same memory again cost no query. It does not notice when the caller frees such memory and the same address
// becomes memory of another kind.
class PointerCheck {
 public:
  using Query = std::function<MemoryFound(const void*)>;

  // `where`: follows an address in messages, such as " on rank 3". `device`: of the kernels. `query`: finds
  // the memory of an address.
  PointerCheck(std::string where, int device, Query query)
      : where_(std::move(where)), device_(device), query_(std::move(query)) {}

  // Throws UsageError, with the argument's name, the memory found and the remedy, at the first pointer that
  // kernels cannot use. `operation`: its name.
  void require_usable(const char* operation, std::span<const CallPointer> pointers);

 private:
  std::string where_;
  int device_;
  Query query_;
  std::array<const void*, 64> accepted_{};
};

// The memory at `address`, and whether kernels of `device` can access it. One call of the driver, and another
// for memory of another device.
MemoryFound find_memory(const void* address, int device);

}  // namespace ferry::cuda
