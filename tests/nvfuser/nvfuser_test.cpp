// nvFuser's call shapes: its own case, random ids against a plain loop, and refusals that every rank gets.
#include "ferry/nvfuser.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "format/numbers.hpp"
#include "nvfuser/random_step.hpp"
#include "seed.hpp"

namespace ferry::test {
namespace {

const std::vector<std::int32_t> kCaseIds = {0, 2, 3, 2};

Config case_config() {
  return {.experts = 4, .top_k = 1, .hidden = kHidden, .max_tokens = 4, .format = Format::fp32()};
}

std::vector<float> case_tokens(int rank) {
  std::vector<float> tokens(16);
  std::iota(tokens.begin(), tokens.end(), 1000.0f * static_cast<float>(rank));
  return tokens;
}

nvfuser::DispatchResult dispatch_case(nvfuser::Exchange& exchange, const std::vector<float>& tokens) {
  return exchange.dispatch(Tokens::rows(tokens.data(), 4, DType::fp32), kCaseIds.data());
}

TEST(Nvfuser, ItsOwnCase) {
  Group::threads(2).run([](const Rank& rank) {
    nvfuser::Exchange exchange(rank, case_config());
    const std::vector<float> tokens = case_tokens(rank.index());
    const nvfuser::DispatchResult received = dispatch_case(exchange, tokens);
    const bool first = rank.index() == 0;
    EXPECT_EQ(received.recv_src_idx, first ? Integers({0, 0}) : Integers({1, 3, 1, 3, 2, 2}));
    EXPECT_EQ(received.recv_src_rank, first ? Integers({0, 1}) : Integers({0, 0, 1, 1, 0, 1}));
    EXPECT_EQ(received.recv_topk_idx, first ? Integers({0, 0}) : Integers({2, 2, 2, 2, 3, 3}));
    EXPECT_EQ(received.n_tokens_to_rank, Integers({1, 3}));
    EXPECT_EQ(received.n_tokens_from_rank, first ? Integers({1, 1}) : Integers({3, 3}));
    std::vector<float> result(16, -1);
    exchange.combine({received.recv_x, received}, 4, result.data());
    EXPECT_EQ(std::memcmp(result.data(), tokens.data(), 64), 0);
  });
}

TEST(Nvfuser, RandomIdsAgreeWithALoop) {
  std::mt19937_64 random(seed());
  for (const int ranks : {2, 3, 4, 8}) {
    for (int top_k = 1; top_k <= 4; ++top_k) {
      const Step step(random, ranks, top_k);
      Group::threads(ranks).run([&](const Rank& rank) {
        nvfuser::Exchange exchange(rank, {.experts = step.experts,
                                          .top_k = top_k,
                                          .hidden = kHidden,
                                          .max_tokens = 8,
                                          .format = Format::fp32()});
        const int me = rank.index();
        const auto received = exchange.dispatch(
            Tokens::rows(step.tokens[me].data(), step.count(me), DType::fp32), step.ids[me].data());
        check_dispatch(step, me, received, static_cast<const float*>(received.recv_x));
        std::vector<float> rows(received.recv_src_idx.size() * kHidden), result(step.tokens[me].size(), -1);
        for (std::size_t i = 0; i < rows.size(); ++i)
          rows[i] = expert(static_cast<const float*>(received.recv_x)[i], me);
        exchange.combine({rows.data(), received}, step.count(me), result.data());
        for (std::size_t i = 0; i < result.size(); ++i) {
          float sum = 0;
          for (const auto target : step.targets(me, static_cast<std::int64_t>(i) / kHidden))
            sum += expert(step.tokens[me][i], target);
          EXPECT_EQ(result[i], sum) << "rank " << me << ", value " << i;
        }
      });
    }
  }
}

TEST(Nvfuser, SumsOfBf16AreRoundedOnce) {
  Group::threads(2).run([](const Rank& rank) {
    nvfuser::Exchange exchange(rank, {.experts = 2, .top_k = 2, .hidden = 8, .max_tokens = 1});
    const std::vector<std::uint16_t> tokens(8, fp32_to_bf16(1));
    const std::vector<std::int32_t> ids = {0, 1};
    const auto received = exchange.dispatch(Tokens::rows(tokens.data(), 1), ids.data());
    ASSERT_EQ(received.recv_src_idx.size(), 2u);
    const std::vector<std::uint16_t> rows(16, fp32_to_bf16(rank.index() == 0 ? 256 : 1.5f));
    std::vector<std::uint16_t> result(8);
    exchange.combine({rows.data(), received}, 1, result.data());
    EXPECT_EQ(result, std::vector<std::uint16_t>(8, fp32_to_bf16(257.5f)));
  });
}

// Sums are arithmetic: every NaN is the one of the contract, of one row and of several.
TEST(Nvfuser, NanPayloadsAreNotKept) {
  std::mt19937_64 random(seed());
  for (const int top_k : {1, 2}) {
    for (const Format& format : {Format::bf16(), Format::fp16(), Format::fp32()}) {
      const DType type = *format.value_type();
      const std::uint32_t infinity = type == DType::fp32 ? 0x7F800000 : type == DType::fp16 ? 0x7C00 : 0x7F80;
      const std::uint32_t expected = type == DType::fp32 ? 0x7FFFFFFF : 0x7FFF,
                          payloads = expected - infinity;
      std::vector<std::uint32_t> nans;
      for (int column = 0; column < 8; ++column) {
        const std::uint32_t sign = random() % 2 ? expected + 1 : 0;
        nans.push_back(sign | infinity | (1 + static_cast<std::uint32_t>(random()) % payloads));
      }
      std::vector<std::uint16_t> half(nans.begin(), nans.end());
      half.insert(half.end(), half.begin(), half.end());
      std::vector<std::uint32_t> full = nans;
      full.insert(full.end(), nans.begin(), nans.end());
      const void* const rows = type == DType::fp32 ? static_cast<const void*>(full.data()) : half.data();
      Group::threads(2).run([&](const Rank& rank) {
        nvfuser::Exchange exchange(
            rank, {.experts = 2, .top_k = top_k, .hidden = 8, .max_tokens = 1, .format = format});
        const std::vector<std::int32_t> ids = {0, 1};
        const auto received = exchange.dispatch(Tokens::rows(rows, 1, type), ids.data());
        std::vector<std::uint32_t> result(8);
        exchange.combine({rows, received}, 1, result.data());
        for (int column = 0; column < 8; ++column) {
          const std::uint32_t got = type == DType::fp32
                                        ? result[column]
                                        : reinterpret_cast<const std::uint16_t*>(result.data())[column];
          EXPECT_EQ(got, expected) << to_string(format) << ", top_k " << top_k;
        }
      });
    }
  }
}

TEST(Nvfuser, AnIdOutOfRangeIsReportedAndItsResultIsThere) {
  Group::threads(2).run([](const Rank& rank) {
    nvfuser::Exchange exchange(rank, case_config());
    EXPECT_EQ(exchange.last_dispatch_result().call, 0u);
    const std::vector<float> tokens = case_tokens(rank.index());
    const bool first = rank.index() == 0;
    const std::vector<std::int32_t> ids = {0, first ? 4 : 2, 3, 2};
    const auto dispatch = [&] { exchange.dispatch(Tokens::rows(tokens.data(), 4, DType::fp32), ids.data()); };
    if (first) {
      EXPECT_THROW(dispatch(), BadIdError);
    } else {
      dispatch();
    }
    const nvfuser::DispatchResult received = exchange.last_dispatch_result();
    EXPECT_EQ(received.n_tokens_to_rank, first ? Integers({1, 2}) : Integers({1, 3}));
    std::vector<float> result(16, -1), expected = tokens;
    if (first) std::fill_n(expected.begin() + kHidden, kHidden, 0.0f);
    exchange.combine({received.recv_x, received}, 4, result.data());
    EXPECT_EQ(result, expected);
  });
}

void expect_refusal(const std::function<void()>& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error: " << text;
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// Rank 1 changes what its dispatch returned.
struct Change {
  std::string error;
  std::function<void(nvfuser::DispatchResult&)> apply;
};

TEST(Nvfuser, BadInputIsRefusedOnEveryRank) {
  using Received = nvfuser::DispatchResult;
  const std::vector<Change> changes = {
      {"rank 1: recv_src_rank[5] = 2, must be 0 to 1; pass", [](Received& r) { r.recv_src_rank[5] = 2; }},
      {"rank 1: recv_src_idx[0] = -1, must be 0 to 3; pass", [](Received& r) { r.recv_src_idx[0] = -1; }},
      {"rank 0: rank 1 returned a row of token 3, which came before",
       [](Received& r) { r.recv_src_idx[0] = 3; }},
      {"rank 0: rank 1 returned a row of token 0, which came before",
       [](Received& r) { r.recv_src_idx[0] = 0; }},
      {"recv_src_rank has 2 rows of rank 0, n_tokens_from_rank[0] = 3",
       [](Received& r) { r.recv_src_rank[0] = 1; }},
      {"n_tokens_to_rank[0] of rank 1 is 2, n_tokens_from_rank[1] of rank 0 is 1",
       [](Received& r) { r.n_tokens_to_rank[0] = 2; }},
      {"rank 1: n_tokens_to_rank[1] = 9, must be 0 to 4", [](Received& r) { r.n_tokens_to_rank[1] = 9; }},
      {"rank 1: recv_src_rank has 5 entries, must have 6", [](Received& r) { r.recv_src_rank.pop_back(); }},
      {"rank 1: n_tokens_from_rank has 1 entries, must have 2",
       [](Received& r) { r.n_tokens_from_rank.pop_back(); }},
      {"rank 1: rows is null; recv_src_idx has 6 entries", [](Received& r) { r.recv_x = nullptr; }},
  };
  Group::threads(2).run([&](const Rank& rank) {
    nvfuser::Exchange exchange(rank, case_config());
    const std::vector<float> tokens = case_tokens(rank.index());
    std::vector<float> result(16);
    for (const Change& change : changes) {
      const Received good = dispatch_case(exchange, tokens);
      Received bad = good;
      if (rank.index() == 1) change.apply(bad);
      expect_refusal([&] { exchange.combine({bad.recv_x, bad}, 4, result.data()); }, change.error);
      exchange.combine({good.recv_x, good}, 4, result.data());
      EXPECT_EQ(result, tokens);
    }
    const Received good = dispatch_case(exchange, tokens);
    expect_refusal([&] { exchange.combine({good.recv_x, good}, 5, result.data()); },
                   "rank 0: tokens = 5, must be 0 to max_tokens = 4");
    expect_refusal([&] { exchange.combine({good.recv_x, good}, 3, result.data()); },
                   "n_tokens_to_rank of rank 0 adds up to 4 rows, its 3 tokens have at most 3; pass tokens");
    expect_refusal([&] { exchange.combine({good.recv_x, good}, 4, nullptr); }, "rank 0: result is null");
    std::vector<float> rows(6 * 4);
    float* const inside = rank.index() == 1 ? rows.data() + 4 : result.data();
    expect_refusal([&] { exchange.combine({rows.data(), good}, 4, inside); }, "rank 1: result (64 bytes at ");
    exchange.combine({good.recv_x, good}, 4, result.data());
    EXPECT_EQ(result, tokens);
  });
}

// On every rank, also where only one has the mistake.
TEST(Nvfuser, UnsuitableConfigurationsAreRefused) {
  using Setting = std::function<void(Config&)>;
  const std::pair<std::string, Setting> changes[] = {
      {"nvfuser: format fp8, must be bf16, fp16 or fp32", [](Config& c) { c.format = Format::fp8_e4m3(); }},
      {"nvfuser: max_tokens = 8388609 on 2 ranks, must be at most 8388608",
       [](Config& c) { c.max_tokens = (1 << 23) + 1; }},
      {"nvfuser: local_slots: leave it", [](Config& c) { c.local_slots = 4; }},
      {"nvfuser: shared_experts: leave it", [](Config& c) { c.shared_experts = 1; }},
      {"nvfuser: layout: leave it", [](Config& c) { c.layout = Layout::rank_major; }},
      {"nvfuser: alignment: leave it", [](Config& c) { c.alignment = 4; }},
      {"nvfuser: capacity: leave it", [](Config& c) { c.capacity = 8; }},
      {"nvfuser: repeats: leave it", [](Config& c) { c.repeats = true; }},
      {"nvfuser: zero_padding: leave it", [](Config& c) { c.zero_padding = true; }},
      {"nvfuser: combine_type other than the format: leave it",
       [](Config& c) { c.combine_type = DType::fp16; }},
      {"nvfuser: reduction: leave it", [](Config& c) { c.reduction = Reduction::exact; }},
      {"nvfuser: lanes: leave it", [](Config& c) { c.lanes = 2; }},
      {"nvfuser: input: leave it", [](Config& c) { c.input = Input::replicated; }},
      {"nvfuser: transfer: leave it", [](Config& c) { c.transfer = Transfer::gather; }},
      {"nvfuser: check_calls (in C manual_check): leave it", [](Config& c) { c.check_calls = false; }},
  };
  Group::threads(2).run([&](const Rank& rank) {
    for (const auto& [error, apply] : changes) {
      Config config = case_config();
      if (rank.index() == 1) apply(config);
      expect_refusal([&] { const nvfuser::Exchange exchange(rank, config); }, error);
    }
    Config config = case_config();
    config.placement = Placement::replicas({{0, 1, 2, 3}, {3}}, 4);
    EXPECT_THROW(nvfuser::Exchange(rank, config), UnsupportedError);
    config.placement = Placement::ep_tp(4, 1, 2);
    EXPECT_THROW(nvfuser::Exchange(rank, config), UnsupportedError);
  });
}

TEST(Nvfuser, ReceivesInMemoryOfTheCaller) {
  Group::threads(2).run([](const Rank& rank) {
    nvfuser::Exchange exchange(rank, case_config());
    const std::vector<float> tokens = case_tokens(rank.index());
    std::vector<float> memory(static_cast<std::size_t>(exchange.capacity() * kHidden), -7), result(16);
    const auto dispatch = [&](const float* x, void* recv_x) {
      return exchange.dispatch(Tokens::rows(x, 4, DType::fp32), kCaseIds.data(), {.recv_x = recv_x});
    };
    const nvfuser::DispatchResult received = dispatch(tokens.data(), memory.data());
    EXPECT_EQ(received.recv_x, memory.data());
    EXPECT_EQ(memory[received.recv_src_idx.size() * kHidden], -7);
    exchange.combine({received.recv_x, received}, 4, result.data());
    EXPECT_EQ(result, tokens);
    const bool odd = rank.index() == 1;
    expect_refusal([&] { dispatch(tokens.data(), odd ? memory.data() + 1 : memory.data()); },
                   "recv_x: address ");
    expect_refusal([&] { dispatch(odd ? memory.data() : tokens.data(), memory.data()); }, "recv_x (");
  });
}

// Errors name nvFuser's arguments and remedies that it has.
TEST(Nvfuser, ErrorsSpeakOfItsArguments) {
  Group::threads(2).run([](const Rank& rank) {
    nvfuser::Exchange exchange(rank, case_config());
    const std::vector<float> tokens = case_tokens(rank.index());
    const DType type = rank.index() == 1 ? DType::fp16 : DType::fp32;
    expect_refusal([&] { exchange.dispatch(Tokens::rows(tokens.data(), 4, type), kCaseIds.data()); },
                   "convert the tokens to fp32, or construct the exchange with format = fp16");
    const nvfuser::DispatchResult received = dispatch_case(exchange, tokens);
    std::vector<float> result(16), rows(32);
    const float* const given = rank.index() == 1 ? rows.data() + 1 : rows.data();
    expect_refusal([&] { exchange.combine({given, received}, 4, result.data()); }, "rows: address ");
  });
}

}  // namespace
}  // namespace ferry::test
