#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "backends/cuda/runtime/stream.hpp"
#include "base/environment.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/bench/engine_bench.hpp"
#include "tools/ferry/bench/gpu_inputs.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/bench/nccl_all_to_all.hpp"
#include "tools/ferry/bench/traffic.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/gpu.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"

namespace ferry::app {

namespace {

constexpr int kUncounted = 3;  // rounds that are not counted

// The parts of a round that are timed, in this order.
enum RoundPart : int {
  kDispatch,
  kDispatchTransfer,
  kDispatchCopy,
  kCombine,
  kCombineTransfer,
  kCombineCopy,
  kRoundParts
};

// Bytes that one rank's calls with one input set send and receive.
struct SetBytes {
  std::int64_t dispatch_wire, dispatch_between, combine_wire, combine_between;
  std::int64_t dispatch_messages;  // over the wire, or with two hops between nodes
  std::int64_t rows;               // received
};

class EngineBenchRunner {
 public:
  EngineBenchRunner(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs)
      : rank_(rank),
        point_(point),
        inputs_(inputs),
        exchange_(rank, point.config),
        tables_(point),
        sets_(rank, point, inputs),
        result_(point.result_bytes()),
        result_copy_(static_cast<std::size_t>(result_.bytes())) {
    if (point_.global_scale != 1) global_scale_ = GpuBuffer::of(point_.global_scale);
  }

  // Collective.
  void run(EngineBenchRow& row) {
    prepare();
    if (point_.config.engine == EngineKind::nccl) nccl_ = std::make_unique<NcclAllToAll>(rank_, load_nccl());
    size_transfers();
    for (int round = -kUncounted; round < point_.repetitions; ++round)
      time_round((round + kUncounted) % kSets, round >= 0);
    exchange_.check();
    row.rank = rank_.index();
    row.nodes = rank_.topology().nodes();
    row.point.config.hops = two_hops() ? Hops::two : Hops::one;
    row.engine = nccl_ ? "NCCL " + nccl_->version() : "MPI";
    row.registers = nccl_ && Environment::says_yes(&Environment::nccl_register);
    std::vector<std::int64_t> checked(static_cast<std::size_t>(point_.ranks));
    rank_.all_gather(&rows_checked_, checked.data(), sizeof rows_checked_);
    row.rows_checked = sum_of(checked);
    row.dispatch = result(kDispatch, &SetBytes::dispatch_wire, &SetBytes::dispatch_between);
    row.combine = result(kCombine, &SetBytes::combine_wire, &SetBytes::combine_between);
  }

 private:
  static constexpr int kSets = BenchInputs::kSets;

  bool two_hops() const { return rank_.topology().nodes() > 1 && exchange_.config().hops == Hops::two; }

  // The experts return the received rows unchanged.
  void prepare() {
    sets_.upload(tables_);
    std::int64_t rows = 1;  // at least 1, so that the outputs have an address
    for (int set = 0; set < kSets; ++set) {
      dispatch(set);
      exchange_.synchronize({.stream = stream_});
      const DispatchResult local = received_on_host_.copy_row_positions(received_, point_.config);
      rows_checked_ += check_row_positions(inputs_, set, rank_.index(), local, true);
      sets_.record_rows(set, local);
      rows = std::max<std::int64_t>(rows, *local.total);
    }
    sets_.make_outputs(tables_, rows, stream_);
    std::vector<SetBytes> mine;
    for (int set = 0; set < kSets; ++set) mine.push_back(check(set));
    bytes_.resize(static_cast<std::size_t>(kSets * point_.ranks));
    for (int set = 0; set < kSets; ++set) {
      rank_.all_gather(&mine[static_cast<std::size_t>(set)],
                       &bytes_[static_cast<std::size_t>(set * point_.ranks)], sizeof(SetBytes));
    }
  }

  void dispatch(int set_index) {
    const GpuInputSet& set = sets_[set_index];
    DispatchOptions options{.call = {.stream = stream_}};
    options.memory.plan = set.plan.as<void>();
    options.global_scale = global_scale_.as<float>();
    received_ = exchange_.dispatch(Tokens::rows(set.tokens.as(), point_.tokens, point_.type),
                                   set.ids.as<std::int32_t>(), set.weights.as<float>(), options);
  }

  void combine(int set_index) {
    const GpuInputSet& set = sets_[set_index];
    CombineOptions options{.call = {.stream = stream_}};
    if (combine_applies_weights(point_.config.layout, point_.config.reduction))
      options.row_weights = set.row_weights.as<float>();
    exchange_.combine({set.outputs.as(), point_.type},
                      Plan::over(set.plan.as<void>(), static_cast<std::size_t>(set.plan.bytes())),
                      {.data = result_.as(), .type = point_.type}, options);
  }

  SetBytes check(int set) {
    const WireCounts before = exchange_.wire_counts();
    constexpr int kPoison = 0xFF;
    result_.fill(kPoison, stream_);
    dispatch(set);
    exchange_.synchronize({.stream = stream_});
    sets_.check_bytes(set, received_, stream_);
    combine(set);
    exchange_.synchronize({.stream = stream_});
    exchange_.check();
    copy_to_host(result_copy_.data(), result_.as(), result_.bytes());
    rows_checked_ += check_result(point_, inputs_, set, rank_.index(), result_copy_.data(),
                                  {.reduction = point_.config.reduction});
    const WireCounts after = exchange_.wire_counts();
    const auto &first = before.between_nodes, &last = after.between_nodes;
    return {.dispatch_wire = after.dispatch_bytes - before.dispatch_bytes,
            .dispatch_between = last.dispatch_bytes - first.dispatch_bytes,
            .combine_wire = after.combine_bytes - before.combine_bytes,
            .combine_between = last.combine_bytes - first.combine_bytes,
            .dispatch_messages = two_hops() ? last.dispatch_messages - first.dispatch_messages
                                            : after.dispatch_messages - before.dispatch_messages,
            .rows = static_cast<std::int64_t>(sets_[set].positions.size())};
  }

  // The all-to-all-v carries what one hop sends, or of two what goes between the nodes.
  void size_transfers() {
    BenchPoint resolved = point_;
    resolved.config.hops = exchange_.config().hops;
    std::int64_t most = 16;
    for (int set = 0; set < kSets; ++set) {
      const auto s = static_cast<std::size_t>(set);
      const auto of_ranks = [&](std::int64_t SetBytes::* member) {
        std::vector<std::int64_t> values;
        for (int rank = 0; rank < point_.ranks; ++rank)
          values.push_back(bytes_[static_cast<std::size_t>(set * point_.ranks + rank)].*member);
        return values;
      };
      const RankMatrix messages = messages_between(resolved, inputs_, set, rank_.topology());
      const RankMatrix rows = rows_between(resolved, inputs_, set, rank_.topology());
      const SetBytes& mine = bytes_[static_cast<std::size_t>(set * point_.ranks + rank_.index())];
      const std::int64_t expected = sum_of(messages[static_cast<std::size_t>(rank_.index())]);
      if (mine.dispatch_messages != expected) {
        throw CheckFailed(fmt::format("check failed: set {}, rank {}: sent {} messages, expected {}", set,
                                      rank_.index(), mine.dispatch_messages, expected));
      }
      dispatched_[s] =
          transfer_of(messages, of_ranks(two_hops() ? &SetBytes::dispatch_between : &SetBytes::dispatch_wire),
                      rank_.index());
      combined_[s] = transfer_of(
          rows, of_ranks(two_hops() ? &SetBytes::combine_between : &SetBytes::combine_wire), rank_.index());
      dispatch_copy_[s] = dispatched_[s].sent() + mine.rows * received_row_bytes(point_.config);
      combine_copy_[s] = combined_[s].sent() + mine.rows * point_.token_bytes();
      for (const std::int64_t bytes : {dispatched_[s].sent(), dispatched_[s].received(), combined_[s].sent(),
                                       combined_[s].received(), dispatch_copy_[s], combine_copy_[s]}) {
        most = std::max(most, bytes);
      }
    }
    from_ = GpuBuffer(most);
    to_ = GpuBuffer(most);
    from_.fill(1, stream_);
    to_.fill(2, stream_);
    stream_.synchronize();
  }

  void time_round(int set, bool counted) {
    const auto s = static_cast<std::size_t>(set);
    const auto exchange = [&](const PeerBytes& transfer) {
      if (!nccl_) return;
      nccl_->enqueue(from_.as(), to_.as(), transfer, stream_);
      stream_.synchronize();
    };
    std::array<double, kRoundParts> seconds{};
    seconds[kDispatch] = time([&] {
      dispatch(set);
      exchange_.synchronize({.stream = stream_});
    });
    seconds[kDispatchTransfer] = time([&] { exchange(dispatched_[s]); });
    seconds[kDispatchCopy] = time([&] { copy(dispatch_copy_[s]); });
    seconds[kCombine] = time([&] {
      combine(set);
      exchange_.synchronize({.stream = stream_});
    });
    seconds[kCombineTransfer] = time([&] { exchange(combined_[s]); });
    seconds[kCombineCopy] = time([&] { copy(combine_copy_[s]); });
    if (!counted) return;
    for (std::size_t timed = 0; timed < kRoundParts; ++timed) seconds_[timed].push_back(seconds[timed]);
  }

  // Seconds until the work is done, from a barrier.
  template <class Work>
  double time(Work work) {
    rank_.barrier();
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void copy(std::int64_t bytes) {
    cuda::check(cudaMemcpyAsync(to_.as(), from_.as(), static_cast<std::size_t>(bytes),
                                cudaMemcpyDeviceToDevice, stream_.get()),
                "copy within a GPU");
    stream_.synchronize();
  }

  // Times of all ranks, by round.
  std::vector<std::vector<double>> gather(RoundPart timed) const {
    const std::vector<double>& mine = seconds_[timed];
    std::vector<double> all(mine.size() * static_cast<std::size_t>(point_.ranks));
    rank_.all_gather(mine.data(), all.data(), mine.size() * sizeof(double));
    std::vector<std::vector<double>> by_rank;
    for (std::size_t begin = 0; begin < all.size(); begin += mine.size()) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(begin);
      by_rank.emplace_back(first, first + static_cast<std::ptrdiff_t>(mine.size()));
    }
    return by_rank;
  }

  EngineCall result(RoundPart first, std::int64_t SetBytes::* wire, std::int64_t SetBytes::* between) const {
    const auto times = [&](int timed) { return round_times(slowest(gather(static_cast<RoundPart>(timed)))); };
    EngineCall call;
    call.call = times(first);
    if (nccl_) call.all_to_all = times(first + 1);
    call.copy = times(first + 2);
    for (const SetBytes& each : bytes_) {
      call.wire_bytes += static_cast<double>(each.*wire);
      call.between_nodes += static_cast<double>(each.*between);
    }
    call.wire_bytes /= static_cast<double>(bytes_.size());
    call.between_nodes /= static_cast<double>(bytes_.size());
    for (std::size_t set = 0; set < kSets; ++set) {
      const PeerBytes& transfer = first == kDispatch ? dispatched_[set] : combined_[set];
      const std::int64_t copied = first == kDispatch ? dispatch_copy_[set] : combine_copy_[set];
      call.all_to_all_bytes += static_cast<double>(transfer.sent()) / kSets;
      call.copied_bytes += static_cast<double>(copied) / kSets;
    }
    return call;
  }

  Rank rank_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  Exchange exchange_;
  cuda::CudaStream stream_;
  GpuBuffer global_scale_;  // empty: g is 1
  TokenTables tables_;
  GpuInputs sets_;
  GpuBuffer result_, from_, to_;
  std::vector<std::byte> result_copy_;
  ResultOnHost received_on_host_;
  DispatchResult received_;  // of the last dispatch
  std::int64_t rows_checked_ = 0;
  std::vector<SetBytes> bytes_;                         // [kSets, R]
  std::array<PeerBytes, kSets> dispatched_, combined_;  // of the all-to-all-v
  std::array<std::int64_t, kSets> dispatch_copy_, combine_copy_;
  std::unique_ptr<NcclAllToAll> nccl_;  // null: another engine
  std::array<std::vector<double>, kRoundParts> seconds_;
};

}  // namespace

EngineBenchRow run_engine_point(const BenchPoint& point) {
  refuse_local_options({.ranks = point.ranks, .hosts = point.hosts, .processes = point.processes});
  const BenchInputs inputs(point);
  Group group = mpi_group(point.ranks);
  group.set_deadline(point.config.deadline);
  EngineBenchRow row;
  row.point = point;
  row.gpu = gpu_names().front();
  row.routing = routing_of(point, inputs);
  group.run([&](const Rank& rank) {
    // Simulated hosts share this machine's GPUs.
    const Topology& topology = rank.topology();
    use_gpu_of_rank(topology.simulated() ? rank.index() : topology.local_rank_of(rank.index()));
    EngineBenchRunner(rank, point, inputs).run(row);
  });
  return row;
}

}  // namespace ferry::app
