// check(): walks through the steps once, and records which step made each value and which calls each lane
// has.
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "program/steps.hpp"

namespace ferry {

namespace {

using ProgramLane = std::pair<std::string_view, int>;  // exchange, lane

// Memory of a lane, with the step whose dispatch filled it.
struct ProgramLaneMemory {
  ProgramLane lane;
  int step = -1;
};

constexpr int kMaxStreams = 1024;

// Planning keeps, for every step, how far each stream has come.
constexpr std::size_t kMaxStepsByStreams = std::size_t{1} << 23;

// Values that are memory of a lane, or a call of it.
constexpr unsigned kInLane = kinds(ValueKind::received, ValueKind::sent_dispatch, ValueKind::sent_combine);

struct CheckedValue {
  ValueKind kind = ValueKind::tokens;
  int step = -1;  // the step that made it; -1: an input
  // received and send phases: the lane that carries the call, and the plan, which may be another lane's.
  ProgramLaneMemory rows{}, plan{};
  bool from_exchange = false;
};

struct ProgramLaneCalls {
  int open = -1;                           // the send phase that is not received yet
  int stream = -1;                         // the stream of all its steps; -1: none yet
  int filled_rows = -1, filled_plan = -1;  // the steps whose rows and plan the lane holds
};

class ProgramChecker {
 public:
  explicit ProgramChecker(const Program& program) : program_(program) {
    for (std::size_t i = 0; i < program.steps.size(); ++i)
      for (const ProgramName& output : program.steps[i].outputs)
        makers_.try_emplace(output.name, static_cast<int>(i));
  }

  void check() {
    require_name(program_.name, "program", "its name");
    require_few_streams();
    for (const ProgramName& input : program_.inputs) check_input(input);
    for (step_ = 0; step_ < static_cast<int>(program_.steps.size()); ++step_) check_step();
    for (const auto& [lane, calls] : lanes_) {
      if (calls.open < 0) continue;
      step_ = calls.open;
      fail(str("its receive phase is missing: add a step ", to_string(receive_phase_of(step().kind)), "(",
               step().outputs.front().name, ")"));
    }
    for (const std::string& output : program_.outputs) check_output(output);
  }

 private:
  const ProgramStep& step() const { return program_.steps[static_cast<std::size_t>(step_)]; }
  std::string name_of(int index) const { return program_.steps[static_cast<std::size_t>(index)].name(); }

  [[noreturn]] void fail(const std::string& what) const { fail(str("step ", step().name()), what); }
  [[noreturn]] void fail(const std::string& where, const std::string& what) const {
    throw UsageError(str("program ", program_.name, ", ", where, ": ", what));
  }

  void require_name(const std::string& name, const std::string& where, const char* what) const {
    if (!is_name(name))
      fail(
          where,
          str(what, " is '", name,
              "': a name is a letter or _, then letters, digits, _ and ., but not program, input or output"));
  }

  void require_few_streams() const {
    std::set<int> streams{0};
    for (const ProgramStep& step : program_.steps) streams.insert(step.stream);
    if (streams.size() * program_.steps.size() > kMaxStepsByStreams)
      fail("streams", str(streams.size(), " for ", program_.steps.size(),
                          " steps: steps times streams are at most ", kMaxStepsByStreams));
  }

  void check_input(const ProgramName& input) {
    const std::string where = str("input ", input.name);
    require_name(input.name, where, "its name");
    if (!contains(kInputKinds, input.kind))
      fail(where, str("is of kind ", to_string(input.kind), ": inputs are ", list_of(kInputKinds)));
    if (!values_.try_emplace(input.name, CheckedValue{.kind = input.kind}).second)
      fail(where, "is there twice: rename one");
  }

  void check_output(const std::string& name) const {
    const std::string where = str("output ", name);
    const auto found = values_.find(name);
    if (found == values_.end()) fail(where, "no input has this name and no step makes it");
    if (!contains(kAnyValue, found->second.kind))
      fail(where,
           str("is of kind ", to_string(found->second.kind), ": receive it and return what that makes"));
    if (const auto fault = overwritten(found->second, true, true)) fail(where, *fault);
  }

  void check_step() {
    check_fields();
    std::vector<const CheckedValue*> inputs;
    for (const std::string& name : step().inputs) inputs.push_back(&value_of(name, "uses "));
    for (const std::string& name : step().after) value_of(name, "comes after ");
    check_kinds(inputs);
    check_memory(inputs);
    std::vector<ValueKind> input_kinds;
    for (const CheckedValue* value : inputs) input_kinds.push_back(value->kind);
    CheckedValue made{.step = step_};
    if (step().kind == StepKind::wait) {
      if (!inputs.front()->from_exchange)
        fail(str(step().inputs.front(), " is not made by an exchange: nothing to wait for"));
      made = *inputs.front();
      made.step = step_;
    } else if (step().kind != StepKind::call) {
      made.kind = made_by(step().kind, input_kinds);
      use_lane(inputs, made);
    }
    for (const ProgramName& output : step().outputs) {
      if (step().kind == StepKind::call) made.kind = output.kind;
      if (const auto [found, added] = values_.try_emplace(output.name, made); !added)
        fail(str(output.name, " exists already, ",
                 found->second.step < 0 ? "as an input" : "made by step " + name_of(found->second.step),
                 ": rename one"));
    }
  }

  // Checks what the step's fields say by themselves.
  void check_fields() const {
    const ProgramStep& step = this->step();
    if (static_cast<unsigned>(step.kind) >= kStepKinds)
      fail(str("step number ", step_), str("there is no kind of step ", static_cast<int>(step.kind)));
    if (step.outputs.empty())
      fail(str("step number ", step_), str("a ", to_string(step.kind), " makes no value: name one"));
    for (const ProgramName& output : step.outputs)
      require_name(output.name, str("step ", step.name()), "the name of its value");
    const bool is_call = step.kind == StepKind::call;
    const bool has_lane = shape_of(step.kind).has_lane, has_exchange = shape_of(step.kind).has_exchange;
    if (is_call) {
      require_name(step.function, str("step ", step.name()), "its function");
      for (const ProgramName& output : step.outputs)
        if (!contains(kCallOutputs, output.kind))
          fail(str(output.name, " is of kind ", to_string(output.kind), ": functions make ",
                   list_of(kCallOutputs)));
    } else if (step.outputs.size() != 1) {
      fail(str("makes ", step.outputs.size(), " values: only calls make more than one"));
    } else if (!step.function.empty()) {
      fail(str("has a function, ", step.function, ": only calls have one"));
    }
    if (!step.exchange.empty() && !has_exchange)
      fail(str("has an exchange, ", step.exchange, ": it works on that of its input"));
    if (!step.exchange.empty()) require_name(step.exchange, str("step ", step.name()), "its exchange");
    if (step.lane > 0 && !has_lane) fail(str("has lane ", step.lane, ": it starts no call of a lane"));
    if (step.lane < 0 || step.lane >= kMaxLanes)
      fail(str("has lane ", step.lane, ": lanes are 0 to ", kMaxLanes - 1));
    if (step.index < 0 || step.index >= step.of || (step.kind != StepKind::part && step.of != 1))
      fail(str("is part ", step.index, " of ", step.of, ": ",
               step.kind == StepKind::part ? "i is 0 to n - 1" : "only `part` takes parts"));
    if (step.stream < 0 || step.stream >= kMaxStreams)
      fail(str("has stream ", step.stream, ": streams are 0 to ", kMaxStreams - 1));
    const bool has_limit = is_dispatch(step.kind) || is_combine(step.kind);
    if (step.sm_limit < 0 || (step.sm_limit > 0 && !has_limit))
      fail(str("has sm_limit ", step.sm_limit, ": ",
               has_limit ? "0 is the share of its lane"
                         : "only dispatch, combine and their send phases have one"));
  }

  // A value that exists when the step begins. `what`: what the step does with it.
  const CheckedValue& value_of(const std::string& name, const char* what) const {
    if (const auto found = values_.find(name); found != values_.end()) return found->second;
    const auto maker = makers_.find(name);
    if (maker == makers_.end()) fail(str(what, name, ", which is no input and which no step makes"));
    if (needs(maker->second, step_))
      fail(str(what, name, " of step ", name_of(maker->second),
               ", which needs this step: a cycle; let one of them do without the other"));
    fail(str(what, name, " before step ", name_of(maker->second), " makes it: move that step up"));
  }

  // Whether `step` needs a value of `other`, directly or through other steps. Without recursion, because the
  // text decides how long the way is.
  bool needs(int step, int other) const {
    std::vector<char> visited(program_.steps.size(), 0);
    std::vector<int> open{step};
    while (!open.empty()) {
      const auto next = static_cast<std::size_t>(open.back());
      open.pop_back();
      if (static_cast<int>(next) == other) return true;
      if (std::exchange(visited[next], 1) != 0) continue;
      for (const auto* const names : {&program_.steps[next].inputs, &program_.steps[next].after}) {
        for (const std::string& name : *names) {
          const auto maker = makers_.find(name);
          if (maker != makers_.end() && visited[static_cast<std::size_t>(maker->second)] == 0)
            open.push_back(maker->second);
        }
      }
    }
    return false;
  }

  void check_kinds(const std::vector<const CheckedValue*>& inputs) const {
    const StepShape& shape = shape_of(step().kind);
    const int given = static_cast<int>(inputs.size());
    if (given < shape.required || (!shape.repeats && given > shape.most))
      fail(str("takes ", given, " values, needs ", shape.required,
               shape.repeats                 ? " or more"
               : shape.most > shape.required ? str(" or ", shape.most)
                                             : ""));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const unsigned wanted = shape.inputs[shape.repeats ? 0 : i];
      if (!contains(wanted, inputs[i]->kind))
        fail(str(step().inputs[i], " is of kind ", to_string(inputs[i]->kind),
                 ", needed here: ", list_of(wanted)));
    }
  }

  // Checks that the lanes still hold the rows and plans that the step reads.
  void check_memory(const std::vector<const CheckedValue*>& inputs) const {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      // Dispatch and combine read only the plan of their second input, and receive phases only that of their
      // first.
      const bool only_plan = is_receive_phase(step().kind) || (shape_of(step().kind).has_lane && i == 1);
      if (const auto fault = overwritten(*inputs[i], !only_plan, true))
        fail(str(step().inputs[i], " ", *fault));
      if (!contains(kInLane, inputs[i]->kind)) continue;
      require_stream(inputs[i]->rows.lane, lanes_.at(inputs[i]->rows.lane));
      require_stream(inputs[i]->plan.lane, lanes_.at(inputs[i]->plan.lane));
    }
  }

  std::optional<std::string> overwritten(const CheckedValue& value, bool rows, bool plan) const {
    const auto fault = [&](const char* what, const ProgramLaneMemory& memory,
                           int holds) -> std::optional<std::string> {
      if (memory.step < 0 || holds == memory.step) return std::nullopt;
      return str("has lost its ", what, ": step ", name_of(holds), " has overwritten the memory of lane ",
                 memory.lane.second, "; use another lane");
    };
    std::optional<std::string> found;
    if (rows && value.rows.step >= 0)
      found = fault("rows", value.rows, lanes_.at(value.rows.lane).filled_rows);
    if (!found && plan && value.plan.step >= 0)
      found = fault("plan", value.plan, lanes_.at(value.plan.lane).filled_plan);
    return found;
  }

  // A lane is used on one stream alone, so that nothing in it is overwritten while it is read.
  void require_stream(const ProgramLane& lane, const ProgramLaneCalls& calls) const {
    if (step().stream == calls.stream) return;
    fail(str("is on stream ", step().stream, ", but lane ", lane.second, ", which it uses, is on stream ",
             calls.stream, ": use that stream, or another lane"));
  }

  // Records the step's call on its lane, and the memory that holds `made`.
  void use_lane(const std::vector<const CheckedValue*>& inputs, CheckedValue& made) {
    if (is_receive_phase(step().kind)) return receive(*inputs.front(), made);
    if (!shape_of(step().kind).has_lane) return;
    made.from_exchange = true;
    const ProgramLane key{step().exchange, step().lane};
    ProgramLaneCalls& lane = lanes_[key];
    if (lane.stream < 0) lane.stream = step().stream;
    require_stream(key, lane);
    if (lane.open >= 0)
      fail(str("lane ", key.second, " is between the phases of ", name_of(lane.open),
               ": receive that first, or use another lane"));
    if (receive_phase_of(step().kind) != StepKind::call) lane.open = step_;
    if (step().kind == StepKind::combine_send) {
      made.rows = {key, -1};  // where the receive phase finds the call
      made.plan = inputs[1]->plan;
    }
    if (!is_dispatch(step().kind)) return;
    lane.filled_rows = step_;
    made.rows = made.plan = {key, step_};
    if (inputs[1]->kind == ValueKind::received) made.plan = inputs[1]->plan;
    // A dispatch by the lane's own plan keeps it.
    if (made.plan.lane != key || made.plan.step == step_) lane.filled_plan = step_;
  }

  void receive(const CheckedValue& sent, CheckedValue& made) {
    ProgramLaneCalls& lane = lanes_.at(sent.rows.lane);
    if (lane.open != sent.step)
      fail(str(step().inputs.front(), " has been received already: use the value that this has made"));
    lane.open = -1;
    made.from_exchange = true;
    if (step().kind == StepKind::combine_receive) return;
    made.rows = sent.rows;
    made.plan = sent.plan;
  }

  const Program& program_;
  // Names are those of `program_`.
  std::map<std::string_view, int> makers_;
  std::map<std::string_view, CheckedValue> values_;
  std::map<ProgramLane, ProgramLaneCalls> lanes_;
  int step_ = 0;
};

}  // namespace

void check(const Program& program) {
  ProgramChecker(program).check();
}

}  // namespace ferry
