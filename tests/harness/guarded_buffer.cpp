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

void GuardedBuffer::Free::operator()(std::byte* block) const {
  if (on_device) return device::release(block);
  ::operator delete[](block, kAlign);
}

std::unique_ptr<std::byte[], GuardedBuffer::Free> GuardedBuffer::allocate(std::int64_t bytes) {
  const bool on_device = device::rank_is_active();
  std::byte* block = on_device
                         ? device::allocate(bytes)
                         : static_cast<std::byte*>(::operator new[](static_cast<std::size_t>(bytes), kAlign));
  return {block, Free{on_device}};
}

GuardedBuffer::GuardedBuffer(std::int64_t bytes, std::byte fill_with)
    : block_(allocate(bytes + 2 * kGuardBytes)), bytes_(bytes) {
  std::fill_n(block_.get(), kGuardBytes, kGuardByte);
  std::fill_n(data() + bytes_, kGuardBytes, kGuardByte);
  fill(fill_with);
}

void GuardedBuffer::fill(std::byte value) {
  std::fill_n(data(), bytes_, value);
}

void GuardedBuffer::require_guards(const std::string& what) const {
  const auto intact = [](const std::byte* guard) {
    return std::all_of(guard, guard + kGuardBytes, [](std::byte b) { return b == kGuardByte; });
  };
  require(intact(block_.get()), what, ": bytes before the buffer were written");
  require(intact(data() + bytes_), what, ": bytes after the buffer were written");
}

void GuardedBuffer::require_contents(const std::vector<std::byte>& expected, std::size_t element_bytes,
                                     const std::string& what) const {
  require_guards(what);
  require_equal_bytes(span(), expected, element_bytes, what);
}

void copy_rows(const std::vector<std::byte>& dense, std::int64_t row_bytes, std::int64_t stride,
               std::byte* to) {
  if (row_bytes == 0) return;
  const std::int64_t rows = static_cast<std::int64_t>(dense.size()) / row_bytes;
  for (std::int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * (stride > 0 ? stride : row_bytes), dense.data() + row * row_bytes,
                static_cast<std::size_t>(row_bytes));
  }
}

GuardedBuffer strided_buffer(const std::vector<std::byte>& dense, std::int64_t rows, std::int64_t row_bytes,
                             std::int64_t stride) {
  GuardedBuffer buffer(rows * (stride > 0 ? stride : row_bytes));
  copy_rows(dense, row_bytes, stride, buffer.data());
  return buffer;
}

}  // namespace ferry::contract
