// Dispatch to expert_major and combine, written by hand: sort, MPI_Alltoallv, copy into place.
//
//   mpirun -n 4 mpi_alltoallv [--rows rank|route] [--tokens N] [--repetitions N]
//
// bf16, hidden 7168, 256 experts, top 8, uniform routing. `--rows rank` is the better variant: it sends a
// token once to each rank that has one of its experts, with ids and weights; the receiver copies the row to
// each expert and sums the experts' rows before it returns them. `--rows route` is the usual variant: one row
// per route. Buffers are allocated once; the exchange of counts is timed. Sums use Ferry's kernels, so that
// only the movement of data differs. Values and weights make every sum exact, so both variants must return
// the same bytes. Prints JSON.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "base/mapping.hpp"
#include "bench/mpi_inputs.hpp"

namespace {

using namespace by_hand;

// Both variants. Received rows are ordered by local expert, source rank, token, slot.
class ByHand {
 public:
  ByHand(const Options& options, int rank, int ranks)
      : row_per_rank_(options.row_per_rank),
        tokens_(options.tokens),
        rank_(rank),
        ranks_(ranks),
        local_experts_(kExperts / ranks),
        item_bytes_(row_per_rank_ ? kMessageBytes : kRowBytes),
        send_(most_items() * kMessageBytes),
        receive_(most_items() * kMessageBytes),
        rows_(std::int64_t{options.tokens} * kTopK * ranks * kRowBytes) {
    MPI_Type_contiguous(static_cast<int>(item_bytes_), MPI_BYTE, &item_);
    MPI_Type_commit(&item_);
    MPI_Type_contiguous(static_cast<int>(kRowBytes), MPI_BYTE, &row_);
    MPI_Type_commit(&row_);
  }
  ~ByHand() {
    MPI_Type_free(&item_);
    MPI_Type_free(&row_);
  }
  ByHand(const ByHand&) = delete;

  void dispatch(const std::byte* tokens, const Inputs& inputs) {
    pack(tokens, inputs);
    inside_mpi([&] { exchange_counts(); });
    receive_starts_ = starts_of(receive_counts_);
    inside_mpi([&] {
      MPI_Alltoallv(send_.data(), send_counts_.data(), send_starts_.data(), item_, receive_.data(),
                    receive_counts_.data(), receive_starts_.data(), item_, MPI_COMM_WORLD);
    });
    copy_into_place();
  }

  // The experts returned the rows unchanged.
  void combine(const Inputs& inputs, std::byte* result) {
    row_per_rank_ ? sum_rows_here() : copy_back();
    inside_mpi([&] {
      MPI_Alltoallv(receive_.data(), receive_counts_.data(), receive_starts_.data(), row_, send_.data(),
                    send_counts_.data(), send_starts_.data(), row_, MPI_COMM_WORLD);
    });
    std::vector<const void*> rows;
    for (int token = 0; token < tokens_; ++token) {
      rows.clear();
      const std::size_t first = static_cast<std::size_t>(token) * kTopK;
      for (std::size_t slot = 0; slot < kTopK && item_of_[first + slot] >= 0; ++slot) {
        rows.push_back(send_.data() + item_of_[first + slot] * kRowBytes);
      }
      sum(result + token * kRowBytes, rows, row_per_rank_ ? nullptr : &inputs.weights[first]);
    }
  }

  const std::byte* row(std::int64_t index) const { return rows_.data() + index * kRowBytes; }
  std::int64_t row_count() const { return row_count_; }
  double seconds_in_mpi = 0;

 private:
  std::int64_t most_items() const { return std::int64_t{tokens_} * kTopK * ranks_; }

  template <class Work>
  void inside_mpi(Work work) {
    const double start = MPI_Wtime();
    work();
    seconds_in_mpi += MPI_Wtime() - start;
  }

  // Sorts the items, rows or messages, by destination rank, or by expert, which implies the rank.
  void pack(const std::byte* tokens, const Inputs& inputs) {
    const int keys = row_per_rank_ ? ranks_ : kExperts;
    std::vector<int> counts(static_cast<std::size_t>(keys));
    for_items(inputs, [&](int, int key, int) { ++counts[static_cast<std::size_t>(key)]; });
    std::vector<int> next = starts_of(counts);
    send_counts_.assign(static_cast<std::size_t>(ranks_), 0);
    for (int key = 0; key < keys; ++key) {
      send_counts_[static_cast<std::size_t>(row_per_rank_ ? key : rank_of(key, ranks_))] +=
          counts[static_cast<std::size_t>(key)];
    }
    send_starts_ = starts_of(send_counts_);
    expert_counts_ = counts;
    item_of_.assign(static_cast<std::size_t>(tokens_) * kTopK, -1);
    for_items(inputs, [&](int token, int key, int number) {
      const int item = next[static_cast<std::size_t>(key)]++;
      const std::size_t first = static_cast<std::size_t>(token) * kTopK;
      item_of_[first + static_cast<std::size_t>(number)] = item;
      std::byte* to = send_.data() + item * item_bytes_;
      std::memcpy(to, tokens + token * kRowBytes, kRowBytes);
      if (!row_per_rank_) return;
      std::memcpy(to + kRowBytes, &inputs.ids[first], 4 * kTopK);
      std::memcpy(to + kRowBytes + 4 * kTopK, &inputs.weights[first], 4 * kTopK);
    });
  }

  // Calls use(token, key, number) for every item; `number` counts the token's items.
  template <class Use>
  void for_items(const Inputs& inputs, Use use) const {
    for (int token = 0; token < tokens_; ++token) {
      std::uint64_t sent = 0;
      int number = 0;
      for (int slot = 0; slot < kTopK; ++slot) {
        const int id = inputs.ids[static_cast<std::size_t>(token * kTopK + slot)];
        const int rank = rank_of(id, ranks_);
        if (row_per_rank_ && (sent >> rank & 1) != 0) continue;
        sent |= std::uint64_t{1} << rank;
        use(token, row_per_rank_ ? rank : id, number++);
      }
    }
  }

  void exchange_counts() {
    receive_counts_.resize(static_cast<std::size_t>(ranks_));
    if (row_per_rank_) {
      MPI_Alltoall(send_counts_.data(), 1, MPI_INT, receive_counts_.data(), 1, MPI_INT, MPI_COMM_WORLD);
      return;
    }
    chunk_counts_.resize(kExperts);
    MPI_Alltoall(expert_counts_.data(), local_experts_, MPI_INT, chunk_counts_.data(), local_experts_,
                 MPI_INT, MPI_COMM_WORLD);
    for (int source = 0; source < ranks_; ++source) {
      const auto begin = chunk_counts_.begin() + source * local_experts_;
      receive_counts_[static_cast<std::size_t>(source)] = std::accumulate(begin, begin + local_experts_, 0);
    }
  }

  void copy_into_place() {
    if (row_per_rank_) {
      copy_to_experts();
      return;
    }
    for_chunks([&](std::int64_t item, std::int64_t row, std::int64_t count) {
      std::memcpy(rows_.data() + row * kRowBytes, receive_.data() + item * kRowBytes,
                  static_cast<std::size_t>(count * kRowBytes));
    });
  }

  void copy_back() {
    for_chunks([&](std::int64_t item, std::int64_t row, std::int64_t count) {
      std::memcpy(receive_.data() + item * kRowBytes, rows_.data() + row * kRowBytes,
                  static_cast<std::size_t>(count * kRowBytes));
    });
  }

  // Calls use(first received item, first row, rows) for every (local expert, source rank).
  template <class Use>
  void for_chunks(Use use) {
    const std::vector<int> starts = starts_of(chunk_counts_);
    row_count_ = 0;
    for (int expert = 0; expert < local_experts_; ++expert) {
      for (int source = 0; source < ranks_; ++source) {
        const auto chunk = static_cast<std::size_t>(source * local_experts_ + expert);
        use(starts[chunk], row_count_, chunk_counts_[chunk]);
        row_count_ += chunk_counts_[chunk];
      }
    }
  }

  const Tail* tail(std::int64_t item) const {
    return reinterpret_cast<const Tail*>(receive_.data() + item * kMessageBytes + kRowBytes);
  }

  // Calls use(item, slot, local expert) for every route to an expert of this rank.
  template <class Use>
  void for_local_routes(Use use) const {
    for (std::int64_t item = 0; item < receive_starts_.back(); ++item) {
      for (int slot = 0; slot < kTopK; ++slot) {
        const int id = tail(item)->ids[slot];
        if (rank_of(id, ranks_) == rank_) use(item, slot, id - rank_ * local_experts_);
      }
    }
  }

  void copy_to_experts() {
    std::vector<int> counts(static_cast<std::size_t>(local_experts_));
    for_local_routes([&](std::int64_t, int, int expert) { ++counts[static_cast<std::size_t>(expert)]; });
    std::vector<int> next = starts_of(counts);
    row_count_ = next.back();
    routes_.clear();
    for_local_routes([&](std::int64_t item, int slot, int expert) {
      const int row = next[static_cast<std::size_t>(expert)]++;
      routes_.push_back({item, row, tail(item)->weights[slot]});
      std::memcpy(rows_.data() + row * kRowBytes, receive_.data() + item * kMessageBytes, kRowBytes);
    });
  }

  // Writes the sums densely over the messages, which are no longer needed.
  void sum_rows_here() {
    std::vector<const void*> rows;
    std::vector<float> weights;
    for (std::size_t i = 0; i < routes_.size();) {
      const std::int64_t item = routes_[i].item;
      rows.clear();
      weights.clear();
      for (; i < routes_.size() && routes_[i].item == item; ++i) {
        rows.push_back(rows_.data() + routes_[i].row * kRowBytes);
        weights.push_back(routes_[i].weight);
      }
      sum(receive_.data() + item * kRowBytes, rows, weights.data());
    }
    ferry::cpu::stream_fence();
  }

  struct Route {
    std::int64_t item, row;
    float weight;
  };

  const bool row_per_rank_;
  const int tokens_, rank_, ranks_, local_experts_;
  const std::int64_t item_bytes_;
  ferry::LocalMemory send_, receive_, rows_;
  MPI_Datatype item_{}, row_{};
  std::vector<int> send_counts_, send_starts_, receive_counts_, receive_starts_;
  std::vector<int> expert_counts_, chunk_counts_;
  std::vector<std::int64_t> item_of_;  // [tokens, K]: the token's items in the send buffer, then -1
  std::vector<Route> routes_;
  std::int64_t row_count_ = 0;
};

class Run {
 public:
  Run(const Options& options, int rank, int ranks)
      : options_(options),
        rank_(rank),
        ranks_(ranks),
        hand_(options, rank, ranks),
        result_(options.tokens * kRowBytes) {
    for (int set = 0; set < kSets; ++set) {
      tokens_.emplace_back(options.tokens * kRowBytes);
      for (std::int64_t token = 0; token < options.tokens; ++token) {
        write_token(set, rank, token, 1.0f, tokens_.back().data() + token * kRowBytes);
      }
      std::vector<Inputs> inputs;
      for (int source = 0; source < ranks; ++source)
        inputs.push_back(make_inputs(set, source, options.tokens));
      inputs_.push_back(std::move(inputs));
    }
  }

  int run() {
    int right = 1, all_right = 0;
    for (int set = 0; set < kSets; ++set) right &= check(set) ? 1 : 0;
    MPI_Allreduce(&right, &all_right, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (all_right == 0) {
      if (rank_ == 0) std::fprintf(stderr, "mpi_alltoallv: check failed\n");
      return 1;
    }
    hand_.seconds_in_mpi = 0;
    for (int i = 0; i < options_.repetitions; ++i) time(i % kSets);
    print();
    return 0;
  }

 private:
  const Inputs& own_inputs(int set) const { return inputs_[index(set)][index(rank_)]; }
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }

  bool check(int set) {
    hand_.dispatch(tokens_[index(set)].data(), own_inputs(set));
    std::memset(result_.data(), 0xFF, static_cast<std::size_t>(result_.bytes()));
    const bool rows = check_rows(set);
    hand_.combine(own_inputs(set), result_.data());
    return rows && check_result(set);
  }

  bool check_rows(int set) const {
    std::vector<std::byte> expected(kRowBytes);
    std::int64_t row = 0;
    const int local = kExperts / ranks_;
    for (int expert = rank_ * local; expert < (rank_ + 1) * local; ++expert) {
      for (int source = 0; source < ranks_; ++source) {
        const std::vector<std::int32_t>& ids = inputs_[index(set)][index(source)].ids;
        for (std::size_t route = 0; route < ids.size(); ++route) {
          if (ids[route] != expert) continue;
          write_token(set, source, static_cast<std::int64_t>(route) / kTopK, 1.0f, expected.data());
          if (std::memcmp(hand_.row(row++), expected.data(), kRowBytes) != 0) return false;
        }
      }
    }
    return row == hand_.row_count();
  }

  bool check_result(int set) const {
    std::vector<std::byte> expected(kRowBytes);
    for (std::int64_t token = 0; token < options_.tokens; ++token) {
      const auto first = own_inputs(set).weights.begin() + token * kTopK;
      write_token(set, rank_, token, std::accumulate(first, first + kTopK, 0.0f), expected.data());
      if (std::memcmp(result_.data() + token * kRowBytes, expected.data(), kRowBytes) != 0) return false;
    }
    return true;
  }

  void time(int set) {
    dispatch_.push_back(slowest([&] { hand_.dispatch(tokens_[index(set)].data(), own_inputs(set)); }));
    combine_.push_back(slowest([&] { hand_.combine(own_inputs(set), result_.data()); }));
  }

  double slowest(const std::function<void()>& work) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    work();
    const double own = MPI_Wtime() - start;
    seconds_ += own;
    double most = 0;
    MPI_Allreduce(&own, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return most;
  }

  static double percentile(std::vector<double> values, double p) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(p * static_cast<double>(values.size() - 1) + 0.5)];
  }

  void print() const {
    double sum = 0;
    const double fraction = hand_.seconds_in_mpi / seconds_;
    MPI_Reduce(&fraction, &sum, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank_ != 0) return;
    std::printf(
        "{\"rows\": \"%s\", \"ranks\": %d, \"tokens\": %d, \"repetitions\": %d, \"inside_mpi\": %.3f, ",
        options_.row_per_rank ? "rank" : "route", ranks_, options_.tokens, options_.repetitions,
        sum / ranks_);
    std::printf("\"dispatch\": {\"p50_us\": %.1f, \"p99_us\": %.1f}, ", percentile(dispatch_, 0.5) * 1e6,
                percentile(dispatch_, 0.99) * 1e6);
    std::printf("\"combine\": {\"p50_us\": %.1f, \"p99_us\": %.1f}}\n", percentile(combine_, 0.5) * 1e6,
                percentile(combine_, 0.99) * 1e6);
  }

  const Options options_;
  const int rank_, ranks_;
  ByHand hand_;
  ferry::LocalMemory result_;
  std::vector<ferry::LocalMemory> tokens_;
  std::vector<std::vector<Inputs>> inputs_;  // [set][rank]
  std::vector<double> dispatch_, combine_;
  double seconds_ = 0;
};

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--rows" && (value == "rank" || value == "route")) {
      options.row_per_rank = value == "rank";
    } else if (name == "--tokens") {
      options.tokens = std::atoi(value.c_str());
    } else if (name == "--repetitions") {
      options.repetitions = std::atoi(value.c_str());
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && options.tokens > 0 && options.repetitions > 0;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1, status = 2;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  Options options;
  if (parse(argc, argv, options) && kExperts % ranks == 0) {
    status = Run(options, rank, ranks).run();
  } else if (rank == 0) {
    std::fprintf(stderr, "usage: mpi_alltoallv [--rows rank|route] [--tokens N] [--repetitions N]\n");
  }
  MPI_Finalize();
  return status;
}
