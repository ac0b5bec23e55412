// Arrays of a call that share memory: every pair of which one is written is refused on all ranks, but for the
// calls that work in place; rows that lie between each other's are not refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "exchange/overlap.hpp"
#include "format/parts.hpp"
#include "harness/harness.hpp"
#include "oracle/combine.hpp"

namespace ferry::contract {
namespace {

constexpr int kOverlappingRank = 1;  // passes the arrays that overlap
constexpr std::int64_t kUnit = 16;

std::int64_t last_unit(std::int64_t bytes) {
  return (bytes - 1) / kUnit * kUnit;
}

// An array that a call takes.
struct Argument {
  std::string name;    // in messages
  std::int64_t bytes;  // as far as the host knows
  bool written;
  std::function<void(std::byte*)> pass;  // empty: it stays at `fixed`
  std::byte* fixed = nullptr;
  // An array of the lane, whose neighbours a large array meets too.
  bool of_lane = false;
  bool only_start = false;  // nothing but its first byte may be named
};

// Lets every pair of arguments, one of them written, overlap by their ends, on one rank, which must make the
// call a UsageError that names both on every rank.
class Pairs {
 public:
  Pairs(SyncExchange& exchange, std::vector<Argument> arguments, std::function<void()> call)
      : arguments_(std::move(arguments)),
        call_(std::move(call)),
        odd_(exchange.rank().index() == kOverlappingRank) {
    for (const Argument& each : arguments_) most_ = std::max(most_, (each.bytes + kUnit - 1) / kUnit * kUnit);
    // Values that every argument accepts: 1.0, or an id out of range.
    memory_ = GuardedBuffer((2 * static_cast<std::int64_t>(arguments_.size()) + 1) * most_);
    std::fill_n(memory_.as<float>(), memory_.bytes() / 4, 1.0f);
    for (std::size_t i = 0; i < arguments_.size(); ++i) pass(i, home(i));
  }

  void require_refused() {
    for (std::size_t written = 0; written < arguments_.size(); ++written) {
      if (!arguments_[written].written) continue;
      for (std::size_t other = 0; other < arguments_.size(); ++other) {
        const bool twice = arguments_[other].written && other <= written;
        const bool both_fixed = !arguments_[written].pass && !arguments_[other].pass;
        if (!twice && !both_fixed) require_refused(written, other);
      }
    }
  }

 private:
  std::byte* home(std::size_t i) {
    return arguments_[i].pass ? memory_.data() + (2 * static_cast<std::int64_t>(i) + 1) * most_
                              : arguments_[i].fixed;
  }
  void pass(std::size_t i, std::byte* address) {
    if (arguments_[i].pass) arguments_[i].pass(address);
  }

  void require_refused(std::size_t written, std::size_t other) {
    const bool moves_other = static_cast<bool>(arguments_[other].pass);
    const std::size_t moved = moves_other ? other : written, stays = moves_other ? written : other;
    std::vector<std::byte*> places{home(stays)};
    if (!arguments_[stays].only_start) {
      places.push_back(home(stays) + last_unit(arguments_[stays].bytes));
      places.push_back(home(stays) - last_unit(arguments_[moved].bytes));
    }
    for (std::byte* place : places) {
      if (odd_) pass(moved, place);
      const std::string text = usage_error(call_);
      if (odd_) pass(moved, home(moved));
      const std::string name = arguments_[written].of_lane ? "the lane's " : arguments_[written].name + " (";
      for (const std::string& words : {name, arguments_[other].name + " (", std::string("on rank 1")}) {
        require(text.find(words) != std::string::npos, arguments_[written].name, " over ",
                arguments_[other].name, " at ", place - home(stays), ": '", words, "' is not in '", text,
                "'");
      }
    }
  }

  std::vector<Argument> arguments_;
  std::function<void()> call_;
  bool odd_;
  std::int64_t most_ = kUnit;
  GuardedBuffer memory_;
};

// `bytes` below 0: of unknown length, of which only the start counts.
template <class T>
Argument array(const char* name, std::int64_t bytes, bool written, T*& to) {
  return {name, std::max<std::int64_t>(bytes, 1), written,
          [&to](std::byte* at) { to = reinterpret_cast<T*>(at); }};
}

Argument plan_of(const Plan& plan) {
  return {
      "plan", static_cast<std::int64_t>(plan.bytes()), false, {}, static_cast<std::byte*>(plan.storage())};
}

TestCase overlap_case(TestCase c) {
  c.ranks = 3;
  c.full = true;
  c.config.reduction = Reduction::exact;
  return c;
}

// The arrays that a dispatch reads.
void add_inputs(const TestCase& c, DispatchRun& run, const float*& weights, Ids* ids,
                std::vector<Argument>& to) {
  const Tokens& tokens = run.tokens();
  const PartList parts = parts_of(*run.options().format, c.config.hidden);
  const bool quantised = run.options().format->quantises();
  for (int p = 0; p < (quantised ? 1 : parts.count); ++p) {
    const std::int64_t row = quantised ? c.config.hidden * bytes_of(tokens.type) : parts.part[p].row_bytes;
    to.push_back(array(p == 0 ? "tokens" : "part 1 of tokens", tokens.count * row, false,
                       run.tokens().parts[static_cast<std::size_t>(p)]));
  }
  if (ids != nullptr)
    to.push_back(array("ids", tokens.count * c.config.top_k * bytes_of(ids->type), false, ids->data));
  to.push_back(array("weights", tokens.count * c.config.top_k * 4, false, weights));
  if (run.options().global_scale != nullptr)
    to.push_back(array("global_scale", 4, false, run.options().global_scale));
  if (!run.options().input_scales.empty()) {
    std::span<const float>& scales = run.options().input_scales;
    to.push_back({"input_scales", static_cast<std::int64_t>(scales.size_bytes()), false,
                  [&](std::byte* at) { scales = {reinterpret_cast<float*>(at), scales.size()}; }});
  }
}

// The arrays that it writes. `rows`: of the capacity, or those that the host knows.
void add_memory(const TestCase& c, const PartList& parts, std::int64_t rows, std::int64_t groups,
                DispatchOptions& options, std::vector<Argument>& to) {
  ReceiveBuffers& memory = options.memory;
  const char* const names[] = {"memory.parts[0]", "memory.parts[1]"};
  const std::int64_t slots = c.config.layout == Layout::rank_major ? c.config.top_k : 1;
  for (int p = 0; p < parts.count; ++p) {
    to.push_back(
        array(names[p], rows * parts.part[p].row_bytes, true, memory.parts[static_cast<std::size_t>(p)]));
  }
  to.push_back(array("memory.weight", rows * slots * 4, true, memory.weight));
  if (c.config.layout == Layout::rank_major)
    to.push_back(array("memory.local_ids", rows * slots * 4, true, memory.local_ids));
  to.push_back(array("memory.group_of_row", rows * 4, true, memory.group_of_row));
  to.push_back(array("memory.counts", groups * 4, true, memory.counts));
  to.push_back(array("memory.row_offsets", (groups + 1) * 4, true, memory.row_offsets));
  to.push_back(array("memory.count_sums", groups * 4, true, memory.count_sums));
  if (options.dot_rows == nullptr) return;
  to.push_back(array("memory.dots", rows * 4, true, memory.dots));
}

// Cases of dispatch: layouts and formats with other arrays.
std::vector<TestCase> dispatch_cases(const TestCase& small) {
  std::vector<TestCase> cases(4, overlap_case(small));
  cases[0].dots = true;
  cases[1].config.layout = Layout::rank_major;
  cases[1].config.reduction = Reduction::partial;
  cases[1].weights_from = WeightsFrom::none;
  cases[2].config.format = Format::nvfp4();
  cases[3].config.format = Format::fp8_e4m3();
  cases[3].input_scales = true;
  for (TestCase& c : cases) c.config.hidden = 128;
  return cases;
}

TEST_P(Contract, DispatchesRefuseArraysThatOverlap) {
  for (const TestCase& c : dispatch_cases(small_case(1))) {
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, exchange_config(c));
      DispatchRun dispatch(exchange, c, step);
      dispatch.run();
      const DispatchResult& received = dispatch.received();
      const Plan plan = received.plan;
      const bool on_device = GetParam().on_device();
      const PartList parts = c.input_scales ? parts_by_expert(*dispatch.options().format, c.config.hidden)
                                            : parts_of(*dispatch.options().format, c.config.hidden);
      const std::int64_t dot_row = c.config.hidden * bytes_of(c.config.combine_type);
      const auto capacity = static_cast<std::int64_t>(received.capacity);
      DispatchRun wrong(exchange, c, step);
      const float* weights = wrong.weights();
      Ids ids = wrong.ids();
      const auto add_dots = [&](std::int64_t rows, std::vector<Argument>& to) {
        if (c.dots) to.push_back(array("dot_rows", rows * dot_row, false, wrong.options().dot_rows));
      };

      std::vector<Argument> arguments;
      add_inputs(c, wrong, weights, &ids, arguments);
      add_dots(kUnknownRows, arguments);
      add_memory(c, parts, capacity, received.groups, wrong.options(), arguments);
      arguments.push_back(
          array("memory.plan", plan_bytes(c.config, c.ranks), true, wrong.options().memory.plan));
      const auto from_ids = [&](bool split) {
        if (!split) return void(exchange.dispatch(wrong.tokens(), ids, weights, wrong.options()));
        exchange.dispatch_send(wrong.tokens(), ids, weights, wrong.options());
        exchange.dispatch_receive();
      };
      for (const bool split : {false, true})
        Pairs(exchange, arguments, [&] { from_ids(split); }).require_refused();

      // By a plan, as far as the host knows its total.
      std::vector<Argument> by_plan;
      const std::int64_t total = on_device ? kUnknownRows : plan.total();
      add_inputs(c, wrong, weights, nullptr, by_plan);
      add_dots(total, by_plan);
      add_memory(c, parts, total, received.groups, wrong.options(), by_plan);
      by_plan.push_back(plan_of(plan));
      Pairs(exchange, by_plan, [&] {
        exchange.dispatch(wrong.tokens(), plan, weights, wrong.options());
      }).require_refused();
      dispatch_and_combine(exchange, c, step, outputs);
    });
  }
}

// Arrays of the lane that a dispatch returned are written by the lane's next one.
TEST_P(Contract, DispatchesRefuseArraysOfTheirLane) {
  for (const TestCase& c : dispatch_cases(small_case(2))) {
    // Scales on the host must be positive wherever they lie, which the lane's memory does not promise.
    if (c.input_scales) continue;
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, exchange_config(c));
      DispatchRun wrong(exchange, c, step);
      wrong.options().memory = {};
      const float* weights = wrong.weights();
      Ids ids = wrong.ids();
      const auto call = [&] { return exchange.dispatch(wrong.tokens(), ids, weights, wrong.options()); };
      const DispatchResult received = call();
      const bool on_device = GetParam().on_device();
      std::vector<Argument> arguments;
      add_inputs(c, wrong, weights, &ids, arguments);
      const auto add = [&](const char* name, const void* at, std::int64_t bytes) {
        arguments.push_back(
            {name, bytes, true, {}, static_cast<std::byte*>(const_cast<void*>(at)), true, on_device});
      };
      const std::int64_t slots = c.config.layout == Layout::rank_major ? c.config.top_k : 1;
      add("the lane's received rows", received.data, received.capacity * received.parts[0].row_bytes);
      add("the lane's weight", received.weight, received.capacity * slots * 4);
      if (c.config.layout == Layout::rank_major)
        add("the lane's local_ids", received.local_ids, received.capacity * slots * 4);
      if (c.dots) add("the lane's dots", received.dots, received.capacity * 4);
      add("the lane's counts", received.counts, std::int64_t{4} * received.groups);
      add("the lane's row_offsets", received.row_offsets, std::int64_t{4} * (received.groups + 1));
      add("the lane's plan", received.plan.storage(), static_cast<std::int64_t>(received.plan.bytes()));
      Pairs(exchange, arguments, call).require_refused();
      dispatch_and_combine(exchange, c, step, outputs);
    });
  }
}

TEST_P(Contract, CombinesRefuseArraysThatOverlap) {
  for (const int variant : {0, 1, 2}) {
    TestCase c = overlap_case(small_case(3));
    c.config.shared_experts = variant == 1 ? 2 : 0;
    if (variant == 2) c.config.reduction = Reduction::unreduced;
    c.reduction = variant == 0 ? Reduction::partial : c.config.reduction;
    c.weights_from = variant == 2 ? WeightsFrom::none : WeightsFrom::row_weights;
    c.row_values = true;
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      DispatchRun dispatch(exchange, c, step);
      dispatch.run();
      const Plan plan = dispatch.received().plan;
      const std::int64_t total = *dispatch.received().total;
      const bool on_device = GetParam().on_device();
      const std::int64_t tokens = on_device ? kUnknownRows : plan.tokens(),
                         rows = on_device ? kUnknownRows : total, row = 2 * c.config.hidden,
                         slots = 4 * c.config.top_k;
      CombineRun wrong(exchange, c, step, outputs, plan, dispatch.received().weight);
      CombineOptions& options = wrong.options();
      std::vector<Argument> arguments{
          array("outputs", total * row, false, wrong.outputs().data), plan_of(plan),
          array("row_values", rows * 4, false, options.row_values),
          array("result", tokens * (variant == 2 ? c.config.top_k : 1) * row, true, wrong.result().data),
          array("route_values", tokens * slots, true, options.route_values)};
      wrong.outputs().rows = total;
      if (variant < 2) {
        arguments.push_back(array("residual", tokens * row, false, options.epilogue.residual));
      }
      if (variant == 1)
        arguments.push_back(array("shared_outputs", 2 * tokens * row, true, options.shared_outputs));
      if (variant < 2) arguments.push_back(array("row_weights", rows * 4, false, options.row_weights));
      // A result at the address of its residual is one of the calls that work; not with another stride.
      wrong.result().stride = row;
      options.epilogue.stride = variant < 2 ? row + 16 : 0;
      for (const bool split : {false, true}) {
        Pairs(exchange, arguments, [&] {
          if (!split) return wrong.call();
          wrong.send();
          wrong.receive();
        }).require_refused();
      }
      if (variant < 2) {
        options.row_weights = nullptr;
        arguments.back() = array("topk_weights", tokens * slots, false, options.topk_weights);
        Pairs(exchange, arguments, [&] { wrong.call(); }).require_refused();
      }
      dispatch_and_combine(exchange, c, step, outputs);
    });
  }
}

TEST_P(Contract, OtherCallsRefuseArraysThatOverlap) {
  TestCase c = overlap_case(small_case(4));
  c.apply_weights = c.dots = true;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    dispatch.run();
    const Plan plan = dispatch.received().plan;
    const bool on_device = GetParam().on_device();
    const std::int64_t total = on_device ? kUnknownRows : plan.total(), slots = 4 * c.config.top_k,
                       tokens = dispatch.tokens().count, known = on_device ? kUnknownRows : tokens,
                       row = c.config.hidden * bytes_of(c.config.combine_type);
    {
      const float* values = nullptr;
      float* row_values = nullptr;
      Pairs(exchange,
            {array("values", known * slots, false, values), plan_of(plan),
             array("row_values", total * 4, true, row_values)},
            [&] { exchange.route_values(values, plan, row_values); })
          .require_refused();
    }
    {
      const float* row_values = nullptr;
      float* route_values = nullptr;
      Pairs(exchange,
            {array("row_values", total * 4, false, row_values),
             array("route_values", known * slots, true, route_values), plan_of(plan)},
            [&] { exchange.return_values(row_values, plan, route_values); })
          .require_refused();
    }
    {
      DispatchRun wrong(exchange, c, step);
      const float* topk_weights = wrong.weights();
      float* d_weights = nullptr;
      Outputs rows{.type = c.config.combine_type, .rows = *dispatch.received().total};
      std::vector<Argument> arguments{array("d_result", tokens * row, false, wrong.tokens().parts[0]),
                                      array("topk_weights", tokens * slots, false, topk_weights),
                                      plan_of(plan), array("outputs", rows.rows * row, false, rows.data),
                                      array("d_weights", tokens * slots, true, d_weights)};
      wrong.options().memory.plan = nullptr;
      add_memory(c, parts_of(c.config.format, c.config.hidden), total, dispatch.received().groups,
                 wrong.options(), arguments);
      wrong.options().apply_weights = false;
      wrong.options().dot_rows = nullptr;
      Pairs(exchange, arguments, [&] {
        exchange.combine_backward(wrong.tokens(), plan, topk_weights, rows, d_weights, wrong.options());
      }).require_refused();
    }
    dispatch_and_combine(exchange, c, step, outputs);
  });
}

// Rows of outputs, residual and result lie side by side in one matrix.
TEST_P(Contract, ColumnsThatInterleaveAreNotRefused) {
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    TestCase c = overlap_case(small_case(5));
    c.reduction = reduction;
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      DispatchRun dispatch(exchange, c, step);
      dispatch.run();
      const int me = rank.index();
      const std::int64_t total = *dispatch.received().total, tokens = step.positions.tokens(me),
                         row = 2 * c.config.hidden, stride = 3 * row;
      Random random(c.seed + static_cast<std::uint64_t>(me));
      const std::vector<std::byte> residual = random_rows(random, c.result, tokens * c.config.hidden, true);
      GuardedBuffer matrix(std::max(total, tokens) * stride);
      copy_rows(outputs.ranks[static_cast<std::size_t>(me)].rows, row, stride, matrix.data());
      copy_rows(residual, row, stride, matrix.data() + row);
      std::vector<std::byte> expected(matrix.data(), matrix.data() + matrix.bytes());
      copy_rows(oracle::with_epilogue(
                    c.result, oracle::combined(c.config, step.positions, outputs, rank.topology(), me), 1.0f,
                    residual.data()),
                row, stride, expected.data() + 2 * row);
      CombineRun combine(exchange, c, step, outputs, dispatch.received().plan, dispatch.received().weight);
      combine.outputs().data = matrix.data();
      combine.outputs().rows = total;
      combine.result().data = matrix.data() + 2 * row;
      combine.outputs().stride = combine.result().stride = stride;
      combine.options().epilogue = {.residual = matrix.data() + row, .stride = stride};
      combine.call();
      exchange.check();
      matrix.require_contents(expected, 2, "matrix");
    });
  }
}

}  // namespace
}  // namespace ferry::contract
