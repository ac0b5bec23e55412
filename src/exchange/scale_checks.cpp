#include "exchange/scale_checks.hpp"

#include <cmath>

#include "base/text.hpp"
#include "format/encoding.hpp"

namespace ferry {
namespace {

void check_global_scale(const DispatchCall& call) {
  if (call.global_scale == nullptr || encoding_of(call.format).takes_global_scale()) return;
  throw UsageError(
      str("dispatch: global_scale is for the format nvfp4 without a scale for each token, this call's is ",
          to_string(call.format), ": leave it null"));
}

// The blocks of mxfp8 have a power of two of their own, so the scale of an expert need not fit its values.
const char* advised_scale(const Encoding& encoding) {
  if (encoding.is_mx()) return "pass 1, with which rows are those without input_scales";
  return encoding.is_two_level() ? "pass the expert's largest |x| / 2688"
                                 : "pass the expert's largest |x| / 448";
}

// The scales of this rank's experts: the others are not read here. Kernels check those in device memory.
void check_scale_values(const Config& config, int rank, const DispatchCall& call) {
  const auto check = [&](int expert) {
    const float scale = call.input_scales[static_cast<std::size_t>(expert)];
    if (scale > 0 && std::isfinite(scale)) return;
    throw UsageError(str("dispatch: input_scales[", expert, "] = ", scale, " on rank ", rank,
                         ", must be positive and finite: ", advised_scale(encoding_of(call.format))));
  };
  for (const int expert : config.placement.experts_of(rank)) check(expert);
  for (int shared = 0; shared < config.shared_experts; ++shared) check(config.experts + shared);
}

void check_input_scales(const Config& config, int rank, const DispatchCall& call) {
  if (!by_expert(call)) return;
  if (!encoding_of(call.format).takes_input_scales()) {
    throw UsageError(
        str("dispatch: input_scales are for the formats fp8 (without options), mxfp8 and nvfp4 "
            "(without a scale for each token), this call's is ",
            to_string(call.format), ": pass none"));
  }
  if (config.layout == Layout::rank_major) {
    throw UsageError(
        "dispatch: input_scales need an expert layout, and the exchange's is rank_major, whose rows stand "
        "for several experts each: use expert_major or expert_padded, or pass none");
  }
  if (call.global_scale != nullptr)
    throw UsageError("dispatch: input_scales and global_scale exclude each other: pass one of them");
  const std::int64_t expected = std::int64_t{config.experts} + config.shared_experts;
  if (static_cast<std::int64_t>(call.input_scales.size()) != expected) {
    throw UsageError(str("dispatch: input_scales has ", counted(call.input_scales.size(), "value"),
                         " on rank ", rank, ", must have one for each of the ", expected,
                         " experts, shared ones included"));
  }
  if (call.input_scales.data() == nullptr)
    throw UsageError(str("dispatch: input_scales: the address is null on rank ", rank, ": pass ", expected,
                         " values, or an empty span"));
  if (config.memory == MemoryKind::host) check_scale_values(config, rank, call);
}

}  // namespace

bool by_expert(const DispatchCall& call) {
  return call.input_scales.data() != nullptr || !call.input_scales.empty();
}

bool marks_bad_scales(const Format& format) {
  return encoding_of(format).marks_bad_scales();
}

PartList message_parts(const Config& config, const DispatchCall& call) {
  return by_expert(call) ? value_parts(call.tokens.type, config.hidden)
                         : parts_of(call.format, config.hidden);
}

PartList received_parts(const Config& config, const DispatchCall& call) {
  return by_expert(call) ? parts_by_expert(call.format, config.hidden) : parts_of(call.format, config.hidden);
}

void check_scales(const Config& config, int rank, const DispatchCall& call) {
  check_global_scale(call);
  check_input_scales(config, rank, call);
}

}  // namespace ferry
