// NPY files, format versions 1.0, 2.0 and 3.0: little endian, C order, up to four dimensions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace ferry::trace {

enum class NpyType { uint8, int8, uint16, int16, uint32, int32, uint64, int64, float16, float32 };

std::size_t bytes_of(NpyType type);
bool is_integer(NpyType type);
const char* descr(NpyType type);  // its name in an NPY header, such as "<i4"

// An array in the bytes of a file, of which a window is in memory: read it from front to back.
//
// Errors are UsageErrors with the offset and the expected and found values. The size that the header claims
// is checked before anything depends on it.
class NpyArray {
 public:
  // Reads from `in`, which holds `size` bytes; `file` is its name in messages.
  NpyArray(std::string file, std::unique_ptr<std::istream> in, std::uint64_t size);
  // Reads the bytes of a whole file.
  NpyArray(std::string file, std::span<const std::byte> content);

  const std::string& file() const { return file_; }
  NpyType type() const { return type_; }
  const std::vector<std::uint64_t>& shape() const { return shape_; }
  std::uint64_t size() const { return size_; }  // elements

  // Element i in C order, i < size(). Throws UsageError for a uint64 above the largest int64, or if the file
  // has become shorter, and SystemError if it cannot be read.
  std::int64_t integer(std::uint64_t i) const;  // requires is_integer(type())
  float real(std::uint64_t i) const;            // requires !is_integer(type()); exact

 private:
  const std::byte* element(std::uint64_t i) const {
    if (i - first_ >= held_) read_window(i);
    return window_.data() + (i - first_) * bytes_of(type_);
  }
  void read_window(std::uint64_t first) const;

  std::string file_;
  std::unique_ptr<std::istream> in_;
  mutable std::vector<std::byte> window_;
  mutable std::uint64_t first_ = 0, held_ = 0;  // the elements in it
  std::size_t data_offset_ = 0;
  NpyType type_ = NpyType::uint8;
  std::vector<std::uint64_t> shape_;
  std::uint64_t size_ = 0;
};

// Throws UsageError if the file does not exist or is not a regular file, SystemError if it cannot be opened
// or read.
NpyArray open_npy(const std::string& path);

// Writes a version 1.0 file and replaces an existing one. shape[0] * shape[1] * ... = data.size(). Throws
// SystemError.
template <class T>  // int32, int64 or float
void write_npy(const std::string& path, std::span<const std::uint64_t> shape, std::span<const T> data);

// The shape as in "[3, 8222, 6]".
std::string shape_text(std::span<const std::uint64_t> shape);

}  // namespace ferry::trace
