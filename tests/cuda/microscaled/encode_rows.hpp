// Quantises rows to a microscaled format with the code of the dispatch kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/format.hpp"
#include "ferry/types.hpp"

namespace ferry::contract {

inline constexpr int kMicroscaledColumns = 2048;  // of a row

struct MicroscaledRows {
  std::vector<std::uint8_t> values, scales;  // rows of Encoding::value_bytes and scale_bytes of the columns
};

// `rows`: bits of values of `type`, kMicroscaledColumns to a row, one value to an element. `whole_rows`: by
// the code for rows that are streamed, which has no fp32. `g`: scale of the call, of nvfp4.
MicroscaledRows encode_on_device(const std::vector<std::uint32_t>& rows, DType type, const Format& format,
                                 bool whole_rows, float g = 1);

}  // namespace ferry::contract
