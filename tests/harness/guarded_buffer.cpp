#include "harness/guarded_buffer.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "harness/check.hpp"
#include "harness/device.hpp"

namespace ferry::contract {
namespace {

constexpr std::align_val_t kAlign{64};
constexpr std::byte kGuardByte{0xA5};

}  // namespace

void Buffer::Free::operator()(std::byte* block) const {
  if (on_device) return device::release(block);
  ::operator delete[](block, kAlign);
}

std::unique_ptr<std::byte[], Buffer::Free> Buffer::allocate(std::int64_t bytes) {
  const bool on_device = device::at_work();
  std::byte* block = on_device
                         ? device::allocate(bytes)
                         : static_cast<std::byte*>(::operator new[](static_cast<std::size_t>(bytes), kAlign));
  return {block, Free{on_device}};
}

Buffer::Buffer(std::int64_t bytes, std::byte fill_with)
    : block_(allocate(bytes + 2 * kGuard)), bytes_(bytes) {
  std::fill_n(block_.get(), kGuard, kGuardByte);
  std::fill_n(data() + bytes_, kGuard, kGuardByte);
  fill(fill_with);
}

void Buffer::fill(std::byte value) {
  std::fill_n(data(), bytes_, value);
}

void Buffer::require_guards(const std::string& what) const {
  const auto intact = [](const std::byte* guard) {
    return std::all_of(guard, guard + kGuard, [](std::byte b) { return b == kGuardByte; });
  };
  require(intact(block_.get()), what, ": bytes before the buffer were written");
  require(intact(data() + bytes_), what, ": bytes after the buffer were written");
}

void Buffer::require_image(const std::vector<std::byte>& expected, std::size_t unit,
                           const std::string& what) const {
  require_guards(what);
  require_equal_bytes(span(), expected, unit, what);
}

void lay_rows(const std::vector<std::byte>& dense, std::int64_t row_bytes, std::int64_t stride,
              std::byte* to) {
  if (row_bytes == 0) return;
  const std::int64_t rows = static_cast<std::int64_t>(dense.size()) / row_bytes;
  for (std::int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * (stride > 0 ? stride : row_bytes), dense.data() + row * row_bytes,
                static_cast<std::size_t>(row_bytes));
  }
}

Buffer strided_buffer(const std::vector<std::byte>& dense, std::int64_t rows, std::int64_t row_bytes,
                      std::int64_t stride) {
  Buffer buffer(rows * (stride > 0 ? stride : row_bytes));
  lay_rows(dense, row_bytes, stride, buffer.data());
  return buffer;
}

}  // namespace ferry::contract
