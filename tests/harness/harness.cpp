#include "harness/harness.hpp"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/environment.hpp"
#include "group/rank_state.hpp"
#include "harness/device.hpp"
#include "harness/engine_ranks.hpp"
#include "harness/persistent_ranks.hpp"
#include "oracle/combine.hpp"
#include "oracle/expected.hpp"
#include "seed.hpp"

namespace ferry::contract {

std::string describe(const Setup& setup) {
  constexpr const char* kRanks[] = {"threads",
                                    "processes",
                                    "persistent processes",
                                    "threads with an engine",
                                    "threads with an engine on two simulated hosts",
                                    "processes of mpirun"};
  return str(to_string(setup.backend), setup.memory == MemoryKind::device ? " on device memory" : "", ", ",
             kRanks[static_cast<int>(setup.rank_kind)],
             setup.hops == Hops::two ? str(", two hops, window ", setup.window) : "",
             setup.engine == EngineKind::nccl ? ", NCCL" : "",
             setup.language != nullptr ? str(", through ", setup.language->name) : "");
}

bool Setup::has_gathered_input() const {
  return hops != Hops::two && !(on_device() && std::getenv("FERRY_WIDE") != nullptr);
}

void Setup::choose_backend(Config& config) const {
  config.backend = backend;
  config.memory = memory;
  config.hops = hops;
  if (window >= 0) config.window = window;
  config.engine = engine;
  if (backend == BackendKind::cuda && hops != Hops::two) config.reduction_level = ReductionLevel::rank;
  // A launch that hangs would take the device from all tests.
  if (has_kernels(backend) && hops == Hops::two) config.deadline = std::min(config.deadline, 4.0);
  if (!has_gathered_input()) config.transfer = Transfer::routed;
  if (on_device() && config.layout == Layout::expert_indexed) config.layout = Layout::expert_major;
  // TestCase::input_scales: see exchange_config().
}

std::vector<Setup> device_setups(RankKind rank_kind) {
  if (!device::is_built()) return {};
  return {{BackendKind::cuda, rank_kind}};
}

std::vector<Setup> relayed_device_setups() {
  if (!device::is_built()) return {};
  return {{.backend = BackendKind::cuda, .rank_kind = RankKind::threads, .hops = Hops::two, .window = 7}};
}

std::vector<Setup> device_collective_setups() {
  if (!device::is_built()) return {};
  return {{BackendKind::collective, RankKind::engine_threads, MemoryKind::device},
          {BackendKind::collective, RankKind::engine_hosts, MemoryKind::device},
          {BackendKind::collective, RankKind::engine_threads, MemoryKind::device, Hops::two, 7}};
}

std::vector<Setup> nccl_setups() {
  if (!device::is_built()) return {};
  return {{.backend = BackendKind::collective,
           .rank_kind = RankKind::mpi,
           .memory = MemoryKind::device,
           .engine = EngineKind::nccl}};
}

std::vector<Setup> nvshmem_setups() {
  if (!device::is_built()) return {};
  return {{.backend = BackendKind::nvshmem, .rank_kind = RankKind::mpi, .hops = Hops::two, .window = 7}};
}

std::string skip_reason(const Setup& setup) {
  if (!setup.on_device()) return {};
  if (setup.backend == BackendKind::nvshmem && setup.rank_kind == RankKind::mpi &&
      !has_simulated_hosts(setup))
    return "needs ranks on several nodes: give each process a FERRY_HOST_ID (scripts/gpu contract-nvshmem)";
  // Each simulated host shows its ranks only GPUs of its own.
  if (setup.engine == EngineKind::nccl && device::count() < 2 && !has_simulated_hosts(setup))
    return "NCCL needs a GPU for each rank";
  const bool forks = setup.rank_kind == RankKind::processes ||
                     (setup.rank_kind == RankKind::persistent_processes && !program_ranks().is_rank());
  if (forks && device::driver_started()) return "this process has started the driver and cannot fork ranks";
  return device::skip_reason();
}

std::uint64_t seed_of(std::uint64_t number) {
  return Random::of({test::seed(), number}).next();
}

int number_from_environment(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

namespace {

// Draws how many bytes the CPU backend copies at a time: one row, several rows, or a whole call. A function
// of `what`, so that a case that is run alone gets the same.
std::int64_t draw_chunk_budget(const std::string& what) {
  Random random = Random::of({std::hash<std::string>()(what)});
  return random.pick({std::int64_t{1}, std::int64_t{1} << random.between(10, 18), std::int64_t{8} << 20});
}

void run_group(const Setup& setup, int ranks, const std::vector<int>& nodes,
               const std::function<void(Rank)>& body) {
  const RankKind kind = setup.rank_kind;
  std::vector<int> labels = nodes;
  for (int rank = 0; rank < ranks && nodes.empty(); ++rank)
    labels.push_back(setup.hops == Hops::two && rank % 3 == 1 ? 1 : 0);
  const Topology topology(labels);
  const bool engine_takes_device_memory = kind == RankKind::engine_threads && setup.on_device();
  if (topology.nodes() > 1 && (kind == RankKind::engine_threads || kind == RankKind::engine_hosts))
    return run_engine_nodes(topology, body, engine_takes_device_memory);
  switch (kind) {
    case RankKind::threads: {
      Group group = Group::threads(topology);
      group.set_deadline(meeting_deadline(ranks));
      return group.run(body);
    }
    case RankKind::processes:
      return Group::processes(topology).run(body);
    case RankKind::persistent_processes:
      return program_ranks().run(ranks, body);
    case RankKind::engine_threads:
      return run_engine_threads(ranks, body, engine_takes_device_memory);
    case RankKind::engine_hosts:
      return run_engine_hosts(ranks, body);
    case RankKind::mpi:
      return setup.engine == EngineKind::nccl ? run_mpi_member(ranks, nodes, body)
                                              : run_mpi_process(ranks, nodes, body);
  }
}

// Keeps this process connected by NCCL, which takes a good part of a second, from one body to the next.
std::unique_ptr<SyncExchange> connected;

void stay_connected(const Setup& setup, const Rank& rank) {
  if (setup.engine != EngineKind::nccl || connected) return;
  TestCase c;
  setup.choose_backend(c.config);
  connected = std::make_unique<SyncExchange>(rank, c.config);
}

}  // namespace

void make_streams(const Rank& rank, int device) {
  for (int turn = 0; turn < rank.size(); ++turn) {
    if (turn == rank.index()) device::make_stream(device);
    rank.barrier();
  }
}

void disconnect_mpi_process() {
  connected = nullptr;
  leave_mpi_group();
}

void run_ranks(const Setup& setup, int ranks, const std::string& what, const std::function<void(Rank)>& body,
               const std::vector<int>& nodes) {
  const std::int64_t chunk_budget = draw_chunk_budget(what);
  const auto run_as_rank = [&](Rank rank) {
    rank.state().set_chunk_budget(chunk_budget);
    try {
      std::optional<device::RankScope> scope;
      if (setup.on_device()) scope.emplace(device_number(rank, setup.backend));
      if (setup.on_device() && setup.same_process()) make_streams(rank, device_number(rank, setup.backend));
      stay_connected(setup, rank);
      body(rank);
    } catch (const Mismatch& mismatch) {
      throw Mismatch(str("rank ", rank.index(), ": ", mismatch.what()));
    }
  };
  SyncExchange::call_through(setup.language);
  try {
    run_group(setup, ranks, nodes, run_as_rank);
  } catch (const std::exception& error) {
    ADD_FAILURE() << describe(setup) << ", FERRY_SEED=" << test::seed()
                  << ", FERRY_TEST_MEMORY=" << device::memory_kind() << ", chunks of " << chunk_budget
                  << " bytes\n"
                  << what << "\n"
                  << error.what();
    // The other ranks no longer run the same code: this process exits.
    if (setup.rank_kind == RankKind::mpi) std::_Exit(1);
    if (program_ranks().is_rank()) program_ranks().finish_test(true);
  }
}

Plan dispatch_and_combine(SyncExchange& exchange, const TestCase& c, const StepInputs& step,
                          const oracle::ExpertOutputs& expert_outputs) {
  DispatchRun dispatch(exchange, c, step);
  dispatch.run();
  CombineRun(exchange, c, step, expert_outputs, dispatch.received().plan, dispatch.received().weight).run();
  return dispatch.received().plan.copy();
}

void check_route_values(SyncExchange& exchange, const TestCase& c, const StepInputs& step, const Plan& plan) {
  const int rank = exchange.rank().index();
  std::vector<std::vector<float>> values;
  for (int source = 0; source < c.ranks; ++source) {
    Random random = Random::of({c.seed, 99, static_cast<std::uint64_t>(source)});
    values.push_back(random_floats(random, step.positions.tokens(source) * c.config.top_k));
  }
  GuardedBuffer mine(static_cast<std::int64_t>(values[rank].size()) * 4);
  std::copy(values[rank].begin(), values[rank].end(), mine.as<float>());
  const std::vector<oracle::RowInfo>& rows = step.positions.ranks[rank].rows;
  GuardedBuffer got(static_cast<std::int64_t>(rows.size()) * 4);
  exchange.route_values(mine.as<float>(), plan, got.as<float>(), c.lane);
  got.require_guards("row values");
  const std::vector<float> expected = oracle::values_at_rows(step.positions, values, rank);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    require_equal(got.as<float>()[row], expected[row], "row value ", row);
  }
  // Back again: each kept route has its value, the others 0.
  GuardedBuffer back(static_cast<std::int64_t>(values[rank].size()) * 4);
  exchange.return_values(got.as<float>(), plan, back.as<float>(), c.lane);
  back.require_guards("route values");
  for (std::size_t route = 0; route < values[rank].size(); ++route) {
    const bool kept = step.positions.routes[rank][route].row >= 0;
    require_equal(back.as<float>()[route], kept ? values[rank][route] : 0.0f, "returned value ", route);
  }
}

bool run_case(const Setup& setup, const TestCase& c, const StepInputs& step) {
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  const bool failed_before = testing::Test::HasFailure();
  const auto body = [&](Rank rank) {
    SyncExchange exchange(rank, exchange_config(c));
    dispatch_and_combine(exchange, c, step, expert_outputs);
  };
  run_ranks(setup, c.ranks, describe(c), body, c.nodes);
  return failed_before || !testing::Test::HasFailure();
}

bool run_case(const Setup& setup, TestCase c) {
  setup.choose_backend(c.config);
  return run_case(setup, c, make_inputs(c));
}

oracle::Travel travel_of(const SyncExchange& exchange) {
  return {.topology = exchange.rank().topology(),
          .two_hops = exchange.config().hops == Hops::two,
          .relays_add = exchange.config().reduction_level == ReductionLevel::node};
}

bool simulates_nodes(const Setup& setup) {
  if (setup.backend == BackendKind::cuda && setup.hops != Hops::two) return false;
  return setup.rank_kind == RankKind::threads || setup.rank_kind == RankKind::processes ||
         setup.rank_kind == RankKind::engine_threads || setup.rank_kind == RankKind::engine_hosts;
}

bool has_simulated_hosts(const Setup& setup) {
  return setup.rank_kind == RankKind::mpi && !Environment::read().host_id.empty();
}

bool takes_nodes(const Setup& setup) {
  return simulates_nodes(setup) || setup.rank_kind == RankKind::mpi;
}

namespace {

void require_traffic(const SyncExchange& exchange, const TestCase& c,
                     const std::vector<const StepInputs*>& steps) {
  const int rank = exchange.rank().index();
  const oracle::Travel travel = travel_of(exchange);
  oracle::SentMessages sent, returned;
  const auto add = [](oracle::SentMessages& all, const oracle::SentMessages& more) {
    all.within_node += more.within_node;
    all.between_nodes += more.between_nodes;
  };
  for (const StepInputs* step : steps) {
    add(sent, oracle::dispatch_messages(step->positions, travel, rank));
    add(returned, oracle::combine_messages(step->positions, travel, rank, c.reduction));
  }
  const WireCounts wire = exchange.wire_counts();
  require_equal(wire.dispatch_messages, sent.all(), "dispatch messages");
  require_equal(wire.combine_messages, returned.all(), "combine messages");
  if (c.config.backend == BackendKind::cuda && !travel.two_hops) return;  // does not tell nodes apart
  require_equal(wire.between_nodes.dispatch_messages, sent.between_nodes, "dispatch messages between nodes");
  require_equal(wire.between_nodes.combine_messages, returned.between_nodes,
                "combine messages between nodes");
}

void require_load(const SyncExchange& exchange, const TestCase& c,
                  const std::vector<const StepInputs*>& steps) {
  std::vector<std::int64_t> experts(c.config.experts), ranks(c.ranks);
  for (const StepInputs* step : steps) {
    for (std::size_t i = 0; i < step->positions.counts.size(); ++i) {
      const Placement& placement = step->inputs.config.placement;
      const int replica = static_cast<int>(i) % placement.total_replicas();
      int expert = 0;
      for (int end = 0; (end += static_cast<int>(placement.replicas_of(expert).size())) <= replica;) ++expert;
      experts[expert] += step->positions.counts[i];
      ranks[placement.locations()[replica].rank] += step->positions.counts[i];
    }
  }
  const LoadCounts load = exchange.load_counts();
  require_equal(load.dispatches, static_cast<std::int64_t>(steps.size()), "dispatches counted");
  require_equal_lists<std::int64_t>(load.experts.data(), experts, "routes to expert");
  require_equal_lists<std::int64_t>(load.layers.data(), experts, "routes to expert in the only layer");
  require_equal_lists<std::int64_t>(load.ranks.data(), ranks, "routes to rank");
}

// The calls of a case that run_sequences() makes.
struct Sequence {
  TestCase c;
  StepInputs first, second, replayed;
  oracle::ExpertOutputs all_expert_outputs[3];

  explicit Sequence(const TestCase& test_case)
      : c(test_case),
        first(make_inputs(c, 0)),
        second(make_inputs(c, 1)),
        replayed(with_new_values(c, first, 2)),
        all_expert_outputs{make_expert_outputs(c, first), make_expert_outputs(c, second),
                           make_expert_outputs(c, replayed)} {}

  void run(Rank rank) const {
    SyncExchange exchange(rank, exchange_config(c));
    const Plan kept = dispatch_and_combine(exchange, c, first, all_expert_outputs[0]);
    dispatch_and_combine(exchange, c, second, all_expert_outputs[1]);
    DispatchRun replay(exchange, c, replayed);
    replay.run_with_plan(kept);
    CombineRun(exchange, c, replayed, all_expert_outputs[2], kept, replay.received().weight).run();
    if (c.config.layout != Layout::rank_major) check_route_values(exchange, c, first, kept);
    require_traffic(exchange, c, {&first, &second, &replayed});
    require_load(exchange, c, {&first, &second});
  }
};

}  // namespace

bool run_sequences(const Setup& setup, const std::vector<TestCase>& cases) {
  std::vector<Sequence> sequences;
  for (TestCase c : cases) {
    setup.choose_backend(c.config);
    if (!simulates_nodes(setup)) c.nodes.clear();
    // On one node the backend cuda takes one hop, in which it has no level node.
    const bool one_node = c.ranks == 1 || (!c.nodes.empty() && Topology(c.nodes).nodes() == 1);
    if (c.config.backend == BackendKind::cuda && one_node) c.config.reduction_level = ReductionLevel::rank;
    sequences.emplace_back(c);
  }
  const bool failed_before = testing::Test::HasFailure();
  const std::string what = cases.size() == 1 ? describe(sequences[0].c) : str(cases.size(), " cases");
  const auto body = [&](Rank rank) {
    for (const Sequence& sequence : sequences) {
      try {
        sequence.run(rank);
      } catch (const std::exception& error) {
        throw Mismatch(str(error.what(), " in ", describe(sequence.c)));
      }
    }
  };
  run_ranks(setup, cases[0].ranks, what, body, sequences[0].c.nodes);
  return failed_before || !testing::Test::HasFailure();
}

void Contract::SetUp() {
  if (const std::string reason = skip_reason(GetParam()); !reason.empty()) GTEST_SKIP() << reason;
}

void Contract::TearDown() {
  if (!added_.empty() && !HasFailure() && !IsSkipped()) ADD_FAILURE() << "cases were added and not run";
  if (GetParam().rank_kind == RankKind::mpi && !take_mpi_process_ran() && !IsSkipped())
    GTEST_SKIP() << "has no group of as many ranks as mpirun has started";
  if (GetParam().rank_kind != RankKind::persistent_processes) return;
  if (const std::string failed = program_ranks().finish_test(HasFailure()); !failed.empty())
    ADD_FAILURE() << "failed:" << failed;
}

void Contract::run_added() {
  std::map<std::pair<int, std::vector<int>>, std::vector<PreparedStep>> groups;
  for (const TestCase& c : added_) groups[{c.ranks, c.nodes}].push_back(prepare(c));
  for (const auto& [ranks_and_nodes, group] : groups) {
    const std::vector<PreparedStep>& prepared = group;
    const auto body = [&](Rank rank) {
      for (const PreparedStep& each : prepared) {
        try {
          SyncExchange exchange(rank, exchange_config(each.c));
          dispatch_and_combine(exchange, each.c, each.step, each.expert_outputs);
        } catch (const Mismatch& mismatch) {
          throw Mismatch(str(mismatch.what(), " in ", describe(each.c)));
        }
      }
    };
    run_ranks(GetParam(), ranks_and_nodes.first, str(prepared.size(), " cases"), body,
              ranks_and_nodes.second);
  }
  added_.clear();
}

TestCase Contract::small_case(std::uint64_t number) const {
  TestCase c;
  c.seed = seed_of(number);
  GetParam().choose_backend(c.config);
  return c;
}

}  // namespace ferry::contract
