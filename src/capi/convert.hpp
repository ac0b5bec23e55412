// Converts values of the C interface to the C++ interface, and back. Numbers that are not enumerators throw
// UsageError; all other checks are those of the C++ interface.
#pragma once

#include <optional>
#include <span>

#include "base/text.hpp"
#include "capi/constants.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/ferry.h"
#include "ferry/group.hpp"

namespace ferry::capi {

// Throws UsageError unless 0 <= value <= last, or if the number is reserved.
template <class Enum>
void check_constant(std::int64_t value, std::int32_t last, const char* field) {
  const std::span allowed = std::span(kConstants<Enum>).first(static_cast<std::size_t>(last) + 1);
  const bool has_number = value >= 0 && value <= last;
  if (!has_number || allowed[static_cast<std::size_t>(value)].name == nullptr)
    throw UsageError(str(field, " = ", value, ", must be ", offered(allowed)));
}

// Converts a number to an enumerator, of which `last` is the highest.
template <class Enum>
Enum to_enum(std::int64_t value, Enum last, const char* field) {
  check_constant<Enum>(value, static_cast<std::int32_t>(last), field);
  return static_cast<Enum>(value);
}

// Converts a field in which 0 selects the default, and so C's numbers are those of C++ plus 1.
template <class Enum>
std::optional<Enum> to_choice(std::int32_t value, Enum last, const char* field) {
  check_constant<Enum>(value, static_cast<std::int32_t>(last) + 1, field);
  if (value == 0) return std::nullopt;
  return static_cast<Enum>(value - 1);
}

DType to_dtype(std::int32_t type, const char* field);
std::optional<Format> to_format(const ferry_format& format);
// `count`: as input_scale_count.
std::span<const float> to_input_scales(const float* scales, std::int64_t count);
std::optional<Reduction> to_reduction(std::int32_t reduction);
Config to_config(const ferry_config& config, int ranks);
// Construction is collective: if this rank's configuration cannot be converted, the peers' construction ends
// too.
Config config_or_refuse(const Rank& rank, const ferry_config* config);
// Empty if both arrays are NULL.
Placement to_placement(const std::int32_t* expert_rank, const std::int32_t* expert_local, int experts,
                       int ranks, std::uint64_t version = 0);
// `node_of_rank`: [ranks], not NULL.
Topology to_topology(const std::int32_t* node_of_rank, int ranks);

Tokens to_tokens(const ferry_tokens& tokens);
Ids to_ids(const void* ids, std::int32_t type);
Plan to_plan(const ferry_plan& plan);
ReceiveBuffers to_receive_buffers(const ferry_receive_buffers& buffers,
                                  const ferry_more_receive_buffers& more = {});
Outputs to_outputs(const ferry_rows& rows, std::int64_t count = 0);
Result to_result(const ferry_rows& rows);
Epilogue to_epilogue(const ferry_epilogue* epilogue);

// Without the placement arrays, for which ferry_exchange has storage.
ferry_config to_c(const Config& config);
ferry_sizes to_c(const Sizes& sizes);
ferry_format to_c(const Format& format);
ferry_dispatch_result to_c(const DispatchResult& received);
void copy_parts(const std::array<ReceivedPart, kMaxParts>& parts, ferry_received_part* to);

}  // namespace ferry::capi
