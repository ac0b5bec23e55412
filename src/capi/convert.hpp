// Converts values of the C interface to the C++ interface, and back. Numbers that are not enumerators and
// reserved fields that are set throw UsageError; all other checks are those of the C++ interface.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/ferry.h"
#include "ferry/group.hpp"

namespace ferry::capi {

// The constants of ferry.h by enumeration, in the order of their numbers: what messages offer in place of a
// wrong one. A number without a name is reserved.
struct Constant {
  const char* name;
  std::int64_t value;
};

#define FERRY_NAMED(constant) {#constant, constant}

// Indexed by the number in C.
template <class Enum>
constexpr const Constant* kConstants = nullptr;

template <>
inline constexpr Constant kConstants<DType>[] = {FERRY_NAMED(FERRY_BF16), FERRY_NAMED(FERRY_FP16),
                                                 FERRY_NAMED(FERRY_FP32)};
template <>
inline constexpr Constant kConstants<IdType>[] = {FERRY_NAMED(FERRY_INT32), FERRY_NAMED(FERRY_INT64)};
template <>
inline constexpr Constant kConstants<BackendKind>[] = {FERRY_NAMED(FERRY_BACKEND_AUTOMATIC),
                                                       {nullptr, FERRY_REFERENCE},
                                                       FERRY_NAMED(FERRY_CPU),
                                                       FERRY_NAMED(FERRY_CUDA),
                                                       FERRY_NAMED(FERRY_COLLECTIVE),
                                                       FERRY_NAMED(FERRY_NVSHMEM)};
template <>
inline constexpr Constant kConstants<EngineKind>[] = {
    FERRY_NAMED(FERRY_ENGINE_AUTOMATIC), FERRY_NAMED(FERRY_ENGINE_MPI), FERRY_NAMED(FERRY_ENGINE_CUSTOM),
    FERRY_NAMED(FERRY_ENGINE_NCCL)};
template <>
inline constexpr Constant kConstants<MemoryKind>[] = {
    FERRY_NAMED(FERRY_MEMORY_AUTOMATIC), FERRY_NAMED(FERRY_HOST_MEMORY), FERRY_NAMED(FERRY_DEVICE_MEMORY)};
template <>
inline constexpr Constant kConstants<Hops>[] = {FERRY_NAMED(FERRY_HOPS_AUTOMATIC), FERRY_NAMED(FERRY_ONE_HOP),
                                                FERRY_NAMED(FERRY_TWO_HOPS)};
template <>
inline constexpr Constant kConstants<Input>[] = {FERRY_NAMED(FERRY_INPUT_OWN),
                                                 FERRY_NAMED(FERRY_INPUT_REPLICATED)};
template <>
inline constexpr Constant kConstants<Transfer>[] = {FERRY_NAMED(FERRY_TRANSFER_ROUTED),
                                                    FERRY_NAMED(FERRY_TRANSFER_GATHER)};
template <>
inline constexpr Constant kConstants<Layout>[] = {
    FERRY_NAMED(FERRY_EXPERT_MAJOR), FERRY_NAMED(FERRY_EXPERT_PADDED), FERRY_NAMED(FERRY_RANK_MAJOR),
    FERRY_NAMED(FERRY_EXPERT_INDEXED)};
template <>
inline constexpr Constant kConstants<Reduction>[] = {FERRY_NAMED(FERRY_REDUCTION_DEFAULT),
                                                     FERRY_NAMED(FERRY_PARTIAL), FERRY_NAMED(FERRY_EXACT),
                                                     FERRY_NAMED(FERRY_UNREDUCED)};
template <>
inline constexpr Constant kConstants<ReductionLevel>[] = {
    FERRY_NAMED(FERRY_LEVEL_AUTOMATIC), FERRY_NAMED(FERRY_LEVEL_RANK), FERRY_NAMED(FERRY_LEVEL_NODE)};
template <>
inline constexpr Constant kConstants<FormatKind>[] = {
    FERRY_NAMED(FERRY_FORMAT_DEFAULT),   FERRY_NAMED(FERRY_FORMAT_BF16),     FERRY_NAMED(FERRY_FORMAT_FP16),
    FERRY_NAMED(FERRY_FORMAT_FP32),      FERRY_NAMED(FERRY_FORMAT_FP8_E4M3), FERRY_NAMED(FERRY_FORMAT_RAW),
    FERRY_NAMED(FERRY_FORMAT_MXFP8),     FERRY_NAMED(FERRY_FORMAT_MXFP4),    FERRY_NAMED(FERRY_FORMAT_NVFP4),
    FERRY_NAMED(FERRY_FORMAT_REGISTERED)};
template <>
inline constexpr Constant kConstants<Operation>[] = {
    FERRY_NAMED(FERRY_OPERATION_NONE),   FERRY_NAMED(FERRY_CONSTRUCT),       FERRY_NAMED(FERRY_DISPATCH),
    FERRY_NAMED(FERRY_COMBINE),          FERRY_NAMED(FERRY_METADATA),        FERRY_NAMED(FERRY_ROUTE_VALUES),
    FERRY_NAMED(FERRY_BARRIER),          FERRY_NAMED(FERRY_DISPATCH_COUNTS), FERRY_NAMED(FERRY_ALL_GATHER_V),
    FERRY_NAMED(FERRY_REDUCE_SCATTER_V), FERRY_NAMED(FERRY_RETURN_VALUES)};

#undef FERRY_NAMED

// "FERRY_INT32 (0) or FERRY_INT64 (1)"
inline std::string offered(std::span<const Constant> constants) {
  std::string text;
  for (std::size_t i = 0; i < constants.size(); ++i) {
    if (constants[i].name == nullptr) continue;
    const char* before = i == 0 ? "" : (i + 1 == constants.size() ? " or " : ", ");
    text += str(before, constants[i].name, " (", constants[i].value, ")");
  }
  return text;
}

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
// The placement of ferry_config or ferry_dispatch_layout_args; empty if all its arrays are NULL.
template <class Given>
Placement to_placement(const Given& given, int ranks, std::uint64_t version = 0);
// `node_of_rank`: [ranks], not NULL.
Topology to_topology(const std::int32_t* node_of_rank, int ranks);

CallOptions to_call_options(const ferry_call_options& options);
// NULL: the defaults.
CallOptions to_call_options(const ferry_call_options* options);
// To refuse a call whose options to_call_options() may refuse.
CallOptions known_call_options(const ferry_call_options& options);
Tokens to_tokens(const ferry_tokens& tokens);
Ids to_ids(const void* ids, std::int32_t type);
Plan to_plan(const ferry_plan& plan);
ReceiveBuffers to_receive_buffers(const ferry_receive_buffers& buffers);
Outputs to_outputs(const ferry_rows& rows);
Result to_result(const ferry_rows& rows);
Epilogue to_epilogue(const ferry_epilogue* epilogue);

// Without the placement arrays, for which ferry_exchange has storage.
ferry_config to_c(const Config& config);
ferry_format to_c(const Format& format);
ferry_dispatch_result to_c(const DispatchResult& received);
void copy_parts(const std::array<ReceivedPart, kMaxParts>& parts, ferry_received_part* to);

}  // namespace ferry::capi
