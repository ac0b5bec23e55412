// Ferry's backend `collective` over MPI beside MPI_Alltoallv of the same messages, in one program:
//
//   mpirun -n 4 collective_mpi [--hops one|two] [--tokens N] [--rounds N]
//
// bf16, hidden 7168, top 8, 256 experts or the next smaller multiple of the ranks, uniform routing,
// expert_major, partial. One round times, one after the other on all ranks: dispatch; combine; MPI_Alltoallv
// with the messages of each, from buffer to buffer; and a memcpy of the bytes that each must pack and unpack.
// A time is that of the slowest rank. With two hops MPI_Alltoallv carries what goes between nodes: a message
// for each (token, other node), to the relay. Messages of a rank to itself are not sent. Prints JSON: medians
// over the rounds, with the least and the most, and what all ranks together send to other
// nodes.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/mapping.hpp"
#include "bench/mpi_inputs.hpp"
#include "ferry/ferry.hpp"

namespace {

using namespace by_hand;

struct PairOptions {
  ferry::Hops hops = ferry::Hops::one;
  int tokens = 2048;
  int rounds = 9;
};

// Bytes that this rank sends to and receives from each rank.
struct Transfer {
  std::vector<int> send, receive;
};

enum Timed { kDispatch, kCombine, kDispatchAllToAll, kCombineAllToAll, kCopy, kTimed };
constexpr const char* kNames[kTimed] = {"dispatch", "combine", "dispatch_alltoallv", "combine_alltoallv",
                                        "copy"};

class PairRun {
 public:
  PairRun(const PairOptions& options, const ferry::Rank& rank)
      : options_(options),
        rank_(rank),
        experts_(kExperts / rank.size() * rank.size()),
        exchange_(rank, {.experts = experts_,
                         .top_k = kTopK,
                         .hidden = kHidden,
                         .max_tokens = options.tokens,
                         .backend = ferry::BackendKind::collective,
                         .hops = options.hops,
                         .reduction = ferry::Reduction::partial}),
        tokens_(options.tokens * kRowBytes),
        result_(options.tokens * kRowBytes) {
    for (std::int64_t token = 0; token < options.tokens; ++token)
      write_token(0, rank.index(), token, 1.0f, tokens_.data() + token * kRowBytes);
    inputs_ = make_inputs(0, rank.index(), options.tokens);
    for (std::int32_t& id : inputs_.ids) id %= experts_;
  }

  void run() {
    step(nullptr);  // connections, and the sizes of messages
    const ferry::WireCounts wire = exchange_.wire_counts();
    messages_ = messages();
    const std::int64_t sent = std::accumulate(messages_.begin(), messages_.end(), std::int64_t{0});
    const ferry::WireCounts::BetweenNodes between = wire.between_nodes;
    const bool two = options_.hops == ferry::Hops::two;
    dispatch_bytes_ = size_of_one(two ? between.dispatch_bytes : wire.dispatch_bytes,
                                  two ? between.dispatch_messages : wire.dispatch_messages, sent);
    // Combine's messages travel the other way, so their number on this rank may differ.
    combine_bytes_ = size_of_one(two ? between.combine_bytes : wire.combine_bytes,
                                 two ? between.combine_messages : wire.combine_messages, -1);
    const Transfer dispatch = transfer(dispatch_bytes_, false), combine = transfer(combine_bytes_, true);
    const std::int64_t copied = sum(dispatch.send) + received_rows_ * kRowBytes;
    ferry::LocalMemory from(std::max({sum(dispatch.send), sum(combine.send), copied}) + 16);
    ferry::LocalMemory to(from.bytes() + sum(dispatch.receive) + sum(combine.receive));
    std::memset(from.data(), 1, static_cast<std::size_t>(from.bytes()));
    std::memset(to.data(), 2, static_cast<std::size_t>(to.bytes()));
    for (int round = 0; round < options_.rounds; ++round) {
      step(times_);
      times_[kDispatchAllToAll].push_back(slowest([&] { all_to_all(dispatch, from, to); }));
      times_[kCombineAllToAll].push_back(slowest([&] { all_to_all(combine, from, to); }));
      times_[kCopy].push_back(
          slowest([&] { std::memcpy(to.data(), from.data(), static_cast<std::size_t>(copied)); }));
    }
    print(between);
  }

 private:
  void step(std::vector<double>* times) {
    ferry::DispatchResult received;
    const double dispatch = slowest([&] {
      received = exchange_.dispatch(ferry::Tokens::rows(tokens_.data(), options_.tokens), inputs_.ids.data(),
                                    inputs_.weights.data());
    });
    received_rows_ = *received.total;
    const double combine = slowest([&] {
      exchange_.combine({.data = received.data}, received.plan, {.data = result_.data()},
                        {.row_weights = received.weight});
    });
    if (times == nullptr) return;
    times[kDispatch].push_back(dispatch);
    times[kCombine].push_back(combine);
  }

  // Messages of dispatch to each rank: (token, rank), or (token, node) to the relay.
  std::vector<int> messages() const {
    const ferry::Topology& topology = rank_.topology();
    std::vector<int> counts(static_cast<std::size_t>(rank_.size()));
    for (int token = 0; token < options_.tokens; ++token) {
      std::set<int> ranks;
      for (int slot = 0; slot < kTopK; ++slot) {
        const int id = inputs_.ids[static_cast<std::size_t>(token * kTopK + slot)];
        int rank = id / (experts_ / rank_.size());
        if (options_.hops == ferry::Hops::two) {
          const int node = topology.node_of(rank);
          rank = node == topology.node_of(rank_.index()) ? rank_.index()
                                                         : topology.relay_of(rank_.index(), node);
        }
        if (rank != rank_.index()) ranks.insert(rank);
      }
      for (const int rank : ranks) ++counts[static_cast<std::size_t>(rank)];
    }
    return counts;
  }

  // Bytes of a message. `expected`: the number of messages, -1 if it is not known.
  static int size_of_one(std::int64_t bytes, std::int64_t messages, std::int64_t expected) {
    if (messages == 0 || bytes % messages != 0 || (expected >= 0 && messages != expected)) {
      std::fprintf(stderr, "collective_mpi: %lld bytes in %lld messages, expected %lld\n",
                   static_cast<long long>(bytes), static_cast<long long>(messages),
                   static_cast<long long>(expected));
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return static_cast<int>(bytes / messages);
  }

  Transfer transfer(int message_bytes, bool back) const {
    Transfer made;
    for (const int count : messages_) made.send.push_back(count * message_bytes);
    made.receive.resize(made.send.size());
    MPI_Alltoall(made.send.data(), 1, MPI_INT, made.receive.data(), 1, MPI_INT, MPI_COMM_WORLD);
    if (back) made.send.swap(made.receive);
    return made;
  }

  static std::int64_t sum(const std::vector<int>& values) {
    return std::accumulate(values.begin(), values.end(), std::int64_t{0});
  }

  static void all_to_all(const Transfer& transfer, const ferry::LocalMemory& from,
                         const ferry::LocalMemory& to) {
    const std::vector<int> from_starts = starts_of(transfer.send), to_starts = starts_of(transfer.receive);
    MPI_Alltoallv(from.data(), transfer.send.data(), from_starts.data(), MPI_BYTE, to.data(),
                  transfer.receive.data(), to_starts.data(), MPI_BYTE, MPI_COMM_WORLD);
  }

  static double slowest(const std::function<void()>& work) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    work();
    const double own = MPI_Wtime() - start;
    double most = 0;
    MPI_Allreduce(&own, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return most;
  }

  // `between`: what this rank has sent to other nodes in one dispatch and one combine.
  void print(const ferry::WireCounts::BetweenNodes& between) {
    const std::int64_t mine[] = {between.dispatch_bytes, between.dispatch_messages, between.combine_bytes,
                                 between.combine_messages};
    std::int64_t all[4] = {};
    MPI_Allreduce(mine, all, 4, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank_.index() != 0) return;
    std::printf(
        "{\"ranks\": %d, \"nodes\": %d, \"hops\": \"%s\", \"tokens\": %d, \"experts\": %d, \"rounds\": %d",
        rank_.size(), rank_.topology().nodes(), options_.hops == ferry::Hops::two ? "two" : "one",
        options_.tokens, experts_, options_.rounds);
    const char* const names[] = {"dispatch_bytes", "dispatch_messages", "combine_bytes", "combine_messages"};
    for (int i = 0; i < 4; ++i)
      std::printf(", \"%s_between_nodes\": %lld", names[i], static_cast<long long>(all[i]));
    for (int timed = 0; timed < kTimed; ++timed) {
      std::vector<double>& times = times_[timed];
      std::sort(times.begin(), times.end());
      std::printf(", \"%s\": {\"p50_ms\": %.3f, \"least_ms\": %.3f, \"most_ms\": %.3f}", kNames[timed],
                  times[times.size() / 2] * 1e3, times.front() * 1e3, times.back() * 1e3);
    }
    std::printf("}\n");
  }

  const PairOptions options_;
  const ferry::Rank rank_;
  const int experts_;
  ferry::Exchange exchange_;
  ferry::LocalMemory tokens_, result_;
  Inputs inputs_;
  std::vector<int> messages_;  // [ranks], of a dispatch of this rank
  int dispatch_bytes_ = 0, combine_bytes_ = 0;
  std::int64_t received_rows_ = 0;
  std::vector<double> times_[kTimed];
};

bool parse_pair(int argc, char** argv, PairOptions& options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--hops" && (value == "one" || value == "two")) {
      options.hops = value == "one" ? ferry::Hops::one : ferry::Hops::two;
    } else if (name == "--tokens") {
      options.tokens = std::atoi(value.c_str());
    } else if (name == "--rounds") {
      options.rounds = std::atoi(value.c_str());
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && options.tokens > 0 && options.rounds > 0;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0, status = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  PairOptions options;
  if (!parse_pair(argc, argv, options)) {
    std::fprintf(stderr, "usage: collective_mpi [--hops one|two] [--tokens N] [--rounds N]\n");
    status = 2;
  } else {
    try {
      ferry::Group::mpi().run([&](const ferry::Rank& rank) { PairRun(options, rank).run(); });
    } catch (const std::exception& error) {
      std::fprintf(stderr, "collective_mpi: %s\n", error.what());
      status = 1;
    }
  }
  MPI_Finalize();
  return status;
}
