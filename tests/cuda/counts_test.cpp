// What only the device sees: numbers of tokens and ids that make no sense.
#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaCounts = OnDevices;

// Inputs of a step in which a rank has no tokens.
Step without_tokens_of(const Case& c, const Step& step, int rank) {
  std::vector<std::vector<std::int64_t>> ids;
  for (const oracle::RankInputs& inputs : step.global.ranks) ids.push_back(inputs.ids);
  ids[static_cast<std::size_t>(rank)].clear();
  return step_of_ids(c, ids, step.index);
}

void set_count(const DeviceRun& play, std::int32_t count) {
  device::copy(play.count(), &count, sizeof count);
}

TEST_F(CudaCounts, ACountThatCannotBeSendsNothingAndIsReported) {
  constexpr int kOdd = 1;
  Case c = device_case(1, 3);
  c.full = true;
  for (const std::int32_t count : {c.config.max_tokens + 1, 0x7FFFFFFF, -1, -0x7FFFFFFF - 1}) {
    run(c.ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun play(exchange, c);
      const Step whole = make_step(c), without = without_tokens_of(c, whole, kOdd);
      const int good = play.keep(whole, make_outcome(c, whole));
      const int reduced = play.keep(without, make_outcome(c, without));
      const OwnStream stream;
      for (int repeat = 0; repeat < 3; ++repeat) {
        play.use(reduced, stream.get());
        play.poison(stream.get());
        stream.synchronize();
        if (rank.index() == kOdd) set_count(play, count);
        play.dispatch(stream.get());
        bool reported = false;
        try {
          exchange.synchronize(c.lane, stream);
          exchange.check(c.lane);
        } catch (const UsageError& error) {
          reported = true;
          require(std::string(error.what()).find(str(count)) != std::string::npos, "message: ", error.what());
        }
        require_equal(reported, rank.index() == kOdd, "reported");
        if (rank.index() == kOdd)
          require_equal(play.received().host->call, play.received().call, "host call number");
        // The exchange is as usable as before.
        play.use(good, stream.get());
        play.poison(stream.get());
        play.dispatch(stream.get());
        play.combine(stream.get());
        play.compare(good, stream.get());
        exchange.check(c.lane);
      }
    });
  }
}

TEST_F(CudaCounts, OtherRanksSeeNoTokensOfARankWithACountThatCannotBe) {
  Case c = device_case(2, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    const Step without = without_tokens_of(c, make_step(c), 1);
    const int reduced = play.keep(without, make_outcome(c, without));
    const OwnStream stream;
    play.use(reduced, stream.get());
    play.poison(stream.get());
    stream.synchronize();
    if (rank.index() == 1) set_count(play, c.config.max_tokens + 1);
    play.dispatch(stream.get());
    stream.synchronize();
    if (rank.index() == 1) return;
    play.combine_options().row_weights = nullptr;
    std::int32_t total = -1;
    device::copy(&total, play.received().total, sizeof total);
    require_equal(total, without.positions.ranks[0].row_offsets.back(), "rows");
  });
}

TEST_F(CudaCounts, BadIdsThatOnlyTheDeviceSees) {
  Case c = device_case(3, 3);
  c.bad_ids = 0.2;
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    const OwnStream stream;
    for (int index = 0; index < 10; ++index) {
      const Step step = make_step(c, index);
      const int set = play.keep(step, make_outcome(c, step));
      play.use(set, stream.get());
      play.poison(stream.get());
      play.dispatch(stream.get());
      play.combine(stream.get());
      play.compare(set, stream.get());
      const BadId& expected = step.positions.bad_ids[static_cast<std::size_t>(rank.index())];
      try {
        exchange.check(c.lane);
        require(expected.count == 0, "no bad id is reported, there are ", expected.count);
      } catch (const BadIdError& error) {
        require_equal(error.bad.count, expected.count, "bad ids");
        require_equal(error.bad.token, expected.token, "token of the first");
        require_equal(error.bad.slot, expected.slot, "slot of the first");
        require_equal(error.bad.id, expected.id, "first bad id");
      }
    }
  });
}

// A count that peers know is the count that was read when the call ran.
TEST_F(CudaCounts, MetadataReadsItsCountWhenItRuns) {
  const Case c = device_case(4, 4);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    const DeviceBytes count(16);
    const OwnStream stream;
    for (std::int32_t call = 0; call < 10; ++call) {
      const std::int32_t mine = 100 * call + rank.index();
      device::copy(count.data(), &mine, sizeof mine);
      const StepMetadata* at = exchange.metadata(count.as<std::int32_t>(), 0, stream);
      exchange.synchronize(0, stream);
      StepMetadata got;
      device::copy(&got, at, sizeof got);
      require_equal(got.sum, 400 * call + 6, "sum");
      require_equal(got.maximum, 100 * call + 3, "maximum");
      require_equal(got.prefix, 100 * call * rank.index() + rank.index() * (rank.index() - 1) / 2, "prefix");
    }
  });
}

}  // namespace
}  // namespace ferry::contract
