// Parts of `ferry bench`: times, lower bounds, transfers and the report of an engine.
#include "tools/ferry/bench/point.hpp"

#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tools/ferry/bench/report.hpp"
#include "tools/ferry/bench/traffic.hpp"

namespace ferry::app {
namespace {

// ---- From measured times to the figures of a benchmark.

TEST(BenchTimes, PercentilesAreMeasuredValues) {
  EXPECT_EQ(times_of({3, 1, 2}).p50, 2);
  EXPECT_EQ(times_of({4, 1, 3, 2}).p50, 3);  // index 1.5, rounded up
  EXPECT_FALSE(times_of({7}).p99.has_value());
  std::vector<double> hundred(101);
  for (std::size_t i = 0; i < hundred.size(); ++i) hundred[i] = static_cast<double>(100 - i);
  EXPECT_EQ(times_of(hundred).p99, 99);
  EXPECT_EQ(times_of(hundred).p50, 50);
}

TEST(BenchTimes, AReplayTakesAsLongAsOnItsSlowestRank) {
  EXPECT_EQ(slowest({{1, 5, 2}, {2, 3, 2}, {0, 4, 3}}), (std::vector<double>{2, 5, 3}));
}

// ---- Lower bounds of benchmark points, compared with counts made by hand.

// Two ranks of two experts each, H = 256. Rank 0 routes tokens {0, 1}, {2, 3}, {0, 2}; rank 1 {2, 3}, {3,
// -1}, {0, 1}; all layers and therefore all sets are equal.
Trace small_trace() {
  Trace trace;
  trace.name = "by hand";
  trace.layers = 1;
  trace.tokens = 6;
  trace.top_k = 2;
  trace.experts = 4;
  trace.ids = {0, 1, 2, 3, 0, 2, 2, 3, 3, -1, 0, 1};
  trace.weights.assign(trace.ids.size(), 0.5f);
  return trace;
}

BenchPoint point_of(const Trace& trace, const Format& format) {
  BenchPoint point;
  point.trace = &trace;
  point.ranks = 2;
  point.tokens = 3;
  point.config.experts = 4;
  point.config.top_k = 2;
  point.config.hidden = 256;
  point.config.max_tokens = 3;
  point.config.placement = Placement::blocks(4, 2);
  point.config.format = format;
  return point;
}

class LowerBound : public testing::Test {
 protected:
  double bytes(const Format& format, const TimedCall& call) const {
    const BenchPoint point = point_of(trace_, format);
    return lower_bound_bytes(point, call, busiest_remote_rows(point, BenchInputs(point)));
  }

  const Trace trace_ = small_trace();
};

// Rank 0 sends 2 pairs and 3 routes and receives 1 and 2; rank 1 the other way round.
TEST_F(LowerBound, CountsTheBusierDirection) {
  const BenchPoint point = point_of(trace_, Format::bf16());
  const RemoteRows busiest = busiest_remote_rows(point, BenchInputs(point));
  EXPECT_EQ(busiest.pairs, 2);
  EXPECT_EQ(busiest.routes, 3);
}

TEST_F(LowerBound, OfDispatchIsTheValuesAndScalesOfPairs) {
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::dispatch}), 2 * 512);
  EXPECT_EQ(bytes(Format::fp32(), {.work = Work::dispatch_plan}), 2 * 1024);
  EXPECT_EQ(bytes(Format::fp8_e4m3(), {.work = Work::dispatch}), 2 * (256 + 2 * 4));
}

TEST_F(LowerBound, OfCombineDependsOnWhereSumsAreComputed) {
  EXPECT_EQ(bytes(Format::fp8_e4m3(), {.work = Work::combine}), 2 * 512);
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::combine, .reduction = Reduction::exact}), 3 * 512);
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::combine, .reduction = Reduction::unreduced}), 3 * 512);
}

TEST_F(LowerBound, OfAPairIsTheSumOfBoth) {
  EXPECT_EQ(bytes(Format::fp8_e4m3(), {.work = Work::pair}), 2 * (256 + 2 * 4) + 2 * 512);
}

TEST_F(LowerBound, OfNcclIsThatOfDispatch) {
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::nccl}), 2 * 512);
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::nccl_rows}), 2 * 512);
}

TEST_F(LowerBound, OfMetadataIsZero) {
  EXPECT_EQ(bytes(Format::bf16(), {.work = Work::metadata}), 0);
}

// ---- The bytes of an all-to-all-v that is measured beside a call over an engine.

class EngineTransfers : public testing::Test {
 protected:
  EngineTransfers() {
    point_.trace = &trace_;
    point_.ranks = 4;
    point_.tokens = 9;
    point_.repetitions = 1;
    point_.config.experts = 8;
    point_.config.top_k = 3;
    point_.config.hidden = 16;
    point_.config.placement = Placement::blocks(8, 4);
    TraceOptions options;
    options.synth.experts = 8;
    options.synth.top_k = 3;
    options.synth.tokens = 36;
    trace_ = open_trace("synth:uniform", options);
  }

  // Ranks that a token of `source` reaches, itself among them.
  std::set<int> reached(const BenchInputs& inputs, int source, int token) const {
    std::set<int> ranks{source};
    for (int slot = 0; slot < 3; ++slot) ranks.insert(inputs.ids(1, source)[token * 3 + slot] / 2);
    return ranks;
  }

  Trace trace_;
  BenchPoint point_;
};

TEST_F(EngineTransfers, OneHopSendsAMessageForEachOtherRank) {
  const BenchInputs inputs(point_);
  const RankMatrix messages = messages_between(point_, inputs, 1, Topology::blocks(4, 1));
  for (int source = 0; source < 4; ++source) {
    std::vector<std::int64_t> expected(4);
    for (int token = 0; token < 9; ++token)
      for (const int rank : reached(inputs, source, token)) ++expected[static_cast<std::size_t>(rank)];
    expected[static_cast<std::size_t>(source)] = 0;
    EXPECT_EQ(messages[static_cast<std::size_t>(source)], expected);
  }
  const RankMatrix rows = rows_between(point_, inputs, 1, Topology::blocks(4, 1));
  for (std::size_t from = 0; from < 4; ++from)
    for (std::size_t to = 0; to < 4; ++to) EXPECT_EQ(rows[from][to], messages[to][from]);
}

TEST_F(EngineTransfers, TwoHopsSendAMessageForEachOtherNodeToItsRelay) {
  point_.config.hops = Hops::two;
  const BenchInputs inputs(point_);
  const Topology topology = Topology::blocks(4, 2);
  const RankMatrix messages = messages_between(point_, inputs, 1, topology);
  for (int source = 0; source < 4; ++source) {
    const int other = source < 2 ? 1 : 0;
    std::int64_t expected = 0;
    for (int token = 0; token < 9; ++token) {
      bool leaves = false;
      for (const int rank : reached(inputs, source, token)) leaves |= rank / 2 == other;
      expected += leaves ? 1 : 0;
    }
    const std::vector<std::int64_t>& sent = messages[static_cast<std::size_t>(source)];
    EXPECT_EQ(sent[static_cast<std::size_t>(topology.relay_of(source, other))], expected);
    EXPECT_EQ(sum_of(sent), expected);
  }
}

TEST_F(EngineTransfers, SumsAtTheSourceReturnARowForEachRemoteRoute) {
  point_.config.reduction = Reduction::exact;
  const BenchInputs inputs(point_);
  const RankMatrix rows = rows_between(point_, inputs, 1, Topology::blocks(4, 1));
  for (int source = 0; source < 4; ++source) {
    std::vector<std::int64_t> expected(4);
    for (int route = 0; route < 27; ++route)
      ++expected[static_cast<std::size_t>(inputs.ids(1, source)[route] / 2)];
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(rows[static_cast<std::size_t>(rank)][static_cast<std::size_t>(source)],
                rank == source ? 0 : expected[static_cast<std::size_t>(rank)]);
    }
  }
}

TEST_F(EngineTransfers, WhatARankSendsItsPeersReceive) {
  const RankMatrix messages{{0, 3, 1}, {2, 0, 0}, {0, 0, 0}};
  const std::vector<std::int64_t> bytes{400, 64, 0};
  std::vector<PeerBytes> of_ranks;
  for (int rank = 0; rank < 3; ++rank) of_ranks.push_back(transfer_of(messages, bytes, rank));
  EXPECT_EQ(of_ranks[0].send, (std::vector<std::int64_t>{0, 300, 100}));
  EXPECT_EQ(of_ranks[1].sent(), 64);
  EXPECT_EQ(of_ranks[0].received(), 64);
  for (std::size_t from = 0; from < 3; ++from)
    for (std::size_t to = 0; to < 3; ++to) EXPECT_EQ(of_ranks[from].send[to], of_ranks[to].receive[from]);
}

// ---- The report of calls over an engine on GPUs, from made-up measurements.

class EngineReport : public testing::Test {
 protected:
  EngineReport() {
    trace_.name = "synth:uniform:experts=256";
    row_.point.trace = &trace_;
    row_.point.ranks = 2;
    row_.point.tokens = 4096;
    row_.point.repetitions = 15;
    row_.point.config.experts = 256;
    row_.point.config.top_k = 8;
    row_.point.config.hidden = 7168;
    row_.point.config.hops = Hops::two;
    row_.nodes = 2;
    row_.engine = "NCCL 2.28.9";
    row_.registers = true;
    row_.gpu = "NVIDIA H200";
    for (EngineCall* call : {&row_.dispatch, &row_.combine}) {
      call->call = {.p50 = 600e-6, .least = 590e-6, .most = 700e-6};
      call->all_to_all = {.p50 = 300e-6, .least = 290e-6, .most = 310e-6};
      call->copy = {.p50 = 200e-6, .least = 190e-6, .most = 210e-6};
      call->wire_bytes = 58.5e6;
    }
  }

  Trace trace_;
  EngineBenchRow row_;
};

TEST_F(EngineReport, TheBoundIsTheTransferAndTheCopy) {
  EXPECT_DOUBLE_EQ(row_.dispatch.bound_seconds(), 500e-6);
  EXPECT_DOUBLE_EQ(row_.dispatch.ratio(), 1.2);
  const nlohmann::ordered_json call = engine_bench_json({row_})["points"][0]["dispatch"];
  EXPECT_NEAR(call["bound_us"], 500, 1e-9);
  EXPECT_NEAR(call["ratio"], 1.2, 1e-12);
  EXPECT_NEAR(call["all_to_all"]["most_us"], 310, 1e-9);
}

TEST_F(EngineReport, WithoutATransferThereIsNoBound) {
  row_.combine.all_to_all = {};
  const nlohmann::ordered_json call = engine_bench_json({row_})["points"][0]["combine"];
  for (const char* name : {"all_to_all", "bound_us", "ratio"}) EXPECT_TRUE(call[name].is_null()) << name;
  EXPECT_NEAR(call["p50_us"], 600, 1e-9);
}

TEST_F(EngineReport, APointSaysHowItWasMeasured) {
  const nlohmann::ordered_json report = engine_bench_json({row_});
  EXPECT_EQ(report["schema"], "ferry.bench.engine");
  const nlohmann::ordered_json& point = report["points"][0];
  EXPECT_EQ(point["engine"], "NCCL 2.28.9");
  EXPECT_EQ(point["registers"], true);
  EXPECT_EQ(point["hops"], "two");
  EXPECT_EQ(point["hosts"], 2);
  EXPECT_EQ(point["rounds"], 15);
}

TEST_F(EngineReport, TheTableFits100Columns) {
  const std::string text = lines_of(row_).heading + lines_of(row_).lines;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100U) << line;
  EXPECT_NE(text.find("2 ranks on 2 hosts (NCCL 2.28.9, registered), NVIDIA H200, two hops"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("1.20"), std::string::npos) << text;
}

TEST_F(EngineReport, TimesOfRounds) {
  const RoundTimes times = round_times({3, 1, 2});
  EXPECT_EQ(times.p50, 2);
  EXPECT_EQ(times.least, 1);
  EXPECT_EQ(times.most, 3);
}

}  // namespace
}  // namespace ferry::app
