// Values of the C interface as values of the C++ one, and back. What no C++ type can hold, such as the number
// of an unknown enumerator, throws UsageError; everything else is left to the checks of the C++ interface.
#pragma once

#include <optional>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/ferry.h"

namespace ferry::capi {

// `last` is the highest number known.
template <class Enum>
Enum to_enum(std::int32_t value, Enum last, const char* field) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    throw UsageError(str(field, " = ", value, ", must be 0 to ", static_cast<std::int32_t>(last)));
  }
  return static_cast<Enum>(value);
}

// For fields in which 0 leaves the choice open: the C++ enumerators follow from 1.
template <class Enum>
std::optional<Enum> to_choice(std::int32_t value, Enum last, const char* field) {
  const std::int32_t most = static_cast<std::int32_t>(last) + 1;
  if (value < 0 || value > most) throw UsageError(str(field, " = ", value, ", must be 0 to ", most));
  if (value == 0) return std::nullopt;
  return static_cast<Enum>(value - 1);
}

DType to_dtype(std::int32_t type, const char* field);
std::optional<Format> to_format(const ferry_format& format);
std::optional<Reduction> to_reduction(std::int32_t reduction);
Config to_config(const ferry_config& config, int ranks);

Tokens to_tokens(const ferry_tokens& tokens);
Ids to_ids(const void* ids, std::int32_t type);
Plan to_plan(const ferry_plan& plan);
ReceiveBuffers to_memory(const ferry_receive_buffers& memory);
Outputs to_outputs(const ferry_rows& rows);
Result to_result(const ferry_rows& rows);

// Without the placement, which needs storage.
ferry_config to_c(const Config& config);
ferry_sizes to_c(const Sizes& sizes);
ferry_dispatch_result to_c(const DispatchResult& received);

}  // namespace ferry::capi
