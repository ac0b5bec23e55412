// A format that the tests have registered: dispatch calls its encoder, and its rows are received as those of
// a raw format with the same bytes.
#include "harness/own_format.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

#ifdef FERRY_TEST_HOOKS
constexpr bool kHasGuards = true;
#else
constexpr bool kHasGuards = false;
#endif

// In every process, before ranks are started.
const Format kOwn = register_format("test_int8", own_encoder(Misbehaviour::none));
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
const Format kOddPart = register_format("test_odd_part", own_encoder(Misbehaviour::odd_part));

// A step of a raw format whose parts are the encoded tokens, and the tokens [N, H] of each rank.
struct OwnStep {
  TestCase c;
  StepInputs step;
  std::vector<std::vector<std::byte>> tokens;
};

// Encodes as docs/guides/own_format.md says, from the values.
void append_encoded(const std::vector<float>& values, oracle::RankInputs& inputs) {
  float largest = 0;
  for (const float x : values) largest = std::max(largest, std::abs(x));
  const float scale = largest / 127;
  for (const float x : values)
    inputs.parts[0].push_back(static_cast<std::byte>(scale == 0 ? 0 : std::lrint(x / scale)));
  std::vector<std::byte> part(16, std::byte{0});
  std::memcpy(part.data(), &scale, sizeof scale);
  inputs.parts[1].insert(inputs.parts[1].end(), part.begin(), part.end());
}

OwnStep own_step(TestCase c, DType type) {
  c.config.format = Format::raw({c.config.hidden, 16});
  c.type = type;
  OwnStep own{c, make_inputs(c), {}};
  for (oracle::RankInputs& inputs : own.step.inputs.ranks) {
    Random random = Random::of({c.seed, 77, own.tokens.size()});
    std::vector<std::byte>& rows = own.tokens.emplace_back();
    inputs.parts[0].clear();
    inputs.parts[1].clear();
    for (std::int64_t token = 0; token < inputs.tokens; ++token) {
      std::vector<float> values;
      for (int column = 0; column < c.config.hidden; ++column) {
        std::byte stored[4];
        oracle::store(type, static_cast<float>(random.uniform() - 0.5), stored);
        values.push_back(token == 0 ? 0.0f : oracle::load(type, stored));
        if (token == 0) oracle::store(type, 0, stored);
        rows.insert(rows.end(), stored, stored + bytes_of(type));
      }
      append_encoded(values, inputs);
    }
  }
  return own;
}

Config own_config(const OwnStep& own, const Format& format) {
  Config config = own.c.config;
  config.format = format;
  return config;
}

// A dispatch of the tokens themselves, which compares with the step.
class OwnRun {
 public:
  OwnRun(SyncExchange& exchange, const OwnStep& own)
      : tokens_(GuardedBuffer::of(own.tokens[static_cast<std::size_t>(exchange.rank().index())])),
        run_(exchange, own.c, own.step) {
    run_.tokens().parts = {tokens_.data()};
    run_.tokens().strides = {};
    run_.options().format = std::nullopt;
  }
  DispatchRun& operator*() { return run_; }
  DispatchRun* operator->() { return &run_; }

 private:
  GuardedBuffer tokens_;
  DispatchRun run_;
};

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
      if (layout == Layout::rank_major) {
        c.weights_from = WeightsFrom::none;
      } else {
        c.config.shared_experts = ranks == 2 ? 2 : ranks == 4 ? 1 : 0;
        c.shared_outputs = ranks == 4;
      }
      GetParam().choose_backend(c.config);
      const OwnStep own = own_step(c, ranks == 4 ? DType::fp32 : DType::bf16);
      const oracle::ExpertOutputs outputs = make_expert_outputs(own.c, own.step);
      run(c.ranks, describe(own.c), [&](Rank rank) {
        SyncExchange exchange(rank, own_config(own, kOwn));
        OwnRun dispatch(exchange, own);
        dispatch->run();
        const Plan plan = dispatch->received().plan.copy();
        CombineRun(exchange, own.c, own.step, outputs, plan, dispatch->received().weight).run();
        OwnRun by_plan(exchange, own);
        by_plan->run_with_plan(plan);
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
  const OwnStep own = own_step(c, DType::bf16);
  run(c.ranks, describe(own.c), [&](Rank rank) {
    const bool encodes = rank.index() == 1;
    for (const auto& [format, words] : {std::pair{kThrows, "test_throws has failed: no row today"},
                                        {kThrowsTimeout, "test_throws_timeout has failed: no row in time"},
                                        {kThrowsNumber, "test_throws_number has failed with an exception"}}) {
      SyncExchange exchange(rank, own_config(own, format));
      OwnRun dispatch(exchange, own);
      for (int call = 0; call < 2; ++call) {  // the exchange stays usable
        const std::string text = usage_error([&] { dispatch->call(); });
        require(text.find(words) != std::string::npos, text);
      }
    }
    SyncExchange exchange(rank, own_config(own, kWritesPast));
    OwnRun dispatch(exchange, own);
    const std::string text = usage_error([&] { dispatch->call(); });
    // In host memory every rank gets the error, on a device the rank whose kernel has written.
    const bool reported = kHasGuards && (encodes || !GetParam().on_device());
    const bool named =
        text.find("test_writes_past has written past the end of part 0 of row 3") != std::string::npos;
    require(named == reported, "rank ", rank.index(), ": '", text, "'");
  });
}

TEST_P(Contract, OwnFormatsAreRefusedWhereTheyDoNotFit) {
  TestCase c = small_case(2);
  GetParam().choose_backend(c.config);
  const OwnStep own = own_step(c, DType::bf16);
  const auto refusal = [&](const Config& config) { return usage_error([&] { size_of(config, c.ranks); }); };
  EXPECT_NE(refusal(own_config(own, kOddPart)).find("test_odd_part: part_bytes of its encoder"),
            std::string::npos);
  run(c.ranks, describe(own.c), [&](Rank rank) {
    SyncExchange exchange(rank, own_config(own, Format::bf16()));
    OwnRun dispatch(exchange, own);
    dispatch->options().format = kOwn;
    const std::string text = usage_error([&] { dispatch->call(); });
    require(text.find("construct the exchange with format = test_int8") != std::string::npos, text);
  });
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
