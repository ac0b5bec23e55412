// Experts in slices on device memory, run on the host: its kernels as fibers, around a backend
// of host memory. What comes out is what an exchange of host memory gives, byte for byte.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>

#include "backends/cuda/sliced/steps.cuh"
#include "backends/sliced/backend.hpp"
#include "exchange/configuration.hpp"
#include "exchange/sliced.hpp"
#include "ferry/ferry.hpp"
#include "group/control_block.hpp"
#include "kernels_on_host/grid.hpp"
#include "plan/shapes.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

// The steps of experts in slices, with kernels that run as fibers.
class FiberSteps final : public sliced::SliceSteps {
 public:
  explicit FiberSteps(const LaneView& lane) : lane_(lane) {}

  void post_dispatch(const PostDispatch& call, Stream) override {
    run_block<AgreeState>(kStepThreads, call,
                          [](const auto& step, auto* state) { cuda::post_dispatch(step, state); });
  }
  void take_slice(const TakeSlice& call, Stream) override {
    run_block<AgreeState>(kStepThreads, call,
                          [](const auto& step, auto* state) { cuda::take_slice(step, state); });
  }
  void take_combine(const TakeCombine& call, Stream) override {
    run_block<AgreeState>(kStepThreads, call,
                          [](const auto& step, auto* state) { cuda::take_combine(step, state); });
  }
  void find_segments(const FindSegments& call, Stream) override {
    run_block<SegmentState>(kStepThreads, call,
                            [](const auto& step, auto* state) { cuda::find_segments(step, state); });
  }
  void copy_tokens(const CopyTokens& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::copy_tokens(call); });
  }
  void pack_rows(const PackRows& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::pack_rows(call); });
  }
  void unpack_rows(const UnpackRows& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::unpack_rows(call); });
  }
  void pack_outputs(const PackOutputs& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::pack_outputs(call); });
  }
  void copy_results(const CopyResults& call, const StepSize&, Stream) override {
    run_grid(2, kMoveThreads, [&] { cuda::copy_results(call); });
  }

 private:
  template <class Body>
  static void run_grid(unsigned blocks, unsigned threads, Body body) {
    on_host::Grid grid(test::seed());
    grid.add(blocks, threads, [&](unsigned) { body(); });
    grid.run();
  }
  // A kernel of one block with a state in shared memory.
  template <class State, class Call, class Body>
  void run_block(unsigned threads, const Call& call, Body body) {
    State state{};
    const SliceStep<Call> step{lane_, call, true};
    run_grid(1, threads, [&] { body(step, &state); });
  }

  const LaneView lane_;
};

// The backend inside: that of host memory, which reads counts where a device would.
class HostInner final : public Backend {
 public:
  HostInner(std::unique_ptr<Backend> backend, LaneState* state) : cpu_(std::move(backend)), state_(*state) {}

  Capabilities capabilities() const override { return {}; }
  Sizes sizes() const override { return cpu_->sizes(); }
  DispatchResult dispatch(const DispatchCall& call, bool split) override {
    DispatchCall counted = call;
    EXPECT_LE(*call.tokens.device_count, call.tokens.count);
    counted.tokens.count = *call.tokens.device_count;
    counted.tokens.device_count = nullptr;
    const DispatchResult result = cpu_->dispatch(counted, split);
    ++state_.calls[0];
    return result;
  }
  void combine(const CombineCall& call, bool split) override {
    cpu_->combine(call, split);
    ++state_.calls[0];
  }
  DispatchResult dispatch_receive(const CallOptions&) override { return {}; }
  void combine_receive(const CallOptions&) override {}
  SmallResult run(const SmallCall& call) override {
    auto counted = std::get<GatherCall>(call);
    if (counted.device_count != nullptr) {
      EXPECT_LE(*counted.device_count, counted.count);
      counted.count = *counted.device_count;
    }
    cpu_->run(counted);
    ++state_.calls[0];
    return {};
  }
  OwnArrays own_arrays(int) const override { return {}; }
  void refuse(Operation, const Error&, const CallOptions&) noexcept override { ++state_.calls[0]; }
  CallDiagnostics take_diagnostics(int lane) override { return cpu_->take_diagnostics(lane); }
  LoadCounts load_counts() const override { return cpu_->load_counts(); }
  WireCounts wire_counts() const override { return cpu_->wire_counts(); }

 private:
  std::unique_ptr<Backend> cpu_;
  LaneState& state_;
};

struct alignas(256) Line {
  std::byte bytes[256];
};

// One rank's lane on the "device".
class DeviceLane {
 public:
  DeviceLane(const Rank& rank, const Config& config)
      : routed_(routed_config(config)),
        inner_(make_cpu_backend(rank, routed_), &state_),
        context_{.rank = rank, .config = config, .inner = &inner_, .on_device = true, .late_errors = true},
        memory_(static_cast<std::size_t>(sliced_arrays(config, rank.index()).bytes / 256 + 1)),
        steps_(view(rank)),
        lane_(context_, 0, steps_, reinterpret_cast<std::byte*>(memory_.data()), &totals_) {}

  Lane& lane() { return lane_; }
  DeviceError& error() { return error_; }
  const HostTotals& totals() const { return totals_; }
  const LaneState& state() const { return state_; }
  WireCounts wire_counts() const {
    WireCounts sum = inner_.wire_counts();
    sum.dispatch_bytes += lane_.all_calls()->dispatch_bytes;
    sum.dispatch_messages += lane_.all_calls()->dispatch_messages;
    sum.combine_bytes += lane_.all_calls()->combine_bytes;
    sum.combine_messages += lane_.all_calls()->combine_messages;
    return sum;
  }

 private:
  LaneView view(const Rank& rank) {
    LaneView view{};
    view.rank = rank.index();
    view.ranks = rank.size();
    view.top_k = routed_.top_k;
    view.hidden = routed_.hidden;
    view.max_tokens = routed_.max_tokens;
    view.capacity_rows = row_capacity(routed_, rank.index());
    view.plan_shape = plan_shape(routed_);
    view.epoch = &epoch_;
    view.state = &state_;
    view.device_error = &error_;
    return view;
  }

  const Config routed_;
  const Epoch epoch_{kFirstEpoch, row_order_hash(routed_), 0};
  LaneState state_{};
  DeviceError error_{};
  HostTotals totals_{};
  HostInner inner_;
  SlicedContext context_;
  std::vector<Line> memory_;
  FiberSteps steps_;
  Lane lane_;
};

struct Inputs {
  std::vector<std::byte> tokens;
  std::vector<std::int64_t> ids;
  std::vector<float> weights, topk_weights;
};

// The inputs that the ranks of sub-group `group` pass in call `number`.
Inputs inputs_of(const Config& config, int group, int number, std::int64_t tokens) {
  std::mt19937_64 random(test::seed() + static_cast<std::uint64_t>(100 * number + group));
  Inputs made;
  for (std::int64_t i = 0; i < tokens * config.hidden; ++i) {
    const auto value =
        std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<int>(random() % 401) - 200) / 16);
    made.tokens.push_back(static_cast<std::byte>(value >> 16));
    made.tokens.push_back(static_cast<std::byte>(value >> 24));
  }
  for (std::int64_t i = 0; i < tokens * config.top_k; ++i) {
    made.ids.push_back(
        random() % 5 == 0 ? -1 : static_cast<std::int64_t>(random() % static_cast<unsigned>(config.experts)));
    made.weights.push_back(static_cast<float>(random() % 16) / 8);
    made.topk_weights.push_back(static_cast<float>(random() % 16) / 4);
  }
  made.weights.push_back(0);  // an address without tokens too
  made.topk_weights.push_back(0);
  return made;
}

void fill_rows(std::vector<std::byte>& rows, std::uint64_t seed, DType type) {
  std::mt19937_64 random(seed);
  for (std::size_t at = 0; at + 4 <= rows.size(); at += static_cast<std::size_t>(bytes_of(type))) {
    const auto value =
        std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 64);
    if (type == DType::fp32) {
      std::memcpy(&rows[at], &value, 4);
    } else {
      rows[at] = static_cast<std::byte>(value >> 16);
      rows[at + 1] = static_cast<std::byte>(value >> 24);
    }
  }
}

struct Variant {
  int ep = 2, tp = 2;
  Format format = Format::bf16();
  Reduction reduction = Reduction::partial;
  DType outputs = DType::bf16, combine_type = DType::bf16;
  bool row_weights = false, topk_weights = false, on_device = false, strided = false;
};

Config config_of(const Variant& v) {
  Config config{.experts = 8, .top_k = 3, .hidden = 48, .max_tokens = 9};
  config.backend = BackendKind::cpu;
  config.format = v.format;
  config.combine_type = v.combine_type;
  config.alignment = 4;
  config.zero_padding = true;
  config.reduction = v.reduction;
  config.reduction_level = ReductionLevel::rank;
  config.placement = Placement::ep_tp(8, v.ep, v.tp);
  return complete_config(config, v.ep * v.tp);
}

template <class T>
std::vector<T> list(const T* from, std::int64_t count) {
  return {from, from + count};
}

void expect_same_rows(const DispatchResult& got, const DispatchResult& expected, const HostTotals& totals) {
  ASSERT_EQ(*got.total, *expected.total);
  EXPECT_EQ(totals.total, *expected.total);
  EXPECT_EQ(totals.call, got.call);
  EXPECT_EQ(list(got.counts, got.groups), list(expected.counts, expected.groups));
  EXPECT_EQ(list(got.row_offsets, got.groups + 1), list(expected.row_offsets, expected.groups + 1));
  const std::int64_t total = *expected.total;
  EXPECT_TRUE(list(got.source, total) == list(expected.source, total));
  EXPECT_EQ(list(got.weight, total), list(expected.weight, total));
  EXPECT_EQ(list(got.group_of_row, total), list(expected.group_of_row, total));
  for (std::size_t p = 0; p < got.parts.size(); ++p) {
    ASSERT_EQ(got.parts[p].row_bytes, expected.parts[p].row_bytes);
    EXPECT_EQ(std::memcmp(got.parts[p].data, expected.parts[p].data,
                          static_cast<std::size_t>(total * got.parts[p].row_bytes)),
              0)
        << "part " << p;
  }
}

void run_calls(const Variant& v) {
  const Config config = config_of(v);
  Group::threads(v.ep * v.tp).run([&](const Rank& rank) {
    Exchange host(rank, config);
    DeviceLane device(rank, config);
    const std::int64_t rows = row_capacity(config, rank.index());
    std::vector<std::int32_t> group_of_row(static_cast<std::size_t>(rows)), expected_groups = group_of_row;
    const std::int64_t tokens_of[3][2] = {{7, 4}, {1, 9}, {0, 3}};
    for (int number = 0; number < 3; ++number) {
      const int group = rank.index() / v.tp;
      const std::int64_t tokens = tokens_of[number][group % 2];
      Inputs in = inputs_of(config, group, number, tokens);
      const DispatchResult expected =
          host.dispatch(Tokens::rows(in.tokens.data(), tokens), in.ids.data(), in.weights.data(),
                        {.memory = {.group_of_row = expected_groups.data()}});
      const auto counted = static_cast<std::int32_t>(tokens);
      DispatchCall call{.tokens = Tokens::rows(in.tokens.data(), v.on_device ? 9 : tokens),
                        .ids = Ids(in.ids.data()),
                        .weights = in.weights.data(),
                        .weighted = true,
                        .format = config.format,
                        .memory = {.group_of_row = group_of_row.data()}};
      if (v.on_device) call.tokens.device_count = &counted;
      const DispatchResult got = device.lane().dispatch(call);
      if (tokens > 0) expect_same_rows(got, expected, device.totals());

      const std::int64_t slots = v.reduction == Reduction::unreduced ? config.top_k : 1,
                         row = config.hidden * 2, stride = v.strided ? row + 16 : 0;
      std::vector<std::byte> outputs(
          static_cast<std::size_t>(*got.total * config.hidden * bytes_of(v.outputs) + 16));
      fill_rows(outputs, test::seed() + static_cast<std::uint64_t>(rank.index() + 10 * number), v.outputs);
      std::vector<std::byte> result(static_cast<std::size_t>(9 * slots * (row + 16)), std::byte{0x5A}),
          expected_result = result;
      const CombineOptions options{.row_weights = v.row_weights ? expected.weight : nullptr,
                                   .topk_weights = v.topk_weights ? in.topk_weights.data() : nullptr};
      const Outputs of{.data = outputs.data(), .type = v.outputs};
      host.combine(of, expected.plan, {.data = expected_result.data(), .stride = stride}, options);
      device.lane().combine({.outputs = of,
                             .plan = got.plan,
                             .result = {.data = result.data(), .stride = stride},
                             .row_weights = v.row_weights ? got.weight : nullptr,
                             .topk_weights = options.topk_weights,
                             .topk_weighted = v.topk_weights,
                             .reduction = v.reduction});
      EXPECT_EQ(result, expected_result);
      EXPECT_EQ(device.error().call.value, 0u);
    }
    const WireCounts got = device.wire_counts(), expected = host.wire_counts();
    EXPECT_EQ(got.dispatch_bytes, expected.dispatch_bytes);
    EXPECT_EQ(got.dispatch_messages, expected.dispatch_messages);
    EXPECT_EQ(got.combine_bytes, expected.combine_bytes);
    EXPECT_EQ(got.combine_messages, expected.combine_messages);
  });
}

TEST(SlicedKernels, GiveTheBytesOfHostMemory) {
  run_calls({.row_weights = true});
  run_calls({.tp = 4, .on_device = true, .strided = true});
  run_calls({.ep = 1, .tp = 3, .format = Format::fp8_e4m3(), .outputs = DType::fp32, .row_weights = true});
  run_calls({.reduction = Reduction::exact, .topk_weights = true, .on_device = true});
  run_calls({.reduction = Reduction::unreduced, .strided = true});
  run_calls({.outputs = DType::bf16, .combine_type = DType::fp32, .topk_weights = true});
}

// Sub-group 1 of two: rank 3 passes something else than rank 2.
TEST(SlicedKernels, RanksThatDifferGetNoRowsAndAnError) {
  const Config config = config_of({});
  Group::threads(4).run([&](const Rank& rank) {
    DeviceLane device(rank, config);
    for (int number = 0; number < 3; ++number) {
      Inputs in = inputs_of(config, rank.index() / 2, 0, 5);
      const bool odd = rank.index() == 3;
      if (odd && number == 1) in.ids[0] = in.ids[0] == 2 ? 3 : 2;
      const DispatchResult got =
          device.lane().dispatch({.tokens = Tokens::rows(in.tokens.data(), odd && number == 0 ? 4 : 5),
                                  .ids = Ids(in.ids.data()),
                                  .weights = in.weights.data(),
                                  .weighted = true,
                                  .format = config.format});
      const std::optional<DeviceError> error = take_error(device.error());
      ASSERT_EQ(error.has_value(), number < 2);
      EXPECT_EQ(*got.total > 0, number == 2);
      EXPECT_EQ(device.totals().total, *got.total);
      if (!error) continue;
      EXPECT_EQ(error->reason, DeviceError::Reason::slices);
      EXPECT_EQ(error->peer, 3);
      EXPECT_EQ(error->index & 7, static_cast<int>(number == 0 ? SliceFault::tokens : SliceFault::ids));
      EXPECT_EQ(error->index >> kSliceFaultBits, 2);
      if (number > 0) continue;
      EXPECT_EQ(error->mine, 4);
      EXPECT_EQ(error->theirs, 5);
    }
  });
}

TEST(SlicedKernels, ADamagedPlanEndsTheCombineOnEveryRank) {
  const Config config = config_of({});
  Group::threads(4).run([&](const Rank& rank) {
    DeviceLane device(rank, config);
    const Inputs in = inputs_of(config, rank.index() / 2, 0, 5);
    const DispatchResult got = device.lane().dispatch({.tokens = Tokens::rows(in.tokens.data(), 5),
                                                       .ids = Ids(in.ids.data()),
                                                       .weights = in.weights.data(),
                                                       .weighted = true,
                                                       .format = config.format});
    const PlanView plan = view_plan(got.plan.storage(), plan_shape(routed_config(config)));
    std::int32_t& entry = plan.counts[0 * config.experts * 2 + 8 * (rank.index() / 2)];
    if (rank.index() == 2) ++entry;
    const std::vector<std::byte> outputs(static_cast<std::size_t>(*got.total * 96 + 16));
    std::vector<std::byte> result(5 * 96, std::byte{0x5A});
    const std::vector<std::byte> before = result;
    const auto combine = [&](const void* from) {
      device.lane().combine({.outputs = {.data = from}, .plan = got.plan, .result = {.data = result.data()}});
      return take_error(device.error());
    };
    const std::optional<DeviceError> damaged = combine(outputs.data());
    ASSERT_TRUE(damaged);
    EXPECT_EQ(damaged->peer, 2);
    EXPECT_EQ(damaged->index & 7, static_cast<int>(SliceFault::plan));
    EXPECT_EQ(result, before);
    if (rank.index() == 2) --entry;
    const std::optional<DeviceError> missing = combine(rank.index() == 1 ? nullptr : outputs.data());
    ASSERT_TRUE(missing);
    EXPECT_EQ(missing->peer, 1);
    EXPECT_EQ(missing->index & 7, static_cast<int>(SliceFault::outputs));
    EXPECT_EQ(result, before);
    EXPECT_FALSE(combine(outputs.data()));
    EXPECT_NE(result, before);
  });
}

// All ranks make the same calls inside, even after an error, so that their call numbers stay equal.
TEST(SlicedKernels, ARefusalUsesUpTheNumbersOfAllCalls) {
  const Config config = config_of({.ep = 1, .tp = 1 + 1});
  Group::threads(2).run([&](const Rank& rank) {
    DeviceLane device(rank, config);
    device.lane().refuse(Operation::dispatch, UsageError("no"), {});
    EXPECT_EQ(device.state().calls[0], 3u);
    device.lane().refuse(Operation::combine, UsageError("no"), {});
    EXPECT_EQ(device.state().calls[0], 7u);
    const Inputs in = inputs_of(config, 0, 0, 5);
    device.lane().dispatch({.tokens = Tokens::rows(in.tokens.data(), 5),
                            .ids = Ids(in.ids.data()),
                            .weights = in.weights.data(),
                            .weighted = true,
                            .format = config.format});
    EXPECT_EQ(device.state().calls[0], 10u);
  });
}

}  // namespace
}  // namespace ferry::cuda
