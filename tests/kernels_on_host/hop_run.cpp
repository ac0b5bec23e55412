#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include "kernels_on_host/hop_run.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace ferry::cuda {

HopRun::HopRun(std::uint64_t seed, const std::vector<int>& labels, int window, int channels,
               std::uint64_t deadline)
    : random_(seed), topology_(labels), ranks_(topology_.ranks()) {
  signals_ = DeviceSignals::of({ranks_, kExperts, kTokens, kTopK, kTokens * kTopK, 64});
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
  const bool unused_channels = of_channels > 1 && random_() % 2 == 0;
  for (int r = 0; r < ranks_; ++r) {
    Rank& rank = rank_.emplace_back();
    rank.windows.reserve(layout_.bytes);
    rank.inbox.reserve(ranks_ * block_bytes_ + kRows * 8 * kQuarters);
    rank.outbox.reserve(ranks_ * block_bytes_);
    rank.states.resize(at(hop_tasks(layout_.shape.ranks, layout_.shape.channels) * 32));
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
    lane.deadline = header_deadline(deadline);
    call.deadline = deadline;
    lane.signals = signals_;
    lane.state = &rank.state;
    lane.epoch = &rank.epoch;
    lane.timeout_claimed = &rank.timeout_claimed;
    lane.report = &rank.report;
    lane.device_error = &rank.error;
    call.threads = ranks_ <= kNarrowRanks && random_() % 4 == 0 ? kManyHopThreads : kHopThreads;
    call.packs_own_rows = true;
    call.channels = unused_channels ? layout_.shape.channels - 1 : layout_.shape.channels;
    call.layout = layout_;
    call.topology = HopTopology::of(topology_, r);
    call.memory = {reinterpret_cast<std::byte*>(rank.states.data()), rank.counts, &rank.agreed};
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

void HopRun::messages(bool by_plan) {
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

void HopRun::rows(bool adds, bool continues) {
  begin(adds ? HopContent::sums : HopContent::rows, Operation::combine, continues);
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

void HopRun::refused(int by, bool differs) {
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

void HopRun::continue_refused() {
  begin(HopContent::rows, Operation::combine, true);
  for (int q = 0; q < ranks_; ++q) {
    Rank& rank = rank_[at(q)];
    std::byte* to = rank.row_outbox.data();
    for (int s = 0; s < ranks_; ++s) {
      const oracle::Bytes row = random_row(q);
      to = std::copy(row.begin(), row.end(), to);
    }
    rank.plan_counts.assign(at(ranks_), 1);
    rank.call.counts = rank.plan_counts.data();
    rank.arrived.assign(kRows, {0, 0});
    post_header(q, rank.plan_counts);
  }
  run();
  for (const Rank& rank : rank_) {
    for (const LLPacket& row : rank.arrived) EXPECT_EQ(row.call, 0u);
    for (const HopCounts& counted : rank.counts) EXPECT_EQ(counted.messages, 0u);
  }
}

void HopRun::send_straight() {
  straight_ = true;
  for (int r = 0; r < ranks_; ++r) rank_[at(r)].call.topology = HopTopology::of(topology_, r, Hops::one);
}

void HopRun::make_puts_late(PutMistake mistake) {
  late_ = true;
  mistake_ = mistake;
  if (mistake != PutMistake::none) network_.set_slowness(30);
}

std::map<int, WaitRecord> HopRun::run_without(int absent) {
  begin(HopContent::messages, Operation::dispatch);
  for (int s = 0; s < ranks_; ++s) {
    post_header(s, std::vector<std::int32_t>(at(ranks_), 0));
    rank_[at(s)].call.counts = nullptr;
  }
  run(absent);
  return records();
}

void HopRun::begin_stopped(int stopped) {
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
}

std::map<int, WaitRecord> HopRun::run_stopped(int stopped) {
  begin_stopped(stopped);
  run();
  return records();
}

void HopRun::run_aborted(int stopped) {
  // More groups than a warp has threads.
  constexpr std::int32_t kGroups = 40, kOld = 7;
  begin_stopped(stopped);
  for (Rank& rank : rank_) {
    rank.result_counts.assign(kGroups, kOld);
    rank.result_offsets.assign(kGroups + 1, kOld);
    HopArguments& call = rank.call;
    call.wires.groups = kGroups;
    call.wires.totals = reinterpret_cast<decltype(call.wires.totals)>(&rank.totals);
    call.result_counts = rank.result_counts.data();
    call.result_offsets = rank.result_offsets.data();
  }
  hosts_abort_ = true;
  run();
  EXPECT_TRUE(records().empty());
  const std::vector<std::int32_t> no_counts(kGroups, 0), no_offsets(kGroups + 1, 0);
  for (int r = 0; r < ranks_; ++r) {
    if (r == stopped) continue;
    const Rank& rank = rank_[at(r)];
    EXPECT_EQ(rank.state.aborted_call.value, kExchangeFailed) << "rank " << r;
    EXPECT_EQ(rank.result_counts, no_counts) << "rank " << r;
    EXPECT_EQ(rank.result_offsets, no_offsets) << "rank " << r;
    EXPECT_EQ(rank.totals.call, number_) << "rank " << r;
  }
}

std::map<int, WaitRecord> HopRun::records() const {
  std::map<int, WaitRecord> found;
  for (int r = 0; r < ranks_; ++r) {
    if (const auto record = timeout_of(rank_[at(r)].report, kFirstEpoch)) found[r] = *record;
  }
  return found;
}

void HopRun::begin(HopContent content, Operation operation, bool continues) {
  if (!continues) ++number_;
  for (Rank& rank : rank_) {
    for (std::uint64_t& calls : rank.state.calls) calls = number_ - 1;
    rank.call.content = content;
    rank.call.continues = continues;
    rank.call.operation = operation;
    for (HopCounts& counts : rank.counts) counts = {};
  }
}

void HopRun::run(int absent) {
  on_host::Grid grid(random_());
  std::vector<unsigned> blocks(at(ranks_), 0);
  unsigned running = 0;
  for (int r = 0; r < ranks_; ++r) {
    if (r == absent) continue;
    blocks[at(r)] = ranks_ > kNarrowRanks ? 1 : 1 + static_cast<unsigned>(random_() % at(most_blocks_));
    running += blocks[at(r)] * static_cast<unsigned>(rank_[at(r)].call.threads);
  }
  if (late_) network_.attach(grid, running, false);
  for (int r = 0; r < ranks_; ++r) {
    if (r == absent) continue;
    Pretended pretended{};
    for (int peer = 0; peer < ranks_; ++peer) {
      if (topology_.node_of(peer) != topology_.node_of(r)) pretended.remote.add(peer);
    }
    if (late_) {
      launch(grid, r, blocks[at(r)], LatePuts{pretended, &network_, mistake_}, running);
    } else {
      launch(grid, r, blocks[at(r)], pretended, running);
    }
  }
  if (hosts_abort_) {
    grid.add(1, 32, [this](unsigned) {
      const std::uint64_t start = on_host::Grid::nanoseconds();
      while (on_host::Grid::nanoseconds() - start < 8 * kAbortPollIntervalNs) __nanosleep(100);
      for (Rank& rank : rank_) store_release(rank.report.abort, 1);
    });
  }
  grid.run();
  EXPECT_EQ(network_.pending(), 0u) << "what is still on its way when all launches have ended";
  // The launch of the receive phase counts the call.
  for (Rank& rank : rank_) {
    for (std::uint64_t& calls : rank.state.calls) calls = number_;
  }
}

}  // namespace ferry::cuda
