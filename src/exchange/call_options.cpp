#include "exchange/call_options.hpp"

#include "layout/plan_layout.hpp"

namespace ferry {
namespace {

constexpr const char* kPlanOption = "call that made the plan";
constexpr const char* kInputHashOption = "hash of the replicated input's N and ids";

// Replicated input: a hash of N and, in a call from ids, of their values (FNV-1a). Otherwise 0, and with ids
// in device memory, which the backend hashes there.
std::int64_t hash_of_replicated(const Config& config, const DispatchCall& call) {
  if (config.input == Input::own || config.memory == MemoryKind::device) return 0;
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&](std::int64_t value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001b3;
  };
  mix(call.tokens.count);
  for (std::int64_t i = 0; i < call.tokens.count * config.top_k && call.plan.empty(); ++i) {
    mix(call.ids.type == IdType::int64 ? static_cast<const std::int64_t*>(call.ids.data)[i]
                                       : static_cast<const std::int32_t*>(call.ids.data)[i]);
  }
  return static_cast<std::int64_t>(hash);
}

}  // namespace

CallOptions options_of(const Config& config, const DispatchCall& call) {
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
  options.add(kInputHashOption, hash_of_replicated(config, call));
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

int input_hash_option(const CallOptions& options) {
  int index = 0;
  for (const CallOption& option : options.values()) {
    if (option.name == kInputHashOption) return index;
    ++index;
  }
  return -1;
}

void add_plan(const Plan& plan, CallOptions* options) {
  const auto call = plan.empty() ? 0 : static_cast<const PlanHeader*>(plan.storage())->call;
  options->add(kPlanOption, static_cast<std::int64_t>(call));
}

const char* option_name(Operation operation, int index) {
  CallOptions options;
  if (operation == Operation::dispatch) options = options_of(Config{}, DispatchCall{});
  if (operation == Operation::combine) options = options_of(CombineCall{});
  const auto i = static_cast<std::size_t>(index);
  return i < options.values().size() ? options.values()[i].name : kPlanOption;
}

}  // namespace ferry
