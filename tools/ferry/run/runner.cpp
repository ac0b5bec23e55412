#include "tools/ferry/run/runner.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/random.hpp"
#include "tools/ferry/run/device_context.hpp"
#include "tools/ferry/run/expected.hpp"

namespace ferry::app {

namespace {

std::uint64_t hash_of(std::span<const std::byte> bytes) {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {  // rows are multiples of 16 bytes
    std::uint64_t word = 0;
    std::memcpy(&word, &bytes[i], sizeof word);
    hash = mix(hash ^ word);
  }

  return hash;
}

class RankRunner {
 public:
  using Clock = std::chrono::steady_clock;

  // run() keeps in `stage` what the rank is doing.
  RankRunner(const Rank& rank, const RunSpec& spec, Clock::time_point start, const SharedResults& results,
             const RunProgress& progress, std::string& stage)
      : rank_(rank),
        spec_(spec),
        start_(start),
        results_(results),
        progress_(progress),
        stage_(stage),
        own_results_(results.rank(rank.index())),
        context_(on_device(spec.config) ? make_gpu_context(rank, spec) : make_host_context(rank, spec)),
        hashes_(static_cast<std::size_t>(spec.options.steps)) {
    progress_.starting.advance();
  }

  void run() {
    check_steps();
    time_steps();
  }

 private:
  struct Step {
    int number;
    ContextInputs inputs;
  };

  void check_steps() {
    rank_.barrier();  // all ranks have started
    progress_.checking.refresh();
    for (int number = 0; number < spec_.options.steps; ++number) {
      stage_ = fmt::format("while step {} of {} was checked", number + 1, spec_.options.steps);
      const Step step = make_step(number);
      const std::vector<float> x = expected_values(spec_, number, rank_.index());
      progress_.checking.advance();
      check_exact(step, x);
      progress_.checking.advance();
      check_swiglu(step, x);
      progress_.checking.advance();
    }
  }

  void check_exact(const Step& step, const std::vector<float>& x) {
    const int me = rank_.index();
    context_->set_inputs(step.inputs);
    dispatch_together();
    dispatch_check(spec_, step.number)
        .run(me, context_->received(), own_results_.dispatch, token_parts(spec_, step.number));
    context_->run_scaling_experts();
    combine_together();
    const Routes routes = combined_routes(spec_, me, step.inputs.routes);
    check_rows(spec_, step.number, me, expected_products(spec_, rank_.topology(), routes, x),
               context_->result(), own_results_.combine);
  }

  void check_swiglu(const Step& step, const std::vector<float>& x) {
    const int me = rank_.index();
    const Routes routes = combined_routes(spec_, me, step.inputs.routes);
    context_->set_inputs(step.inputs);
    dispatch_together();
    context_->run_swiglu_experts();
    combine_together();
    const std::span<const std::byte> result = context_->result();
    hashes_[static_cast<std::size_t>(step.number)] = hash_of(result);
    check_dense(spec_, step.number, me, routes, dense_swiglu(spec_, routes, x), result, own_results_.dense);
  }

  // A checked call starts after a barrier. Where ranks share a GPU, what a slow rank has yet to do before the
  // call, a copy or loading a module for its experts, could otherwise wait for the kernels of a fast one,
  // which wait for the slow rank.
  void dispatch_together() {
    rank_.barrier();
    context_->dispatch();
  }

  void combine_together() {
    rank_.barrier();
    context_->combine();
  }

  void time_steps() {
    const WireCounts before = context_->exchange().wire_counts();
    const std::vector<std::int64_t> routes_before = context_->exchange().load_counts().experts;
    for (int number = 0; number < spec_.options.steps; ++number) {
      stage_ = fmt::format("while step {} of {} was timed", number + 1, spec_.options.steps);
      time_step(make_step(number), results_.times(number, rank_.index()));
      progress_.timing.advance();
    }
    const WireCounts after = context_->exchange().wire_counts();
    own_results_.dispatch_wire_bytes = after.dispatch_bytes - before.dispatch_bytes;
    own_results_.dispatch_messages = after.dispatch_messages - before.dispatch_messages;
    own_results_.combine_wire_bytes = after.combine_bytes - before.combine_bytes;
    own_results_.combine_messages = after.combine_messages - before.combine_messages;
    own_results_.dispatch_bytes_between_nodes =
        after.between_nodes.dispatch_bytes - before.between_nodes.dispatch_bytes;
    own_results_.combine_bytes_between_nodes =
        after.between_nodes.combine_bytes - before.between_nodes.combine_bytes;
    if (rank_.index() != 0) return;
    const LoadCounts load = context_->exchange().load_counts();
    std::transform(load.experts.begin(), load.experts.end(), routes_before.begin(), results_.routes().begin(),
                   std::minus<>());
  }

  // A barrier before each stage keeps a late peer's delay in the stage that caused it.
  void time_step(const Step& step, report::StepTimes& times) {
    auto timed = [&](report::StepStage stage, auto&& work) {
      rank_.barrier();
      times[stage].begin_us = now_us();
      work();
      times[stage].end_us = now_us();
    };
    context_->set_inputs(step.inputs);
    timed(report::StepStage::dispatch, [&] { context_->dispatch(); });
    timed(report::StepStage::experts, [&] { context_->run_swiglu_experts(); });
    timed(report::StepStage::combine, [&] { context_->combine(); });
    count(step, context_->received());
    if (hash_of(context_->result()) == hashes_[static_cast<std::size_t>(step.number)])
      return own_results_.repeated.pass(1);
    own_results_.repeated.fail(1, fmt::format("step {}, rank {}", step.number, rank_.index()));
  }

  Step make_step(int number) const {
    return {number, {make_tokens(spec_, number, rank_.index()), make_routes(spec_, number, rank_.index())}};
  }

  void count(const Step& step, const DispatchResult& received) {
    const std::int64_t rows =
        std::accumulate(received.counts, received.counts + received.groups, std::int64_t{0});
    own_results_.rows += rows;
    own_results_.stored_rows += received.row_total != nullptr ? *received.row_total : rows;
    if (rank_.index() != 0) return;
    results_.dropped() += received.plan.dropped();
    add_planned_messages(spec_, context_->exchange().config(), rank_.topology(), step.number, results_);
  }

  double now_us() const { return std::chrono::duration<double, std::micro>(Clock::now() - start_).count(); }

  const Rank& rank_;
  const RunSpec& spec_;
  Clock::time_point start_;
  const SharedResults& results_;
  const RunProgress& progress_;
  std::string& stage_;
  RankResults& own_results_;
  std::unique_ptr<DeviceContext> context_;
  std::vector<std::uint64_t> hashes_;  // [steps] of the checked SwiGLU results
};

}  // namespace

void run_rank(const Rank& rank, const RunSpec& spec, std::chrono::steady_clock::time_point start,
              const SharedResults& results, const RunProgress& progress) {
  std::string stage = "while the ranks started";
  try {
    RankRunner(rank, spec, start, results, progress, stage).run();
  } catch (const TimeoutError& error) {
    throw TimeoutError(fmt::format("{}, {} (--deadline sets how long a rank waits)", error.what(), stage),
                       error.record);
  }
}

}  // namespace ferry::app
