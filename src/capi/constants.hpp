// The constants of ferry.h by enumeration, in the order of their numbers: what messages offer in place of a
// wrong one. A number without a name is reserved.
#pragma once

#include <span>
#include <string>

#include "base/text.hpp"
#include "ferry/exchange.hpp"
#include "ferry/ferry.h"

namespace ferry::capi {

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
inline constexpr Constant kConstants<BackendKind>[] = {FERRY_NAMED(FERRY_BACKEND_DEFAULT),
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
    FERRY_NAMED(FERRY_EXPERT_MAJOR), FERRY_NAMED(FERRY_EXPERT_PADDED), FERRY_NAMED(FERRY_RANK_MAJOR)};
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
    FERRY_NAMED(FERRY_OPERATION_NONE),  FERRY_NAMED(FERRY_CONSTRUCT),       FERRY_NAMED(FERRY_DISPATCH),
    FERRY_NAMED(FERRY_COMBINE),         FERRY_NAMED(FERRY_METADATA),        FERRY_NAMED(FERRY_ROUTE_VALUES),
    FERRY_NAMED(FERRY_BARRIER),         FERRY_NAMED(FERRY_DISPATCH_COUNTS), FERRY_NAMED(FERRY_ALL_GATHER_V),
    FERRY_NAMED(FERRY_REDUCE_SCATTER_V)};

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

}  // namespace ferry::capi
