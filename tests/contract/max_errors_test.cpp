// MAX's call shapes (ferry/max.hpp): wrong arrays, rows that do not come back, unsuitable configurations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "contract/max_calls.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

// Two ranks with two experts each. Rank 0 has the ids {0, 2}, {1, 1}, rank 1 {2, -1}, {0, 3}, {2, 0}; with
// one shared expert.
struct WrongArrays {
  std::string error;
  std::function<void(MaxArrays&)> change;  // of rank 1
  bool of_lengths = false;
};

std::vector<WrongArrays> wrong_arrays() {
  using Received = MaxArrays;
  // Rank 1 receives: shared {0, 2} {1, 2} {2, 2}; expert 2: {0, 1} of rank 0, {0, 0} {2, 0} of rank 1; expert
  // 3: {1, 1} of rank 1.
  return {
      {"rank 1: src_info[3] = {9, 1}, of rank 0, must be below {9, 2}",
       [](Received& r) { r.src_info[6] = 9; }},
      {"rank 1: src_info[3] = {0, -1}, of rank 0, must be below", [](Received& r) { r.src_info[7] = -1; }},
      {"rank 1: src_info[4] = {3, 0}, of rank 1, must be below {3, 2}",
       [](Received& r) { r.src_info[8] = 3; }},
      {"rank 1: src_info[4] = {1, 0} is a row of expert 2, topk_ids[1, 0] of rank 1 is another expert; pass",
       [](Received& r) { r.src_info[8] = 1; }},
      {"rank 1: src_info[5] = {0, 0}, of rank 1, is also in row 4; pass",
       [](Received& r) { r.src_info[10] = 0; }},
      {"rank 1: src_info[1] = {2, 2}, must be {1, 2}: rows of a shared expert",
       [](Received& r) { r.src_info[2] = 2; }},
      {"rank 1: src_info has 6 rows, row_offsets say 7", [](Received& r) { r.src_info.resize(12); }, true},
      {"rank 1: row_offsets[1] = 2, counts give 3; pass", [](Received& r) { r.row_offsets[1] = 2; }},
      {"rank 1: row_offsets has 5 entries, counts give 4", [](Received& r) { r.row_offsets.push_back(7); },
       true},
      {"rank 1: row_offsets is empty", [](Received& r) { r.row_offsets.clear(); }, true},
      {"rank 1: counts has 5 entries, must have 3 x 2", [](Received& r) { r.counts.pop_back(); }, true},
      {"rank 1: counts[1, 0] = -1, must be 0 to max_tokens x top_k = 18; pass",
       [](Received& r) { r.counts[2] = -1; }},
      {"rank 1: counts[0, 1] = 2, must be 3: a shared expert has the 3 tokens of rank 1",
       [](Received& r) { r.counts[1] = 2; }},
      {"rank 1: topk_ids[1, 1] = 3, an expert of rank 1, but src_info has no row of it",
       [](Received& r) {
         r.counts[5] = 0;
         r.row_offsets = {0, 3, 6};
       }},
  };
}

// MaxCalls copies what a device's call takes, so that nothing overlaps there.
TEST_P(Contract, MaxRefusesArraysThatOverlap) {
  if (GetParam().on_device()) GTEST_SKIP() << "of host memory";
  const TestCase c = max_case(small_case(6), 2, 1, Reduction::exact);
  const StepInputs step = make_inputs(c);
  run(2, describe(c), [&](Rank rank) {
    const bool odd = rank.index() == 1;
    MaxCalls exchange(rank, c.config);
    const std::int64_t tokens = c.config.max_tokens, row = 2 * c.config.hidden,
                       slots = tokens * c.config.top_k;
    GuardedBuffer x(tokens * row), sums(tokens * row);
    const std::vector<float> ones(static_cast<std::size_t>(slots), 1.0f);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(slots));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i) % c.config.experts;
    const MaxArrays received = exchange.ep_fused_dispatch(Tokens::rows(x.data(), tokens), ids.data());
    const std::int64_t rows = received.row_offsets.back();
    GuardedBuffer outputs(rows * row), shared(tokens * row);
    max::CombineInput input({outputs.data()}, received);
    input.tokens = tokens;
    // Far apart, so that a result over one of them meets no other.
    GuardedBuffer arrays(5 << 16);
    const auto placed = [&]<class T>(std::int64_t index, std::span<const T> values) {
      std::byte* const to = arrays.data() + (index << 16);
      std::memcpy(to, values.data(), values.size_bytes());
      return std::span<const T>(reinterpret_cast<const T*>(to), values.size());
    };
    input.src_info = placed(0, input.src_info);
    input.row_offsets = placed(1, input.row_offsets);
    input.counts = placed(2, input.counts);
    input.topk_ids = Ids(placed(3, std::span<const std::int32_t>(ids)).data());
    const float* const weights = placed(4, std::span<const float>(ones)).data();
    const max::CombineOutput good{.output_tokens = {sums.data()},
                                  .router_weights = weights,
                                  .shared_outputs = shared.data(),
                                  .epilogue = {.residual = sums.data()}};
    const auto refused = [&](const std::string& name,
                             const std::function<void(max::CombineOutput&)>& change) {
      max::CombineOutput output = good;
      if (odd) change(output);
      const std::string text = usage_error([&] { exchange.ep_fused_combine(input, output); });
      require(text.find("ep_combine: rank 1: ") != std::string::npos &&
                  text.find(name + " (") != std::string::npos,
              name, ": '", text, "'");
      exchange.ep_fused_combine(input, good);
    };
    refused("input_tokens",
            [&](auto& output) { output.output_tokens.data = outputs.data() + (rows - 1) * row; });
    refused("router_weights", [&](auto& output) { output.output_tokens.data = const_cast<float*>(weights); });
    refused("src_info", [&](auto& output) {
      output.output_tokens.data = const_cast<void*>(static_cast<const void*>(input.src_info.data()));
    });
    refused("row_offsets", [&](auto& output) {
      output.output_tokens.data = const_cast<void*>(static_cast<const void*>(input.row_offsets.data()));
    });
    refused("counts", [&](auto& output) {
      output.output_tokens.data = const_cast<void*>(static_cast<const void*>(input.counts.data()));
    });
    refused("topk_ids",
            [&](auto& output) { output.output_tokens.data = const_cast<void*>(input.topk_ids.data); });
    refused("residual", [&](auto& output) { output.epilogue.residual = sums.data() + 16; });
    refused("shared_outputs", [&](auto& output) { output.shared_outputs = sums.data(); });
  });
}

TEST_P(Contract, MaxRefusesWrongArraysOnEveryRank) {
  TestCase c = max_case(small_case(5), 2, 1, Reduction::exact);
  c.config.experts = 4;
  c.config.top_k = 2;
  c.config.hidden = 8;
  const bool on_device = GetParam().on_device();
  run(2, describe(c), [&](Rank rank) {
    const bool second = rank.index() == 1;
    const std::vector<std::int32_t> ids =
        second ? std::vector<std::int32_t>{2, -1, 0, 3, 2, 0} : std::vector<std::int32_t>{0, 2, 1, 1};
    const std::int64_t count = second ? 3 : 2;
    const std::vector<std::uint16_t> values(static_cast<std::size_t>(count * 8), 0x3F80);
    std::vector<std::uint16_t> result(static_cast<std::size_t>(count * 8)), expected;
    MaxCalls exchange(rank, c.config);
    const MaxArrays good = exchange.ep_fused_dispatch(Tokens::rows(values.data(), count), ids.data());
    const auto combine_with = [&](const MaxArrays& arrays, bool split) {
      std::ranges::fill(result, std::uint16_t{1});
      const max::CombineInput input({.data = good.output_tokens}, arrays);
      const max::CombineOutput output{.output_tokens = {.data = result.data()}};
      if (!split) return exchange.ep_fused_combine(input, output);
      exchange.ep_combine_async(input, output);
      exchange.ep_combine_wait();
    };
    combine_with(good, false);
    expected = result;
    for (const WrongArrays& wrong : wrong_arrays()) {
      if (on_device && wrong.of_lengths) continue;  // which a device's arrays do not have
      for (const bool split : {false, true}) {
        MaxArrays bad = good;
        if (second) wrong.change(bad);
        require_error(on_device && !second ? "rank 1 refused" : wrong.error,
                      [&] { combine_with(bad, split); });
        combine_with(good, split);
        require(result == expected, "another result after '", wrong.error, "'");
      }
    }
    require_error("rank 1: topk_ids without tokens; pass tokens", [&] {
      max::CombineInput input({.data = good.output_tokens}, good);
      if (second) input.topk_ids = ids.data();
      exchange.ep_fused_combine(input, {.output_tokens = {.data = result.data()}});
    });
    require_error("lane 1 does not exist", [&] { exchange.ep_combine_wait(1); });
    require_error("call ep_combine_async first", [&] { exchange.ep_combine_wait(); });
    require_error("call ep_dispatch_async first", [&] { exchange.ep_dispatch_wait(); });
    exchange.ep_dispatch_async(Tokens::rows(values.data(), count), ids.data());
    require_error("call ep_dispatch_wait first", [&] { combine_with(good, false); });
    exchange.ep_dispatch_wait();
    combine_with(good, true);
    require(result == expected, "another result after calls out of order");
  });
}

// Errors name MAX's arguments and remedies that its calls have, on every rank.
TEST_P(Contract, MaxErrorsSpeakOfItsArguments) {
  TestCase c = max_case(small_case(10), 2, 0, Reduction::exact);
  c.config.experts = 4;
  c.config.top_k = 1;
  c.config.hidden = 32;
  run(2, describe(c), [&](Rank rank) {
    const bool second = rank.index() == 1;
    const std::vector<std::uint16_t> values(320, 0x3F80);  // 10 tokens, of which a good call passes 2
    const std::vector<std::int32_t> ids = {0, 3, 0, 3, 0, 3, 0, 3, 0, 3};
    std::vector<std::uint16_t> result(64);
    MaxCalls exchange(rank, c.config);
    const auto dispatch_with = [&](auto change) {
      Tokens tokens = Tokens::rows(values.data(), 2);
      Ids topk_ids = ids.data();
      max::DispatchOptions options;
      change(tokens, topk_ids, options);
      return exchange.ep_fused_dispatch(tokens, topk_ids, options);
    };
    const auto good = [](Tokens&, Ids&, max::DispatchOptions&) {};
    const auto said = [&](const std::string& words) {
      return GetParam().on_device() && !second ? "rank 1 refused" : words;
    };
    const auto refused = [&](const std::string& words, auto change) {
      require_error(said(words), [&] { second ? dispatch_with(change) : dispatch_with(good); });
    };
    refused("convert the tokens to bf16, or construct the exchange with format = fp16",
            [](Tokens& tokens, Ids&, max::DispatchOptions&) { tokens.type = DType::fp16; });
    refused("ep_dispatch: 10 tokens on rank 1, max_tokens is 9",
            [](Tokens& tokens, Ids&, max::DispatchOptions&) { tokens.count = 10; });
    refused("input_tokens: stride = 4 bytes on rank 1",
            [](Tokens& tokens, Ids&, max::DispatchOptions&) { tokens.strides[0] = 4; });
    refused("ep_dispatch: topk_ids is null for the 2 tokens of rank 1",
            [](Tokens&, Ids& topk_ids, max::DispatchOptions&) { topk_ids.data = nullptr; });
    refused(
        "because its format is bf16: construct it with format = mxfp4-tiles",
        [](Tokens&, Ids&, max::DispatchOptions& options) { options.format = parse_format("mxfp4-tiles"); });
    const MaxArrays received = dispatch_with(good);
    const auto refused_combine = [&](const std::string& words, auto change) {
      const max::CombineInput input({.data = received.output_tokens}, received);
      max::CombineOutput output{.output_tokens = {.data = result.data()}};
      if (second) change(output);
      require_error(said(words), [&] { exchange.ep_fused_combine(input, output); });
    };
    refused_combine("output_tokens: stride = 4 bytes on rank 1",
                    [](max::CombineOutput& output) { output.output_tokens.stride = 4; });
    refused_combine("output_tokens: type = 7",
                    [](max::CombineOutput& output) { output.output_tokens.type = DType{7}; });
    if (GetParam().on_device()) return;
    refused_combine("output_tokens is null for the ",
                    [](max::CombineOutput& output) { output.output_tokens.data = nullptr; });
  });
}

// Rank 1 passes the arrays of another dispatch, which contradict nothing that it knows: rank 0 misses a row.
TEST_P(Contract, MaxFindsRowsThatDoNotComeBack) {
  TestCase c = max_case(small_case(6), 2, 0, Reduction::exact);
  c.config.experts = 4;
  c.config.top_k = 1;
  c.config.hidden = 8;
  run(2, describe(c), [&](Rank rank) {
    const bool second = rank.index() == 1;
    const std::vector<std::uint16_t> values(16, 0x3F80);
    std::vector<std::uint16_t> result(16);
    MaxCalls exchange(rank, c.config);
    const auto dispatch_of = [&](std::int32_t first, std::int32_t other) {
      const std::vector<std::int32_t> ids = {first, other};
      return exchange.ep_fused_dispatch(Tokens::rows(values.data(), 2), ids.data());
    };
    const auto combine_with = [&](const MaxArrays& arrays) {
      exchange.ep_fused_combine({{.data = values.data()}, arrays},
                                {.output_tokens = {.data = result.data()}});
    };
    // Token 1 of rank 0 goes to expert 2, then to expert 3; then only token 0 goes to rank 1.
    const MaxArrays other_expert = dispatch_of(second ? 0 : 2, second ? 0 : 3);
    const MaxArrays fewer = dispatch_of(second ? 0 : 2, 0);
    const MaxArrays last = dispatch_of(second ? 0 : 2, second ? 0 : 2);
    for (const MaxArrays* wrong : {&other_expert, &fewer}) {
      if (second) {
        combine_with(*wrong);
      } else {
        require_error("topk_ids[1, 0] of rank 0 is expert 2: rank 1 has returned no row for it; pass",
                      [&] { combine_with(last); });
      }
      combine_with(last);
      require(std::ranges::equal(result, values), "another result after a wrong combine");
    }
  });
}

TEST_P(Contract, MaxRefusesUnsuitableConfigurations) {
  const TestCase c = max_case(small_case(8), 2, 0, Reduction::exact);
  run(2, describe(c), [&](Rank rank) {
    const auto refused = [&](const char* words, auto change) {
      Config wrong = c.config;
      change(wrong);
      require_error(words, [&] { MaxCalls(rank, wrong); });
    };
    const auto refused_by_one = [&](const char* words, auto change) {
      Config wrong = c.config;
      if (rank.index() == 1) change(wrong);
      require_error(words, [&] { MaxCalls(rank, wrong); });
    };
    refused_by_one("max: capacity = 64, must be 0", [](Config& wrong) { wrong.capacity = 64; });
    refused("max: layout expert_padded, must be expert_major",
            [](Config& wrong) { wrong.layout = Layout::expert_padded; });
    refused("max: capacity = 64, must be 0", [](Config& wrong) { wrong.capacity = 64; });
    refused("max: skip_a2a with reduction unreduced", [](Config& wrong) {
      wrong = max::skip_a2a(wrong);
      wrong.reduction = Reduction::unreduced;
    });
    refused_by_one("max: allreduce_world_size = 3, must be 0 to 2", [](Config& wrong) {
      wrong.shared_experts = 1;
      wrong = max::skip_a2a(wrong, 3);
    });
    refused("max: transfer gather, must be routed", [](Config& wrong) { wrong.transfer = Transfer::gather; });
    refused("max: own_receive_buffers is off, must be on",
            [](Config& wrong) { wrong.own_receive_buffers = false; });
    if (!GetParam().on_device())
      refused("max: check_calls (in C manual_check) is off, must be on",
              [](Config& wrong) { wrong.check_calls = false; });
    refused("max: experts in slices", [](Config& wrong) { wrong.placement = Placement::ep_tp(8, 1, 2); });
    refused("max: a placement with replicas",
            [](Config& wrong) { wrong.placement = Placement::replicas({{0, 1, 2, 3, 4, 5, 6, 7}, {7}}, 8); });
  });
}

}  // namespace
}  // namespace ferry::contract
