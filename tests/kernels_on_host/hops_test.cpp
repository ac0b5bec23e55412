// The launch between the phases of a call in two hops, run on the host: every block and thread of all ranks,
// with any nodes, windows and numbers of blocks.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/two_hops/hop_block.cuh"
#include "kernels_on_host/grid.hpp"
#include "kernels_on_host/network.hpp"
#include "oracle/gather.hpp"
#include "oracle/numbers.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr int kTopK = 3, kExperts = 4, kHidden = 40;
constexpr std::int32_t kTokens = 24;  // most of a rank
constexpr std::int64_t kPayload = 1040, kMetadata = kTopK * sizeof(LLPacket), kMessage = kPayload + kMetadata;

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

struct alignas(16) Line {
  std::byte bytes[16];
};
// Memory aligned to 16 bytes.
struct Memory {
  std::vector<Line> lines;

  std::byte* reserve(std::int64_t bytes) {
    lines.assign(at((bytes + 15) / 16), Line{});
    return data();
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(lines.data()); }
};

HopTopology topology_of(const std::vector<int>& labels, int rank) {
  const Topology topology(labels);
  HopTopology of{};
  for (int other = 0; other < topology.ranks(); ++other) {
    of.node[other] = static_cast<std::uint8_t>(topology.node_of(other));
    of.local[other] = static_cast<std::uint8_t>(topology.local_rank_of(other));
    of.relay_there[other] = static_cast<std::uint8_t>(topology.relay_of(rank, topology.node_of(other)));
    of.relay_here[other] = static_cast<std::uint8_t>(topology.relay_of(other, topology.node_of(rank)));
  }
  return of;
}

// Some ranks and their lanes, on which calls follow one another.
class HopRun {
 public:
  HopRun(std::uint64_t seed, std::vector<int> labels, int window, int channels,
         std::uint64_t deadline = ~0ull)
      : random_(seed), labels_(std::move(labels)), topology_(labels_), ranks_(topology_.ranks()) {
    signals_ = DeviceSignals::of(ranks_, kExperts, kTokens, kTopK, kTokens * kTopK, 64);
    header_bytes_ = (signals_.header_bytes + 8 * kPayloads + 127) / 128 * 128;
    flags_ = header_bytes_ + kTokens * kMessage;
    block_bytes_ = (flags_ + kTokens * 8 * kQuarters + 127) / 128 * 128;
    row_ = combine_row_layout(DType::bf16, kHidden, kTopK);
    row_bytes_ = (row_.bytes + 8 + 15) / 16 * 16;
    int node_ranks = 0;
    for (int node = 0; node < topology_.nodes(); ++node)
      node_ranks = std::max(node_ranks, static_cast<int>(topology_.ranks_of(node).size()));
    const int of_channels = std::min(channels, window);
    layout_ = HopLayout::of({.ranks = ranks_,
                             .node_ranks = node_ranks,
                             .channels = of_channels,
                             .slots = window / of_channels,
                             .header_bytes = header_bytes_,
                             .payload_bytes = kPayload,
                             .metadata_bytes = kMetadata,
                             .row_bytes = row_bytes_});
    for (int r = 0; r < ranks_; ++r) {
      Rank& rank = rank_.emplace_back();
      rank.windows.reserve(layout_.bytes);
      rank.inbox.reserve(ranks_ * block_bytes_ + kRows * 8 * kQuarters);
      rank.outbox.reserve(ranks_ * block_bytes_);
      rank.states.resize(at(hop_tasks(layout_.shape) * 32));
      rank.sent_tokens.assign(at(ranks_ * kTokens), 0);
      rank.row_outbox.reserve(ranks_ * kRows * row_bytes_);
      rank.row_inbox.reserve(kRows * row_bytes_);
      rank.arrived.resize(kRows);
      rank.state.diagnostics = DeviceDiagnostics::none();
      HopArguments& call = rank.call;
      LaneView& lane = call.wires;
      lane.rank = r;
      lane.ranks = ranks_;
      lane.max_tokens = kTokens;
      lane.top_k = kTopK;
      lane.hidden = kHidden;
      lane.most_ranks = std::min(kTopK, ranks_);
      lane.deadline = deadline;
      lane.signals = signals_;
      lane.state = &rank.state;
      lane.timeout_claimed = &rank.timeout_claimed;
      lane.report = &rank.report;
      lane.device_error = &rank.error;
      call.layout = layout_;
      call.topology = topology_of(labels_, r);
      call.memory = {rank.states.data(), rank.counts};
      call.inbox = rank.inbox.data();
      call.outbox = rank.outbox.data();
      call.block_bytes = block_bytes_;
      call.header_bytes = header_bytes_;
      call.flags = flags_;
      call.end_of_stream = signals_.header_bytes;
      call.payload_bytes = kPayload;
      call.metadata_bytes = kMetadata;
      call.sent_tokens = rank.sent_tokens.data();
      call.row_outbox = rank.row_outbox.data();
      call.row_inbox = rank.row_inbox.data();
      call.row_bytes = row_bytes_;
      call.label_offset = row_.bytes;
      call.most_sent = ranks_ * kRows;
      call.most_received = kRows;
      call.arrived = rank.arrived.data();
      call.row_flags = ranks_ * block_bytes_;
      call.combine_type = DType::bf16;
      call.row = row_;
    }
    for (Rank& rank : rank_) sections_.push_back(rank.windows.data());
    for (Rank& rank : rank_) {
      if (ranks_ <= kNarrowRanks) {
        std::copy(sections_.begin(), sections_.end(), rank.call.wires.symmetric);
      } else {
        rank.call.wires.symmetric[0] = reinterpret_cast<std::byte*>(sections_.data());
      }
    }
  }

  // Messages of a dispatch with random destinations. `by_plan`: counts come from a plan.
  void messages(bool by_plan = false) {
    begin(HopContent::messages, Operation::dispatch);
    std::vector<std::vector<std::set<int>>> to(at(ranks_));  // [source][token]
    for (int s = 0; s < ranks_; ++s) {
      const auto tokens = static_cast<std::int32_t>(random_() % 4 == 0 ? 0 : random_() % (kTokens + 1));
      to[at(s)].resize(at(tokens));
      Rank& rank = rank_[at(s)];
      std::vector<std::int32_t> count(at(ranks_), 0);
      for (std::int32_t t = 0; t < tokens; ++t) {
        std::set<int>& ranks = to[at(s)][at(t)];
        for (int slot = 0; slot < kTopK; ++slot) {
          if (random_() % 5 != 0) ranks.insert(static_cast<int>(random_() % at(ranks_)));
        }
        for (const int d : ranks) {
          const std::int32_t i = count[at(d)]++;
          rank.sent_tokens[at(d * kTokens + i)] = t;
          if (d != s) store_message(rank.outbox.data() + d * block_bytes_, s, d, t, i);
        }
      }
      post_header(s, count);
      rank.plan_counts = count;
      rank.call.counts = by_plan ? rank.plan_counts.data() : nullptr;
      rank.call.sets_flags = true;
    }
    run();
    for (int d = 0; d < ranks_; ++d) {
      for (int s = 0; s < ranks_; ++s) {
        if (s != d) expect_messages(s, d, to[at(s)]);
      }
    }
    expect_wire(to);
  }

  // Rows of a combine, each for a random (source rank, token, position). `adds`: by node.
  void rows(bool adds) {
    begin(adds ? HopContent::sums : HopContent::rows, Operation::combine);
    const int most = std::min(kTopK, ranks_);
    // [source][token]: the ranks that have a row of it, ascending; a position for each.
    std::vector<std::vector<std::vector<int>>> holders(at(ranks_));
    std::map<std::pair<int, std::int64_t>, oracle::Bytes> made;  // by (source, index)
    std::vector<std::vector<std::int32_t>> counts(at(ranks_), std::vector<std::int32_t>(at(ranks_), 0));
    for (int s = 0; s < ranks_; ++s) {
      holders[at(s)].resize(kTokens);
      for (auto& ranks : holders[at(s)]) {
        std::set<int> all;
        for (int slot = 0; slot < most; ++slot) {
          if (random_() % 4 != 0) all.insert(static_cast<int>(random_() % at(ranks_)));
        }
        ranks.assign(all.begin(), all.end());
      }
    }
    for (int q = 0; q < ranks_; ++q) {
      std::byte* to = rank_[at(q)].row_outbox.data();
      for (int s = 0; s < ranks_; ++s) {
        for (int t = 0; t < kTokens; ++t) {
          const auto& ranks = holders[at(s)][at(t)];
          for (std::size_t p = 0; p < ranks.size(); ++p) {
            if (ranks[p] != q) continue;
            const std::int64_t index = t * most + static_cast<std::int64_t>(p);
            const oracle::Bytes row = random_row(index);
            std::copy(row.begin(), row.end(), to);
            to += row_bytes_;
            made[{s, index}] = row;
            ++counts[at(q)][at(s)];
          }
        }
      }
      post_header(q, counts[at(q)]);
      rank_[at(q)].plan_counts = counts[at(q)];
      rank_[at(q)].call.counts = rank_[at(q)].plan_counts.data();
    }
    run();
    for (int s = 0; s < ranks_; ++s) {
      Rank& rank = rank_[at(s)];
      for (int t = 0; t < kTokens; ++t) {
        const auto& ranks = holders[at(s)][at(t)];
        std::map<int, std::vector<oracle::Bytes>> of_node;
        std::map<int, std::int64_t> first;
        for (std::size_t p = 0; p < ranks.size(); ++p) {
          const std::int64_t index = t * most + static_cast<std::int64_t>(p);
          const int node = topology_.node_of(ranks[p]);
          const int key = adds && node != topology_.node_of(s) ? -1 - node : ranks[p];
          of_node[key].push_back(made[{s, index}]);
          first.emplace(key, index);
        }
        for (const auto& [key, of] : of_node) {
          const LLPacket found = rank.arrived[at(first[key])];
          ASSERT_EQ(found.call, number_) << "row " << first[key] << " of rank " << s;
          const auto* row = reinterpret_cast<const std::byte*>(found.word);
          const oracle::Bytes expected = of.size() == 1 ? of[0] : sum_of(of);
          // All but the padding between the values of the routes and the label.
          EXPECT_TRUE(
              std::equal(expected.begin(), expected.begin() + row_.tail_offset + 4 * kTopK, row) &&
              std::equal(expected.begin() + row_.bytes, expected.begin() + row_.bytes + 8, row + row_.bytes))
              << "row " << first[key] << " of rank " << s;
          const auto* flags =
              reinterpret_cast<const Flag*>(rank.inbox.data() + rank.call.row_flags) + first[key] * kQuarters;
          for (int f = 0; f < kQuarters; ++f) EXPECT_EQ(flags[f].value, number_);
        }
      }
    }
  }

  // A call that one rank refuses, or in which ranks differ.
  void refused(int by, bool differs) {
    begin(HopContent::messages, Operation::dispatch);
    for (int s = 0; s < ranks_; ++s) {
      post_header(s, std::vector<std::int32_t>(at(ranks_), 3));
      rank_[at(s)].call.counts = nullptr;
      if (s != by) continue;
      for (int d = 0; d < ranks_; ++d) {
        auto* header = reinterpret_cast<LLPacket*>(rank_[at(s)].outbox.data() + d * block_bytes_);
        if (d != s) header[kHeaderTerms].word = differs ? 77 : 0;
      }
    }
    for (Rank& rank : rank_) rank.arrived.assign(kRows, {0, 0});
    run();
    for (int d = 0; d < ranks_; ++d) {
      const auto* header = reinterpret_cast<const LLPacket*>(rank_[at(d)].inbox.data() + by * block_bytes_);
      if (d != by) {
        EXPECT_EQ(header[kHeaderTerms].call, number_);
        EXPECT_EQ(header[kHeaderTerms].word, differs ? 77u : 0u);
      }
    }
  }

  // What is put between nodes arrives late, in any order that a network has.
  void make_puts_late(PutMistake mistake = PutMistake::none) {
    late_ = true;
    mistake_ = mistake;
    if (mistake != PutMistake::none) network_.set_slowness(30);
  }

  // Runs a dispatch in which rank `absent` does not take part.
  std::map<int, WaitRecord> run_without(int absent) {
    begin(HopContent::messages, Operation::dispatch);
    for (int s = 0; s < ranks_; ++s) {
      post_header(s, std::vector<std::int32_t>(at(ranks_), 0));
      rank_[at(s)].call.counts = nullptr;
    }
    run(absent);
    return records();
  }

  // Runs a dispatch in which rank `stopped` stops when it has exchanged call headers.
  std::map<int, WaitRecord> run_stopped(int stopped) {
    begin(HopContent::messages, Operation::dispatch);
    for (int s = 0; s < ranks_; ++s) {
      std::vector<std::int32_t> count(at(ranks_), kTokens);
      for (int d = 0; d < ranks_; ++d) {
        for (std::int32_t t = 0; t < kTokens; ++t) {
          rank_[at(s)].sent_tokens[at(d * kTokens + t)] = t;
          if (d != s) store_message(rank_[at(s)].outbox.data() + d * block_bytes_, s, d, t, t);
        }
      }
      post_header(s, count);
      rank_[at(s)].call.counts = nullptr;
    }
    rank_[at(stopped)].call.content = HopContent::headers;
    run();
    return records();
  }
  std::map<int, WaitRecord> records() const {
    std::map<int, WaitRecord> found;
    for (int r = 0; r < ranks_; ++r) {
      if (const auto record = timeout_of(rank_[at(r)].report)) found[r] = *record;
    }
    return found;
  }

  const HopCounts& counted(int rank, int kind) const { return rank_[at(rank)].counts[kind]; }

 private:
  static constexpr std::int64_t kRows = kTokens * kTopK;

  struct Rank {
    Memory windows, inbox, outbox, row_outbox, row_inbox;
    std::vector<HopTaskState> states;
    std::vector<std::int32_t> sent_tokens, plan_counts;
    std::vector<LLPacket> arrived;
    HopCounts counts[4] = {};
    LaneState state{};
    unsigned timeout_claimed = 0;
    HostSignals report{};
    DeviceError error{};
    HopArguments call{};
  };

  void begin(HopContent content, Operation operation) {
    ++number_;
    for (Rank& rank : rank_) {
      rank.call.content = content;
      rank.call.operation = operation;
      for (HopCounts& counts : rank.counts) counts = {};
    }
  }

  std::vector<std::byte> payload_of(int source, int token) const {
    std::vector<std::byte> made(kPayload);
    std::mt19937_64 random(number_ * 1000003 + at(source) * 1009 + at(token));
    for (std::byte& each : made) each = static_cast<std::byte>(random());
    return made;
  }
  std::array<LLPacket, kTopK> metadata_of(int source, int rank, int token) const {
    std::array<LLPacket, kTopK> made{};
    for (int k = 0; k < kTopK; ++k)
      made[at(k)] = {number_ << SlotMetadata::kTokenBits | at(token),
                     static_cast<std::uint64_t>(source * 100000 + rank * 1000 + token * 10 + k)};
    return made;
  }
  void store_message(std::byte* block, int s, int d, int token, std::int32_t i) const {
    std::byte* to = block + header_bytes_ + i * kMessage;
    const auto payload = payload_of(s, token);
    std::copy(payload.begin(), payload.end(), to);
    const auto metadata = metadata_of(s, d, token);
    std::copy_n(reinterpret_cast<const std::byte*>(metadata.data()), kMetadata, to + kPayload);
  }

  // As the launch of a send phase: to others in the outbox, to itself in the inbox.
  void post_header(int s, const std::vector<std::int32_t>& counts) {
    for (int d = 0; d < ranks_; ++d) {
      Rank& rank = rank_[at(s)];
      auto* header = reinterpret_cast<LLPacket*>(d == s ? rank.inbox.data() + s * block_bytes_
                                                        : rank.outbox.data() + d * block_bytes_);
      HeaderFacts facts;
      facts.operation = static_cast<std::uint8_t>(rank.call.operation);
      for (int i = 0; i < kHeaderCounts; ++i) header[i] = {number_, at(5 + i)};
      header[kHeaderFacts].word = facts.word();
      for (int w = 0; w < signals_.count_words; ++w) header[kHeaderCounts + w] = {number_, 0};
      for (int r = 0; r < ranks_; ++r) {
        const int i = signals_.first_messages + r;
        header[kHeaderCounts + i / 2].word |= static_cast<std::uint64_t>(counts[at(r)]) << (32 * (i % 2));
      }
    }
  }

  void run(int absent = -1) {
    on_host::Grid grid(random_());
    std::vector<unsigned> blocks(at(ranks_), 0);
    unsigned running = 0;
    for (int r = 0; r < ranks_; ++r) {
      if (r == absent) continue;
      blocks[at(r)] = ranks_ > kNarrowRanks ? 1 : 1 + static_cast<unsigned>(random_() % at(most_blocks_));
      running += blocks[at(r)] * kHopThreads;
    }
    if (late_) network_.attach(grid, running, false);
    for (int r = 0; r < ranks_; ++r) {
      if (r == absent) continue;
      Pretended pretended{};
      for (int peer = 0; peer < ranks_; ++peer) {
        if (topology_.node_of(peer) != topology_.node_of(r)) pretended.remote.add(peer);
      }
      if (late_) {
        launch(grid, r, blocks[at(r)], LatePuts{pretended, &network_, r, mistake_}, running);
      } else {
        launch(grid, r, blocks[at(r)], pretended, running);
      }
    }
    grid.run();
    EXPECT_EQ(network_.pending(), 0u) << "what is still on its way when all launches have ended";
    // The launch of the receive phase counts the call.
    for (Rank& rank : rank_) {
      for (std::uint64_t& calls : rank.state.calls) calls = number_;
    }
  }
  template <class Transport>
  void launch(on_host::Grid& grid, int r, unsigned blocks, const Transport& transport, unsigned& running) {
    const auto states = std::make_shared<std::deque<HopState>>(blocks);
    const HopArguments* call = &rank_[at(r)].call;
    grid.add(blocks, kHopThreads, [call, states, transport, &running](unsigned block) {
      HopBlock<Transport>(*call, transport, &(*states)[block]).run();
      --running;
    });
  }

  void expect_messages(int s, int d, const std::vector<std::set<int>>& to) {
    const std::byte* block = rank_[at(d)].inbox.data() + s * block_bytes_;
    std::int32_t i = 0;
    for (std::size_t t = 0; t < to.size(); ++t) {
      if (!to[t].contains(d)) continue;
      const std::byte* message = block + header_bytes_ + i * kMessage;
      const auto token = static_cast<int>(t);
      const auto payload = payload_of(s, token);
      EXPECT_TRUE(std::equal(payload.begin(), payload.end(), message))
          << "payload " << i << " from " << s << " to " << d;
      const auto metadata = metadata_of(s, d, token);
      EXPECT_TRUE(std::equal(message + kPayload, message + kMessage,
                             reinterpret_cast<const std::byte*>(metadata.data())))
          << "metadata " << i << " from " << s << " to " << d;
      const auto* flags = reinterpret_cast<const Flag*>(block + flags_) + i * kQuarters;
      for (int f = 0; f < kQuarters; ++f) EXPECT_EQ(flags[f].value, number_);
      ++i;
    }
    for (; i < kTokens; ++i)
      EXPECT_NE((reinterpret_cast<const Flag*>(block + flags_) + i * kQuarters)->value, number_);
    const auto* header = reinterpret_cast<const LLPacket*>(block);
    EXPECT_EQ(header[kHeaderTerms].call, number_);
    const auto* ends = reinterpret_cast<const Flag*>(block + signals_.header_bytes);
    for (int p = 0; p < kPayloads; ++p) EXPECT_EQ(ends[p].value, number_);
  }

  void expect_wire(const std::vector<std::vector<std::set<int>>>& to) {
    unsigned long long between = 0, within = 0;
    for (int s = 0; s < ranks_; ++s) {
      for (const std::set<int>& ranks : to[at(s)]) {
        std::set<int> nodes;
        for (const int d : ranks) {
          if (topology_.node_of(d) != topology_.node_of(s)) {
            nodes.insert(topology_.node_of(d));
            if (topology_.relay_of(s, topology_.node_of(d)) != d) ++within;
          } else if (d != s) {
            ++within;
          }
        }
        between += nodes.size();
      }
    }
    unsigned long long counted_between = 0, counted_within = 0;
    for (const Rank& rank : rank_) {
      counted_within += rank.counts[0].messages;
      counted_between += rank.counts[1].messages;
    }
    EXPECT_EQ(counted_between, between);
    EXPECT_EQ(counted_within, within);
  }

  oracle::Bytes random_row(std::int64_t index) {
    oracle::Bytes row(at(row_bytes_));
    for (int c = 0; c < kHidden; ++c)
      oracle::store(DType::bf16, static_cast<float>(static_cast<int>(random_() % 4001) - 2000) / 37,
                    row.data() + 2 * c);
    for (int k = 0; k < kTopK; ++k) {
      const auto word = static_cast<std::uint32_t>(1u << (random_() % 32));
      std::memcpy(row.data() + row_.tail_offset + 4 * k, &word, 4);
    }
    const std::uint64_t label = packed_label(number_, index);
    std::memcpy(row.data() + row_.bytes, &label, 8);
    return row;
  }
  oracle::Bytes sum_of(const std::vector<oracle::Bytes>& rows) const {
    oracle::Bytes sum = rows[0];
    for (int c = 0; c < kHidden; ++c) {
      float value = 0;
      for (const oracle::Bytes& row : rows) value += oracle::load(DType::bf16, row.data() + 2 * c);
      oracle::store(DType::bf16, value, sum.data() + 2 * c);
    }
    for (int k = 0; k < kTopK; ++k) {
      std::uint32_t joined = 0, word = 0;
      for (const oracle::Bytes& row : rows) {
        std::memcpy(&word, row.data() + row_.tail_offset + 4 * k, 4);
        joined |= word;
      }
      std::memcpy(sum.data() + row_.tail_offset + 4 * k, &joined, 4);
    }
    return sum;
  }

  std::mt19937_64 random_;
  const std::vector<int> labels_;
  const Topology topology_;
  const int ranks_;
  DeviceSignals signals_;
  HopLayout layout_;
  CombineRowLayout row_;
  std::int64_t header_bytes_, flags_, block_bytes_, row_bytes_;
  std::deque<Rank> rank_;
  std::vector<std::byte*> sections_;  // of symmetric memory
  std::uint64_t number_ = 0;
  bool late_ = false;
  PutMistake mistake_ = PutMistake::none;
  Network network_{random_()};
  static constexpr int most_blocks_ = 3;
};

const std::vector<std::vector<int>> kNodes = {
    {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 1, 2, 2, 2, 2, 2}};

// Nodes of about the same size: ranks that follow one another, or scattered.
std::vector<int> many(int ranks, int nodes, bool scattered) {
  std::vector<int> labels;
  for (int rank = 0; rank < ranks; ++rank) labels.push_back(scattered ? rank % nodes : rank * nodes / ranks);
  return labels;
}

std::uint64_t seed_for(std::uint64_t number) {
  return test::seed() + number;
}

class Hops : public testing::TestWithParam<std::tuple<int, int, bool>> {
 protected:
  HopRun run() const {
    const auto [nodes, window, late] = GetParam();
    HopRun calls(seed_for(static_cast<std::uint64_t>(nodes * 100 + window)), kNodes[at(nodes)], window, 4);
    if (late) calls.make_puts_late();
    return calls;
  }
};

TEST_P(Hops, MessagesArriveUnchanged) {
  HopRun calls = run();
  for (const bool by_plan : {false, true}) calls.messages(by_plan);
}

TEST_P(Hops, RowsReturnUnchanged) {
  HopRun calls = run();
  for (int call = 0; call < 2; ++call) calls.rows(false);
}

TEST_P(Hops, RelaysAddTheRowsOfTheirNode) {
  HopRun calls = run();
  calls.rows(true);
  calls.messages();
  calls.rows(true);
}

INSTANTIATE_TEST_SUITE_P(Windows, Hops,
                         testing::Combine(testing::Range(0, static_cast<int>(kNodes.size())),
                                          testing::Values(1, 7, 64), testing::Bool()),
                         [](const auto& parameter) {
                           return "nodes" + std::to_string(std::get<0>(parameter.param)) + "_window" +
                                  std::to_string(std::get<1>(parameter.param)) +
                                  (std::get<2>(parameter.param) ? "_late" : "");
                         });

// More ranks than a warp has threads.
TEST(HopCalls, ManyRanksInSeveralNodes) {
  if (!kWide) GTEST_SKIP() << "of wide kernels";
  HopRun eight_nodes(seed_for(4), many(64, 8, false), 2, 1);
  eight_nodes.messages();
  eight_nodes.rows(true);
  HopRun scattered(seed_for(5), many(36, 3, true), 2, 1);
  scattered.messages(true);
  scattered.rows(false);
  scattered.rows(true);
}

// A rank that is a relay for more ranks than a warp has threads.
TEST(HopCalls, OneRankRelaysForManyRanks) {
  if (!kWide) GTEST_SKIP() << "of wide kernels";
  std::vector<int> labels = many(34, 2, false);
  labels.push_back(2);
  HopRun calls(seed_for(6), labels, 1, 1);
  calls.messages();
  calls.rows(false);
  calls.rows(true);
}

TEST(HopCalls, RefusalsAndDifferencesEndTheCallOnEveryRank) {
  HopRun calls(seed_for(1), {0, 0, 1, 1}, 4, 2);
  calls.messages();
  calls.refused(2, false);
  calls.refused(1, true);
  calls.messages();
}

TEST(HopCalls, ARankThatIsMissingIsNamed) {
  HopRun calls(seed_for(2), {0, 0, 1, 1}, 4, 2, 20'000'000);
  const auto records = calls.run_without(2);
  EXPECT_EQ(records.size(), 3u);
  for (const auto& [rank, record] : records) {
    EXPECT_EQ(record.rank, rank);
    EXPECT_EQ(record.peer, 2);
    EXPECT_EQ(record.operation, Operation::dispatch);
  }
}

// What a transport has to promise is needed: without it calls fail.
TEST(HopCalls, AMistakeOfTheTransportIsFound) {
  for (const PutMistake mistake : {PutMistake::flag_before_put, PutMistake::no_quiet}) {
    testing::TestPartResultArray failures;
    {
      const testing::ScopedFakeTestPartResultReporter reporter(
          testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
      HopRun calls(seed_for(4), {0, 1}, 6, 1, 50'000'000);
      calls.make_puts_late(mistake);
      for (int call = 0; call < 5; ++call) {
        calls.messages();
        calls.rows(false);
      }
      EXPECT_TRUE(calls.records().empty()) << "a wait has ended at its deadline";
    }
    EXPECT_GT(failures.size(), 0) << "mistake " << static_cast<int>(mistake);
  }
}

// Rank 2 is the relay of rank 0, and rank 0 of rank 2.
TEST(HopCalls, ARankThatStopsIsNamedWithTheRelay) {
  HopRun calls(seed_for(3), {0, 0, 1, 1}, 2, 2, 20'000'000);
  const auto records = calls.run_stopped(2);
  EXPECT_EQ(records.size(), 3u);
  // Rank 0 misses what rank 2 sends to its node, and rank 3 the room in the windows of rank 2. They give up
  // before rank 1, which waits for them, and their record is the group's. Here no host tells the others of
  // it.
  for (const int rank : {0, 3}) {
    ASSERT_TRUE(records.contains(rank));
    EXPECT_EQ(records.at(rank).peer, 2) << "rank " << rank;
    EXPECT_EQ(records.at(rank).via, -1) << "rank " << rank;
    EXPECT_EQ(records.at(rank).role, rank == 0 ? WaitRole::relay : WaitRole::sender) << "rank " << rank;
  }
}

}  // namespace
}  // namespace ferry::cuda
