// The text header of an NPY file: a Python dictionary literal with the keys descr, fortran_order and shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trace/npy.hpp"

namespace ferry::trace {

inline constexpr std::size_t kMaxDimensions = 4;

struct NpyHeader {
  NpyType type = NpyType::uint8;
  std::vector<std::uint64_t> shape;  // at most kMaxDimensions
};

// Parses `text`, which starts at byte `offset` of the file called `file`. Throws UsageError.
NpyHeader parse_npy_header(const std::string& file, std::size_t offset, std::string_view text);

}  // namespace ferry::trace
