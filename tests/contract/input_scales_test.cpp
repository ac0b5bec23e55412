// input_scales: tokens travel as they are, and rows are encoded with a scale of their expert where they
// arrive.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/expected.hpp"

namespace ferry::contract {
namespace {

constexpr const char* kByExpert[] = {"fp8",   "mxfp8",         "mxfp8-ocp-columns", "mxfp8-tiles",
                                     "nvfp4", "nvfp4-columns", "nvfp4-tiles"};

TestCase scaled_case(TestCase c, const char* format) {
  c.config.format = parse_format(format);
  c.config.hidden = c.config.format.kind == FormatKind::nvfp4 ? 608 : 656;
  c.input_scales = true;
  c.weights_from = WeightsFrom::none;
  return c;
}

// A token has experts with different scales on one rank.
TEST_P(Contract, InputScales) {
  for (const char* format : kByExpert) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      for (const int ranks : kGroupSizes) {
        TestCase c = scaled_case(small_case(ranks), format);
        c.ranks = ranks;
        c.config.experts = 2 * ranks + 1;
        c.config.top_k = 3;
        c.config.layout = layout;
        c.config.alignment = 4;
        c.config.zero_padding = ranks == 2;
        c.config.shared_experts = ranks == 3 ? 2 : 0;
        c.any_bits = ranks > 2;
        c.type = ranks == 3 ? DType::fp32 : ranks == 4 ? DType::fp16 : DType::bf16;
        add(c);
        c.split_phases = true;
        c.caller_memory = c.config.format.mx.tiles || c.config.format.nvfp4_options.tiles;
        add(c);
      }
    }
  }
  run_added();
}

// Dispatches by a plan too, and the messages are those of the tokens as they are.
TEST_P(Contract, InputScalesByPlan) {
  for (const char* format : kByExpert) {
    TestCase c = scaled_case(small_case(5), format);
    c.ranks = 3;
    c.config.experts = 7;
    c.config.shared_experts = 1;
    ASSERT_TRUE(run_sequences(GetParam(), {c}));
  }
  TestCase c = scaled_case(small_case(6), "nvfp4");
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, exchange_config(c));
    DispatchRun(exchange, c, step).run();
    const std::int64_t raw = exchange.wire_counts().dispatch_bytes;
    TestCase plain = c;
    plain.input_scales = false;
    plain.config.format = Format::bf16();
    const StepInputs plain_step = make_inputs(plain);
    DispatchRun(exchange, plain, plain_step).run();
    require_equal(exchange.wire_counts().dispatch_bytes, 2 * raw, "bytes of both calls");
  });
}

// Kernels read scales in device memory, so a call with a bad one is not refused. check() reports it.
void report_bad_scale(SyncExchange& exchange, const TestCase& c, const StepInputs& step,
                      std::span<const float> scales, bool bad) {
  DispatchRun dispatch(exchange, c, step);
  dispatch.options().global_scale = nullptr;
  dispatch.options().input_scales = scales;
  dispatch.call();
  const std::string text = usage_error([&] { exchange.check(c.lane); });
  require((text.find("input_scales") != std::string::npos) == bad, "rank ", exchange.rank().index(), ": '",
          text, "'");
}

// Every rank passes `change`d options on its own or all of them, and the call ends on all with these words.
TEST_P(Contract, BadInputScalesAreRefused) {
  TestCase c = scaled_case(small_case(3), "nvfp4");
  c.config.shared_experts = 1;
  c.full = true;
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, exchange_config(c));
    const std::vector<float> values(static_cast<std::size_t>(c.config.experts) + 1, 0.5f);
    GuardedBuffer memory = GuardedBuffer::of(values);
    const std::span<float> scales{memory.as<float>(), values.size()};
    const auto refused = [&](const std::string& words, const auto& change) {
      DispatchRun dispatch(exchange, c, step);
      dispatch.options().global_scale = nullptr;
      dispatch.options().input_scales = scales;
      change(dispatch.options());
      std::string text;
      try {
        dispatch.call();
      } catch (const Error& error) {
        text = error.what();
      }
      require(text.find(words) != std::string::npos, "expected '", words, "', got '", text, "'");
    };
    const bool odd = rank.index() == 1;
    const auto on_one = [&](const std::string& words, const auto& change) {
      refused(words, [&](DispatchOptions& options) {
        if (odd) change(options);
      });
    };
    on_one("input_scales has 8 values on rank 1",
           [&](DispatchOptions& options) { options.input_scales = {scales.data(), scales.size() - 1}; });
    on_one("input_scales has 10 values on rank 1",
           [&](DispatchOptions& options) { options.input_scales = {scales.data(), scales.size() + 1}; });
    on_one("input_scales has 0 values on rank 1",
           [&](DispatchOptions& options) { options.input_scales = {scales.data(), 0}; });
    on_one("the address is null on rank 1: pass 9 values", [&](DispatchOptions& options) {
      options.input_scales = {static_cast<const float*>(nullptr), scales.size()};
    });
    on_one("the type of tokens with input_scales",
           [](DispatchOptions& options) { options.input_scales = {}; });
    const float g = 1;
    on_one("exclude each other", [&](DispatchOptions& options) { options.global_scale = &g; });
    for (const char* name : {"bf16", "mxfp4", "nvfp4-token", "fp8-pow2", "fp8-columns"})
      refused(name, [&](DispatchOptions& options) { options.format = parse_format(name); });
    for (const float bad :
         {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      // Each rank looks at the scales of its own experts: the last scale is that of the shared expert.
      if (odd) scales.back() = bad;
      if (GetParam().on_device()) {
        report_bad_scale(exchange, c, step, scales, odd);
      } else {
        refused("must be positive and finite: pass the expert's largest |x|", [](DispatchOptions&) {});
        refused("input_scales[8]", [](DispatchOptions&) {});
      }
      scales.back() = 0.5f;
    }
    if (GetParam().on_device())
      on_one("input_scales", [&](DispatchOptions& options) { options.input_scales = values; });
    dispatch_and_combine(exchange, c, step, make_expert_outputs(c, step));
  });
}

// On device memory, where check() reports them, the error does not know the format.
TEST_P(Contract, RefusalsOfInputScalesAdviseByFormat) {
  if (GetParam().on_device()) GTEST_SKIP() << "scales in device memory are not refused";
  const std::string fp8 = "pass the expert's largest |x| / 448",
                    nvfp4 = "pass the expert's largest |x| / 2688",
                    mxfp8 = "pass 1, with which rows are those without input_scales";
  for (const auto& [format, advice] : {std::pair{"fp8", fp8},
                                       {"mxfp8", mxfp8},
                                       {"mxfp8-ocp-columns", mxfp8},
                                       {"nvfp4", nvfp4},
                                       {"nvfp4-columns", nvfp4}}) {
    TestCase c = scaled_case(small_case(9), format);
    c.full = true;
    StepInputs step = make_inputs(c);
    const float bad = -0.5f;
    step.inputs.input_scales.assign(step.inputs.input_scales.size(), bad);
    run(c.ranks, describe(c), [&, advice = advice](Rank rank) {
      SyncExchange exchange(rank, exchange_config(c));
      DispatchRun dispatch(exchange, c, step);
      const std::string text = usage_error([&] { dispatch.call(); }),
                        end = "must be positive and finite: " + advice;
      require(text.ends_with(end), "expected '", end, "', got '", text, "'");
    });
  }
}

TEST_P(Contract, InputScalesNeedRoomForTheTokensAndAnExpertLayout) {
  TestCase c = scaled_case(small_case(4), "mxfp8");
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange small(rank, c.config);
    DispatchRun dispatch(small, c, step);
    require_refused("construct the exchange with format = bf16", [&] { dispatch.call(); });
  });
  c.config.layout = Layout::rank_major;
  c.config.alignment = 1;
  TestCase by_rank = c;
  by_rank.input_scales = false;
  const StepInputs rank_step = make_inputs(by_rank);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, exchange_config(c));
    GuardedBuffer scales =
        GuardedBuffer::of(std::vector<float>(static_cast<std::size_t>(c.config.experts), 0.5f));
    DispatchRun dispatch(exchange, by_rank, rank_step);
    dispatch.options().input_scales = {scales.as<float>(), static_cast<std::size_t>(c.config.experts)};
    require_refused("use expert_major or expert_padded", [&] { dispatch.call(); });
  });
}

// No format has room both for tokens as they are and for tiles.
TEST_P(Contract, InputScalesAsTilesNeedMemoryOfTheCaller) {
  TestCase c = scaled_case(small_case(7), "mxfp8-tiles");
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    const auto refused = [&](const char* format, const std::string& end) {
      Config config = exchange_config(c);
      config.format = parse_format(format);
      SyncExchange exchange(rank, config);
      DispatchRun dispatch(exchange, c, step);
      dispatch.options().memory.parts[1] = nullptr;
      const std::string text = usage_error([&] { dispatch.call(); });
      require(text.ends_with(end), "expected '", end, "', got '", text, "'");
      if (config.format == Format::bf16()) DispatchRun(exchange, c, step).run();
    };
    refused("bf16", "because its format is bf16: pass memory.parts[1]");
    refused("mxfp8-tiles", ": construct the exchange with format = bf16, and pass memory.parts[1]");
  });
}

// The rank that encodes a block whose scale overflows reports it.
TEST_P(Contract, OverflowingInputScalesAreReported) {
  TestCase c = scaled_case(small_case(8), "nvfp4");
  c.config.experts = 4;
  c.config.top_k = 1;
  c.config.check_calls = false;
  c.type = DType::fp32;
  c.tokens = {1, 0};
  StepInputs step = inputs_from_ids(c, {{2}, {}});  // to rank 1
  auto* values = reinterpret_cast<float*>(step.inputs.ranks[0].parts[0].data());
  values[0] = std::numeric_limits<float>::infinity();  // its scale is 448, and 448 * g no fp32
  step.inputs.input_scales[2] = 1e36f;
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, exchange_config(c));
    DispatchRun dispatch(exchange, c, step);
    dispatch.call();
    dispatch.compare();
    const std::string text = usage_error([&] { exchange.check(c.lane); });
    const char* const words = GetParam().on_device() ? "input_scales" : "input_scales[2] = 1e+36 on rank 1";
    const bool reported = text.find(words) != std::string::npos;
    require(reported == (rank.index() == 1), "rank ", rank.index(), ": '", text, "'");
  });
}

}  // namespace
}  // namespace ferry::contract
