#include <algorithm>
#include <map>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "program/compiled.hpp"
#include "program/steps.hpp"

namespace ferry {

namespace {

constexpr std::align_val_t kProgramAlignment{64};

ProgramMemory allocate_rows(std::int64_t bytes) {
  return ProgramMemory(static_cast<std::byte*>(
      ::operator new(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)), kProgramAlignment)));
}

class ProgramCompiler {
 public:
  ProgramCompiler(const Program& program, const ProgramExchanges& exchanges,
                  const ProgramFunctions& functions)
      : program_(program), exchanges_(exchanges), functions_(functions) {}

  CompiledProgram compile() {
    check(program_);
    for (const ProgramName& input : program_.inputs) add_value(input.name, input.kind);
    for (const ProgramStep& step : program_.steps) add_step(step);
    for (const std::string& output : program_.outputs) made_.outputs.push_back(numbers_.at(output));
    for (std::size_t i = 0; i < made_.steps.size(); ++i)
      if (made_.steps[i].kind == StepKind::join) place_parts(made_.steps[i]);
    for (CompiledValue& value : made_.values)
      if (value.join < 0 && value.row_bytes > 0)
        value.memory = allocate_rows(value.most_rows * value.row_bytes);
    return std::move(made_);
  }

 private:
  [[noreturn]] void refuse(const CompiledStep& step, const std::string& what) const {
    throw UsageError(str("program ", program_.name, ", step ", step.name, ": ", what));
  }
  [[noreturn]] void unsupported(const CompiledStep& step, const std::string& what) const {
    throw UnsupportedError(str("program ", program_.name, ", step ", step.name, ": ", what));
  }

  int add_value(const std::string& name, ValueKind kind) {
    const int number = static_cast<int>(made_.values.size());
    made_.values.push_back({.kind = kind});
    assigned_by_.push_back(-1);
    numbers_.emplace(name, number);
    return number;
  }

  CompiledValue& value(int number) { return made_.values[static_cast<std::size_t>(number)]; }
  ValueKind kind_of(int number) { return value(number).kind; }

  void add_step(const ProgramStep& given) {
    const int number = static_cast<int>(made_.steps.size());
    CompiledStep step;
    step.kind = given.kind;
    step.name = given.name();
    step.lane = given.lane;
    step.index = given.index;
    step.of = given.of;
    std::vector<ValueKind> kinds;
    for (const std::string& input : given.inputs) {
      step.inputs.push_back(numbers_.at(input));
      kinds.push_back(kind_of(step.inputs.back()));
    }
    for (const ProgramName& output : given.outputs) {
      step.outputs.push_back(
          add_value(output.name, given.kind == StepKind::call ? output.kind : made_by(given.kind, kinds)));
      assigned_by_.back() = number;
      made_by_.emplace(step.outputs.back(), number);
    }
    find_exchange(given, step);
    if (step.kind == StepKind::call) find_function(given, step);
    if (shape_of(step.kind).has_lane) check_call(step);
    if (step.kind == StepKind::combine) step.result = step.outputs.front();
    if (is_receive_phase(step.kind)) step.sender = made_by_.at(step.inputs.front());
    if (step.kind == StepKind::combine_receive) {
      made_.steps[static_cast<std::size_t>(step.sender)].result = step.outputs.front();
      assigned_by_[static_cast<std::size_t>(step.outputs.front())] = step.sender;
    }
    size_memory(step);
    made_.steps.push_back(std::move(step));
  }

  // The exchange that the step names, or that of the call that made its input.
  void find_exchange(const ProgramStep& given, CompiledStep& step) const {
    if (!shape_of(step.kind).has_exchange) {
      const CompiledStep& maker = made_.steps[static_cast<std::size_t>(made_by_.at(step.inputs.front()))];
      step.exchange = maker.exchange;
      step.lane = maker.lane;
      return;
    }
    const auto found = exchanges_.find(given.exchange);
    if (found != exchanges_.end()) {
      step.exchange = found->second;
    } else if (exchanges_.size() == 1 && exchanges_.begin()->first.empty()) {
      step.exchange = exchanges_.begin()->second;  // the one that takes every step
    }
    if (step.exchange == nullptr)
      refuse(step, given.exchange.empty()
                       ? std::string("names no exchange, and no exchange without a name was passed")
                       : str("no exchange ", given.exchange, " was passed"));
  }

  void find_function(const ProgramStep& given, CompiledStep& step) const {
    const auto found = functions_.find(given.function);
    if (found == functions_.end() || !found->second)
      refuse(step, str("no function ", given.function, " was passed"));
    step.function = &found->second;
  }

  void check_call(const CompiledStep& step) {
    const Config& config = step.exchange->config();
    if (config.backend == BackendKind::cuda || config.memory == MemoryKind::device)
      unsupported(step,
                  "its exchange has device memory; the C++ evaluator runs on host memory, ferry.Program of "
                  "Python on both");
    if (step.lane >= config.lanes)
      refuse(step, str("lane ", step.lane, " does not exist: its exchange has ",
                       counted(config.lanes, "lane"), "; construct it with ", step.lane + 1));
    if (is_dispatch(step.kind)) {
      if (config.format.is_raw())
        unsupported(step, "its exchange has a raw format, whose parts are no tokens value");
      if (!config.own_receive_buffers)
        refuse(step, "its exchange owns no receive buffers; set Config::own_receive_buffers");
    }
    if (!is_combine(step.kind)) return;
    if (config.reduction == Reduction::unreduced)
      unsupported(step, "its exchange does not reduce, so its results are no tokens");
    if (step.inputs.size() < 3) return;
    if (config.layout == Layout::rank_major) refuse(step, "rank_major takes no weights");
    if (step.kind == StepKind::combine_send && config.reduction == Reduction::partial &&
        kind_of(step.inputs[2]) == ValueKind::weights)
      refuse(step,
             "topk_weights with the reduction partial need a combine in one piece, or the reduction exact");
  }

  void size_memory(const CompiledStep& step) {
    const bool makes_result = step.kind == StepKind::combine || step.kind == StepKind::combine_receive;
    if (!makes_result && step.kind != StepKind::call && step.kind != StepKind::join) return;
    const Config& config = step.exchange->config();
    for (const int output : step.outputs) {
      CompiledValue& made = value(output);
      made.type = config.combine_type;
      const std::int64_t row = std::int64_t{config.hidden} * bytes_of(made.type);
      made.most_rows = config.max_tokens;
      if (made.kind == ValueKind::tokens) made.row_bytes = row;
      if (step.kind == StepKind::join) made.most_rows *= static_cast<std::int64_t>(step.inputs.size());
      if (made.kind == ValueKind::ids || made.kind == ValueKind::weights)
        made.row_bytes = std::int64_t{4} * config.top_k;
      if (made.kind != ValueKind::outputs) continue;
      made.row_bytes = row;
      made.most_rows = step.exchange->capacity();
      if (config.layout == Layout::expert_padded) made.most_rows *= groups_of(*step.exchange);
    }
  }

  static std::int64_t groups_of(const Exchange& exchange) {
    const auto experts = exchange.config().placement.experts_of(exchange.rank().index());
    return static_cast<std::int64_t>(experts.size()) + exchange.config().shared_experts;
  }

  // Parts whose place is known when they are made lie in the memory of the join from the beginning.
  void place_parts(const CompiledStep& join) {
    const int joined = join.outputs.front();
    const auto assigned = [&](int number) { return assigned_by_[static_cast<std::size_t>(number)]; };
    for (std::size_t i = 0; i < join.inputs.size(); ++i) {
      const int number = join.inputs[i];
      if (i > 0 && assigned(join.inputs[i - 1]) >= assigned(number)) return;  // made out of order
      CompiledValue& part = value(number);
      const bool fits = part.row_bytes == value(joined).row_bytes && part.type == value(joined).type;
      const bool free = part.join < 0 && std::ranges::count(join.inputs, number) == 1 && part.row_bytes > 0 &&
                        made_.steps[static_cast<std::size_t>(made_by_.at(number))].kind != StepKind::join;
      if (!fits || !free) continue;
      part.join = joined;
      part.parts_before.assign(join.inputs.begin(), join.inputs.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  const Program& program_;
  const ProgramExchanges& exchanges_;
  const ProgramFunctions& functions_;
  CompiledProgram made_;
  std::map<std::string, int, std::less<>> numbers_;
  std::map<int, int> made_by_;    // value -> step
  std::vector<int> assigned_by_;  // value -> step after which its rows are known; inputs: -1
};

}  // namespace

void ProgramMemoryDeleter::operator()(std::byte* memory) const {
  ::operator delete(memory, kProgramAlignment);
}

CompiledProgram compile(const Program& program, const ProgramExchanges& exchanges,
                        const ProgramFunctions& functions) {
  return ProgramCompiler(program, exchanges, functions).compile();
}

}  // namespace ferry
