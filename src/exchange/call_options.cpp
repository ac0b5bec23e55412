#include "exchange/call_options.hpp"

#include "layout/plan_layout.hpp"

namespace ferry {
namespace {

constexpr const char* kPlanOption = "call that made the plan";

}  // namespace

CallOptions options_of(const DispatchCall& call) {
  const Format& format = call.format;
  CallOptions options;
  options.add("format", static_cast<std::int64_t>(format.kind));
  options.add("column_major of the format", format.fp8.column_major);
  options.add("power_of_two of the format", format.fp8.power_of_two);
  options.add("packed of the format", format.fp8.packed);
  options.add("bytes of part 0 of the format", format.part_bytes[0]);
  options.add("bytes of part 1 of the format", format.part_bytes[1]);
  options.add("bytes of part 2 of the format", format.part_bytes[2]);
  options.add("bytes of part 3 of the format", format.part_bytes[3]);
  options.add("dispatch from a plan", !call.plan.empty());
  options.add("apply_weights", call.apply_weights);
  return options;
}

CallOptions options_of(const CombineCall& call) {
  CallOptions options;
  options.add("reduction", static_cast<std::int64_t>(call.reduction));
  // With partial sums the weights are applied where the experts are: they are sent there first, and every
  // rank takes part.
  options.add("topk_weights given (with partial on every rank or none, also without tokens)",
              call.reduction == Reduction::partial && call.topk_weights != nullptr);
  return options;
}

void add_plan(const Plan& plan, CallOptions* options) {
  const auto call = plan.empty() ? 0 : static_cast<const PlanHeader*>(plan.storage())->call;
  options->add(kPlanOption, static_cast<std::int64_t>(call));
}

const char* option_name(Operation operation, int index) {
  CallOptions options;
  if (operation == Operation::dispatch) options = options_of(DispatchCall{});
  if (operation == Operation::combine) options = options_of(CombineCall{});
  const auto i = static_cast<std::size_t>(index);
  return i < options.values().size() ? options.values()[i].name : kPlanOption;
}

}  // namespace ferry
