#include "program/steps.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "base/enumerators.hpp"
#include "base/text.hpp"
#include "ferry/evaluator.hpp"

namespace ferry {
namespace {

constexpr StepShape kDispatch{
    {kinds(ValueKind::tokens), kinds(ValueKind::ids, ValueKind::received), kinds(ValueKind::weights)},
    2,
    3,
    false,
    true,
    true};
constexpr StepShape kCombine{
    {kinds(ValueKind::outputs), kinds(ValueKind::received), kinds(ValueKind::received, ValueKind::weights)},
    2,
    3,
    false,
    true,
    true};

// In the order of StepKind.
constexpr std::array<StepShape, kStepKinds> kShapes = {
    kDispatch,
    kDispatch,
    StepShape{{kinds(ValueKind::sent_dispatch)}, 1, 1},
    kCombine,
    kCombine,
    StepShape{{kinds(ValueKind::sent_combine)}, 1, 1},
    StepShape{{kinds(ValueKind::count)}, 1, 1, false, true, true},
    StepShape{{kAnyValue}, 0, 0, true, false, true},
    StepShape{{kinds(ValueKind::received, ValueKind::tokens, ValueKind::metadata)}, 1, 1},
    StepShape{{kByToken}, 1, 1, false, false, true},
    StepShape{{kinds(ValueKind::tokens)}, 1, 1, true, false, true},
    StepShape{{kByToken}, 1, 1, false, true, true},
    StepShape{{kinds(ValueKind::tokens), kInputKinds}, 2, 2, false, true, true},
};

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

}  // namespace

const char* to_string(ValueKind kind) {
  return name_of(kind, {"tokens", "ids", "weights", "received", "outputs", "count", "metadata",
                        "sent_dispatch", "sent_combine"});
}

const char* to_string(StepKind kind) {
  return name_of(
      kind, {"dispatch", "dispatch_send", "dispatch_receive", "combine", "combine_send", "combine_receive",
             "metadata", "call", "wait", "part", "join", "all_gather_v", "reduce_scatter_v"});
}

std::string ProgramStep::name() const {
  std::string text;
  for (const ProgramName& output : outputs) text += (text.empty() ? "" : ", ") + output.name;
  return text + " (" + to_string(kind) + (kind == StepKind::call ? " " + function : "") + ")";
}

const StepShape& shape_of(StepKind kind) {
  return kShapes[static_cast<std::size_t>(kind)];
}

StepKind receive_phase_of(StepKind kind) {
  if (kind == StepKind::dispatch_send) return StepKind::dispatch_receive;
  return kind == StepKind::combine_send ? StepKind::combine_receive : StepKind::call;
}

bool is_receive_phase(StepKind kind) {
  return kind == StepKind::dispatch_receive || kind == StepKind::combine_receive;
}

bool is_dispatch(StepKind kind) {
  return kind == StepKind::dispatch || kind == StepKind::dispatch_send;
}

bool is_combine(StepKind kind) {
  return kind == StepKind::combine || kind == StepKind::combine_send;
}

bool is_gather(StepKind kind) {
  return kind == StepKind::all_gather_v || kind == StepKind::reduce_scatter_v;
}

ValueKind made_by(StepKind kind, std::span<const ValueKind> inputs) {
  switch (kind) {
    case StepKind::dispatch:
    case StepKind::dispatch_receive:
      return ValueKind::received;
    case StepKind::dispatch_send:
      return ValueKind::sent_dispatch;
    case StepKind::combine_send:
      return ValueKind::sent_combine;
    case StepKind::metadata:
      return ValueKind::metadata;
    case StepKind::wait:
    case StepKind::part:
    case StepKind::all_gather_v:
      return inputs.front();
    case StepKind::combine:
    case StepKind::combine_receive:
    case StepKind::join:
    case StepKind::call:
    case StepKind::reduce_scatter_v:
      break;
  }
  return ValueKind::tokens;
}

bool is_name(std::string_view name) {
  return !name.empty() && is_letter(name.front()) && name != "program" && name != "input" &&
         name != "output" &&
         std::ranges::all_of(name, [](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '.'; });
}

void fill_in_kinds(Program& program) {
  std::map<std::string_view, ValueKind> known;
  for (const ProgramName& input : program.inputs) known[input.name] = input.kind;
  for (ProgramStep& step : program.steps) {
    std::vector<ValueKind> inputs;
    for (const std::string& name : step.inputs) {
      const auto found = known.find(name);
      inputs.push_back(found == known.end() ? ValueKind::tokens : found->second);
    }
    for (ProgramName& output : step.outputs) {
      if (step.kind != StepKind::call && (!inputs.empty() || shape_of(step.kind).required == 0))
        output.kind = made_by(step.kind, inputs);
      known[output.name] = output.kind;
    }
  }
}

std::string list_of(unsigned set) {
  std::vector<std::string> names;
  for (int kind = 0; kind < kValueKinds; ++kind)
    if (contains(set, static_cast<ValueKind>(kind)))
      names.emplace_back(to_string(static_cast<ValueKind>(kind)));
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  return text;
}

// Values that a caller passes to Evaluator::run().

ProgramValue ProgramValue::tokens(const void* data, std::int64_t rows, DType type, std::int64_t stride) {
  return {.kind = ValueKind::tokens,
          .data = const_cast<void*>(data),
          .rows = rows,
          .stride = stride,
          .type = type};
}
ProgramValue ProgramValue::ids(const Ids& ids, std::int64_t rows) {
  return {.kind = ValueKind::ids, .data = const_cast<void*>(ids.data), .rows = rows, .id_type = ids.type};
}
ProgramValue ProgramValue::weights(const float* data, std::int64_t rows) {
  return {.kind = ValueKind::weights, .data = const_cast<float*>(data), .rows = rows};
}
ProgramValue ProgramValue::number(std::int32_t count) {
  return {.kind = ValueKind::count, .count = count};
}
ProgramValue ProgramValue::device_number(const std::int32_t* count) {
  return {.kind = ValueKind::count, .device_count = const_cast<std::int32_t*>(count)};
}

}  // namespace ferry
