// Random tokens and ids for nvFuser's calls, and what a dispatch must return, by loops.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "ferry/nvfuser.hpp"

namespace ferry::test {

using Integers = std::vector<std::int64_t>;

inline constexpr int kHidden = 4;

// Tokens and ids of every rank; the last rank has no tokens.
struct Step {
  int ranks, top_k, experts;
  std::vector<std::vector<float>> tokens;
  std::vector<std::vector<std::int64_t>> ids;

  Step(std::mt19937_64& random, int rank_count, int k)
      : ranks(rank_count), top_k(k), experts(4 * rank_count) {
    for (int rank = 0; rank < ranks; ++rank) {
      const auto count = rank + 1 == ranks ? 0 : random() % 8;
      auto& values = tokens.emplace_back(count * kHidden);
      for (float& value : values) value = static_cast<float>(random() % 4096) / 7;
      auto& list = ids.emplace_back();
      for (std::size_t token = 0; token < count; ++token) {
        std::vector<std::int64_t> order(experts);
        std::iota(order.begin(), order.end(), 0);
        std::ranges::shuffle(order, random);
        for (int slot = 0; slot < top_k; ++slot) list.push_back(random() % 5 == 0 ? -1 : order[slot]);
      }
    }
  }
  std::int64_t count(int rank) const { return static_cast<std::int64_t>(tokens[rank].size()) / kHidden; }
  std::set<std::int64_t> targets(int rank, std::int64_t token) const {
    std::set<std::int64_t> found;
    for (int slot = 0; slot < top_k; ++slot)
      if (const auto id = ids[rank][token * top_k + slot]; id >= 0) found.insert(id / 4);
    return found;
  }
};

inline float expert(float value, std::int64_t rank) {
  return value * (static_cast<float>(rank) + 0.3f);
}

// `values`: recv_x in host memory.
inline void check_dispatch(const Step& step, int rank, const nvfuser::DispatchResult& received,
                           const float* values) {
  struct Row {
    std::int64_t expert, source, token;
  };
  std::vector<Row> rows;
  Integers to(step.ranks), from(step.ranks);
  for (int source = 0; source < step.ranks; ++source) {
    for (std::int64_t token = 0; token < step.count(source); ++token) {
      const auto targets = step.targets(source, token);
      if (source == rank)
        for (const auto target : targets) ++to[target];
      if (!targets.contains(rank)) continue;
      ++from[source];
      rows.push_back({step.top_k == 1 ? step.ids[source][token] : 0, source, token});
    }
  }
  std::ranges::stable_sort(rows, {}, &Row::expert);
  EXPECT_EQ(received.n_tokens_to_rank, to);
  EXPECT_EQ(received.n_tokens_from_rank, from);
  ASSERT_EQ(received.recv_src_idx.size(), rows.size());
  ASSERT_EQ(received.recv_topk_idx.size(), rows.size() * step.top_k);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    EXPECT_EQ(received.recv_src_idx[row], rows[row].token);
    EXPECT_EQ(received.recv_src_rank[row], rows[row].source);
    EXPECT_TRUE(std::equal(values + row * kHidden, values + (row + 1) * kHidden,
                           step.tokens[rows[row].source].data() + rows[row].token * kHidden));
    for (int slot = 0; slot < step.top_k; ++slot) {
      const auto id = step.ids[rows[row].source][rows[row].token * step.top_k + slot];
      const auto local = id >= 0 && id / 4 == rank ? id % 4 : -1;
      EXPECT_EQ(received.recv_topk_idx[row * step.top_k + slot], step.top_k == 1 ? id : local);
    }
  }
}

}  // namespace ferry::test
