// The boundary of the C interface, which every function crosses: turns exceptions into statuses, and structs
// that begin with `size` into complete values. The objects behind its opaque handles.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/ferry.h"
#include "ferry/group.hpp"
#include "ferry/version.hpp"

namespace ferry::capi {

// Stores the exception that is being handled as this thread's last error, and returns its status.
ferry_status store_current_error() noexcept;

// Runs `body` and returns its status. Throws nothing.
template <class Body>
ferry_status guarded(const Body& body) noexcept {
  try {
    body();
    return FERRY_OK;
  } catch (...) {
    return store_current_error();
  }
}

// What an error without another text says of the status that `function` of the caller has returned.
std::string describe(ferry_status status, const char* function);

// Throws the status that a function of the caller has returned, unless it is FERRY_OK: as this thread's last
// error if that has the same status, else as an error that names `function`.
void raise(ferry_status status, const char* function);

// Throws UsageError if the pointer is NULL.
template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) throw UsageError(str(name, " is NULL"));
  return *pointer;
}

// The size that the caller has set. A size beyond that of any struct means that the memory was not
// initialised.
template <class T>
std::size_t checked_size(const T* given, const char* name) {
  constexpr std::size_t kMost = 1 << 16;
  const std::size_t size = required(given, name).size;
  if (size < sizeof size || size > kMost) {
    throw UsageError(str(name, ": size = ", size, ", must be sizeof(", name, "), which is ", sizeof(T),
                         " in this library"));
  }
  return size;
}

// Reads a struct of a caller built with this, an earlier or a later header.
template <class T>
T read_sized(const T* given, const char* name) {
  const std::size_t size = checked_size(given, name);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw UnsupportedError(str(name, ": byte ", i, " of ", size, " is set, but this library knows ",
                               sizeof(T), " bytes: use a newer library, or leave later fields zero"));
  }
  T value{};
  std::memcpy(&value, given, std::min(size, sizeof(T)));
  return value;
}

// Throws UsageError if a field is set that is reserved in this header, in a struct without `size`.
template <class T>
void check_reserved(const T& given, const char* name) {
  for (const std::int64_t& field : given.reserved) {
    if (field == 0) continue;
    throw UsageError(str(name, ".reserved[", &field - given.reserved, "] = ", field,
                         ", must be 0: this library, version ", version(),
                         ", is older than the program's headers, or the struct was not zeroed"));
  }
}

// Writes as much of `value` as the caller's struct has room for, and zeros to the rest of the struct.
template <class T>
void write_sized(T* given, T value, const char* name) {
  const std::size_t size = checked_size(given, name);
  value.size = size;
  std::memset(static_cast<void*>(given), 0, size);
  std::memcpy(static_cast<void*>(given), &value, std::min(size, sizeof(T)));
}

}  // namespace ferry::capi

struct ferry_group {
  ferry::Group group;
};

struct ferry_rank {
  ferry::Rank rank;
};

struct ferry_exchange {
  ferry_exchange(ferry::Rank rank, const ferry::Config& config) : exchange(std::move(rank), config) {
    const ferry::Placement& placement = exchange.config().placement;
    for (int held = 0; placement.has_replicas() && held < placement.ranks(); ++held) {
      const std::vector<int>& experts = placement.experts_of(held);
      held_experts.insert(held_experts.end(), experts.begin(), experts.end());
      held_counts.push_back(static_cast<std::int32_t>(experts.size()));
    }
    if (placement.has_replicas()) return;
    for (const ferry::ExpertLocation& location : placement.locations()) {
      expert_rank.push_back(location.rank);
      expert_local.push_back(location.local);
    }
  }

  ferry::Exchange exchange;
  // The placement, for ferry_exchange_config: [E], or with replicas [P] and [R].
  std::vector<std::int32_t> expert_rank, expert_local, held_experts, held_counts;
};
