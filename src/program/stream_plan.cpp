#include "program/compiled.hpp"

#include <algorithm>
#include <map>
#include <string>

namespace ferry {

namespace {

class StreamPlanner {
 public:
  StreamPlan make(const Program& program) {
    number_streams(program);
    done_.assign(numbers_.size(), Progress(numbers_.size(), -1));
    for (const ProgramStep& step : program.steps) add(step);
    for (std::size_t stream = 1; stream < numbers_.size(); ++stream)
      if (const int last = done_[stream][stream]; last > done_[0][stream]) {
        plan_.ends.push_back(last);
        plan_.steps[static_cast<std::size_t>(last)].awaited = true;
      }
    return std::move(plan_);
  }

 private:
  using Progress = std::vector<int>;  // by stream: the last step that is known to be done, -1: none

  void number_streams(const Program& program) {
    numbers_.emplace(0, 0);
    for (const ProgramStep& step : program.steps)
      numbers_.try_emplace(step.stream, static_cast<int>(numbers_.size()));
    plan_.streams = static_cast<int>(numbers_.size());
  }

  void add(const ProgramStep& given) {
    const int number = static_cast<int>(plan_.steps.size());
    StreamPlan::Step step{.stream = numbers_.at(given.stream)};
    Progress& here = done_[static_cast<std::size_t>(step.stream)];
    std::vector<int> makers;
    for (const auto* const names : {&given.inputs, &given.after})
      for (const std::string& name : *names)
        if (const auto found = made_by_.find(name); found != made_by_.end()) makers.push_back(found->second);
    std::ranges::sort(makers, std::greater());  // the latest first: it may cover the others
    for (const int maker : makers) {
      StreamPlan::Step& made = plan_.steps[static_cast<std::size_t>(maker)];
      if (here[static_cast<std::size_t>(made.stream)] >= maker) continue;
      step.waits_for.push_back(maker);
      made.awaited = true;
      const Progress& there = after_[static_cast<std::size_t>(maker)];
      for (std::size_t i = 0; i < here.size(); ++i) here[i] = std::max(here[i], there[i]);
    }
    here[static_cast<std::size_t>(step.stream)] = number;
    after_.push_back(here);
    for (const ProgramName& output : given.outputs) made_by_[output.name] = number;
    plan_.steps.push_back(std::move(step));
  }

  StreamPlan plan_;
  std::map<int, int> numbers_;                       // of the program -> of the plan
  std::map<std::string, int, std::less<>> made_by_;  // value -> step
  std::vector<Progress> done_;                       // by stream
  std::vector<Progress> after_;                      // by step: what its stream knows to be done after it
};

}  // namespace

StreamPlan plan_streams(const Program& program) {
  return StreamPlanner().make(program);
}

}  // namespace ferry
