// check() of a program together with the configurations of its exchanges.
#include "program/requirements.hpp"

#include <set>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "program/steps.hpp"

namespace ferry {

namespace {

class RequirementChecker {
 public:
  RequirementChecker(const Program& program, const ProgramConfigs& configs)
      : program_(program), configs_(configs) {
    fill_in_kinds(program_);
    for (const ProgramName& input : program_.inputs) kinds_.emplace(input.name, input.kind);
    for (const ProgramStep& step : program_.steps)
      for (const ProgramName& output : step.outputs) kinds_.emplace(output.name, output.kind);
  }

  void check() {
    for (const ProgramStep& step : program_.steps) {
      check_gathered(step);
      if (!shape_of(step.kind).has_lane) continue;  // starts no call of an exchange
      const Config& config = config_of(step);
      require_one_memory(step, config);
      check_call(step, config);
      if (is_dispatch(step.kind)) check_dispatch(step, config);
      if (is_combine(step.kind)) check_combine(step, config);
    }
  }

 private:
  std::string where(const ProgramStep& step) const {
    return str("program ", program_.name, ", step ", step.name(), ": ");
  }
  [[noreturn]] void refuse(const ProgramStep& step, const std::string& what) const {
    throw UsageError(where(step) + what);
  }
  [[noreturn]] void unsupported(const ProgramStep& step, const std::string& what) const {
    throw UnsupportedError(where(step) + what);
  }

  const Config& config_of(const ProgramStep& step) const {
    const auto found = find_exchange(configs_, step.exchange);
    if (found == configs_.end()) refuse(step, no_such_exchange(step.exchange));
    return found->second;
  }

  // Values pass from step to step without a copy, so all exchanges have the same kind of memory.
  void require_one_memory(const ProgramStep& step, const Config& config) {
    const MemoryKind memory = chosen_memory(config);
    if (memory_ == MemoryKind::automatic) memory_ = memory;
    if (memory_ != memory)
      refuse(step, str("its exchange has ", to_string(memory), " memory, that of earlier steps ",
                       to_string(memory_), " memory: a program has one kind"));
  }

  void check_call(const ProgramStep& step, const Config& config) const {
    if (step.lane >= config.lanes)
      refuse(step, str("lane ", step.lane, " does not exist: its exchange has ",
                       counted(config.lanes, "lane"), "; construct it with ", step.lane + 1));
    if (config.placement.tp() > 1) check_slices(step);
  }

  void check_slices(const ProgramStep& step) const {
    const std::string lack = "its exchange has experts in slices (Placement::ep_tp), which do not have ";
    if (step.kind == StepKind::dispatch_send || step.kind == StepKind::combine_send)
      unsupported(step, lack + "phases: take dispatch and combine in one piece");
    if (is_dispatch(step.kind) && kinds_.at(step.inputs[1]) == ValueKind::received)
      unsupported(step, lack + "a dispatch by plan: pass ids");
  }

  // In device memory the host does not know how many rows all ranks have. Functions may process all rows that
  // there is room for; the kernel of reduce_scatter_v reads the number.
  void check_gathered(const ProgramStep& step) {
    const bool gathers = step.kind == StepKind::all_gather_v;
    if (gathers && chosen_memory(config_of(step)) == MemoryKind::device)
      gathered_.insert(step.outputs.front().name);
    for (std::size_t i = 0; i < step.inputs.size(); ++i) {
      if (!gathered_.contains(step.inputs[i]) || step.kind == StepKind::call) continue;
      if (step.kind == StepKind::wait) {
        gathered_.insert(step.outputs.front().name);
      } else if (step.kind != StepKind::reduce_scatter_v || i > 0) {
        unsupported(step, str(step.inputs[i],
                              " has the rows of all ranks in device memory, and the host does not know how "
                              "many: only functions and reduce_scatter_v take them"));
      }
    }
  }

  void check_dispatch(const ProgramStep& step, const Config& config) const {
    if (config.format.is_raw())
      unsupported(step, "its exchange has a raw format, whose parts are no tokens value");
    if (!config.own_receive_buffers)
      refuse(step, "its exchange owns no receive buffers; set Config::own_receive_buffers");
  }

  void check_combine(const ProgramStep& step, const Config& config) const {
    if (config.reduction == Reduction::unreduced)
      unsupported(
          step,
          "its exchange does not reduce, so its results are no tokens: use the reduction partial or exact");
    if (step.inputs.size() < 3) return;
    if (config.layout == Layout::rank_major)
      refuse(step, "rank_major takes no weights: leave out the third value, or use another layout");
    if (step.kind == StepKind::combine_send && config.reduction == Reduction::partial &&
        kinds_.at(step.inputs[2]) == ValueKind::weights)
      refuse(step,
             "topk_weights with the reduction partial need a combine in one piece, or the reduction exact");
  }

  Program program_;
  const ProgramConfigs& configs_;
  std::map<std::string, ValueKind, std::less<>> kinds_;
  std::set<std::string, std::less<>> gathered_;  // values with rows of all ranks in device memory
  MemoryKind memory_ = MemoryKind::automatic;    // of the exchanges so far
};

}  // namespace

std::string no_such_exchange(const std::string& name) {
  return name.empty() ? std::string("names no exchange, and no exchange without a name was passed")
                      : str("no exchange ", name, " was passed");
}

void check(const Program& program, const ProgramConfigs& configs) {
  check(program);
  RequirementChecker(program, configs).check();
}

void check(const Program& program, const Config& config) {
  check(program, ProgramConfigs{{"", config}});
}

}  // namespace ferry
