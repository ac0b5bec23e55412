// The kernels of a combine by source, run on the host around an exchange of host memory: MAX's arrays of a
// dispatch, and combines by the plans that the kernels make of them.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "backends/cuda/by_source/source_rows.cuh"
#include "backends/cuda/host/memory_layout.hpp"
#include "exchange/configuration.hpp"
#include "ferry/max.hpp"
#include "group/control_block.hpp"
#include "kernels_on_host/grid.hpp"
#include "plan/shapes.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

template <class Body>
void run_source_grid(unsigned blocks, unsigned threads, Body body) {
  on_host::Grid grid(test::seed());
  grid.add(blocks, threads, [&](unsigned block) { body(block); });
  grid.run();
}

// One rank: an exchange of host memory, and a device's view of it.
class SourceRank {
 public:
  SourceRank(const Rank& rank, const Config& given)
      : exchange_(rank, given),
        config_(exchange_.config()),
        epoch_{kFirstEpoch, row_order_hash(config_), config_.placement.version()},
        tables_(routing_tables(config_)),
        plan_(static_cast<std::size_t>(view_plan(nullptr, plan_shape(config_)).bytes / 16 + 1)) {
    const int me = rank.index();
    view_.rank = me;
    view_.ranks = rank.size();
    view_.experts = config_.experts;
    view_.top_k = config_.top_k;
    view_.max_tokens = config_.max_tokens;
    view_.groups = groups_of(config_, me);
    view_.shared_experts = config_.shared_experts;
    view_.capacity_rows = row_capacity(config_, me);
    view_.by_alignment = Divisor::of(config_.alignment);
    view_.plan_shape = plan_shape(config_);
    view_.epoch = &epoch_;
    view_.tables = tables_.data();
    view_.state = &state_;
    view_.device_error = &error_;
    const auto rows = static_cast<std::size_t>(view_.capacity_rows),
               groups = static_cast<std::size_t>(view_.groups);
    offsets.assign(groups + 1, 77);
    ids.assign(groups + 1, 77);
    stats.assign(2, 77);
    info.assign(2 * rows + 1, 77);
    counts.assign(groups * static_cast<std::size_t>(view_.ranks) + 1, 77);
    row_tags_.assign(rows + 1, 0);
    came_.assign(static_cast<std::size_t>(config_.max_tokens * config_.top_k) + 1, 0);
    kept_ids_.assign(came_.size(), 0);
    scratch_.resize(static_cast<std::size_t>(return_scratch_bytes(view_) / 16 + 1));
  }

  DispatchResult dispatch(const Tokens& tokens, const Ids& topk_ids) {
    const DispatchResult received = exchange_.dispatch(tokens, topk_ids);
    ++state_.calls[0];
    const KeepIdsArguments keep{view_,
                                {.ids = topk_ids,
                                 .tokens = tokens.count,
                                 .kept_ids = kept_ids_.data(),
                                 .kept_tokens = &kept_tokens_}};
    run_source_grid(2, kSourceThreads, [&](unsigned) { keep_ids(keep); });
    const DescribeRowsArguments describe{view_,
                                         view_plan(received.plan.storage(), view_.plan_shape),
                                         {.received = received,
                                          .row_offsets = offsets.data(),
                                          .expert_ids = ids.data(),
                                          .expert_usage_stats = stats.data(),
                                          .src_info = info.data(),
                                          .counts = counts.data()}};
    run_source_grid(2, kSourceThreads, [&](unsigned) { describe_rows(describe); });
    return received;
  }

  // Returns the error that the device has recorded. A combine with wrong arrays does not run.
  std::optional<DeviceError> combine(const Outputs& outputs, const Result& result, const float* weights) {
    const Plan plan =
        Plan::over(plan_.data(), static_cast<std::size_t>(view_plan(nullptr, view_.plan_shape).bytes));
    const PlanReturnArguments arguments{view_,
                                        view_plan(plan.storage(), view_.plan_shape),
                                        {.src_info = info.data(),
                                         .row_offsets = offsets.data(),
                                         .counts = counts.data(),
                                         .ids = Ids(kept_ids_.data()),
                                         .tokens = config_.max_tokens,
                                         .device_tokens = &kept_tokens_,
                                         .plan = plan,
                                         .row_tags = row_tags_.data(),
                                         .scratch = reinterpret_cast<std::byte*>(scratch_.data())}};
    run_source_grid(3, kReturnThreads, [&](unsigned) { start_return(arguments); });
    run_source_grid(2, kReturnThreads, [&](unsigned) { place_rows(arguments); });
    run_source_grid(1, kReturnThreads, [&](unsigned) { finish_return(arguments); });
    if (const std::optional<DeviceError> error = take_error(error_)) {
      EXPECT_EQ(arguments.plan.header->magic, kWrongArraysMagic);
      ++state_.calls[0];  // the combine ends, refused
      return error;
    }
    exchange_.combine(
        outputs, plan, result,
        {.topk_weights = weights, .row_values = row_tags_.data(), .route_values = came_.data()});
    ++state_.calls[0];
    unsigned long long first = 0;
    const CheckReturnedArguments check{view_, arguments.plan, came_.data()};
    run_source_grid(1, kReturnThreads, [&](unsigned) { check_returned(check, &first); });
    return take_error(error_);
  }

  const Config& config() const { return config_; }

  std::vector<std::uint32_t> offsets, stats;
  std::vector<std::int32_t> ids, info, counts;

 private:
  struct alignas(16) Line {
    std::byte bytes[16];
  };

  Exchange exchange_;
  const Config& config_;
  const Epoch epoch_;
  const std::vector<std::byte> tables_;
  std::vector<Line> plan_, scratch_;
  std::vector<float> row_tags_, came_;
  std::vector<std::int64_t> kept_ids_;
  std::int32_t kept_tokens_ = 0;
  LaneState state_{};
  DeviceError error_{};
  LaneView view_{};
};

Config source_config(Reduction reduction, int shared_experts, int alignment) {
  Config config{.experts = 7, .top_k = 3, .hidden = 16, .max_tokens = 9};
  config.format = Format::fp32();
  config.combine_type = DType::fp32;
  config.reduction = reduction;
  config.shared_experts = shared_experts;
  config.alignment = alignment;
  config.repeats = true;
  return config;
}

struct SourceInputs {
  std::int64_t tokens;
  std::vector<float> rows, weights;
  std::vector<std::int64_t> ids;
};

SourceInputs source_inputs(const Config& config, int rank, int number) {
  std::mt19937_64 random(test::seed() + static_cast<std::uint64_t>(100 * number + rank));
  SourceInputs in{.tokens = static_cast<std::int64_t>(random() % 10), .rows = {}, .weights = {}, .ids = {}};
  for (std::int64_t i = 0; i < in.tokens * config.hidden; ++i)
    in.rows.push_back(static_cast<float>(random() % 100));
  for (std::int64_t i = 0; i < in.tokens * config.top_k; ++i) {
    in.ids.push_back(static_cast<std::int64_t>(random() % 8) - 1);
    in.weights.push_back(static_cast<float>(random() % 8) / 4);
  }
  in.rows.resize(in.rows.size() + 16);
  in.ids.push_back(0);
  in.weights.push_back(0);
  return in;
}

template <class T>
std::vector<T> first_of(const std::vector<T>& all, std::size_t count) {
  return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count)};
}

// Reverses the rows of every routed group from every source.
void reverse_rows(SourceRank& rank, std::vector<float>& rows, int ranks) {
  const auto hidden = static_cast<std::size_t>(rank.config().hidden);
  for (std::size_t i = 0; i < rank.stats[1]; ++i) {
    const auto group = static_cast<std::size_t>(rank.ids[i]);
    if (static_cast<int>(group) < rank.config().shared_experts) continue;
    std::size_t row = rank.offsets[i];
    for (int source = 0; source < ranks; ++source) {
      const auto count = static_cast<std::size_t>(
          rank.counts[group * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(source)]);
      for (std::size_t a = row, b = row + count; a + 1 < b; ++a) {
        --b;
        std::swap_ranges(&rank.info[2 * a], &rank.info[2 * a] + 2, &rank.info[2 * b]);
        std::swap_ranges(&rows[a * hidden], &rows[a * hidden] + hidden, &rows[b * hidden]);
      }
      row += count;
    }
  }
}

TEST(BySourceKernels, GiveTheArraysAndResultsOfHostMemory) {
  for (const int ranks : {1, 2, 4}) {
    for (const int variant : {0, 1, 2}) {
      Config config = source_config(variant == 1 ? Reduction::unreduced : Reduction::exact,
                                    variant == 2 ? 2 : 0, variant == 0 ? 1 : 4);
      config.local_slots = 4 * variant + variant % 2 * 5;  // 0, 9, 8
      Group::threads(ranks).run([&](const Rank& rank) {
        max::Exchange host(rank, config);
        SourceRank device(rank, config);
        for (int number = 0; number < 4; ++number) {
          const SourceInputs in = source_inputs(config, rank.index(), number);
          const Tokens tokens = Tokens::rows(in.rows.data(), in.tokens, DType::fp32);
          const max::DispatchResult expected = host.ep_fused_dispatch(tokens, in.ids.data());
          const DispatchResult received = device.dispatch(tokens, in.ids.data());
          EXPECT_TRUE(std::ranges::equal(first_of(device.offsets, expected.row_offsets.size()),
                                         expected.row_offsets));
          EXPECT_TRUE(
              std::ranges::equal(first_of(device.ids, expected.expert_ids.size()), expected.expert_ids));
          EXPECT_TRUE(std::ranges::equal(first_of(device.info, expected.src_info.size()), expected.src_info));
          EXPECT_TRUE(std::ranges::equal(first_of(device.counts, expected.counts.size()), expected.counts));
          EXPECT_EQ(device.stats[0], expected.expert_usage_stats[0]);
          EXPECT_EQ(device.stats[1], expected.expert_usage_stats[1]);
          for (std::size_t i = expected.expert_ids.size(); i < static_cast<std::size_t>(received.groups);
               ++i) {
            EXPECT_EQ(device.ids[i], -1);
            EXPECT_EQ(device.offsets[i + 1], expected.row_offsets.back());
          }
          const auto* const rows = static_cast<const float*>(expected.output_tokens);
          std::vector<float> outputs(rows, rows + expected.row_offsets.back() * 16);
          outputs.resize(outputs.size() + 16);
          for (std::size_t i = 0; i < outputs.size(); ++i) outputs[i] *= 1 + static_cast<float>(i / 16 % 3);
          std::vector<float> result(9 * 3 * 16, -1), expected_result = result;
          const float* const weights = config.reduction == Reduction::exact ? in.weights.data() : nullptr;
          host.ep_fused_combine({{.data = outputs.data(), .type = DType::fp32}, expected},
                                {.output_tokens = {.data = expected_result.data(), .type = DType::fp32},
                                 .router_weights = weights});
          if (number % 2 == 1) reverse_rows(device, outputs, ranks);
          const std::optional<DeviceError> error =
              device.combine({.data = outputs.data(), .type = DType::fp32},
                             {.data = result.data(), .type = DType::fp32}, weights);
          EXPECT_FALSE(error) << (error ? error->index : 0);
          EXPECT_EQ(result, expected_result);
        }
      });
    }
  }
}

// One rank with two experts and a shared one; three tokens.
TEST(BySourceKernels, WrongArraysAreRefused) {
  Config config = source_config(Reduction::exact, 1, 1);
  config.experts = 2;
  config.top_k = 2;
  config.local_slots = 3;
  Group::threads(1).run([&](const Rank& rank) {
    SourceRank device(rank, config);
    const std::vector<float> rows(3 * 16, 1);
    const std::vector<std::int64_t> ids = {0, 1, 1, -1, 0, 1};
    device.dispatch(Tokens::rows(rows.data(), 3, DType::fp32), ids.data());
    // Rows: shared 0 1 2; expert 0: {0, 0} {2, 0}; expert 1: {0, 1} {1, 0} {2, 1}.
    ASSERT_EQ(first_of(device.info, 16),
              (std::vector<std::int32_t>{0, 2, 1, 2, 2, 2, 0, 0, 2, 0, 0, 1, 1, 0, 2, 1}));
    const std::vector<float> outputs(8 * 16, 1);
    std::vector<float> result(3 * 16);
    const auto combine = [&] {
      return device.combine({.data = outputs.data(), .type = DType::fp32},
                            {.data = result.data(), .type = DType::fp32}, nullptr);
    };
    const auto refused = [&](const std::string& text, auto& word, std::int32_t value) {
      const auto kept = std::exchange(word, static_cast<std::remove_reference_t<decltype(word)>>(value));
      const std::optional<DeviceError> error = combine();
      word = kept;
      ASSERT_TRUE(error) << text;
      ASSERT_EQ(error->reason, DeviceError::Reason::source);
      const auto low = [](std::int64_t two) { return std::int64_t{static_cast<std::int32_t>(two)}; };
      const std::string got = text_of(static_cast<SourceFault>(error->index & 15), 0,
                                      {.peer = error->peer,
                                       .limit = error->index >> kSourceFaultBits,
                                       .a = error->mine >> 32,
                                       .b = low(error->mine),
                                       .c = error->theirs >> 32,
                                       .d = low(error->theirs)});
      EXPECT_EQ(got.substr(0, got.find(';')), text);
    };
    EXPECT_FALSE(combine());
    refused("counts[3, 0] = 1, must be 0: rank 0 has no rows of the group from rank 0", device.counts[3], 1);
    refused("src_info[3] = {3, 0}, of rank 0, must be below {3, 2} and not negative", device.info[6], 3);
    refused("src_info[3] = {0, -1}, of rank 0, must be below {3, 2} and not negative", device.info[7], -1);
    refused("src_info[3] = {0, 1} is a row of expert 0, topk_ids[0, 1] of rank 0 is another expert",
            device.info[7], 1);
    refused("src_info[4] = {0, 0}, of rank 0, is also in row 3", device.info[8], 0);
    refused("src_info[1] = {2, 2}, must be {1, 2}: rows of a shared expert are in the order of the tokens",
            device.info[2], 2);
    refused("row_offsets[1] = 4, counts give 3", device.offsets[1], 4);
    refused("row_offsets[3] = 9, counts give 8", device.offsets[3], 9);
    refused("counts[1, 0] = -1, must be 0 to max_tokens x top_k = 18", device.counts[1], -1);
    refused("counts[0, 0] = 2, must be 3: a shared expert has the 3 tokens of rank 0 alone", device.counts[0],
            2);
    refused("row_offsets[2] = 5, counts give 4", device.counts[1], 1);
    const std::int32_t offset = std::exchange(device.offsets[3], 7);
    refused("topk_ids[2, 1] = 1, an expert of rank 0, but src_info has no row of it", device.counts[2], 2);
    device.offsets[3] = static_cast<std::uint32_t>(offset);
    EXPECT_FALSE(combine());
  });
}

}  // namespace
}  // namespace ferry::cuda
