// Scales as tiles of 128 rows x 4 blocks: every byte of them, for every format that has them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::contract {
namespace {

constexpr const char* kTiled[] = {"mxfp8-tiles", "mxfp8-ocp-tiles", "mxfp4-up-tiles", "nvfp4-tiles",
                                  "nvfp4-token-tiles"};

TestCase tiled_case(TestCase c, const char* format) {
  c.config.format = parse_format(format);
  c.config.hidden = c.config.format.kind == FormatKind::mxfp8 ? 656 : 608;  // neither fills its last tile
  c.weights_from = WeightsFrom::none;
  return c;
}

TEST_P(Contract, ScalesAsTiles) {
  for (const char* format : kTiled) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      for (const int ranks : kGroupSizes) {
        TestCase c = tiled_case(small_case(ranks), format);
        c.ranks = ranks;
        c.config.experts = 2 * ranks + 1;
        c.config.layout = layout;
        c.config.alignment = ranks % 2 == 0 ? 4 : 1;
        c.config.zero_padding = ranks == 2;
        c.any_bits = ranks > 2;
        c.type = ranks == 3 ? DType::fp32 : DType::bf16;
        add(c);
        c.split_phases = true;
        c.caller_memory = false;
        add(c);
      }
    }
  }
  run_added();
}

// The ids of `tokens` tokens of each of two ranks with top_k = 1: rows of expert e in all are counts[e].
std::vector<std::vector<std::int64_t>> ids_of_counts(const std::vector<int>& counts, int tokens) {
  std::vector<std::vector<std::int64_t>> ids(2, std::vector<std::int64_t>(tokens, -1));
  int next = 0;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    for (int i = 0; i < counts[expert]; ++i, ++next)
      ids[next % 2].at(next / 2) = static_cast<std::int64_t>(expert);
  }
  return ids;
}

// Groups that end before, at and after a tile's last row, and empty ones between them and at the ends.
TEST_P(Contract, TilesOfEveryGroupSize) {
  const std::vector<int> counts = {0, 1, 127, 0, 128, 129, 1, 0};
  constexpr int kTokens = 200;
  for (const char* format : kTiled) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      for (const int alignment : {1, 128}) {
        TestCase c = tiled_case(small_case(7), format);
        c.config.hidden = 96;
        c.config.experts = static_cast<int>(counts.size());
        c.config.top_k = 1;
        c.config.max_tokens = kTokens;
        c.config.layout = layout;
        c.config.alignment = alignment;
        c.config.placement = Placement::blocks(c.config.experts, 2);
        c.tokens = {kTokens, kTokens};
        // All groups on rank 0, then in halves.
        for (const bool together : {true, false}) {
          std::vector<ExpertLocation> locations(counts.size());
          for (int e = 0; e < c.config.experts; ++e) locations[e] = {0, e};
          if (together) c.config.placement = Placement::table(locations, 2);
          if (!run_case(c, inputs_from_ids(c, ids_of_counts(counts, kTokens)))) return;
          c.config.placement = Placement::blocks(c.config.experts, 2);
        }
      }
    }
  }
}

TEST_P(Contract, TilesOfDroppedRowsAndSharedExperts) {
  for (const char* format : kTiled) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      for (const int shared : {0, 2}) {
        TestCase c = tiled_case(small_case(shared + 1), format);
        c.ranks = 3;
        c.config.hidden = 160;
        c.config.experts = 6;
        c.config.top_k = 2;
        c.config.max_tokens = 150;
        c.config.layout = layout;
        c.config.alignment = 2;
        c.config.shared_experts = shared;
        c.config.zero_padding = shared > 0;
        c.tokens = {131, 0, 150};
        add(c);
        c.config.capacity = layout == Layout::expert_major ? 206 : 130;  // cuts a group inside a tile
        c.split_phases = true;
        add(c);
      }
    }
  }
  run_added();
}

// The message with which the configuration is refused.
std::string refusal(const Config& config) {
  try {
    size_of(config, 2);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_P(Contract, TilesAreRefusedWhereThereAreNone) {
  for (const char* format : kTiled) {
    Config config = tiled_case(small_case(1), format).config;
    config.layout = Layout::rank_major;
    EXPECT_NE(refusal(config).find(str(format, ": rank_major has no tiles")), std::string::npos)
        << refusal(config);
    config.layout = Layout::expert_major;
    config.format.mx.column_major = config.format.nvfp4_options.column_major = true;
    EXPECT_NE(refusal(config).find("exclude each other"), std::string::npos) << refusal(config);
  }
}

// Calls whose format has tiles, on an exchange whose configuration has none.
TEST_P(Contract, TilesOfACall) {
  TestCase c = small_case(3);
  c.config.format = Format::bf16();
  c.config.hidden = 160;
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    for (const char* format : kTiled) {
      TestCase call = c;
      call.config.format = parse_format(format);
      const StepInputs step = make_inputs(call);
      dispatch_and_combine(exchange, call, step, make_expert_outputs(call, step));
      DispatchRun own_memory(exchange, call, step);
      own_memory.options().memory.parts[1] = nullptr;
      require_refused("memory.parts[1]", [&] { own_memory.call(); });
      DispatchRun fewer_rows(exchange, call, step);
      fewer_rows.options().memory.rows = 3;
      require_refused("tiles", [&] { fewer_rows.call(); });
    }
  });
}

}  // namespace
}  // namespace ferry::contract
