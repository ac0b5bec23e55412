// A format that the tests have registered: dispatch calls its encoder, and its rows are received as those of
// a raw format with the same bytes.
#include "harness/own_format.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "format/registry.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

#ifdef FERRY_TEST_HOOKS
constexpr bool kHasGuards = true;
#else
constexpr bool kHasGuards = false;
#endif

// In every process, before ranks are started.
const Format kOwn = own_format();
const Format kWritesPast = register_format("test_writes_past", own_encoder(Misbehaviour::writes_past));
const Format kThrows = register_format("test_throws", own_encoder(Misbehaviour::throws));
// Encoders that throw what a call of Ferry may throw for other reasons, and what has no text.
Encoder encoder_that(std::function<void()> throws) {
  Encoder encoder = own_encoder(Misbehaviour::none);
  encoder.on_host = [throws](const EncoderCall&) { throws(); };
  if (encoder.on_device) encoder.on_device = encoder.on_host;
  return encoder;
}
const Format kThrowsTimeout =
    register_format("test_throws_timeout", encoder_that([] { throw TimeoutError("no row in time", {}); }));
const Format kThrowsNumber = register_format("test_throws_number", encoder_that([] { throw 5; }));
Encoder encoder_without_sizes(std::function<void()> throws) {
  Encoder encoder = own_encoder(Misbehaviour::none);
  encoder.part_bytes = [throws](int) {
    throws();
    return std::array<std::int64_t, kMaxParts>{};
  };
  return encoder;
}
const Format kSizesThrowTimeout = register_format(
    "test_sizes_throw_timeout", encoder_without_sizes([] { throw TimeoutError("no size in time", {}); }));
const Format kSizesThrowNumber =
    register_format("test_sizes_throw_number", encoder_without_sizes([] { throw 7; }));
const Format kOddPart = register_format("test_odd_part", own_encoder(Misbehaviour::odd_part));

// A case of the tests' own format.
TestCase own_case(TestCase c, DType type) {
  c.own_format = true;
  c.config.format = own_format_as_raw(c.config.hidden);
  c.type = type;
  return c;
}

Config with_format(const TestCase& c, const Format& format) {
  Config config = c.config;
  config.format = format;
  return config;
}

// Two shared experts on two ranks, one on four.
TEST_P(Contract, OwnFormats) {
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
    for (const int ranks : kGroupSizes) {
      TestCase c = small_case(ranks);
      c.ranks = ranks;
      c.config.experts = 2 * ranks + 1;
      c.config.layout = layout;
      c.config.alignment = layout == Layout::rank_major ? 1 : 4;
      c.config.zero_padding = ranks == 2;
      c.split_phases = ranks == 3;
      c.input_gap = ranks == 3 ? 48 : 0;
      if (layout == Layout::rank_major) {
        c.weights_from = WeightsFrom::none;
      } else {
        c.config.shared_experts = ranks == 2 ? 2 : ranks == 4 ? 1 : 0;
        c.shared_outputs = ranks == 4;
      }
      GetParam().choose_backend(c.config);
      c = own_case(c, ranks == 4 ? DType::fp32 : ranks == 3 ? DType::fp16 : DType::bf16);
      const StepInputs step = make_inputs(c), other = with_new_values(c, step, 1);
      const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
      run(c.ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, exchange_config(c));
        const Plan plan = dispatch_and_combine(exchange, c, step, outputs);
        DispatchRun(exchange, c, other).run_with_plan(plan);
      });
    }
  }
}

TEST_P(Contract, OwnFormatsThatWriteTooMuchOrThrowEndTheCall) {
  TestCase c = small_case(2);
  c.tokens.assign(static_cast<std::size_t>(c.ranks), 0);
  c.tokens[1] = c.config.max_tokens;
  c.full = true;
  c.config.check_calls = true;
  GetParam().choose_backend(c.config);
  c = own_case(c, DType::bf16);
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    const bool encodes = rank.index() == 1;
    for (const auto& [format, words] :
         {std::pair{kThrows, "test_throws has failed: no row today"},
          {kThrowsTimeout, "test_throws_timeout has failed: no row in time"},
          {kThrowsNumber,
           "test_throws_number has failed with an exception that is not a std::exception: throw one"}}) {
      SyncExchange exchange(rank, with_format(c, format));
      DispatchRun dispatch(exchange, c, step);
      for (int call = 0; call < 2; ++call) {  // the exchange stays usable
        require_refused(words, [&] { dispatch.call(); });
      }
      // The exchange's destructor waits for the device, which the other rank may still need for its call.
      rank.barrier();
    }
    SyncExchange exchange(rank, with_format(c, kWritesPast));
    DispatchRun dispatch(exchange, c, step);
    const std::string text = usage_error([&] { dispatch.call(); });
    // In host memory every rank gets the error, on a device the rank whose kernel has written.
    const bool reported = kHasGuards && (encodes || !GetParam().on_device());
    const bool named =
        text.find("test_writes_past has written past the end of part 0 of row 3") != std::string::npos &&
        text.find("return more from part_bytes") != std::string::npos;
    require(named == reported, "rank ", rank.index(), ": '", text, "'");
  });
}

TEST_P(Contract, OwnFormatsAreRefusedWhereTheyDoNotFit) {
  TestCase c = small_case(2);
  GetParam().choose_backend(c.config);
  c = own_case(c, DType::bf16);
  const StepInputs step = make_inputs(c);
  const auto refusal = [&](const Config& config) { return usage_error([&] { size_of(config, c.ranks); }); };
  EXPECT_NE(refusal(with_format(c, kOddPart)).find("test_odd_part: part_bytes of its encoder"),
            std::string::npos);
  const std::string failed =
      str(": part_bytes of its encoder, for hidden = ", c.config.hidden, ", has failed");
  for (const auto& [format, words] :
       {std::pair{kSizesThrowTimeout, "test_sizes_throw_timeout" + failed + ": no size in time"},
        {kSizesThrowNumber, "test_sizes_throw_number" + failed +
                                " with an exception that is not a std::exception: throw one"}}) {
    for (int call = 0; call < 2; ++call) {  // a failure is not kept as an answer
      const std::string text = refusal(with_format(c, format));
      EXPECT_NE(text.find(words), std::string::npos) << "expected '" << words << "', got '" << text << "'";
    }
  }
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, with_format(c, Format::bf16()));
    DispatchRun dispatch(exchange, c, step);
    dispatch.options().format = kOwn;
    require_refused("construct the exchange with format = test_int8", [&] { dispatch.call(); });
  });
}

TEST_P(Contract, OwnFormatsTakeNoOptionsOfOtherFormats) {
  TestCase c = small_case(6);
  GetParam().choose_backend(c.config);
  c = own_case(c, DType::bf16);
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, exchange_config(c));
    GuardedBuffer scales =
        GuardedBuffer::of(std::vector<float>(static_cast<std::size_t>(c.config.experts), 0.5f));
    const auto refused = [&](const char* option, const auto& change) {
      DispatchRun dispatch(exchange, c, step);
      change(dispatch.options());
      require_refused(option, [&] { dispatch.call(); });
    };
    refused("apply_weights", [](DispatchOptions& options) { options.apply_weights = true; });
    refused("dot_rows", [&](DispatchOptions& options) { options.dot_rows = scales.data(); });
    refused("global_scale", [&](DispatchOptions& options) { options.global_scale = scales.as<float>(); });
    refused("input_scales", [&](DispatchOptions& options) {
      options.input_scales = {scales.as<float>(), static_cast<std::size_t>(c.config.experts)};
    });
  });
}

TEST_P(Contract, AnExchangeOfAnOwnFormatServesOthersThatFit) {
  TestCase raw = small_case(4);
  GetParam().choose_backend(raw.config);
  const TestCase c = own_case(raw, DType::bf16);
  raw.config.format = Format::raw({16, 32});
  const StepInputs step = make_inputs(c), raw_step = make_inputs(raw);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step),
                              raw_outputs = make_expert_outputs(raw, raw_step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, exchange_config(c));
    dispatch_and_combine(exchange, raw, raw_step, raw_outputs);
    for (const Format& other : {kThrows, Format::bf16()}) {
      DispatchRun dispatch(exchange, c, step);
      dispatch.options().format = other;
      require_refused("construct the exchange with format = " + to_string(other), [&] { dispatch.call(); });
    }
    dispatch_and_combine(exchange, c, step, outputs);
  });
}

// In this process.
std::atomic<int> asked_for_part_bytes = 0;

const Format kCounted = register_format("test_counted", [] {
  Encoder encoder = own_encoder(Misbehaviour::none);
  encoder.part_bytes = [part_bytes = encoder.part_bytes](int hidden) {
    ++asked_for_part_bytes;
    return part_bytes(hidden);
  };
  return encoder;
}());

TEST_P(Contract, EncodersOfOwnFormatsAreAskedForSizesBeforeTheCallsOnly) {
  TestCase c = small_case(3);
  GetParam().choose_backend(c.config);
  c = own_case(c, DType::bf16);
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, with_format(c, kCounted));
    rank.barrier();
    const int before = asked_for_part_bytes;
    require(before > 0, "part_bytes was not called");
    for (int call = 0; call < 3; ++call) dispatch_and_combine(exchange, c, step, outputs);
    require_equal(asked_for_part_bytes.load(), before, "calls of part_bytes");
  });
}

TEST(OwnFormats, HavePartsOfEachHiddenSize) {
  for (const int hidden : {64, 32, 64, 4096})
    EXPECT_EQ(as_raw(kOwn, hidden), own_format_as_raw(hidden)) << "hidden = " << hidden;
}

TEST(OwnFormats, HaveNamesOfTheirOwn) {
  EXPECT_EQ(parse_format("test_int8"), kOwn);
  EXPECT_EQ(to_string(kOwn), "test_int8");
  EXPECT_TRUE(kOwn.quantises());
  EXPECT_FALSE(kOwn.is_raw());
  EXPECT_FALSE(kOwn.value_type());
  for (const char* name : {"", "9x", "a-b", "raw:16", "bf16", "mxfp8", "test_int8"}) {
    const std::string text = usage_error([&] { register_format(name, own_encoder(Misbehaviour::none)); });
    EXPECT_NE(text.find("register_format"), std::string::npos) << "'" << name << "': " << text;
  }
  EXPECT_NE(usage_error([] { register_format("test_empty", {}); }).find("part_bytes"), std::string::npos);
  EXPECT_NE(usage_error([] { parse_format("test_nothing"); }).find("unknown"), std::string::npos);
}

}  // namespace
}  // namespace ferry::contract
