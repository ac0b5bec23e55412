#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "ferry/error.hpp"
#include "tools/ferry/bench/gpu_inputs.hpp"
#include "tools/ferry/bench/gpu_rows.hpp"
#include "tools/ferry/bench/gpu_timer.hpp"
#include "tools/ferry/bench/nccl_all_to_all.hpp"
#include "tools/ferry/bench/runners.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

// Page-locked host memory, to which the GPU copies while the host works.
class PinnedCounts {
 public:
  explicit PinnedCounts(int count) {
    cuda::check(cudaMallocHost(&data_, static_cast<std::size_t>(count) * 4), "pin memory");
  }
  ~PinnedCounts() { cudaFreeHost(data_); }
  PinnedCounts(const PinnedCounts&) = delete;
  PinnedCounts& operator=(const PinnedCounts&) = delete;

  std::int32_t* get() const { return static_cast<std::int32_t*>(data_); }

 private:
  void* data_ = nullptr;
};

class NcclRunner {
 public:
  NcclRunner(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs, const Nccl& nccl)
      : rank_(rank),
        point_(point),
        inputs_(inputs),
        row_bytes_(point.token_bytes()),
        nccl_(rank, nccl),
        timer_(rank, point, stream_, [this] { stream_.synchronize(); }),
        sets_(rank, point, inputs),
        rank_of_(std::int64_t{point.config.experts} * 4),
        row_of_route_(routes() * 4),
        counts_(2 * std::int64_t{point.ranks} * 4),
        counts_on_host_(2 * point.ranks) {}

  std::vector<double> run(Work work, TokenTables& tables, std::int64_t& rows_checked) {
    prepare(tables);
    const auto issue = [&](int set) {
      work == Work::nccl ? sort_and_exchange(set) : exchange_rows(set, transfers_[at(set)]);
    };
    for (int set = 0; set < kSets; ++set) rows_checked += check(set, issue);
    return work == Work::nccl ? timer_.one_by_one(issue) : timer_.in_graphs(issue);
  }

 private:
  static constexpr int kSets = BenchInputs::kSets;

  std::int64_t routes() const { return std::int64_t{point_.tokens} * point_.config.top_k; }
  const GpuBuffer& sorted(int set) const { return sorted_[at(set)]; }

  void prepare(TokenTables& tables) {
    sets_.upload(tables);
    std::vector<std::int32_t> ranks;
    for (int expert = 0; expert < point_.config.experts; ++expert)
      ranks.push_back(point_.config.placement.location(expert).rank);
    rank_of_.fill_from(ranks.data(), rank_of_.bytes());
    std::int64_t most = row_bytes_;  // at least a row, so that the buffer has an address
    for (int set = 0; set < kSets; ++set) {
      transfers_.push_back(transfer_of_set(set));
      most = std::max(most, transfers_.back().received());
      sorted_.emplace_back(routes() * row_bytes_);
      sort_routes(list(set), row_of_route_.as<std::int32_t>(), counts_.as<std::int32_t>(), stream_.get());
      gather(set);
    }
    received_ = GpuBuffer(most);
    stream_.synchronize();
    rank_.barrier();
  }

  // Also records the tokens of the received rows, which lie in the order of source rank, token and slot.
  PeerBytes transfer_of_set(int set) {
    PeerBytes bytes = same_for_all(0);
    std::vector<RowToken>& positions = sets_[set].positions;
    for (int source = 0; source < point_.ranks; ++source) {
      const std::int32_t* ids = inputs_.ids(set, source);
      for (std::int64_t route = 0; route < routes(); ++route) {
        if (ids[route] < 0) continue;
        const int to = point_.config.placement.location(ids[route]).rank;
        if (source == rank_.index()) bytes.send[at(to)] += row_bytes_;
        if (to != rank_.index()) continue;
        bytes.receive[at(source)] += row_bytes_;
        const std::int64_t token = std::int64_t{source} * point_.tokens + route / point_.config.top_k;
        positions.push_back({static_cast<std::int32_t>(positions.size()), static_cast<std::int32_t>(token)});
      }
    }
    return bytes;
  }

  PeerBytes same_for_all(std::int64_t bytes) const {
    return {std::vector(at(point_.ranks), bytes), std::vector(at(point_.ranks), bytes)};
  }

  RouteList list(int set) {
    return {sets_[set].ids.as<std::int32_t>(), routes(), point_.config.top_k, rank_of_.as<std::int32_t>(),
            point_.ranks};
  }

  void gather(int set) {
    gather_rows(list(set), row_of_route_.as<std::int32_t>(), counts_.as<std::int32_t>(),
                sets_[set].tokens.as(), sorted(set).as(), row_bytes_, stream_.get());
  }

  // The host needs the counts to issue the all-to-all-v. While they are copied, the GPU gathers the rows.
  void sort_and_exchange(int set) {
    const int ranks = point_.ranks;
    auto* const send = counts_.as<std::int32_t>();
    sort_routes(list(set), row_of_route_.as<std::int32_t>(), send, stream_.get());
    nccl_.enqueue(counts_.as(), counts_.as() + 4 * ranks, same_for_all(4), stream_);
    cuda::check(cudaMemcpyAsync(counts_on_host_.get(), send, static_cast<std::size_t>(counts_.bytes()),
                                cudaMemcpyDeviceToHost, stream_.get()),
                "copy counts from a GPU");
    counts_copied_.record(stream_);
    gather(set);
    counts_copied_.wait();
    PeerBytes bytes = same_for_all(row_bytes_);
    for (int peer = 0; peer < ranks; ++peer) {
      bytes.send[at(peer)] *= counts_on_host_.get()[peer];
      bytes.receive[at(peer)] *= counts_on_host_.get()[ranks + peer];
    }
    exchange_rows(set, bytes);
  }

  void exchange_rows(int set, const PeerBytes& bytes) {
    nccl_.enqueue(sorted(set).as(), received_.as(), bytes, stream_);
  }

  std::int64_t check(int set, const GpuTimer::Call& call) {
    received_.fill(0xFF, stream_);
    call(set);
    stream_.synchronize();
    DispatchResult received;
    received.parts[0].data = received_.as();
    sets_.check_bytes(set, received, stream_);
    return static_cast<std::int64_t>(sets_[set].positions.size());
  }

  Rank rank_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  const std::int64_t row_bytes_;
  cuda::CudaStream stream_;
  const NcclAllToAll nccl_;
  GpuEvent counts_copied_;
  GpuTimer timer_;
  GpuInputs sets_;
  GpuBuffer rank_of_, row_of_route_, counts_;  // counts_: sent, then received, by peer
  PinnedCounts counts_on_host_;
  std::vector<PeerBytes> transfers_;  // by set
  std::vector<GpuBuffer> sorted_;     // by set
  GpuBuffer received_;
};

// Bytes that a rank sends to others, mean over ranks and input sets.
double wire_bytes_of(const BenchPoint& point, const BenchInputs& inputs) {
  constexpr int kSets = BenchInputs::kSets;
  std::int64_t remote = 0;
  for (int set = 0; set < kSets; ++set) {
    for (int rank = 0; rank < point.ranks; ++rank) {
      const std::int32_t* ids = inputs.ids(set, rank);
      remote += std::count_if(
          ids, ids + std::int64_t{point.tokens} * point.config.top_k,
          [&](std::int32_t id) { return id >= 0 && point.config.placement.location(id).rank != rank; });
    }
  }
  return static_cast<double>(remote * point.token_bytes()) / (static_cast<double>(point.ranks) * kSets);
}

}  // namespace

BenchPoint without_quantisation(const BenchPoint& point) {
  BenchPoint plain = point;
  plain.config.format = point.type == DType::bf16   ? Format::bf16()
                        : point.type == DType::fp16 ? Format::fp16()
                                                    : Format::fp32();
  return plain;
}

GpuTimes run_nccl_baseline(const BenchPoint& point, Work work, const std::string& path) try {
  setenv("NCCL_NVLS_ENABLE", "0", 1);  // compared with Ferry's kernels, which do without multicast
  const Nccl& nccl = load_nccl(path);
  int gpus = 0;
  cuda::check(cudaGetDeviceCount(&gpus), "count the GPUs");
  if (point.ranks > gpus) {
    throw UnsupportedError(fmt::format("NCCL {} allows one rank per GPU: there are {} and {}",
                                       nccl.version_text(), report::counted(point.ranks, "rank"),
                                       report::counted(gpus, "GPU")));
  }
  const BenchInputs inputs(point);
  TokenTables tables(point);
  std::vector<std::vector<double>> seconds(static_cast<std::size_t>(point.ranks));
  std::vector<std::int64_t> checked(seconds.size());
  Group group = Group::threads(point.ranks);
  group.set_deadline(point.config.deadline);
  group.run([&](const Rank& rank) {
    const auto me = static_cast<std::size_t>(rank.index());
    cuda::check(cudaSetDevice(rank.index()), "select a GPU");
    seconds[me] = NcclRunner(rank, point, inputs, nccl).run(work, tables, checked[me]);
  });
  return {.seconds = times_of(slowest(seconds)),
          .wire_bytes = wire_bytes_of(point, inputs),
          .rows_checked = std::accumulate(checked.begin(), checked.end(), std::int64_t{0})};
} catch (const UnsupportedError& error) {
  GpuTimes skipped;
  skipped.skipped = error.what();
  return skipped;
}

}  // namespace ferry::app
