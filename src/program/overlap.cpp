// overlap(): a program in micro-batches that take turns.
#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <vector>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "program/steps.hpp"

namespace ferry {

namespace {

class BatchedProgram {
 public:
  BatchedProgram(const Program& program, int batches) : program_(program), batches_(batches) {
    for (const ProgramName& input : program.inputs) used_.insert(input.name);
    for (const ProgramStep& step : program.steps)
      for (const ProgramName& output : step.outputs) used_.insert(output.name);
    makers_ = makers_in(program.steps);
  }

  Program make() {
    check_program();
    split_into_phases();
    count_lanes();
    made_.name = program_.name;
    made_.inputs = program_.inputs;
    made_.outputs = program_.outputs;
    StepsByName users;
    for (const ProgramStep& step : steps_)
      for (const std::string& name : step.inputs) users.try_emplace(name, &step);
    for (const ProgramName& input : program_.inputs) add_parts(input, users);
    add_turns();
    const StepsByName makers = makers_in(steps_);
    for (const std::string& output : std::set(program_.outputs.begin(), program_.outputs.end()))
      add_join(output, makers);
    return std::move(made_);
  }

 private:
  [[noreturn]] void fail(const std::string& where, const std::string& what) const {
    throw UsageError(str("overlap of program ", program_.name, ", ", where, ": ", what));
  }

  void check_program() const {
    if (batches_ < 1 || batches_ > kMaxLanes)
      fail("batches", str(batches_, ", must be 1 to ", kMaxLanes, ": each has lanes of its own"));
    if (program_.steps.size() * static_cast<std::size_t>(batches_) > kMostSteps)
      fail("batches", str(batches_, " for ", program_.steps.size(),
                          " steps: steps times micro-batches are at most ", kMostSteps));
    for (const ProgramName& input : program_.inputs)
      if (!contains(kByToken, input.kind))
        fail(str("input ", input.name),
             str("is of kind ", to_string(input.kind), ", which has no rows to split"));
    for (const ProgramStep& step : program_.steps)
      if (step.kind == StepKind::metadata || step.kind == StepKind::part || step.kind == StepKind::join)
        fail(str("step ", step.name()), "works on all tokens of the rank at once");
    for (const ProgramStep& step : program_.steps)
      for (const ProgramName& output : step.outputs)
        if (step.kind == StepKind::call && step.inputs.empty() && contains(kByToken, output.kind))
          fail(str("step ", step.name()),
               str("takes nothing, so each micro-batch would have all rows of ", output.name,
                   ": pass it what it is made of, or make it an input"));
    check_gathered_rows();
    for (const std::string& output : program_.outputs) {
      const auto found = makers_.find(output);
      if (found == makers_.end()) fail(str("output ", output), "is an input: take it from there");
      const auto made = std::ranges::find(found->second->outputs, output, &ProgramName::name);
      if (made->kind != ValueKind::tokens)
        fail(str("output ", output), str("is of kind ", to_string(made->kind), ", only tokens are joined"));
    }
  }

  // The rows of all ranks are in a different order for each number of micro-batches. So they cannot be
  // outputs, and only such rows may be added: then each rank's own rows come back.
  void check_gathered_rows() const {
    std::set<std::string, std::less<>> gathered;
    const auto is_gathered = [&](const std::string& name) { return gathered.contains(name); };
    for (const ProgramStep& step : program_.steps) {
      const bool takes = std::ranges::any_of(step.inputs, is_gathered);
      if (step.kind == StepKind::reduce_scatter_v && !is_gathered(step.inputs.front()))
        fail(str("step ", step.name()),
             str(step.inputs.front(),
                 " is made of no rows that the program has gathered, so it cannot be "
                 "split as they are"));
      if (step.kind != StepKind::all_gather_v && (step.kind == StepKind::reduce_scatter_v || !takes))
        continue;
      for (const ProgramName& output : step.outputs) gathered.insert(output.name);
    }
    for (const std::string& output : program_.outputs)
      if (is_gathered(output))
        fail(str("output ", output),
             "is made of the rows of all ranks, which micro-batches gather in another "
             "order: return a reduce_scatter_v of it");
  }

  // By name, the step that makes a value, or takes it first. The names are those of the steps.
  using StepsByName = std::map<std::string_view, const ProgramStep*>;
  static StepsByName makers_in(const std::vector<ProgramStep>& steps) {
    StepsByName makers;
    for (const ProgramStep& step : steps)
      for (const ProgramName& output : step.outputs) makers.try_emplace(output.name, &step);
    return makers;
  }

  // Whether a step keeps its fused form: topk_weights may need a round trip of their own, which has no
  // phases.
  bool stays_whole(const ProgramStep& step) const {
    if (step.kind == StepKind::dispatch) return false;
    return step.kind != StepKind::combine ||
           (step.inputs.size() > 2 && kind_of(step.inputs[2]) == ValueKind::weights);
  }

  ValueKind kind_of(const std::string& name) const {
    const auto input = std::ranges::find(program_.inputs, name, &ProgramName::name);
    if (input != program_.inputs.end()) return input->kind;
    return std::ranges::find(makers_.at(name)->outputs, name, &ProgramName::name)->kind;
  }

  void split_into_phases() {
    for (const ProgramStep& step : program_.steps) {
      if (stays_whole(step)) {
        steps_.push_back(step);
        continue;
      }
      const bool dispatch = step.kind == StepKind::dispatch;
      ProgramStep send = step;
      send.kind = dispatch ? StepKind::dispatch_send : StepKind::combine_send;
      send.outputs = {{unused(step.outputs.front().name + ".sent"),
                       dispatch ? ValueKind::sent_dispatch : ValueKind::sent_combine}};
      ProgramStep receive{.kind = receive_phase_of(send.kind),
                          .inputs = {send.outputs.front().name},
                          .outputs = step.outputs,
                          .stream = step.stream};
      steps_.push_back(std::move(send));
      steps_.push_back(std::move(receive));
    }
  }

  void count_lanes() {
    for (const ProgramStep& step : steps_) streams_ = std::max(streams_, step.stream + 1);
    for (const ProgramStep& step : steps_)
      if (shape_of(step.kind).has_lane)
        lanes_[step.exchange] = std::max(lanes_[step.exchange], step.lane + 1);
  }

  std::string unused(std::string name) {
    while (!used_.insert(name).second) name += '_';
    return name;
  }

  // The name of a value in a micro-batch.
  const std::string& name_in(const std::string& name, int batch) {
    auto& names = names_[name];
    while (static_cast<int>(names.size()) < batches_) names.push_back(unused(str(name, ".", names.size())));
    return names[static_cast<std::size_t>(batch)];
  }

  // `users`: by name, the first step that takes a value.
  void add_parts(const ProgramName& input, const StepsByName& users) {
    const auto found = users.find(input.name);
    if (found == users.end()) return;
    const ProgramStep* const user = found->second;
    for (int batch = 0; batch < batches_; ++batch)
      made_.steps.push_back({.kind = StepKind::part,
                             .inputs = {input.name},
                             .outputs = {{name_in(input.name, batch), input.kind}},
                             .exchange = user->exchange,
                             .index = batch,
                             .of = batches_,
                             .stream = batch * streams_});
  }

  // Adds the steps up to the next receive phase, of each micro-batch in turn.
  void add_turns() {
    for (auto begin = steps_.begin(); begin != steps_.end();) {
      const auto end = std::find_if(begin + 1, steps_.end(),
                                    [](const ProgramStep& step) { return is_receive_phase(step.kind); });
      for (int batch = 0; batch < batches_; ++batch)
        for (auto step = begin; step != end; ++step) {
          made_.steps.push_back(in_batch(*step, batch));
          add_order(*step, batch);
        }
      begin = end;
    }
  }

  // On GPUs only this keeps the streams of the micro-batches from doing the same work at the same time: a
  // send phase follows that of the micro-batch before, and the experts of one micro-batch follow those of
  // another. So one micro-batch sends while the experts of another run.
  void add_order(const ProgramStep& step, int batch) {
    ProgramStep& made = made_.steps.back();
    if (batch > 0 && receive_phase_of(step.kind) != StepKind::call)
      made.after.push_back(name_in(step.outputs.front().name, batch - 1));
    if (step.kind != StepKind::call || step.outputs.front().kind != ValueKind::outputs) return;
    if (last_experts_batch_ >= 0 && last_experts_batch_ != batch) made.after.push_back(last_experts_);
    last_experts_ = made.outputs.front().name;
    last_experts_batch_ = batch;
  }

  ProgramStep in_batch(ProgramStep step, int batch) {
    std::erase_if(step.after, [&](const std::string& name) {
      return std::ranges::find(program_.inputs, name, &ProgramName::name) != program_.inputs.end();
    });
    for (auto* const names : {&step.inputs, &step.after})
      for (std::string& name : *names) name = name_in(name, batch);
    for (ProgramName& output : step.outputs) output.name = name_in(output.name, batch);
    if (shape_of(step.kind).has_lane) step.lane += batch * lanes_.at(step.exchange);
    step.stream += batch * streams_;
    if (step.sm_limit > 0) step.sm_limit = std::max(1, step.sm_limit / batches_);
    return step;
  }

  // `makers`: of steps_.
  void add_join(const std::string& output, const StepsByName& makers) {
    const ProgramStep* maker = makers.at(output);
    while (!shape_of(maker->kind).has_exchange) maker = makers.at(maker->inputs.front());
    ProgramStep join{.kind = StepKind::join, .outputs = {{output}}, .exchange = maker->exchange};
    for (int batch = 0; batch < batches_; ++batch) join.inputs.push_back(name_in(output, batch));
    made_.steps.push_back(std::move(join));
  }

  const Program& program_;
  int batches_;
  StepsByName makers_;              // in program_
  std::vector<ProgramStep> steps_;  // of one micro-batch, in phases
  std::map<std::string, int, std::less<>> lanes_;
  int streams_ = 1;
  std::string last_experts_;  // output of the last call of experts, and its micro-batch
  int last_experts_batch_ = -1;
  std::set<std::string, std::less<>> used_;
  std::map<std::string, std::vector<std::string>, std::less<>> names_;
  Program made_;
};

}  // namespace

Program overlap(const Program& program, int batches) {
  check(program);
  Program filled = program;
  fill_in_kinds(filled);
  Program made = BatchedProgram(filled, batches).make();
  check(made);
  return made;
}

}  // namespace ferry
