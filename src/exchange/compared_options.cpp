#include "exchange/compared_options.hpp"

#include "base/text.hpp"
#include "format/encoding.hpp"
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

std::string name_of_hash(std::int64_t value) {
  return str("0x", std::hex, static_cast<std::uint64_t>(value));
}

std::string name_of_flag(std::int64_t value) {
  return value != 0 ? "true" : "false";
}

std::string name_of_input_scales(std::int64_t value) {
  return value == 0 ? "none" : to_string(static_cast<DType>(value - 1));
}

std::string name_of_reduction(std::int64_t value) {
  return to_string(static_cast<Reduction>(value));
}

// A format as one number, so that an error names the whole format. The sizes of raw parts are options of
// their own.
std::int64_t code_of(const Format& format) {
  return std::int64_t{options_of(format)} << 8 | static_cast<std::int64_t>(format.kind);
}

std::string name_of_format(std::int64_t code) {
  const Format format = format_with(static_cast<FormatKind>(code & 0xFF), static_cast<OptionBits>(code >> 8));
  return format.is_raw() ? to_string(format.kind) : to_string(format);
}

}  // namespace

ComparedOption type_option(const char* name, DType type) {
  return {name, static_cast<std::int64_t>(type),
          [](std::int64_t value) { return std::string(to_string(static_cast<DType>(value))); }};
}

ComparedOptions options_of(const Config& config, const DispatchCall& call) {
  const Format& format = call.format;
  ComparedOptions options;
  options.add("format", code_of(format), name_of_format);
  options.add("bytes of part 0 of the format", format.part_bytes[0]);
  options.add("bytes of part 1 of the format", format.part_bytes[1]);
  options.add("bytes of part 2 of the format", format.part_bytes[2]);
  options.add("bytes of part 3 of the format", format.part_bytes[3]);
  options.add("dispatch from a plan", !call.plan.empty(), name_of_flag);
  options.add("apply_weights", call.apply_weights, name_of_flag);
  options.add("weights given (on every rank or none, also without tokens)", call.weighted, name_of_flag);
  options.add(kInputHashOption, hash_of_replicated(config, call), name_of_hash);
  // Rows are encoded where they arrive, so their type must be known there.
  const bool by_expert = !call.input_scales.empty();
  options.add("the type of tokens with input_scales",
              by_expert ? 1 + static_cast<std::int64_t>(call.tokens.type) : 0, name_of_input_scales);
  return options;
}

ComparedOptions options_of(const CombineCall& call) {
  ComparedOptions options;
  options.add("reduction", static_cast<std::int64_t>(call.reduction), name_of_reduction);
  options.add("topk_weights given (with partial on every rank or none, also without tokens)",
              call.weights_travel(), name_of_flag);
  return options;
}

int input_hash_option(const ComparedOptions& options) {
  int index = 0;
  for (const ComparedOption& option : options.values()) {
    if (option.name == kInputHashOption) return index;
    ++index;
  }
  return -1;
}

void add_plan(const Plan& plan, ComparedOptions* options) {
  const auto call = plan.empty() ? 0 : static_cast<const PlanHeader*>(plan.storage())->call;
  options->add(kPlanOption, static_cast<std::int64_t>(call));
}

ComparedOption option_at(Operation operation, int index) {
  ComparedOptions options;
  if (operation == Operation::dispatch) options = options_of(Config{}, DispatchCall{});
  if (operation == Operation::combine) options = options_of(CombineCall{});
  if (operation == Operation::all_gather_v) options.add("row_bytes", 0);
  if (operation == Operation::reduce_scatter_v) options.add(type_option("type", DType{}));
  const auto i = static_cast<std::size_t>(index);
  return i < options.values().size() ? options.values()[i] : ComparedOption{kPlanOption, 0};
}

}  // namespace ferry
