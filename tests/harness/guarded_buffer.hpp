// Memory of the caller as a test sees it: poisoned before a call, with guards around it. Made while a rank
// works on a device, it is memory that devices reach.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace ferry::contract {

inline constexpr std::byte kPoison{0x7F};  // what outputs hold before a call
inline constexpr std::byte kNan{0xFF};     // every value of these bytes is NaN: rows that must not be read

class Buffer {
 public:
  explicit Buffer(std::int64_t bytes = 0, std::byte fill = kPoison);

  // A buffer that holds these values.
  template <class T>
  static Buffer of(const std::vector<T>& values) {
    Buffer buffer(static_cast<std::int64_t>(values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), buffer.as<T>());
    return buffer;
  }

  std::byte* data() { return block_.get() + kGuard; }
  const std::byte* data() const { return block_.get() + kGuard; }
  std::int64_t bytes() const { return bytes_; }
  std::span<const std::byte> span() const { return {data(), static_cast<std::size_t>(bytes_)}; }

  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }

  void fill(std::byte value);

  // Throws Mismatch when a guard has changed.
  void require_guards(const std::string& what) const;

  // Throws Mismatch when a guard or any byte differs.
  void require_image(const std::vector<std::byte>& expected, std::size_t unit, const std::string& what) const;

 private:
  static constexpr std::int64_t kGuard = 192;  // keeps data() at a multiple of 64

  struct Free {
    bool on_device = false;
    void operator()(std::byte* block) const;
  };
  static std::unique_ptr<std::byte[], Free> allocate(std::int64_t bytes);
  std::unique_ptr<std::byte[], Free> block_;
  std::int64_t bytes_;
};

// Values as bytes.
template <class T>
std::vector<std::byte> bytes_of_values(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

// Dense rows laid out with `stride` bytes from row to row; what lies between is poison.
void lay_rows(const std::vector<std::byte>& dense, std::int64_t row_bytes, std::int64_t stride,
              std::byte* to);

// A buffer of `rows` rows with `stride` (0: dense).
Buffer strided_buffer(const std::vector<std::byte>& dense, std::int64_t rows, std::int64_t row_bytes,
                      std::int64_t stride);

}  // namespace ferry::contract
