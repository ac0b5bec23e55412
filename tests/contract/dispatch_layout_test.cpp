// dispatch_layout(): counts by rank, node and expert, and the ranks of every token.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "ferry/dispatch_layout.hpp"
#include "harness/device.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

// The counts that dispatch_layout() must write for one rank's ids. `node_of` [R]; empty: no counts by node.
struct ExpectedLayout {
  std::vector<std::int32_t> tokens_per_rank, routes_per_expert, tokens_per_node;
  std::vector<std::uint8_t> token_in_rank;

  ExpectedLayout(const StepInputs& step, const Config& config, int rank, const std::vector<int>& node_of) {
    for (const int node : node_of)
      tokens_per_node.resize(std::max(tokens_per_node.size(), static_cast<std::size_t>(node) + 1));
    const int ranks = step.positions.size();
    for (int to = 0; to < ranks; ++to)
      tokens_per_rank.push_back(step.positions.tokens_between[rank * ranks + to]);
    const int replicas = static_cast<int>(step.positions.counts.size()) / ranks;
    for (int replica = 0; replica < replicas; ++replica)
      routes_per_expert.push_back(step.positions.counts[rank * replicas + replica]);
    for (std::int64_t token = 0; token < step.positions.tokens(rank); ++token) {
      std::vector<std::uint8_t> on_rank(static_cast<std::size_t>(ranks)), on_node(tokens_per_node.size());
      for (int slot = 0; slot < config.top_k; ++slot) {
        const int to = step.positions.route(rank, token, slot).destination;
        if (to < 0) continue;
        on_rank[static_cast<std::size_t>(to)] = 1;
        if (!node_of.empty()) on_node[static_cast<std::size_t>(node_of[static_cast<std::size_t>(to)])] = 1;
      }
      token_in_rank.insert(token_in_rank.end(), on_rank.begin(), on_rank.end());
      for (std::size_t node = 0; node < on_node.size(); ++node) tokens_per_node[node] += on_node[node];
    }
  }
};

// Ids as the case's type.
GuardedBuffer ids_of(const TestCase& c, const std::vector<std::int64_t>& ids) {
  if (c.ids == IdType::int64) return GuardedBuffer::of(ids);
  return GuardedBuffer::of(std::vector<std::int32_t>(ids.begin(), ids.end()));
}

// Compares the layout of one rank's ids, in the memory of the backend under test.
void compare_layout(const TestCase& c, const StepInputs& step, int rank, const std::vector<int>& node_of) {
  const bool device_memory = on_device(c.config);
  const std::int64_t ranks = c.ranks, tokens = step.positions.tokens(rank);
  const ExpectedLayout expected(step, c.config, rank, node_of);
  std::optional<Topology> topology;
  if (!node_of.empty()) topology.emplace(node_of);
  GuardedBuffer ids = ids_of(c, step.inputs.ranks[rank].ids);
  GuardedBuffer per_rank(4 * ranks),
      per_expert(4 * static_cast<std::int64_t>(expected.routes_per_expert.size())), in_rank(tokens * ranks),
      per_node(4 * static_cast<std::int64_t>(expected.tokens_per_node.size()));
  DeviceMirror memory(device_memory);
  memory.begin();
  const Stream stream = device_memory ? device::stream(0) : Stream{};
  const Ids given = c.ids == IdType::int64 ? Ids(ids.as<std::int64_t>()) : Ids(ids.as<std::int32_t>());
  dispatch_layout({.ids = memory.translate(given),
                   .tokens = tokens,
                   .top_k = c.config.top_k,
                   .placement = oracle::placement_of(c.config, c.ranks),
                   .topology = topology ? &*topology : nullptr,
                   .source = rank},
                  {.tokens_per_rank = memory.translate(per_rank.as<std::int32_t>()),
                   .routes_per_expert = memory.translate(per_expert.as<std::int32_t>()),
                   .token_in_rank = memory.translate(in_rank.as<bool>()),
                   .tokens_per_node = topology ? memory.translate(per_node.as<std::int32_t>()) : nullptr},
                  device_memory ? MemoryKind::device : MemoryKind::automatic, stream);
  if (device_memory) device::wait(stream);
  memory.download();
  per_rank.require_contents(bytes_of_values(expected.tokens_per_rank), 4, "tokens_per_rank");
  per_expert.require_contents(bytes_of_values(expected.routes_per_expert), 4, "routes_per_expert");
  in_rank.require_contents(bytes_of_values(expected.token_in_rank), 1, "token_in_rank");
  per_node.require_contents(bytes_of_values(expected.tokens_per_node), 4, "tokens_per_node");
  ids.require_guards("ids");
}

// The node of each rank: one node, nodes of 1, 2 and 5 ranks that are not consecutive, a node for each rank;
// empty: without nodes.
std::vector<int> nodes_of(int ranks) {
  if (ranks == 3) return {0, 0, 0};
  if (ranks == 8) return {0, 1, 2, 0, 2, 2, 1, 2};
  std::vector<int> nodes;
  for (int rank = 0; ranks >= 32 && rank < ranks; ++rank) nodes.push_back(ranks == 200 ? rank / 3 : rank);
  return nodes;
}

TEST_P(Contract, DispatchLayoutCountsTokensAndRoutes) {
  std::uint64_t number = 0;
  for (const int ranks : {1, 2, 3, 8, 32, 40, 200}) {
    for (const int tokens : {0, 1, 33, 700, 5000}) {
      TestCase c = small_case(++number);
      c.ranks = ranks;
      c.config.experts = number % 3 == 0 ? 256 : 32 + static_cast<int>(number);
      c.config.top_k = 1 + static_cast<int>(number) % 9;
      c.config.max_tokens = 5000;
      c.config.hidden = 8;
      // The counts are of one rank's tokens, so the others need none.
      c.tokens = std::vector<int>(static_cast<std::size_t>(ranks), 0);
      c.tokens.back() = tokens;
      c.ids = number % 2 == 0 ? IdType::int64 : IdType::int32;
      c.masked = 0.2;
      c.bad_ids = 0.1;
      c.duplicates = true;
      if (number % 4 == 0) {
        Random random(number);
        c.config.placement = draw_placement(random, c.config.experts, ranks);
      } else if (number % 4 == 2) {
        Random random(number);
        c.config.placement = draw_replicas(random, c.config.experts, ranks);
      }
      const StepInputs step = make_inputs(c);
      run(1, describe(c), [&](Rank) { compare_layout(c, step, ranks - 1, nodes_of(ranks)); });
    }
  }
}

TEST_P(Contract, DispatchLayoutRefusesBadArguments) {
  const Config config = on_backend({.experts = 8, .top_k = 2, .hidden = 64, .max_tokens = 8});
  run(1, "arguments of dispatch_layout", [&](Rank) {
    const Placement placement = Placement::blocks(8, 4);
    GuardedBuffer ids = GuardedBuffer::of(std::vector<std::int32_t>(6)), counts(32), in_rank(12);
    const DispatchLayout good{.tokens_per_rank = counts.as<std::int32_t>(),
                              .routes_per_expert = counts.as<std::int32_t>(),
                              .token_in_rank = in_rank.as<bool>()};
    const MemoryKind memory = on_device(config) ? MemoryKind::device : MemoryKind::host;
    const auto require_refused = [&](const char* words, const Ids& given, std::int64_t tokens, int top_k,
                                     const Placement& where, const DispatchLayout& result,
                                     const Topology* topology = nullptr) {
      contract::require_refused(
          words, [&] { dispatch_layout({given, tokens, top_k, where, topology}, result, memory); });
    };
    const Ids right(ids.as<std::int32_t>());
    require_refused("ids is null", {}, 3, 2, placement, good);
    require_refused("tokens = -1", right, -1, 2, placement, good);
    require_refused("top_k = 0", right, 3, 0, placement, good);
    require_refused("top_k = 33", right, 3, 33, placement, good);
    require_refused("the placement has no experts", right, 3, 2, {}, good);
    require_error("memory 3 does not exist, expected automatic, host or device",
                  [&] { dispatch_layout({right, 3, 2, placement}, good, static_cast<MemoryKind>(3)); });
    DispatchLayout wrong = good;
    wrong.tokens_per_rank = nullptr;
    require_refused("tokens_per_rank is null", right, 3, 2, placement, wrong);
    wrong = good;
    wrong.routes_per_expert = nullptr;
    require_refused("routes_per_expert is null", right, 3, 2, placement, wrong);
    wrong = good;
    wrong.tokens_per_node = counts.as<std::int32_t>();
    const Topology of_three({0, 0, 1});
    require_refused("topology is null", right, 3, 2, placement, wrong);
    require_refused("the topology has 3 ranks, and the placement 4", right, 3, 2, placement, wrong,
                    &of_three);
    require_refused("tokens_per_rank (16 bytes", right, 3, 2, placement, good);
    wrong = good;
    wrong.routes_per_expert = ids.as<std::int32_t>() + 5;
    require_refused("which the call writes, overlaps ids (24 bytes", right, 3, 2, placement, wrong);
  });
}

}  // namespace
}  // namespace ferry::contract
