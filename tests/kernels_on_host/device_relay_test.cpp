// Two hops over an engine between device memory of the ranks, which is memory of the host here. Launches and
// copies are queued, and executed when the relay waits for them: one that it did not wait for is missing.
#include "backends/cuda/engine/device_relay.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "backends/collective/engine_call.hpp"
#include "collective/engine_ranks.hpp"
#include "group/rank_state.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr std::byte kPoison{0xA5};

// The memory of a "device", and its stream.
class QueuedMemory final : public collective::HopMemory {
 public:
  bool on_device() const override { return true; }
  std::byte* room(Part of, std::int64_t bytes) override {
    std::vector<std::uint64_t>& part = parts_[static_cast<std::size_t>(of)];
    if (static_cast<std::int64_t>(8 * part.size()) < std::max<std::int64_t>(bytes, 1 << 18))
      part.assign(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1 << 18) / 8 + 1),
                  0xA5A5A5A5A5A5A5A5u);
    return reinterpret_cast<std::byte*>(part.data());
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    enqueue([=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  }
  void finish() override {
    for (const auto& each : queue_) each();
    queue_.clear();
  }
  void enqueue(std::function<void()> work) { queue_.push_back(std::move(work)); }
  cudaStream_t stream() { return reinterpret_cast<cudaStream_t>(this); }

 private:
  std::vector<std::uint64_t> parts_[4];
  std::vector<std::function<void()>> queue_;
};

QueuedMemory& memory_of(cudaStream_t stream) {
  return *reinterpret_cast<QueuedMemory*>(stream);
}

}  // namespace

// --- the launches, as their headers describe them ----------------------------------------------------------

void launch_number_payloads(const NumberPayloadsArguments& call, cudaStream_t stream) {
  memory_of(stream).enqueue([=] {
    std::map<std::int32_t, std::int32_t> number_of;
    for (int i = 0; i < call.to.ranks; ++i) {
      const std::int64_t first = std::int64_t{call.to.rank[i]} * call.max_tokens;
      for (std::int64_t m = first; m < first + call.to.count[i]; ++m) {
        const auto next = static_cast<std::int32_t>(number_of.size());
        const auto [known, is_new] = number_of.try_emplace(call.sent_tokens[m], next);
        call.payload_of[m] = is_new ? next : -1 - known->second;
      }
    }
    *call.payloads = static_cast<std::int32_t>(number_of.size());
  });
}

void launch_write_bundle(const WriteBundleArguments& call, cudaStream_t stream) {
  memory_of(stream).enqueue([=] {
    const auto payload = static_cast<std::size_t>(call.sizes.payload),
               metadata = static_cast<std::size_t>(call.sizes.metadata);
    std::byte* entry = call.bundle;
    for (int i = 0; i < call.to.ranks; ++i) {
      for (std::int32_t m = 0; m < call.to.count[i]; ++m, entry += call.sizes.entry()) {
        const std::byte* message = call.to.messages[i] + m * std::int64_t{call.sizes.message()};
        const std::int32_t noted = call.payload_of[std::int64_t{call.to.rank[i]} * call.max_tokens + m];
        const std::int64_t number = noted < 0 ? -1 - noted : noted;
        std::memcpy(entry, message + payload, metadata);
        std::memcpy(entry + metadata, &number, sizeof number);
        if (noted >= 0) std::memcpy(call.payloads + number * call.sizes.payload, message, payload);
      }
    }
  });
}

void launch_open_bundle(const OpenBundleArguments& call, cudaStream_t stream) {
  memory_of(stream).enqueue([=] {
    const auto payload = static_cast<std::size_t>(call.sizes.payload),
               metadata = static_cast<std::size_t>(call.sizes.metadata);
    for (int i = 0; i < call.ranks; ++i) {
      const std::byte* entry = call.entries[i];
      std::byte* message = call.messages[i];
      for (std::int32_t m = 0; m < call.count[i]; ++m) {
        std::int64_t number = -1;
        std::memcpy(&number, entry + metadata, sizeof number);
        std::memcpy(message + payload, entry, metadata);
        if (number >= 0 && number < call.payload_count)
          std::memcpy(message, call.payloads + number * call.sizes.payload, payload);
        entry += call.sizes.entry();
        message += call.sizes.message();
      }
    }
  });
}

namespace {

using Bytes = std::vector<std::byte>;

// A row: the token it belongs to, and a value.
struct Row {
  std::int64_t token, value;
};

// What all ranks send in one call; the same on all ranks.
struct Traffic {
  int ranks, max_tokens;
  BundleSizes sizes;
  std::vector<std::vector<std::vector<std::int32_t>>> tokens;  // [from][to] ascending

  Traffic(std::mt19937_64& random, int of_ranks)
      : ranks(of_ranks),
        max_tokens(static_cast<int>(random() % 20 + 1)),
        sizes{.payload = static_cast<std::int32_t>(16 * (random() % 4)), .metadata = 16},
        tokens(static_cast<std::size_t>(ranks),
               std::vector<std::vector<std::int32_t>>(static_cast<std::size_t>(ranks))) {
    for (auto& from : tokens) {
      const bool silent = random() % 5 == 0;
      for (auto& to : from) {
        const std::uint64_t share = random() % 4;  // of 3
        for (int token = 0; token < max_tokens && !silent; ++token) {
          if (random() % 3 < share) to.push_back(token);
        }
      }
    }
  }
  const std::vector<std::int32_t>& between(int from, int to) const {
    return tokens[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
  }
  // The payload depends on source and token alone, the metadata on the destination too.
  Bytes messages(int from, int to) const {
    Bytes all;
    for (const std::int32_t token : between(from, to)) {
      for (int i = 0; i < sizes.payload; ++i)
        all.push_back(static_cast<std::byte>(from * 31 + token * 7 + i));
      for (int i = 0; i < sizes.metadata; ++i)
        all.push_back(static_cast<std::byte>(from * 3 + to * 101 + token * 13 + i + 1));
    }
    return all;
  }
  Bytes rows(int from, int to) const {
    Bytes all;
    for (const std::int32_t token : between(from, to)) {
      const Row row{token, 1000 * from + 10 * token + to + 1};
      const auto* bytes = reinterpret_cast<const std::byte*>(&row);
      all.insert(all.end(), bytes, bytes + sizeof row);
    }
    return all;
  }
};

// One value for each token, in the order of the tokens.
Bytes sums_of(const std::vector<std::pair<const std::byte*, std::int64_t>>& rows) {
  std::map<std::int64_t, std::int64_t> sums;
  for (const auto& [data, count] : rows) {
    for (std::int64_t i = 0; i < count; ++i) {
      Row row{};
      std::memcpy(&row, data + i * static_cast<std::int64_t>(sizeof row), sizeof row);
      sums[row.token] += row.value;
    }
  }
  Bytes all;
  for (const auto& [token, value] : sums) {
    const Row row{token, value};
    const auto* bytes = reinterpret_cast<const std::byte*>(&row);
    all.insert(all.end(), bytes, bytes + sizeof row);
  }
  return all;
}

// A lane of one rank on a "device".
class RelayLane {
 public:
  RelayLane(const Rank& rank, int window)
      : rank_(rank), counts_(static_cast<std::size_t>(rank.size()), -1), payload_of_(1 << 16, -7) {
    Engine& engine = *rank.state().engine();
    auto memory = std::make_unique<QueuedMemory>();
    memory_ = memory.get();
    relay_ = std::make_unique<DeviceRelay>(DeviceRelay::Setup{
        .topology = rank.topology(),
        .rank = rank.index(),
        .device = 0,
        .max_tokens = 20,
        .hops = *memory,
        .stream = memory->stream(),
        .payload_of = payload_of_.data(),
        .counts = counts_.data(),
        .add_rows = [this](std::span<const ArrivedRows> rows, std::byte* out, std::int32_t* count) {
          std::vector<ArrivedRows> kept(rows.begin(), rows.end());
          memory_->enqueue([=] {
            std::vector<std::pair<const std::byte*, std::int64_t>> all;
            for (const ArrivedRows& each : kept) all.emplace_back(each.rows, each.count);
            const Bytes sums = sums_of(all);
            std::memcpy(out, sums.data(), sums.size());
            *count = static_cast<std::int32_t>(sums.size() / sizeof(Row));
          });
        }});
    auto messages = std::make_unique<collective::MessageHops>(
        rank.topology(), rank.index(), collective::HopOptions{.relays = true, .window = window},
        std::move(memory));
    messages_ = messages.get();
    call_ = std::make_unique<collective::EngineCall>(
        rank,
        collective::LaneConnection{.communicator = std::move(engine.communicators(1).front()),
                                   .lane = 0,
                                   .summary_bytes = 8,
                                   .deadline = 30.0},
        std::move(messages));
  }

  // Sends `out[p]` to every rank p. `kind`: null, straight.
  void exchange(const std::vector<Bytes>& out, std::int64_t message_bytes, const DeviceRelay::Kind* kind,
                std::byte* slots, std::int64_t slot_bytes) {
    call_->begin(Operation::dispatch, {});
    call_->post(false, [&](const collective::EngineCall::Check&) {
      collective::SentMessages sent(rank_.size(), message_bytes);
      std::int64_t end = 0;
      stored_.clear();
      for (const Bytes& each : out) stored_.insert(stored_.end(), each.begin(), each.end());
      sent.first.base = stored_.data();
      for (std::size_t peer = 0; peer < out.size(); ++peer) {
        sent.bytes[peer] = sent.first.bytes[peer] = static_cast<std::int64_t>(out[peer].size());
        sent.first.offsets[peer] = end;
        sent.stored[peer] = stored_.data() + end;
        end += sent.bytes[peer];
      }
      sent.slots = slots;
      sent.slot_bytes = slot_bytes;
      sent.straight = kind == nullptr;
      if (kind != nullptr) relay_->pack(*kind, &sent);
      messages_->reserve(std::move(sent));
    });
    call_->wait();
  }
  Bytes received(int from) const {
    return {messages_->incoming(from), messages_->incoming(from) + messages_->incoming_bytes(from)};
  }
  const ferry::Traffic& between_nodes() const { return messages_->between_nodes(); }

 private:
  const Rank rank_;
  std::vector<std::int32_t> counts_, payload_of_;
  Bytes stored_;
  QueuedMemory* memory_;
  std::unique_ptr<DeviceRelay> relay_;
  collective::MessageHops* messages_;
  std::unique_ptr<collective::EngineCall> call_;
};

void check_messages(RelayLane& lane, const Rank& rank, const Traffic& traffic) {
  const int me = rank.index(), ranks = rank.size();
  std::vector<Bytes> out;
  std::vector<std::int32_t> sent_tokens(static_cast<std::size_t>(20 * ranks), -1);
  for (int to = 0; to < ranks; ++to) {
    out.push_back(traffic.messages(me, to));
    std::copy(traffic.between(me, to).begin(), traffic.between(me, to).end(), sent_tokens.begin() + 20 * to);
  }
  const std::int64_t slot_bytes = 20 * std::int64_t{traffic.sizes.message()};
  Bytes inbox(static_cast<std::size_t>(slot_bytes * ranks), kPoison);
  const DeviceRelay::Kind kind{
      .rows = false, .sizes = traffic.sizes, .sent_tokens = sent_tokens.data(), .adds = false};
  lane.exchange(out, traffic.sizes.message(), &kind, inbox.data(), slot_bytes);
  Bytes expected(inbox.size(), kPoison);
  for (int from = 0; from < ranks; ++from) {
    if (from == me) continue;  // its place is left as it is
    const Bytes messages = traffic.messages(from, me);
    std::copy(messages.begin(), messages.end(), expected.begin() + from * slot_bytes);
    FERRY_CHECK(lane.received(from) == messages, "messages from rank " + std::to_string(from));
  }
  FERRY_CHECK(inbox == expected, "bytes of the inbox");
  std::int64_t payloads = 0, entries = 0;
  const Topology& topology = rank.topology();
  for (int node = 0; node < topology.nodes(); ++node) {
    if (node == topology.node_of(me)) continue;
    std::set<std::int32_t> tokens;
    for (const int to : topology.ranks_of(node)) {
      tokens.insert(traffic.between(me, to).begin(), traffic.between(me, to).end());
      entries += static_cast<std::int64_t>(traffic.between(me, to).size());
    }
    payloads += static_cast<std::int64_t>(tokens.size());
  }
  FERRY_CHECK(lane.between_nodes().messages == payloads, "payloads between nodes");
  FERRY_CHECK(
      lane.between_nodes().bytes == payloads * traffic.sizes.payload + entries * traffic.sizes.entry(),
      "bytes between nodes");
}

void check_rows(RelayLane& lane, const Rank& rank, const Traffic& traffic, bool adds) {
  const int me = rank.index(), ranks = rank.size();
  const Topology& topology = rank.topology();
  std::vector<Bytes> out;
  for (int to = 0; to < ranks; ++to) out.push_back(traffic.rows(me, to));
  const DeviceRelay::Kind kind{.rows = true, .sizes = {}, .sent_tokens = nullptr, .adds = adds};
  lane.exchange(out, sizeof(Row), &kind, nullptr, 0);
  for (int from = 0; from < ranks; ++from) {
    if (from == me) continue;
    const int node = topology.node_of(from);
    Bytes expected = traffic.rows(from, me);
    if (adds && node != topology.node_of(me)) {
      std::vector<Bytes> rows;
      std::vector<std::pair<const std::byte*, std::int64_t>> all;
      for (const int each : topology.ranks_of(node)) rows.push_back(traffic.rows(each, me));
      for (const Bytes& each : rows) all.emplace_back(each.data(), each.size() / sizeof(Row));
      expected = topology.relay_of(me, node) == from ? sums_of(all) : Bytes();
    }
    FERRY_CHECK(lane.received(from) == expected, "rows from rank " + std::to_string(from));
  }
}

void check_straight(RelayLane& lane, const Rank& rank, const Traffic& traffic) {
  std::vector<Bytes> out;
  for (int to = 0; to < rank.size(); ++to) out.push_back(traffic.rows(rank.index(), to));
  lane.exchange(out, sizeof(Row), nullptr, nullptr, 0);
  for (int from = 0; from < rank.size(); ++from) {
    if (from == rank.index()) continue;
    FERRY_CHECK(lane.received(from) == traffic.rows(from, rank.index()),
                "straight rows from rank " + std::to_string(from));
  }
}

TEST(DeviceRelay, EveryRankReceivesWhatIsForIt) {
  const std::uint64_t chosen = test::seed();
  for (const std::vector<int>& nodes : {std::vector<int>{0, 0, 1, 1},
                                        {0, 1, 0, 1},
                                        {0, 0, 0, 1},
                                        {0, 1, 2},
                                        {0, 1, 1, 2, 2, 2, 2, 2},
                                        {0, 1, 0, 0, 1, 0, 1, 0}}) {
    for (const int window : {0, 1, 7}) {
      const auto ranks = static_cast<int>(nodes.size());
      const test::ThreadEngine engine(ranks, false, [](void* to, const void* from, std::int64_t bytes) {
        std::memcpy(to, from, static_cast<std::size_t>(bytes));
      });
      test::expect_none(test::run_ranks(
          ranks, [&](int rank) { return engine.functions(rank); },
          [&](const Rank& rank) {
            std::mt19937_64 random(chosen);
            RelayLane lane(rank, window);
            for (int i = 0; i < 5; ++i) {
              check_messages(lane, rank, Traffic(random, ranks));
              check_rows(lane, rank, Traffic(random, ranks), true);
              check_straight(lane, rank, Traffic(random, ranks));
              check_rows(lane, rank, Traffic(random, ranks), false);
            }
          },
          nodes));
    }
  }
}

}  // namespace
}  // namespace ferry::cuda
