#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "ferry/program.hpp"
#include "program/compiled.hpp"
#include "program/steps.hpp"

namespace ferry {

namespace {

// The entry for a step that names this exchange, or end(): the entry of that name, or a single one without a
// name, which serves every step. For ProgramConfigs and ProgramExchanges.
template <class Map>
typename Map::const_iterator find_exchange(const Map& exchanges, const std::string& name) {
  const auto found = exchanges.find(name);
  if (found != exchanges.end()) return found;
  return exchanges.size() == 1 && exchanges.begin()->first.empty() ? exchanges.begin() : exchanges.end();
}

// For messages: why find_exchange() has found nothing.
std::string no_such_exchange(const std::string& name) {
  return name.empty() ? std::string("names no exchange, and no exchange without a name was passed")
                      : str("no exchange ", name, " was passed");
}

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
    if (config.layout == Layout::expert_indexed)
      unsupported(step, "its exchange has the layout expert_indexed, whose rows are not those of combine");
    if (!config.own_receive_buffers)
      refuse(step, "its exchange owns no receive buffers: construct it with own_receive_buffers");
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

void check(const Program& program, const ProgramConfigs& configs) {
  check(program);
  RequirementChecker(program, configs).check();
}

void check(const Program& program, const Config& config) {
  check(program, ProgramConfigs{{"", config}});
}

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
    check(program_, configs());
    made_.streams = plan_streams(program_);
    for (const auto& [name, exchange] : exchanges_)
      if (exchange != nullptr && made_.device == nullptr) made_.device = make_device_work(*exchange);
    for (const ProgramName& input : program_.inputs)
      value(add_value(input.name, input.kind)).most_rows = most_tokens();
    for (const ProgramStep& step : program_.steps) add_step(step);
    for (const std::string& output : program_.outputs) made_.outputs.push_back(numbers_.at(output));
    for (std::size_t i = 0; i < made_.steps.size(); ++i)
      if (made_.steps[i].kind == StepKind::join) place_parts(made_.steps[i]);
    for (CompiledValue& value : made_.values)
      if (value.join < 0 && value.row_bytes > 0) allocate(value);
    return std::move(made_);
  }

 private:
  [[noreturn]] void refuse(const CompiledStep& step, const std::string& what) const {
    throw UsageError(str("program ", program_.name, ", step ", step.name, ": ", what));
  }

  ProgramConfigs configs() const {
    ProgramConfigs found;
    for (const auto& [name, exchange] : exchanges_)
      if (exchange != nullptr) found.emplace(name, exchange->config());
    return found;
  }

  void allocate(CompiledValue& value) const {
    const std::int64_t bytes = value.most_rows * value.row_bytes;
    if (made_.device != nullptr) {
      value.memory = made_.device->allocate(bytes);
    } else {
      value.host_memory = allocate_rows(bytes);
      value.memory = value.host_memory.get();
    }
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
    step.sm_limit = given.sm_limit;
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
    set_exchange(given, step);
    require_gathers(step);
    if (step.kind == StepKind::call) find_function(given, step);
    if (step.kind == StepKind::combine) step.result = step.outputs.front();
    if (is_receive_phase(step.kind)) step.sender = made_by_.at(step.inputs.front());
    if (step.kind == StepKind::combine_receive) {
      made_.steps[static_cast<std::size_t>(step.sender)].result = step.outputs.front();
      assigned_by_[static_cast<std::size_t>(step.outputs.front())] = step.sender;
    }
    size_memory(step);
    if (made_.device != nullptr && step.kind == StepKind::reduce_scatter_v)
      step.device_count = reinterpret_cast<std::int32_t*>(made_.device->allocate(sizeof(std::int32_t)));
    const bool calls = shape_of(step.kind).has_lane || is_receive_phase(step.kind);
    if (made_.device != nullptr && made_.capture_obstacle < 0 &&
        (step.kind == StepKind::wait || (calls && !can_be_captured(*step.exchange))))
      made_.capture_obstacle = number;
    made_.steps.push_back(std::move(step));
  }

  // The exchange that the step names, or that of the call that made its input.
  void set_exchange(const ProgramStep& given, CompiledStep& step) const {
    if (!shape_of(step.kind).has_exchange) {
      const CompiledStep& maker = made_.steps[static_cast<std::size_t>(made_by_.at(step.inputs.front()))];
      step.exchange = maker.exchange;
      step.lane = maker.lane;
      return;
    }
    const auto found = find_exchange(exchanges_, given.exchange);
    if (found == exchanges_.end() || found->second == nullptr) refuse(step, no_such_exchange(given.exchange));
    step.exchange = found->second;
  }

  // This depends on whether ranks are on several nodes, which is not part of the configuration.
  void require_gathers(const CompiledStep& step) const {
    if (!is_gather(step.kind) || made_.device == nullptr) return;
    const Config& config = step.exchange->config();
    if (has_kernels(config.backend) && has_relays(config, step.exchange->rank().topology()))
      throw UnsupportedError(str("program ", program_.name, ", step ", step.name,
                                 ": its exchange sends in two hops on device memory, which has no ",
                                 to_string(step.kind), " yet: use an exchange with hops one"));
  }

  void find_function(const ProgramStep& given, CompiledStep& step) const {
    const auto found = functions_.find(given.function);
    if (found == functions_.end() || !found->second)
      refuse(step,
             str("no function ", given.function, " was passed: pass it in the functions of the evaluator"));
    step.function = &found->second;
  }

  // Sizes the values of a step: their most rows, and the memory of those that the evaluator holds.
  void size_memory(const CompiledStep& step) {
    const Config* const config = step.exchange == nullptr ? nullptr : &step.exchange->config();
    for (const int output : step.outputs) {
      CompiledValue& made = value(output);
      made.most_rows = most_rows(step, made.kind);
      if (!has_memory(step.kind)) continue;
      made.type = config->combine_type;
      made.row_bytes = row_bytes(made.kind, *config);
      // Gathered values have the type of the input, which is known when the program runs.
      if (is_gather(step.kind) && made.kind != ValueKind::weights)
        made.row_bytes = widest_row(made.kind, *config);
    }
  }

  static bool has_memory(StepKind kind) {
    return kind == StepKind::combine || kind == StepKind::combine_receive || kind == StepKind::call ||
           kind == StepKind::join || kind == StepKind::metadata || is_gather(kind);
  }

  std::int64_t row_bytes(ValueKind kind, const Config& config) const {
    const bool on_device = made_.device != nullptr;
    switch (kind) {
      case ValueKind::tokens:
      case ValueKind::outputs:
        return std::int64_t{config.hidden} * bytes_of(config.combine_type);
      case ValueKind::ids:
      case ValueKind::weights:
        return std::int64_t{4} * config.top_k;
      case ValueKind::count:  // on host memory a member of the value
        return on_device ? static_cast<std::int64_t>(sizeof(std::int32_t)) : 0;
      case ValueKind::metadata:
        return on_device ? static_cast<std::int64_t>(sizeof(StepMetadata)) : 0;
      default:
        return 0;
    }
  }

  static std::int64_t widest_row(ValueKind kind, const Config& config) {
    return kind == ValueKind::tokens ? std::int64_t{config.hidden} * bytes_of(DType::fp32)
                                     : std::int64_t{config.top_k} * bytes_of(IdType::int64);
  }

  std::int64_t most_rows(const CompiledStep& step, ValueKind kind) {
    if (kind == ValueKind::count || kind == ValueKind::metadata) return 1;
    std::int64_t most = 0, sum = 0;
    for (const int input : step.inputs) {
      most = std::max(most, value(input).most_rows);
      sum += value(input).most_rows;
    }
    if (step.exchange == nullptr) return most;
    const Config& config = step.exchange->config();
    const std::int64_t tokens = config.max_tokens;
    switch (step.kind) {
      case StepKind::call:
        return kind == ValueKind::outputs ? most_outputs(*step.exchange)
                                          : std::max(most_by_token(step), tokens);
      case StepKind::join:
        return sum;
      case StepKind::wait:
        return most;
      case StepKind::all_gather_v:
        return tokens * step.exchange->rank().size();
      default:
        return tokens;
    }
  }

  std::int64_t most_tokens() const {
    std::int64_t most = 0;
    for (const auto& [name, exchange] : exchanges_)
      if (exchange != nullptr) most = std::max<std::int64_t>(most, exchange->config().max_tokens);
    return most;
  }

  std::int64_t most_by_token(const CompiledStep& step) {
    std::int64_t most = 0;
    for (const int input : step.inputs)
      if (contains(kByToken, kind_of(input))) most = std::max(most, value(input).most_rows);
    return most;
  }

  static std::int64_t most_outputs(const Exchange& exchange) {
    const bool padded = exchange.config().layout == Layout::expert_padded;
    return exchange.capacity() * (padded ? groups_of(exchange.config(), exchange.rank().index()) : 1);
  }

  // A part whose position is known when it is made lies in the memory of the join from the beginning.
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
  std::map<int, int> made_by_;    // by value: the step that makes it
  std::vector<int> assigned_by_;  // by value: the step after which its rows are known; -1 for inputs
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
