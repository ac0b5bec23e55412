// Turns the error record that an aborted call left on the device into an exception.
#include <array>

#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/protocol/diagnostics.hpp"
#include "base/text.hpp"
#include "exchange/compared_options.hpp"
#include "exchange/faults.hpp"
#include "exchange/gather.hpp"

namespace ferry::cuda {
namespace {

constexpr std::array kCombineArguments = {"row_values and route_values", "row_weights"};

[[noreturn]] void raise_plan_fault(const DeviceError& error) {
  switch (static_cast<PlanFault>(error.index)) {
    case PlanFault::configuration:
      throw UsageError("plan: made by an exchange of another configuration or placement");
    case PlanFault::rank:
      throw UsageError(str("plan: made on rank ", error.theirs, ", used on rank ", error.mine));
    case PlanFault::tokens:
      throw UsageError(str("dispatch: ", counted(error.mine, "token"), " with a plan of ", error.theirs,
                           " on rank ", error.peer));
    case PlanFault::outputs_and_result:
      throw UsageError(
          "combine: outputs is null for rows of the plan, or result for its tokens: for row_values alone "
          "call "
          "return_values()");
    case PlanFault::values:
      throw UsageError("combine: row_values and route_values must both be given or both be absent");
    case PlanFault::weights:
      throw UsageError("combine: topk_weighted needs topk_weights for the tokens of the plan");
    case PlanFault::null_values:
      if (error.operation == Operation::return_values) {
        throw UsageError(
            "return_values: row_values must be given for the rows of the plan, and route_values for its "
            "tokens");
      }
      throw UsageError(
          "route_values: values must be given for the tokens of the plan, and row_values for its rows");
    case PlanFault::arrays:
      throw UsageError("ep_combine: src_info, row_offsets and counts contradict each other or topk_ids");
    case PlanFault::none:
    case PlanFault::damaged:
      break;
  }
  throw UsageError("plan: unfinished or damaged: its header does not match its checksum");
}

[[noreturn]] void raise_source(const DeviceError& error, int rank) {
  const auto high = [](std::int64_t two) { return two >> 32; };
  const auto low = [](std::int64_t two) { return std::int64_t{static_cast<std::int32_t>(two)}; };
  raise_source_fault(static_cast<SourceFault>(error.index & ((1 << kSourceFaultBits) - 1)), rank,
                     {.peer = error.peer,
                      .limit = error.index >> kSourceFaultBits,
                      .a = high(error.mine),
                      .b = low(error.mine),
                      .c = high(error.theirs),
                      .d = low(error.theirs)});
}

[[noreturn]] void raise(const DeviceError& error, int rank) {
  const std::string call = str(to_string(error.operation), " ", error.call.value);
  switch (error.reason) {
    case DeviceError::Reason::refused:
      error.refusal.raise(str("rank ", error.peer, " refused ", call, ": "));
    case DeviceError::Reason::operation:
      throw UsageError(str("call ", error.call.value, " of the lane is ", to_string(error.operation),
                           " on rank ", rank, " and ", to_string(static_cast<Operation>(error.theirs)),
                           " on rank ", error.peer));
    case DeviceError::Reason::option:
      if (error.index == kEpochOption)
        throw_other_epoch(error.operation, error.call.value, {rank, error.mine}, {error.peer, error.theirs});
      throw UsageError(str(call, ": ",
                           describe_difference(option_at(error.operation, error.index), rank, error.mine,
                                               error.peer, error.theirs)));
    case DeviceError::Reason::given:
      throw_given_on_some(to_string(error.operation),
                          kCombineArguments.at(static_cast<std::size_t>(error.index)),
                          static_cast<int>(error.mine), static_cast<int>(error.theirs));
    case DeviceError::Reason::too_many:
      throw UsageError(str(to_string(error.operation), ": a count of ", error.mine,
                           " in device memory on rank ", rank, ", must be 0 to ", error.theirs));
    case DeviceError::Reason::rows_held:
      raise_rows_held(error.operation, error.peer, error.mine, error.theirs);
    case DeviceError::Reason::misplaced:
      raise_misplaced(error.operation, error.peer, error.mine, error.theirs);
    case DeviceError::Reason::slices:
      raise_slice_fault(static_cast<SliceFault>(error.index & ((1 << kSliceFaultBits) - 1)), error.peer,
                        error.index >> kSliceFaultBits, error.mine, error.theirs);
    case DeviceError::Reason::source:
      raise_source(error, rank);
    case DeviceError::Reason::bad_plan:
      break;
  }
  raise_plan_fault(error);
}

}  // namespace

void Lane::raise_device_error() {
  const std::optional<DeviceError> error = take_error(*view_.device_error);
  if (!error) return;
  // Diagnostics of the aborted call must not be reported for a later one.
  take_diagnostics();
  raise(*error, view_.rank);
}

}  // namespace ferry::cuda
