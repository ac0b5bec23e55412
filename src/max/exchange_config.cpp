#include "max/exchange_config.hpp"

#include "base/errors.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"

namespace ferry::max {
namespace {

Config exchange_config(Config config) {
  if (config.placement.tp() > 1)
    throw UnsupportedError("max: experts in slices are not supported: use ferry::Exchange with its plans");
  if (config.layout != Layout::expert_major)
    throw UsageError(str("max: layout ", to_string(config.layout), ", must be expert_major"));
  if (config.capacity != 0) {
    throw UsageError(str("max: capacity = ", config.capacity,
                         ", must be 0: combine by src_info needs every row, so none may be dropped"));
  }
  if (config.input != Input::own || config.transfer != Transfer::routed) {
    throw UsageError(str("max: input ", to_string(config.input), " and transfer ", to_string(config.transfer),
                         ", must be own and routed: use ferry::Exchange with its plans"));
  }
  if (!config.own_receive_buffers)
    throw UsageError("max: own_receive_buffers is off, must be on: dispatch takes no memory for its rows");
  if (!config.check_calls && chosen_memory(config) == MemoryKind::host)
    throw UsageError("max: check_calls (in C manual_check) is off, must be on: every call checks its rows");
  if (config.reduction != Reduction::unreduced) config.reduction = Reduction::exact;
  config.repeats = true;
  return config;
}

}  // namespace

Config config_or_refuse(const Rank& rank, const Config& config) {
  return or_refuse([&](const Error& error) { refuse_configuration(rank, error); },
                   [&] { return exchange_config(config); });
}

DispatchOptions dispatch_options(const TokenFormat& format, int lane) {
  return {.format = format.format,
          .lane = lane,
          .global_scale = format.global_scale,
          .input_scales = format.input_scales};
}

}  // namespace ferry::max
