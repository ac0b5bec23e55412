// The kernels of all_gather_v and reduce_scatter_v, run on the host: random counts, sizes and addresses, any
// number of rounds and blocks, against the oracle.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <memory>
#include <numeric>

#include "backends/cuda/operations/gather.cuh"
#include "kernels_on_host/lanes.hpp"
#include "oracle/gather.hpp"
#include "oracle/numbers.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr std::int32_t kHidden = 24;
constexpr std::byte kUntouched{0xA5};

// One rank's memory for a call. `shift`: bytes past an aligned address, so that copies of all widths run.
struct Buffer {
  Buffer(oracle::Bytes values, std::int64_t room, std::int64_t shift)
      : first(static_cast<std::size_t>(shift)) {
    bytes.assign(first + static_cast<std::size_t>(room) + 16, kUntouched);
    std::copy(values.begin(), values.end(), bytes.begin() + static_cast<std::ptrdiff_t>(first));
  }
  std::byte* data() { return bytes.data() + first; }
  // `expected`, and nothing else has been written.
  bool holds(const oracle::Bytes& expected) const {
    oracle::Bytes all(bytes.size(), kUntouched);
    std::copy(expected.begin(), expected.end(), all.begin() + static_cast<std::ptrdiff_t>(first));
    return all == bytes;
  }

  std::size_t first;
  oracle::Bytes bytes;
};

// The seed of the case with this number.
std::uint64_t seed_for(std::uint64_t number) {
  return test::seed() + number;
}

using GatherBody = void (*)(const GatherArguments&, GatherState*);

// Calls of some ranks, one after another, on the same lanes.
class GatherRun {
 public:
  // `members`: ranks of a sub-group; 0: all.
  GatherRun(std::uint64_t seed, int ranks, int members = 0)
      : random_(seed),
        ranks_(ranks),
        members_(members == 0 ? ranks : members),
        lanes_(ranks, 4, 2 * kHidden) {}

  // Runs one call on all ranks at once; each rank has its own number of blocks.
  void run(GatherBody kernel, std::vector<GatherArguments> calls) {
    on_host::Grid grid(random_());
    for (GatherArguments& call : calls) {
      const unsigned blocks = 1 + static_cast<unsigned>(random_() % 3);
      auto states = std::make_shared<std::vector<GatherState>>(blocks);
      grid.add(blocks, kGatherThreads,
               [kernel, call, states](unsigned block) { kernel(call, &(*states)[block]); });
    }
    grid.run();
  }

  std::vector<std::int64_t> random_counts(std::int64_t most) {
    std::vector<std::int64_t> counts;
    for (int r = 0; r < ranks_; ++r)
      counts.push_back(random_() % 3 == 0 ? 0 : static_cast<std::int64_t>(random_() % (most + 1)));
    return counts;
  }

  GatherArguments arguments(int rank, Operation operation) const {
    GatherArguments call{};
    call.lane = lanes_.view(rank);
    call.terms = AgreedOptions::of(operation);
    call.first = rank / members_ * members_;
    call.members = members_;
    return call;
  }

  void gather(const std::vector<std::int64_t>& counts, std::int64_t row_bytes) {
    std::vector<oracle::Bytes> rows;
    for (const std::int64_t count : counts) rows.push_back(random_bytes(count * row_bytes));
    std::vector<Buffer> from, to;
    std::vector<GatherArguments> calls;
    std::vector<std::int32_t> on_device(counts.begin(), counts.end());
    const bool counted_on_device = random_() % 2 == 0;
    for (int r = 0; r < ranks_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      from.emplace_back(rows[i], counts[i] * row_bytes, shift());
      to.emplace_back(oracle::Bytes{}, (sum_for(counts, r) + 2) * row_bytes, shift());
    }
    for (int r = 0; r < ranks_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      GatherArguments call = arguments(r, Operation::all_gather_v);
      call.terms.add(row_bytes);
      call.rows = from[i].data();
      call.out = to[i].data();
      call.row_bytes = row_bytes;
      call.held = sum_for(counts, r) + 2;
      call.count = static_cast<std::int32_t>(counts[i]) + (counted_on_device ? 3 : 0);
      if (counted_on_device) call.device_count = &on_device[i];
      calls.push_back(call);
    }
    run(&all_gather, calls);
    for (int r = 0; r < ranks_; ++r) {
      EXPECT_TRUE(to[static_cast<std::size_t>(r)].holds(oracle::gathered(of_group(rows, r))))
          << "gathered rows of rank " << r;
    }
  }

  // Both, with each rank's arrays in one block of memory.
  void in_place(const std::vector<std::int64_t>& counts, DType type) {
    const std::int64_t row_bytes = kHidden * bytes_of(type);
    std::vector<oracle::Bytes> mine, whole;
    std::vector<Buffer> gathered, summed;
    std::vector<GatherArguments> gathers, scatters;
    for (int r = 0; r < ranks_; ++r) {
      const std::int64_t sum = sum_for(counts, r), count = counts[static_cast<std::size_t>(r)];
      mine.push_back(random_bytes(count * row_bytes));
      whole.push_back(random_rows(type, sum * kHidden));
      gathered.emplace_back(oracle::Bytes{}, sum * row_bytes, 0);
      summed.emplace_back(whole.back(), sum * row_bytes, 0);
    }
    const auto first_of = [&](int rank) {
      return std::accumulate(counts.begin() + rank / members_ * members_, counts.begin() + rank,
                             std::int64_t{0});
    };
    for (int r = 0; r < ranks_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      std::byte* const place = gathered[i].data() + first_of(r) * row_bytes;
      std::copy(mine[i].begin(), mine[i].end(), place);
      GatherArguments call = arguments(r, Operation::all_gather_v);
      call.terms.add(row_bytes);
      call.rows = place;
      call.out = gathered[i].data();
      call.row_bytes = row_bytes;
      call.held = sum_for(counts, r);
      call.place = first_of(r) + 1;
      call.count = static_cast<std::int32_t>(counts[i]);
      gathers.push_back(call);
      call.terms = AgreedOptions::of(Operation::reduce_scatter_v);
      call.terms.add(static_cast<std::int64_t>(type));
      call.rows = summed[i].data();
      call.out = summed[i].data() + first_of(r) * row_bytes;
      scatters.push_back(call);
    }
    run(&all_gather, gathers);
    run(type == DType::bf16 ? &reduce_scatter<DType::bf16> : &reduce_scatter<DType::fp32>, scatters);
    for (int r = 0; r < ranks_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      EXPECT_TRUE(gathered[i].holds(oracle::gathered(of_group(mine, r)))) << "gathered rows of rank " << r;
      const oracle::Bytes sums =
          oracle::scattered_sums(of_group(whole, r), type, kHidden, first_of(r), counts[i]);
      oracle::Bytes expected = whole[i];
      std::copy(sums.begin(), sums.end(), expected.begin() + first_of(r) * row_bytes);
      EXPECT_TRUE(summed[i].holds(expected)) << "sums of rank " << r;
    }
  }

  void scatter(const std::vector<std::int64_t>& counts, DType type, std::int64_t aligned_shift) {
    const std::int64_t row_bytes = kHidden * bytes_of(type);
    std::vector<oracle::Bytes> rows;
    for (int r = 0; r < ranks_; ++r) rows.push_back(random_rows(type, sum_for(counts, r) * kHidden));
    std::vector<Buffer> from, to;
    for (int r = 0; r < ranks_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      from.emplace_back(rows[i], sum_for(counts, r) * row_bytes, aligned_shift);
      to.emplace_back(oracle::Bytes{}, counts[i] * row_bytes, aligned_shift);
    }
    std::vector<GatherArguments> calls;
    for (int r = 0; r < ranks_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      GatherArguments call = arguments(r, Operation::reduce_scatter_v);
      call.terms.add(static_cast<std::int64_t>(type));
      call.rows = from[i].data();
      call.out = to[i].data();
      call.row_bytes = row_bytes;
      call.held = sum_for(counts, r);
      call.count = static_cast<std::int32_t>(counts[i]);
      calls.push_back(call);
    }
    run(type == DType::bf16   ? &reduce_scatter<DType::bf16>
        : type == DType::fp16 ? &reduce_scatter<DType::fp16>
                              : &reduce_scatter<DType::fp32>,
        calls);
    std::int64_t first = 0;
    for (int r = 0; r < ranks_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      if (r % members_ == 0) first = 0;
      const oracle::Bytes expected =
          oracle::scattered_sums(of_group(rows, r), type, kHidden, first, counts[i]);
      EXPECT_TRUE(to[i].holds(expected)) << "sums of rank " << r;
      first += counts[i];
    }
  }

  // Adds blocks as over an engine: one of `count` values from each rank, all or some at any address.
  void add(std::int64_t count, DType type, bool aligned) {
    std::vector<oracle::Bytes> values;
    std::vector<Buffer> from;
    for (int r = 0; r < ranks_; ++r) {
      values.push_back(random_rows(type, count));
      const bool shifted = !aligned && r == ranks_ - 1;
      from.emplace_back(values.back(), count * bytes_of(type), shifted ? bytes_of(type) : 0);
    }
    Buffer to({}, count * bytes_of(type), 0);
    AddedBlocks call{};
    for (Buffer& each : from) call.block[call.members++] = each.data();
    call.out = to.data();
    call.bytes = count * bytes_of(type);
    on_host::Grid grid(random_());
    grid.add(1 + static_cast<unsigned>(random_() % 3), kGatherThreads, [&](unsigned) {
      type == DType::bf16   ? add_blocks<DType::bf16>(call)
      : type == DType::fp16 ? add_blocks<DType::fp16>(call)
                            : add_blocks<DType::fp32>(call);
    });
    grid.run();
    EXPECT_TRUE(to.holds(oracle::scattered_sums(values, type, 1, 0, count)));
  }

  // No call has left a trace but its numbers, and all ranks have used up the same.
  void expect_idle() {
    for (int r = 0; r < ranks_; ++r) {
      LaneState& state = lanes_.state(r);
      EXPECT_EQ(lanes_.error(r).call.value, 0u);
      EXPECT_EQ(state.calls[0], lanes_.state(0).calls[0]);
      EXPECT_EQ(state.calls[kMaxBlocks - 1], state.calls[0]);
      for (const std::uint32_t blocks : state.finished) EXPECT_EQ(blocks, 0u);
    }
  }

  // The entries of the ranks of this one's sub-group.
  template <class T>
  std::vector<T> of_group(const std::vector<T>& all, int rank) const {
    const auto first = all.begin() + rank / members_ * members_;
    return {first, first + members_};
  }
  std::int64_t sum_for(const std::vector<std::int64_t>& counts, int rank) const {
    const std::vector<std::int64_t> theirs = of_group(counts, rank);
    return std::accumulate(theirs.begin(), theirs.end(), std::int64_t{0});
  }

  HostLanes& lanes() { return lanes_; }
  std::int64_t shift() { return static_cast<std::int64_t>(random_() % 3 == 0 ? random_() % 16 : 0); }

 private:
  oracle::Bytes random_bytes(std::int64_t bytes) {
    oracle::Bytes made(static_cast<std::size_t>(bytes));
    for (std::byte& each : made) each = static_cast<std::byte>(random_());
    return made;
  }
  oracle::Bytes random_rows(DType type, std::int64_t values) {
    oracle::Bytes made(static_cast<std::size_t>(values * bytes_of(type)));
    for (std::int64_t i = 0; i < values; ++i) {
      const auto value = static_cast<float>(static_cast<int>(random_() % 4001) - 2000) / 37;
      oracle::store(type, value, made.data() + i * bytes_of(type));
    }
    return made;
  }

  std::mt19937_64 random_;
  const int ranks_, members_;
  HostLanes lanes_;
};

TEST(GatherKernel, GathersAnyCountsInAnyNumberOfRounds) {
  for (const int ranks : {1, 2, 3}) {
    GatherRun calls(seed_for(static_cast<std::uint64_t>(ranks)), ranks);
    for (const std::int64_t row_bytes : {48, 3}) {
      calls.gather(calls.random_counts(3), row_bytes);
      calls.gather(calls.random_counts(40), row_bytes);
    }
    calls.gather(std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 0), 16);
    calls.expect_idle();
  }
}

TEST(GatherKernel, AddsInRankOrder) {
  GatherRun calls(seed_for(10), 3);
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    calls.scatter(calls.random_counts(3), type, 0);
    calls.scatter(calls.random_counts(20), type, 0);
    calls.scatter(calls.random_counts(5), type, bytes_of(type));
  }
  calls.scatter({0, 0, 0}, DType::fp32, 0);
  calls.gather({2, 0, 9}, 8);
  calls.expect_idle();
}

TEST(GatherKernel, AddsBlocksThatAnEngineHasBrought) {
  for (const int ranks : {1, 3}) {
    GatherRun calls(seed_for(13), ranks);
    for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
      for (const std::int64_t count : {1, 37, 5000}) {
        calls.add(count, type, true);
        calls.add(count, type, false);
      }
    }
  }
}

TEST(GatherKernel, SubGroupsKeepToThemselves) {
  GatherRun calls(seed_for(12), 4, 2);
  for (int repeat = 0; repeat < 3; ++repeat) {
    calls.gather(calls.random_counts(20), 16);
    calls.scatter(calls.random_counts(12), DType::bf16, 0);
  }
  calls.expect_idle();
}

TEST(GatherKernel, RowsMayLieAtTheirOwnPlace) {
  for (const int ranks : {1, 2, 3}) {
    GatherRun calls(seed_for(static_cast<std::uint64_t>(30 + ranks)), ranks);
    for (const std::int64_t most : {3, 40}) {
      calls.in_place(calls.random_counts(most), DType::bf16);
      calls.in_place(calls.random_counts(most), DType::fp32);
    }
    calls.expect_idle();
  }
  GatherRun calls(seed_for(34), 4, 2);
  calls.in_place(calls.random_counts(20), DType::bf16);
  calls.expect_idle();
}

// Three ranks gather, of which rank 1 has made this change to its arguments.
void expect_refused(const std::function<void(GatherArguments&)>& change, DeviceError::Reason reason, int mine,
                    int theirs) {
  GatherRun calls(seed_for(35), 3);
  const oracle::Bytes rows(6 * 16, std::byte{1});
  std::vector<Buffer> to(3, Buffer({}, 6 * 16, 0));
  std::vector<GatherArguments> arguments;
  for (int r = 0; r < 3; ++r) {
    GatherArguments call = calls.arguments(r, Operation::all_gather_v);
    call.rows = rows.data();
    call.out = to[static_cast<std::size_t>(r)].data();
    call.row_bytes = 16;
    call.held = 6;
    call.count = 2;
    if (r == 1) change(call);
    arguments.push_back(call);
  }
  calls.run(&all_gather, arguments);
  for (int r = 0; r < 3; ++r) {
    EXPECT_TRUE(to[static_cast<std::size_t>(r)].holds({}));
    const std::optional<DeviceError> error = take_error(calls.lanes().error(r));
    ASSERT_TRUE(error);
    EXPECT_EQ(error->reason, reason);
    EXPECT_EQ(error->peer, 1);
    EXPECT_EQ(error->mine, mine);
    EXPECT_EQ(error->theirs, theirs);
  }
  calls.gather({2, 2, 2}, 16);  // the lane stays usable
  calls.expect_idle();
}

TEST(GatherKernel, RowsAtAnotherPlaceEndTheCallOnEveryRank) {
  expect_refused([](GatherArguments& call) { call.place = 4; }, DeviceError::Reason::misplaced, 3, 2);
}

TEST(GatherKernel, TooLittleRoomEndsTheCallOnEveryRank) {
  expect_refused([](GatherArguments& call) { call.held = 5; }, DeviceError::Reason::rows_held, 5, 6);
}

}  // namespace
}  // namespace ferry::cuda
