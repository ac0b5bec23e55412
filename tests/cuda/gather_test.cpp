// all_gather_v and reduce_scatter_v in CUDA graphs: replays read counts and rows anew.
#include <array>
#include <cstring>
#include <numeric>

#include "cuda/device_test.hpp"
#include "oracle/gather.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

constexpr int kGatherSets = 6;
constexpr std::int64_t kMostRows = 40;  // of a rank: more than one round of small_exchange()

// The arguments of every rank in one replay; the same on all ranks.
struct GatherSet {
  std::vector<std::int64_t> counts;
  std::vector<oracle::Bytes> rows;     // to gather
  std::vector<oracle::Bytes> addends;  // [sum of counts, hidden] of bf16
};

GatherSet make_set(std::uint64_t seed, int ranks, std::int64_t hidden) {
  Random random(seed);
  GatherSet set;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::int64_t most = random.chance(0.2) ? kMostRows : 6;
    set.counts.push_back(random.chance(0.3) ? 0 : random.below(most + 1));
  }
  const std::int64_t sum = std::accumulate(set.counts.begin(), set.counts.end(), std::int64_t{0});
  for (int rank = 0; rank < ranks; ++rank) {
    oracle::Bytes rows(static_cast<std::size_t>(2 * hidden * set.counts[static_cast<std::size_t>(rank)]));
    for (std::byte& each : rows) each = static_cast<std::byte>(random.below(256));
    oracle::Bytes addends(static_cast<std::size_t>(2 * hidden * sum));
    for (std::int64_t i = 0; i < hidden * sum; ++i)
      oracle::store(DType::bf16, static_cast<float>(random.below(2001) - 1000) / 64, addends.data() + 2 * i);
    set.rows.push_back(std::move(rows));
    set.addends.push_back(std::move(addends));
  }
  return set;
}

// `values`, and poison up to `bytes`.
DeviceBytes padded_bytes(oracle::Bytes values, std::int64_t bytes) {
  values.resize(static_cast<std::size_t>(bytes), kPoison);
  return DeviceBytes(values);
}

// One rank's set on the device, with what its calls are to return.
struct DeviceSet {
  DeviceSet(const GatherSet& set, std::size_t rank, std::int64_t row_bytes)
      : count(bytes_of_values(std::vector<std::int32_t>{static_cast<std::int32_t>(set.counts[rank])})),
        rows(padded_bytes(set.rows[rank], kMostRows * row_bytes)),
        addends(padded_bytes(set.addends[rank], room(set, row_bytes))),
        gathered(padded_bytes(oracle::gathered(set.rows), room(set, row_bytes))),
        sums(padded_bytes(sums_of(set, rank, row_bytes), kMostRows * row_bytes)) {}

  static std::int64_t room(const GatherSet& set, std::int64_t row_bytes) {
    return static_cast<std::int64_t>(set.counts.size()) * kMostRows * row_bytes;
  }
  static oracle::Bytes sums_of(const GatherSet& set, std::size_t rank, std::int64_t row_bytes) {
    const std::int64_t first = std::accumulate(
        set.counts.begin(), set.counts.begin() + static_cast<std::ptrdiff_t>(rank), std::int64_t{0});
    return oracle::scattered_sums(set.addends, DType::bf16, row_bytes / 2, first, set.counts[rank]);
  }

  DeviceBytes count, rows, addends, gathered, sums;
};

class CudaGather : public DeviceTest {
 protected:
  static TestCase gather_case(std::uint64_t number, int ranks) {
    TestCase c = device_case(number, ranks);
    c.config.hidden = 48;
    c.config.max_tokens = 4;
    return c;
  }
};

TEST_F(CudaGather, ReplaysReadCurrentCountsAndRows) {
  const TestCase c = gather_case(1, 3);
  const int replays = number_from_environment("FERRY_REPLAYS", 10000);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    const auto me = static_cast<std::size_t>(rank.index());
    const std::int64_t row_bytes = 2 * c.config.hidden, room = c.ranks * kMostRows;
    std::vector<DeviceSet> sets;
    for (std::uint64_t set = 0; set < kGatherSets; ++set)
      sets.emplace_back(make_set(c.seed + set, c.ranks, c.config.hidden), me, row_bytes);
    const DeviceBytes count(4), rows(kMostRows * row_bytes), addends(room * row_bytes),
        gathered(room * row_bytes), sums(kMostRows * row_bytes);
    DeviceComparison comparison;
    const TestStream stream;
    rank.barrier();
    const Graph graph(stream.get(), [&] {
      gathered.poison(stream.get());
      sums.poison(stream.get());
      const auto* from = count.as<std::int32_t>();
      exchange.all_gather_v({.rows = rows.data(),
                             .count = kMostRows,
                             .row_bytes = row_bytes,
                             .gathered = gathered.data(),
                             .capacity = room,
                             .device_count = from},
                            {.stream = {stream.get()}});
      exchange.reduce_scatter_v({.rows = addends.data(),
                                 .total = room,
                                 .type = DType::bf16,
                                 .sums = sums.data(),
                                 .count = kMostRows,
                                 .device_count = from},
                                {.stream = {stream.get()}});
    });
    rank.barrier();
    for (int number = 0; number < replays; ++number) {
      const DeviceSet& set = sets[static_cast<std::size_t>(number % kGatherSets)];
      count.copy_from(set.count, stream.get());
      rows.copy_from(set.rows, stream.get());
      addends.copy_from(set.addends, stream.get());
      graph.launch(stream.get());
      ArrayPairs pairs;
      pairs.add(gathered.data(), set.gathered.data(), gathered.bytes());
      pairs.add(sums.data(), set.sums.data(), sums.bytes());
      comparison.compare(pairs, number, stream.get());
      // A launch on a full stream blocks inside the driver, where ranks that share a device could deadlock.
      if (number % 100 == 99) stream.synchronize();
    }
    comparison.require_no_difference(stream.get(), {"gathered rows", "sums"});
  });
}

TEST_F(CudaGather, AnInvalidCountGathersNothingAndIsReported) {
  const TestCase c = gather_case(2, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    const bool odd = rank.index() == 1;
    const DeviceBytes rows(4 * 16), gathered(8 * 16);
    const DeviceBytes count(bytes_of_values(std::vector<std::int32_t>{odd ? 5 : 2}));
    const TestStream stream;
    exchange.all_gather_v({.rows = rows.data(),
                           .count = 4,
                           .row_bytes = 16,
                           .gathered = gathered.data(),
                           .capacity = 8,
                           .device_count = count.as<std::int32_t>()},
                          {.stream = {stream.get()}});
    if (!odd) {
      exchange.synchronize({.stream = {stream.get()}});
      return;
    }
    try {
      exchange.synchronize({.stream = {stream.get()}});
      require(false, "no error for 5 rows of at most 4");
    } catch (const UsageError& error) {
      require(std::string(error.what()).find("a count of 5 in device memory on rank 1, must be 0 to 4") !=
                  std::string::npos,
              error.what());
    }
  });
}

// Over an engine the host reads the count, so the call itself refuses a wrong one, on every rank.
TEST_F(CudaGather, CountsInDeviceMemoryOverAnEngine) {
  TestCase c = gather_case(3, 3);
  for (const contract::Setup& setup : device_collective_setups()) {
    setup.choose_backend(c.config);
    run_ranks(setup, c.ranks, describe(c), [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      const auto me = static_cast<std::size_t>(rank.index());
      const std::int64_t row_bytes = 2 * c.config.hidden, room = c.ranks * kMostRows;
      const TestStream stream;
      const Stream on{stream.get()};
      for (std::uint64_t number = 0; number < 4; ++number) {
        const DeviceSet set(make_set(c.seed + number, c.ranks, c.config.hidden), me, row_bytes);
        const DeviceBytes gathered(room * row_bytes), sums(kMostRows * row_bytes);
        exchange.all_gather_v({.rows = set.rows.data(),
                               .count = kMostRows,
                               .row_bytes = row_bytes,
                               .gathered = gathered.data(),
                               .capacity = room,
                               .device_count = set.count.as<std::int32_t>()},
                              {.stream = on});
        exchange.reduce_scatter_v({.rows = set.addends.data(),
                                   .total = room,
                                   .type = DType::bf16,
                                   .sums = sums.data(),
                                   .count = kMostRows,
                                   .device_count = set.count.as<std::int32_t>()},
                                  {.stream = on});
        exchange.synchronize({.stream = on});
        require(gathered.to_host() == set.gathered.to_host(), "other rows than expected");
        require(sums.to_host() == set.sums.to_host(), "other sums than expected");
        const DeviceBytes wrong(bytes_of_values(std::vector<std::int32_t>{me == 1 ? 5 : 2}));
        try {
          exchange.all_gather_v({.rows = set.rows.data(),
                                 .count = 4,
                                 .row_bytes = 16,
                                 .gathered = gathered.data(),
                                 .capacity = room,
                                 .device_count = wrong.as<std::int32_t>()},
                                {.stream = on});
          require(false, "no error for 5 rows of at most 4");
        } catch (const UsageError& error) {
          require(std::string(error.what()).find("a count of 5 in device memory on rank 1, must be 0 to 4") !=
                      std::string::npos,
                  error.what());
        }
      }
    });
  }
}

}  // namespace
}  // namespace ferry::contract
