// The border of the C interface: C++ errors become statuses here, and structs with a size become plain
// values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/ferry.h"

namespace ferry::capi {

// Keeps the exception that is being handled as this thread's last error.
ferry_status remember_current() noexcept;

// Runs `body`; no exception gets past it.
template <class Body>
ferry_status guarded(const Body& body) noexcept {
  try {
    body();
    return FERRY_OK;
  } catch (...) {
    return remember_current();
  }
}

// Throws what a function of the caller has returned: this thread's last error if it is of that status, or
// else an error that names `function`. Does nothing for FERRY_OK.
void raise(ferry_status status, const char* function);

template <class T>
T& required(T* pointer, const char* what) {
  if (pointer == nullptr) throw UsageError(str(what, " is NULL"));
  return *pointer;
}

// The size that the caller has put first. One beyond any struct's is memory that nobody has set.
template <class T>
std::size_t checked_size(const T* given, const char* name) {
  constexpr std::size_t kMost = 1 << 16;
  const std::size_t size = required(given, name).size;
  if (size < sizeof size || size > kMost) {
    throw UsageError(str(name, ": size = ", size, ", must be its sizeof, ", sizeof(T), " in this library"));
  }
  return size;
}

// A struct of the caller's, whatever header that was built against.
template <class T>
T read_sized(const T* given, const char* name) {
  const std::size_t size = checked_size(given, name);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw UnsupportedError(str(name, ": byte ", i, " of ", size, " is set, this library knows ", sizeof(T)));
  }
  T taken{};
  std::memcpy(&taken, given, std::min(size, sizeof(T)));
  return taken;
}

// Fills as much of the caller's struct as it has room for, and the rest with zero.
template <class T>
void write_sized(T* given, T value, const char* name) {
  const std::size_t size = checked_size(given, name);
  value.size = size;
  std::memset(static_cast<void*>(given), 0, size);
  std::memcpy(static_cast<void*>(given), &value, std::min(size, sizeof(T)));
}

}  // namespace ferry::capi
