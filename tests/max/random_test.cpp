// Random cases of MAX's calls against loops written from docs/guides/max.md: formats that keep bits, any
// placement.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "ferry/max.hpp"
#include "seed.hpp"

namespace ferry::test {
namespace {

constexpr int kRowHidden = 8, kRawBytes = 48;

struct Row {
  int source, token, slot;
};

struct RandomCase {
  explicit RandomCase(std::mt19937_64& random)
      : ranks(1 + draw(random, 4)),
        experts(1 + draw(random, 9)),
        top_k(1 + draw(random, 4)),
        alignment(1 + 3 * draw(random, 2)),
        raw(draw(random, 2) == 1) {
    std::vector<std::int32_t> held(static_cast<std::size_t>(ranks));
    for (int expert = 0; expert < experts; ++expert) {
      const int rank = draw(random, ranks);
      places.push_back({rank, held[static_cast<std::size_t>(rank)]++});
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const int count = draw(random, kMost + 1);
      auto& list = ids.emplace_back();
      for (int route = 0; route < count * top_k; ++route)
        list.push_back(draw(random, 5) == 0 ? -1 : draw(random, experts));
      auto& weight = weights.emplace_back();
      weight.reserve(1);  // an address without tokens too
      for (int route = 0; route < count * top_k; ++route)
        weight.push_back(static_cast<float>(draw(random, 2000)) / 700 - 1);
    }
    seed = static_cast<std::uint32_t>(random());
  }
  static int draw(std::mt19937_64& random, int below) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(below));
  }

  int count(int rank) const { return static_cast<int>(ids[static_cast<std::size_t>(rank)].size()) / top_k; }
  int id(int rank, int token, int slot) const {
    return ids[static_cast<std::size_t>(rank)][static_cast<std::size_t>(token * top_k + slot)];
  }
  int row_bytes() const { return raw ? kRawBytes : 4 * kRowHidden; }
  std::vector<std::uint8_t> token_bytes(int rank, int token) const {
    std::vector<std::uint8_t> bytes;
    for (int i = 0; i < row_bytes(); ++i)
      bytes.push_back(static_cast<std::uint8_t>((seed + 7919u * rank + 104729u * token + 31u * i * i) >> 3));
    return bytes;
  }
  // What the experts return for a row.
  float output(const Row& row, int column) const {
    const auto mixed =
        static_cast<std::uint32_t>(row.source * 977 + row.token * 331 + row.slot * 53 + column * 7);
    return static_cast<float>((seed ^ (mixed * 2654435761u)) >> 8) / 65536 - 100;
  }
  // The rows of each group of a rank, in their order.
  std::vector<std::vector<Row>> groups(int rank) const {
    std::vector<std::vector<Row>> found;
    for (int expert = 0; expert < experts; ++expert) {
      if (places[static_cast<std::size_t>(expert)].rank != rank) continue;
      auto& group = found.emplace_back();
      for (int source = 0; source < ranks; ++source)
        for (int token = 0; token < count(source); ++token)
          for (int slot = 0; slot < top_k; ++slot)
            if (id(source, token, slot) == expert) group.push_back({source, token, slot});
    }
    return found;
  }

  void check(const Rank& rank) const;
  std::vector<float> check_dispatch(const max::DispatchResult& received, int rank) const;

  static constexpr int kMost = 6;
  int ranks, experts, top_k, alignment;
  bool raw;
  std::vector<ExpertLocation> places;
  std::vector<std::vector<std::int32_t>> ids;
  std::vector<std::vector<float>> weights;
  std::uint32_t seed = 0;
};

// Returns the experts' outputs.
std::vector<float> RandomCase::check_dispatch(const max::DispatchResult& received, int rank) const {
  std::vector<std::uint32_t> offsets;
  std::vector<std::int32_t> filled, info, counts;
  std::vector<float> outputs;
  const auto found = groups(rank);
  const auto* rows = static_cast<const std::uint8_t*>(received.output_tokens);
  std::uint32_t at = 0;
  for (std::size_t group = 0; group < found.size(); ++group) {
    std::vector<std::int32_t> from(static_cast<std::size_t>(ranks));
    if (!found[group].empty()) {
      filled.push_back(static_cast<std::int32_t>(group));
      offsets.push_back(at);
    }
    for (const Row& row : found[group]) {
      ++from[static_cast<std::size_t>(row.source)];
      info.insert(info.end(), {row.token, row.slot});
      const auto sent = token_bytes(row.source, row.token);
      EXPECT_EQ(std::memcmp(rows + std::size_t{at} * sent.size(), sent.data(), sent.size()), 0);
      for (int column = 0; column < kRowHidden; ++column) outputs.push_back(output(row, column));
      ++at;
    }
    for (; at % static_cast<unsigned>(alignment) != 0; ++at) {
      info.insert(info.end(), {-1, -1});
      outputs.resize(outputs.size() + kRowHidden);
    }
    counts.insert(counts.end(), from.begin(), from.end());
  }
  offsets.push_back(at);
  EXPECT_EQ(std::vector(received.row_offsets.begin(), received.row_offsets.end()), offsets);
  EXPECT_EQ(std::vector(received.expert_ids.begin(), received.expert_ids.end()), filled);
  EXPECT_EQ(std::vector(received.src_info.begin(), received.src_info.end()), info);
  EXPECT_EQ(std::vector(received.counts.begin(), received.counts.end()), counts);
  return outputs;
}

void RandomCase::check(const Rank& rank) const {
  const int me = rank.index(), n = count(me);
  max::Exchange exchange(rank, {.experts = experts,
                                .top_k = top_k,
                                .hidden = kRowHidden,
                                .max_tokens = kMost,
                                .placement = Placement::table(places, ranks),
                                .alignment = alignment,
                                .format = raw ? Format::raw({kRawBytes}) : Format::fp32(),
                                .combine_type = DType::fp32});
  std::vector<std::uint8_t> x;
  for (int token = 0; token < n; ++token) {
    const auto bytes = token_bytes(me, token);
    x.insert(x.end(), bytes.begin(), bytes.end());
  }
  x.resize(x.size() + 16);
  Tokens tokens = Tokens::rows(x.data(), n, DType::fp32);
  const auto received = exchange.ep_fused_dispatch(tokens, ids[static_cast<std::size_t>(me)].data());
  std::vector<float> outputs = check_dispatch(received, me);
  outputs.resize(outputs.size() + 4);
  std::vector<float> y(static_cast<std::size_t>(n * kRowHidden) + 4, -7);
  exchange.ep_fused_combine({{.data = outputs.data(), .type = DType::fp32}, received},
                            {.output_tokens = {.data = y.data(), .type = DType::fp32},
                             .router_weights = weights[static_cast<std::size_t>(me)].data()});
  for (int token = 0; token < n; ++token) {
    for (int column = 0; column < kRowHidden; ++column) {
      float sum = 0;
      for (int slot = 0; slot < top_k; ++slot) {
        const float w = weights[static_cast<std::size_t>(me)][static_cast<std::size_t>(token * top_k + slot)];
        if (id(me, token, slot) >= 0) sum = std::fma(w, output({me, token, slot}, column), sum);
      }
      EXPECT_EQ(y[static_cast<std::size_t>(token * kRowHidden + column)], sum);
    }
  }
}

TEST(Max, RandomCasesAgreeWithLoops) {
  std::mt19937_64 random(seed());
  for (int number = 0; number < 150; ++number) {
    SCOPED_TRACE(number);
    const RandomCase one(random);
    Group::threads(one.ranks).run([&](const Rank& rank) { one.check(rank); });
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace ferry::test
