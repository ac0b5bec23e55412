// What a call that ended early on the device left for the host, as an error.
#include <array>
#include <atomic>

#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/protocol/plan_fault.hpp"
#include "base/text.hpp"
#include "exchange/call_options.hpp"

namespace ferry::cuda {
namespace {

constexpr std::array kCombineArguments = {"outputs and result", "row_values and route_values",
                                          "weights of the rows"};

const char* argument_name(Operation operation, int index) {
  return operation == Operation::combine ? kCombineArguments.at(static_cast<std::size_t>(index)) : "weights";
}

[[noreturn]] void raise_plan_fault(const DeviceError& ended) {
  switch (static_cast<PlanFault>(ended.index)) {
    case PlanFault::configuration:
      throw UsageError("plan: made by an exchange of another configuration or placement");
    case PlanFault::rank:
      throw UsageError(str("plan: made on rank ", ended.theirs, ", used on rank ", ended.mine));
    case PlanFault::tokens:
      throw UsageError(
          str("dispatch: ", ended.mine, " tokens with a plan of ", ended.theirs, " on rank ", ended.peer));
    case PlanFault::outputs_and_result:
      throw UsageError("combine: outputs and result go together");
    case PlanFault::values:
      throw UsageError("combine: row_values and route_values go together");
    case PlanFault::none:
    case PlanFault::damaged:
      break;
  }
  throw UsageError("plan: unfinished or damaged: its header does not agree with itself");
}

[[noreturn]] void raise(const DeviceError& ended, int rank) {
  const std::string call = str(to_string(ended.operation), " ", ended.call);
  switch (ended.why) {
    case DeviceError::Why::refused:
      ended.refusal.raise(str("rank ", ended.peer, " refused ", call, ": "));
    case DeviceError::Why::operation:
      throw UsageError(str("call ", ended.call, " of the lane is ", to_string(ended.operation), " on rank ",
                           rank, " and ", to_string(static_cast<Operation>(ended.theirs)), " on rank ",
                           ended.peer));
    case DeviceError::Why::option:
      throw UsageError(str(call, ": ", option_name(ended.operation, ended.index), " is ", ended.mine,
                           " on rank ", rank, " and ", ended.theirs, " on rank ", ended.peer));
    case DeviceError::Why::given:
      throw UsageError(str(to_string(ended.operation),
                           ": the ranks' options differ: ", argument_name(ended.operation, ended.index),
                           " given on rank ", ended.mine, " and not on rank ", ended.theirs));
    case DeviceError::Why::too_many:
      throw UsageError(str(to_string(ended.operation), ": a count of ", ended.mine,
                           " in device memory on rank ", rank, ", must be 0 to ", ended.theirs));
    case DeviceError::Why::bad_plan:
      break;
  }
  raise_plan_fault(ended);
}

}  // namespace

void Lane::raise_device_error() {
  DeviceError* left = view_.ended;
  // Acquire: the kernel stored the rest before the number.
  if (std::atomic_ref(left->call).load(std::memory_order_acquire) == 0) return;
  const DeviceError ended = *left;
  // Release: a kernel that finds the place free may write it.
  std::atomic_ref(left->call).store(0, std::memory_order_release);
  // What a call found that has ended early is nothing a later one should be blamed for.
  take_diagnostics();
  raise(ended, view_.rank);
}

}  // namespace ferry::cuda
