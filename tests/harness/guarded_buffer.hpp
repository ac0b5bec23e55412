// Memory that a test hands to a call: filled with poison before the call, with guard bytes on both sides.
// Created while a device::RankScope exists, it is pinned host memory that devices can access.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace ferry::contract {

inline constexpr std::byte kPoison{0x7F};  // fills outputs before a call
inline constexpr std::byte kNan{0xFF};  // fills rows that must not be read: NaN in every floating-point type

class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::int64_t bytes = 0, std::byte fill = kPoison);

  // A buffer that holds a copy of `values`.
  template <class T>
  static GuardedBuffer of(const std::vector<T>& values) {
    GuardedBuffer buffer(static_cast<std::int64_t>(values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), buffer.as<T>());
    return buffer;
  }

  std::byte* data() { return block_.get() + kGuardBytes; }
  const std::byte* data() const { return block_.get() + kGuardBytes; }
  std::int64_t bytes() const { return bytes_; }
  std::span<const std::byte> span() const { return {data(), static_cast<std::size_t>(bytes_)}; }

  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }

  void fill(std::byte value);

  // @throws Mismatch if a guard byte changed.
  void require_guards(const std::string& what) const;

  // @throws Mismatch if a guard byte changed or the contents differ. `element_bytes` is used for the
  // message.
  void require_contents(const std::vector<std::byte>& expected, std::size_t element_bytes,
                        const std::string& what) const;

 private:
  static constexpr std::int64_t kGuardBytes = 192;  // a multiple of 64: data() is aligned to 64 bytes

  struct Free {
    bool on_device = false;
    void operator()(std::byte* block) const;
  };
  static std::unique_ptr<std::byte[], Free> allocate(std::int64_t bytes);
  std::unique_ptr<std::byte[], Free> block_;
  std::int64_t bytes_;
};

using Buffer = GuardedBuffer;  // for tests/capi

template <class T>
std::vector<std::byte> bytes_of_values(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

// Copies dense rows to rows that lie `stride` bytes apart (0: dense). Bytes between rows are left alone.
void copy_rows(const std::vector<std::byte>& dense, std::int64_t row_bytes, std::int64_t stride,
               std::byte* to);

// A buffer of `rows` rows that lie `stride` bytes apart (0: dense), with poison between them.
GuardedBuffer strided_buffer(const std::vector<std::byte>& dense, std::int64_t rows, std::int64_t row_bytes,
                             std::int64_t stride);

}  // namespace ferry::contract
