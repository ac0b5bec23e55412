#include "tools/ferry/run/program_run.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>

#include "ferry/evaluator.hpp"
#include "ferry/version.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/run/expected.hpp"
#include "tools/ferry/run/program_context.hpp"
#include "tools/ferry/run/report.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

int lanes_of(const Program& program) {
  int lanes = 1;
  for (const ProgramStep& step : program.steps) lanes = std::max(lanes, step.lane + 1);
  return lanes;
}

Config with_lanes(Config config, int lanes) {
  config.lanes = lanes;
  return config;
}

int calls_of(const Program& program) {
  return static_cast<int>(std::ranges::count(program.steps, StepKind::call, &ProgramStep::kind));
}

// Exchanges and evaluators work on the GPU that is current when they are constructed.
Rank on_its_gpu(const Rank& rank, const RunSpec& spec) {
  if (on_device(spec.config)) choose_gpu(rank);
  return rank;
}

// One rank's two evaluators on one exchange.
class RankPrograms {
 public:
  RankPrograms(const Rank& rank, const RunSpec& spec, const Program& plain, const Program& batched,
               const ProgramResults& results)
      : rank_(rank),
        spec_(spec),
        results_(results),
        exchange_(on_its_gpu(rank, spec),
                  with_lanes(spec.config, std::max(lanes_of(plain), lanes_of(batched)))),
        context_(on_device(spec.config)
                     ? make_gpu_program_context(spec, exchange_, calls_of(plain) + calls_of(batched))
                     : make_host_program_context(spec, exchange_)),
        plain_(plain, exchange_, functions()),
        batched_(batched, exchange_, functions()) {
    rank.barrier();  // times count from here
    context_->start_clock();
  }

  void run() {
    for (int step = 0; step < spec_.options.steps; ++step) check_step(step);
    gather_checks();
    swiglu_ = true;
    time_steps();
  }

 private:
  ProgramFunctions functions() {
    return {{"experts", [this](ProgramInputs inputs, ProgramOutputs outputs, Stream stream) {
               context_->run_experts(swiglu_, inputs[0]->received, *outputs[0], stream);
             }}};
  }

  struct StepInputs {
    std::vector<std::byte> tokens;
    Routes routes;
    std::vector<ProgramValue> values;
  };

  // Valid until the next call.
  StepInputs inputs_of(int step) const {
    StepInputs made{make_tokens(spec_, step, rank_.index()), make_routes(spec_, step, rank_.index()), {}};
    const ProgramContext::InputAddresses at = context_->set_inputs(made.tokens, made.routes);
    for (const ProgramName& input : plain_.program().inputs) {
      if (input.kind == ValueKind::tokens)
        made.values.push_back(ProgramValue::tokens(at.tokens, spec_.tokens(), spec_.type));
      if (input.kind == ValueKind::ids) made.values.push_back(ProgramValue::ids(at.ids, spec_.tokens()));
      if (input.kind == ValueKind::weights)
        made.values.push_back(ProgramValue::weights(at.weights, spec_.tokens()));
    }
    return made;
  }

  // The rows of each output that is tokens; nothing for the others.
  std::vector<std::vector<std::byte>> rows_of_run(Evaluator& program, const StepInputs& inputs) {
    const auto outputs = program.run(inputs.values, context_->stream());
    context_->synchronize();
    std::vector<std::vector<std::byte>> rows;
    for (const ProgramValue* const output : outputs)
      rows.push_back(output->kind == ValueKind::tokens ? context_->copy_rows(*output)
                                                       : std::vector<std::byte>());
    return rows;
  }

  void check_step(int step) {
    const StepInputs inputs = inputs_of(step);
    const auto plain = rows_of_run(plain_, inputs), batched = rows_of_run(batched_, inputs);
    const int me = rank_.index();
    for (std::size_t i = 0; i < plain.size(); ++i)
      check_rows(spec_, step, me, plain[i], batched[i], found_.batches);
    if (!spec_.options.program.empty()) return;
    const std::vector<float> x = expected_values(spec_, step, me);
    check_rows(spec_, step, me,
               expected_products(spec_, rank_.topology(), combined_routes(spec_, me, inputs.routes), x),
               plain[0], found_.sums);
  }

  void gather_checks() {
    std::vector<ProgramResults::Summary> all(at(rank_.size()));
    rank_.all_gather(&found_, all.data(), sizeof found_);
    if (rank_.index() != 0) return;
    for (const ProgramResults::Summary& one : all) {
      results_.summary().sums.add(one.sums);
      results_.summary().batches.add(one.batches);
    }
  }

  // Both programs take turns in going first.
  void time_steps() {
    const StepInputs first = inputs_of(0);
    for (Evaluator* const program : {&plain_, &batched_}) rows_of_run(*program, first);  // warm
    for (int step = 0; step < spec_.options.steps; ++step) {
      const StepInputs inputs = inputs_of(step);
      if (step % 2 == 1) time_run(step, batched_, inputs);
      time_run(step, plain_, inputs);
      if (step % 2 == 0) time_run(step, batched_, inputs);
    }
    plain_times_.insert(plain_times_.end(), batched_times_.begin(), batched_times_.end());
    gather_step_times(plain_times_);
  }

  void time_run(int step, Evaluator& program, const StepInputs& inputs) {
    const bool last = step + 1 == spec_.options.steps;
    if (last) program.set_observer([this](std::size_t, Stream stream) { context_->mark(stream); });
    rank_.barrier();
    const double begin = context_->now_us();
    program.run(inputs.values, context_->stream());
    context_->synchronize();
    const double mine = context_->now_us() - begin;
    std::vector<double> all(at(rank_.size()));
    rank_.all_gather(&mine, all.data(), sizeof mine);
    if (rank_.index() == 0)
      results_.times()[(&program == &batched_ ? spec_.options.steps : 0) + step] = std::ranges::max(all);
    if (last) (&program == &batched_ ? batched_times_ : plain_times_) = context_->take_marks();
  }

  void gather_step_times(const std::vector<double>& mine) {
    std::vector<double> all(mine.size() * at(rank_.size()));
    rank_.all_gather(mine.data(), all.data(), mine.size() * sizeof(double));
    if (rank_.index() == 0) std::ranges::copy(all, results_.step_times());
  }

  const Rank& rank_;
  const RunSpec& spec_;
  const ProgramResults& results_;
  Exchange exchange_;
  std::unique_ptr<ProgramContext> context_;
  bool swiglu_ = false;
  Evaluator plain_, batched_;
  ProgramResults::Summary found_{};
  std::vector<double> plain_times_, batched_times_;  // when the steps of the last run began, and it ended
};

// Names and kinds of the values of a program.
std::map<std::string, ValueKind> kinds_of(const Program& program) {
  std::map<std::string, ValueKind> kinds;
  for (const ProgramName& input : program.inputs) kinds.emplace(input.name, input.kind);
  for (const ProgramStep& step : program.steps)
    for (const ProgramName& output : step.outputs) kinds.emplace(output.name, output.kind);
  return kinds;
}

// Refuses programs that need other values or functions than `ferry run` has, or make nothing to compare.
void require_runnable(const Program& program) {
  const auto fail = [&](const std::string& what) {
    throw UsageError(fmt::format("program {}, {}", program.name, what));
  };
  const std::map<std::string, ValueKind> kinds = kinds_of(program);
  for (const ProgramName& input : program.inputs)
    if (input.kind == ValueKind::count)
      fail(fmt::format("input {}: ferry run passes tokens, ids and weights only", input.name));
  for (const ProgramStep& step : program.steps) {
    if (step.kind != StepKind::call) continue;
    if (step.function != "experts" || step.inputs.size() != 1 || step.outputs.size() != 1 ||
        kinds.at(step.inputs[0]) != ValueKind::received || step.outputs[0].kind != ValueKind::outputs)
      fail(
          fmt::format("step {}: ferry run has one function, experts, which takes a received value and "
                      "makes outputs: write 'NAME: outputs = call experts(ROWS)'",
                      step.name()));
  }
  if (std::ranges::none_of(program.outputs,
                           [&](const std::string& name) { return kinds.at(name) == ValueKind::tokens; }))
    fail("outputs: none is of kind tokens, so there is nothing to compare: add a line 'output NAME'");
}

}  // namespace

Program read_program(const std::string& path) {
  try {
    return parse_program(read_file(path, "--program " + path));
  } catch (const UsageError& error) {
    const std::string text = error.what();
    throw UsageError(text.starts_with("--program") ? text : fmt::format("--program {}: {}", path, text));
  }
}

Program program_of(const RunSpec& spec) {
  if (!spec.options.program.empty()) {
    Program program = read_program(spec.options.program);
    require_runnable(program);
    return program;
  }
  const bool weights = combine_applies_weights(spec.config.layout, spec.config.reduction);
  return parse_program(
      fmt::format("program layer\ninput x: tokens\ninput ids: ids\ninput weights: weights\n"
                  "rows = dispatch(x, ids, weights)\noutputs: outputs = call experts(rows)\n"
                  "y = combine(outputs, rows{})\noutput y\n",
                  weights ? ", rows" : ""));
}

ProgramResults::ProgramResults(int ranks, int runs, std::size_t plain, std::size_t batched)
    : ranks_(ranks),
      runs_(runs),
      plain_(plain),
      batched_(batched),
      memory_(Mapping::anonymous_shared(static_cast<std::int64_t>(
          sizeof(Summary) + (2 * at(runs_) + at(ranks_) * times_of_rank()) * sizeof(double)))) {}

ProgramResults::Summary& ProgramResults::summary() const {
  return *reinterpret_cast<Summary*>(memory_.data());
}
double* ProgramResults::times() const {
  return reinterpret_cast<double*>(memory_.data() + sizeof(Summary));
}
double* ProgramResults::step_times() const {
  return times() + 2 * at(runs_);
}

void run_programs(const Rank& rank, const RunSpec& spec, const Program& plain, const Program& batched,
                  const ProgramResults& results) {
  RankPrograms(rank, spec, plain, batched, results).run();
}

report::ProgramReport make_program_report(const RunSpec& spec, const Topology& topology, const Program& plain,
                                          const Program& batched, const ProgramResults& results) {
  const RunOptions& options = spec.options;
  const int ranks = options.ranks;
  report::ProgramReport run{.ferry_version = std::string(version()),
                            .command = command_line(),
                            .workload = workload_of(spec),
                            .configuration = configuration_of(spec, topology),
                            .machine = {.cpu = cpu_name(), .cores = cores(), .memory_bytes = memory_bytes()},
                            .micro_batches = std::max(options.overlap, 1)};
  const auto runs_of = [&](const Program& program, const double* times, std::size_t offset) {
    report::ProgramRuns runs{
        .program = program, .times_us = {times, times + options.steps}, .on_streams = on_device(spec.config)};
    for (int rank = 0; rank < ranks; ++rank) {
      const double* const begins = results.step_times() + at(rank) * results.times_of_rank() + offset;
      runs.begin_us.insert(runs.begin_us.end(), begins, begins + program.steps.size() + 1);
    }
    return runs;
  };
  run.plain = runs_of(plain, results.times(), 0);
  run.batched = runs_of(batched, results.times() + options.steps, plain.steps.size() + 1);
  const ProgramResults::Summary& found = results.summary();
  if (options.program.empty())
    run.checks.push_back(
        check_of("sums with scaling experts, bit for bit", found.sums,
                 "against the same sums computed on the source rank in the specified order"));
  run.checks.push_back(check_of((run.second_name() + " against the plain program").c_str(), found.batches,
                                "bytes of every output of kind tokens in every step"));
  return run;
}

std::string program_table(const report::ProgramReport& run, bool coloured) {
  using report::Tone;
  std::string table = fmt::format("program {}, {} steps; {} ranks, {} tokens a rank, {} runs\n\n",
                                  run.plain.program.name, run.plain.program.steps.size(),
                                  run.configuration.ranks, run.workload.tokens_per_rank, run.workload.steps);
  for (const report::Check& check : run.checks)
    table += fmt::format(
        "{:<44} {}\n", check.name,
        check.passed ? fmt::format("{} values, {}", report::with_thousands(check.compared),
                                   report::toned("all equal", Tone::good, coloured))
                     : report::toned(fmt::format("{} of {} wrong, {}", report::with_thousands(check.wrong),
                                                 report::with_thousands(check.compared), check.detail),
                                     Tone::bad, coloured));
  const double whole = spread_of(run.plain.times_us).median, split = spread_of(run.batched.times_us).median;
  table +=
      fmt::format("\n{:<44} {:.1f} us\n{:<44} {:.1f} us, {:.2f} of it\n",
                  "median run, slowest rank: plain program", whole, run.second_name(), split, split / whole);
  return table;
}

}  // namespace ferry::app
