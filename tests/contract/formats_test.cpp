// Every format: the bytes of received rows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

// Calls use(case) for each number of ranks and layout, with ordinary values and with random bits.
template <class Use>
void for_each_shape(TestCase base, Use use) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      for (const bool any_bits : {false, true}) {
        TestCase c = base;
        c.ranks = ranks;
        c.config.experts = 2 * ranks + 1;
        c.config.layout = layout;
        c.config.alignment = layout == Layout::rank_major ? 1 : 4;
        c.weights_from = WeightsFrom::none;
        c.any_bits = any_bits;
        use(c);
      }
    }
  }
}

TEST_P(Contract, Bf16) {
  TestCase c = small_case(1);
  for_each_shape(c, [&](const TestCase& each) { add(each); });
  run_added();
}

TEST_P(Contract, Fp16AndFp32) {
  for (const Format& format : {Format::fp16(), Format::fp32()}) {
    TestCase c = small_case(1);
    c.config.format = format;
    c.type = natural_type(format);
    for_each_shape(c, [&](const TestCase& each) { add(each); });
  }
  run_added();
}

TEST_P(Contract, Fp8WithScales) {
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    TestCase c = small_case(1);
    c.config.hidden = 272;  // two blocks and a short one
    c.config.format = Format::fp8_e4m3();
    c.type = type;
    for_each_shape(c, [&](const TestCase& each) { add(each); });
  }
  run_added();
}

TEST_P(Contract, ColumnMajorScales) {
  TestCase c = small_case(1);
  c.config.hidden = 400;
  c.config.format = Format::fp8_e4m3({.column_major = true});
  for_each_shape(c, [&](const TestCase& each) { add(each); });
  // Groups of 14 rows, each with columns of 16.
  for (const char* name :
       {"fp8-columns", "fp8-columns-pow2-packed", "mxfp8-columns", "nvfp4-token-columns"}) {
    for (const int shared : {0, 2}) {
      TestCase padded = small_case(2);
      padded.ranks = 3;
      padded.config.hidden = 672;
      padded.config.format = parse_format(name);
      padded.config.layout = Layout::expert_padded;
      padded.config.capacity = 14;
      padded.config.alignment = 2;
      padded.config.shared_experts = shared;
      padded.config.zero_padding = padded.caller_memory = shared > 0;
      padded.split_phases = shared > 0;
      padded.input_scales = shared > 0 && padded.config.format.kind == FormatKind::mxfp8;
      add(padded);
    }
  }
  run_added();
}

TEST_P(Contract, PowerOfTwoScales) {
  for (const bool columns : {false, true}) {
    for (const bool packed : {false, true}) {
      TestCase c = small_case(1);
      c.config.hidden = 656;  // six blocks: a packed word is partly used
      c.config.format = Format::fp8_e4m3({.column_major = columns, .power_of_two = true, .packed = packed});
      for_each_shape(c, [&](const TestCase& each) { add(each); });
    }
  }
  run_added();
}

TEST_P(Contract, MxFormats) {
  for (const char* name : {"mxfp8", "mxfp8-ocp-columns", "mxfp4", "mxfp4-up-columns"}) {
    for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
      TestCase c = small_case(1);
      c.config.format = parse_format(name);
      c.config.hidden = c.config.format.kind == FormatKind::mxfp8 ? 656 : 608;  // mxfp8: a short last block
      c.type = type;
      for_each_shape(c, [&](const TestCase& each) { add(each); });
    }
  }
  run_added();
}

TEST_P(Contract, Nvfp4) {
  for (const char* name : {"nvfp4", "nvfp4-columns", "nvfp4-token", "nvfp4-token-columns"}) {
    for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
      TestCase c = small_case(1);
      c.config.format = parse_format(name);
      c.config.hidden = 608;
      c.type = type;
      if (!c.config.format.nvfp4_options.per_token) c.global_scale = 0.0123f;
      for_each_shape(c, [&](const TestCase& each) { add(each); });
    }
  }
  run_added();
}

// The blocks of a call whose g is no scale are sent as zeros with scale 7F, and check() says so.
TEST_P(Contract, BadGlobalScalesAreReported) {
  for (const float g : {0.0f, -1.0f, std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN(), 3e38f}) {
    TestCase c = small_case(1);
    c.config.format = Format::nvfp4();
    c.config.hidden = 64;
    c.config.check_calls = false;
    c.full = true;
    c.global_scale = g;
    const StepInputs step = make_inputs(c);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      DispatchRun dispatch(exchange, c, step);
      dispatch.call();
      dispatch.compare();
      const std::string text = usage_error([&] { exchange.check(c.lane); });
      // With 3e38 no scale but 0 is representable, so that d is 0 and the scales are good. Host backends
      // name the value; kernels report no more than that there was one.
      std::vector<std::string> words{"global_scale", str(" on rank ", rank.index()), "/ 2688"};
      if (!GetParam().on_device()) words.push_back(str("global_scale = ", g, " on rank "));
      if (g == 3e38f) words.clear();
      require(text.empty() == words.empty(), "g = ", g, ": '", text, "'");
      for (const std::string& each : words)
        require(text.find(each) != std::string::npos, "g = ", g, ": no '", each, "' in '", text, "'");
    });
  }
}

// Ranks with other g than their peers are not refused: the host of a device backend does not know it.
TEST_P(Contract, GlobalScalesAreNotCompared) {
  TestCase c = small_case(2);
  c.config.format = Format::nvfp4();
  c.config.hidden = 64;
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    GuardedBuffer g = GuardedBuffer::of(std::vector<float>{0.5f + static_cast<float>(rank.index())});
    dispatch.options().global_scale = g.as<float>();
    dispatch.call();
    exchange.check(c.lane);
  });
}

TEST_P(Contract, GlobalScalesOfOtherFormatsAreRefused) {
  for (const char* name : {"bf16", "mxfp4", "nvfp4-token"}) {
    TestCase c = small_case(1);
    c.config.format = parse_format(name);
    c.config.hidden = 64;
    const StepInputs step = make_inputs(c);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      DispatchRun dispatch(exchange, c, step);
      const float g = 1;
      dispatch.options().global_scale = &g;
      const std::string text = usage_error([&] { dispatch.call(); });
      require(text.find("global_scale") != std::string::npos && text.find(name) != std::string::npos, name,
              ": ", text);
    });
  }
}

TEST_P(Contract, PowerOfTwoScalesArePowersOfTwo) {
  TestCase c = small_case(2);
  c.config.hidden = 256;
  c.config.format = Format::fp8_e4m3({.power_of_two = true});
  c.full = true;
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    dispatch.run();
    for (int row = 0; row < *dispatch.received().total; ++row) {
      float scales[2];
      std::memcpy(scales, dispatch.row(1, row), sizeof scales);
      for (const float scale : scales) {
        int exponent = 0;
        require(std::frexp(scale, &exponent) == 0.5f, "row ", row, ": scale ", scale);
      }
    }
  });
}

TEST_P(Contract, RawParts) {
  for (const Format& format : {Format::raw({16}), Format::raw({1024, 64}), Format::raw({48, 16, 2048, 32})}) {
    TestCase c = small_case(1);
    c.config.format = format;
    for_each_shape(c, [&](const TestCase& each) { add(each); });
  }
  run_added();
}

TEST_P(Contract, OneExchangeServesSeveralFormats) {
  for (const bool caller_memory : {false, true}) {
    TestCase c = small_case(caller_memory);
    c.config.format = Format::fp32();  // the largest message
    c.config.hidden = 512;
    c.caller_memory = caller_memory;
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      for (const Format& format :
           {Format::bf16(), Format::fp8_e4m3(), Format::raw({64, 256, 16}), Format::fp32(), Format::mxfp4(),
            Format::fp8_e4m3({.column_major = true}), Format::mxfp8(), Format::fp16()}) {
        TestCase call = c;
        call.config.format = format;
        call.type = natural_type(format);
        const StepInputs step = make_inputs(call);
        dispatch_and_combine(exchange, call, step, make_expert_outputs(call, step));
      }
    });
  }
}

TEST_P(Contract, HiddenSizes) {
  for (const int hidden : {64, 1000, 2688, 2880, 5120, 7168, 7424}) {
    for (const Format& format :
         {Format::bf16(), Format::fp8_e4m3(), Format::mxfp8(), Format::mxfp4(), Format::nvfp4()}) {
      TestCase c = small_case(static_cast<std::uint64_t>(hidden));
      c.config.hidden = hidden;
      c.config.max_tokens = 3;
      c.config.format = format;
      const bool halves = format.kind == FormatKind::mxfp4 || format.kind == FormatKind::nvfp4;
      const int multiple = halves ? 32 : format.quantises() ? 16 : 1;
      const bool fits = hidden % multiple == 0;
      if (fits) {
        add(c);
        continue;
      }
      run(c.ranks, describe(c),
          [&](Rank rank) { require_refused(str(hidden), [&] { SyncExchange exchange(rank, c.config); }); });
    }
  }
  run_added();
}

TEST_P(Contract, InputStrides) {
  for (const int gap : {0, 16, 48, 4096}) {
    for (const Format& format : {Format::bf16(), Format::fp8_e4m3(), Format::raw({32, 16})}) {
      TestCase c = small_case(static_cast<std::uint64_t>(gap));
      c.input_gap = gap;
      c.config.format = format;
      add(c);
      c.split_phases = true;
      add(c);
    }
  }
  run_added();
}

}  // namespace
}  // namespace ferry::contract
