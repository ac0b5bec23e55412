// Random programs whose inputs are tokens x, ids, weights and the count k, for the functions of
// eager_run.hpp.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ferry/program.hpp"
#include "harness/check.hpp"
#include "harness/random.hpp"

namespace ferry::contract {

inline Program empty_program() {
  return {.name = "drawn",
          .inputs = {{"x", ValueKind::tokens},
                     {"ids", ValueKind::ids},
                     {"weights", ValueKind::weights},
                     {"k", ValueKind::count}},
          .steps = {},
          .outputs = {}};
}

// Draws programs: steps whose inputs are of the right kinds, of which those stay that check() accepts.
class ProgramMaker {
 public:
  // `gathers`: whether the exchange has all_gather_v and reduce_scatter_v.
  ProgramMaker(Random& random, Reduction reduction, bool gathers)
      : random_(random), reduction_(reduction), gathers_(gathers) {
    for (const ProgramName& input : program_.inputs) named_[input.kind].push_back(input.name);
  }

  Program draw(int steps) {
    while (static_cast<int>(program_.steps.size() + open_.size()) < steps) {
      if (!open_.empty() && random_.chance(0.3)) {
        receive(random_.below(static_cast<std::int64_t>(open_.size())));
      } else if (std::optional<ProgramStep> step = draw_step()) {
        add(*step);
      }
    }
    while (!open_.empty()) receive(0);
    for (const std::string& tokens : named_[ValueKind::tokens]) program_.outputs.push_back(tokens);
    for (const std::string& metadata : named_[ValueKind::metadata]) program_.outputs.push_back(metadata);
    for (const auto& [kind, names] : gathered_)
      program_.outputs.insert(program_.outputs.end(), names.begin(), names.end());
    return program_;
  }

 private:
  std::string one_of(ValueKind kind) { return one_of(named_[kind]); }

  std::string one_of(const std::vector<std::string>& names) {
    return names.empty()
               ? "missing"
               : names[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(names.size())))];
  }

  std::optional<ProgramStep> draw_step() {
    const StepKind kind =
        random_.pick({StepKind::dispatch, StepKind::dispatch_send, StepKind::combine, StepKind::combine,
                      StepKind::combine_send, StepKind::metadata, StepKind::call, StepKind::call,
                      StepKind::wait, StepKind::all_gather_v, StepKind::reduce_scatter_v});
    if (!gathers_ && (kind == StepKind::all_gather_v || kind == StepKind::reduce_scatter_v))
      return std::nullopt;
    ProgramStep step{.kind = kind, .outputs = {{"v" + std::to_string(program_.steps.size())}}, .lane = 0};
    const bool dispatch = kind == StepKind::dispatch || kind == StepKind::dispatch_send;
    if (dispatch) {
      step.inputs = {one_of(ValueKind::tokens),
                     one_of(random_.chance(0.25) ? ValueKind::received : ValueKind::ids)};
      if (random_.chance(0.6)) step.inputs.push_back(one_of(ValueKind::weights));
    } else if (kind == StepKind::combine || kind == StepKind::combine_send) {
      const std::string outputs = one_of(ValueKind::outputs), rows = rows_of_[outputs];
      step.inputs = {outputs, rows};
      const bool partial_send = kind == StepKind::combine_send && reduction_ == Reduction::partial;
      if (random_.chance(0.6))
        step.inputs.push_back(partial_send || random_.chance(0.5) ? rows : one_of(ValueKind::weights));
    } else if (kind == StepKind::metadata) {
      step.inputs = {one_of(ValueKind::count)};
    } else if (kind == StepKind::all_gather_v) {
      step.inputs = {one_of(random_.chance(0.7) ? ValueKind::tokens : ValueKind::weights)};
    } else if (kind == StepKind::reduce_scatter_v) {
      step.inputs = {one_of(gathered_[ValueKind::tokens]), random_.chance(0.5) ? "x" : "weights"};
    } else if (kind == StepKind::wait) {
      step.inputs = {one_of(ValueKind::received)};
    } else if (random_.chance(0.6)) {
      step.function = "experts";
      step.inputs = {one_of(ValueKind::received)};
      step.outputs[0].kind = ValueKind::outputs;
    } else if (random_.chance(0.5)) {
      auto& names = (random_.chance(0.4) ? gathered_ : named_)[ValueKind::tokens];
      step.function = "mix";
      step.inputs = {one_of(names), one_of(names)};
      step.outputs[0].kind = ValueKind::tokens;
    } else {
      step.function = "regate";
      step.inputs = {one_of(ValueKind::weights), "k"};
      step.outputs[0].kind = ValueKind::weights;
      step.outputs.push_back({step.outputs[0].name + ".n", ValueKind::count});
    }
    if (kind != StepKind::call && kind != StepKind::wait) step.lane = random_.below(3);
    return accepted(step) ? std::optional(step) : std::nullopt;
  }

  // Whether check() accepts the program with this step, all open calls received behind it.
  bool accepted(const ProgramStep& step) const {
    Program tried = program_;
    tried.steps.push_back(step);
    std::vector<ProgramStep> open = open_;
    if (step.kind == StepKind::dispatch_send || step.kind == StepKind::combine_send)
      open.push_back(receive_of(step));
    tried.steps.insert(tried.steps.end(), open.begin(), open.end());
    return usage_error([&] { check(tried); }).empty();
  }

  static ProgramStep receive_of(const ProgramStep& send) {
    const bool dispatch = send.kind == StepKind::dispatch_send;
    return {.kind = dispatch ? StepKind::dispatch_receive : StepKind::combine_receive,
            .inputs = {send.outputs[0].name},
            .outputs = {
                {send.outputs[0].name + ".received", dispatch ? ValueKind::received : ValueKind::tokens}}};
  }

  void receive(int index) {
    const ProgramStep step = open_[static_cast<std::size_t>(index)];
    open_.erase(open_.begin() + index);
    add(step);
  }

  bool is_gathered(const ProgramStep& step) {
    const auto& tokens = gathered_[ValueKind::tokens];
    return step.kind == StepKind::all_gather_v ||
           (step.function == "mix" && std::ranges::find(tokens, step.inputs[0]) != tokens.end());
  }

  void add(ProgramStep step) {
    const std::string name = step.outputs[0].name;
    switch (step.kind) {
      case StepKind::dispatch_send:
      case StepKind::combine_send:
        open_.push_back(receive_of(step));
        step.outputs[0].kind =
            step.kind == StepKind::dispatch_send ? ValueKind::sent_dispatch : ValueKind::sent_combine;
        break;
      case StepKind::dispatch:
      case StepKind::dispatch_receive:
      case StepKind::wait:
        step.outputs[0].kind = ValueKind::received;
        break;
      case StepKind::metadata:
        step.outputs[0].kind = ValueKind::metadata;
        break;
      default:
        break;
    }
    const auto& weights = named_[ValueKind::weights];
    if (step.kind == StepKind::all_gather_v)
      step.outputs[0].kind = std::ranges::find(weights, step.inputs[0]) == weights.end() ? ValueKind::tokens
                                                                                         : ValueKind::weights;
    if (step.outputs[0].kind == ValueKind::outputs) rows_of_[name] = step.inputs[0];
    auto& names = is_gathered(step) ? gathered_ : named_;
    for (const ProgramName& made : step.outputs) names[made.kind].push_back(made.name);
    program_.steps.push_back(std::move(step));
  }

  Random& random_;
  Reduction reduction_;
  bool gathers_;
  Program program_ = empty_program();
  std::map<ValueKind, std::vector<std::string>> named_;
  std::map<ValueKind, std::vector<std::string>> gathered_;  // with a row for each row of all ranks
  std::map<std::string, std::string> rows_of_;              // outputs -> the received rows that they answer
  std::vector<ProgramStep> open_;                           // receive phases that are missing yet
};

}  // namespace ferry::contract
