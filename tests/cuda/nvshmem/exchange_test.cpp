// The backend nvshmem on simulated nodes: what arrives is compared with the oracle byte for byte, and
// messages between nodes are put also where their memory is mapped. Ranks are processes; they share a GPU
// only under MPS, whose daemon CUDA_MPS_PIPE_DIRECTORY names. A group starts NVSHMEM once, so it runs many
// cases.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "cuda/device_test.hpp"
#include "cuda/nvshmem/availability.hpp"
#include "cuda/replays.hpp"
#include "exchange/configuration.hpp"

namespace ferry::contract {
namespace {

struct Nodes {
  const char* name;
  std::vector<int> of_rank;
};
const Nodes kNodes[] = {{"two_nodes_of_one", {0, 1}},
                        {"two_nodes_of_two", {0, 0, 1, 1}},
                        {"four_nodes_of_two", {0, 0, 1, 1, 2, 2, 3, 3}},
                        {"three_and_one", {0, 1, 0, 0}}};

constexpr Setup kSetup{
    .backend = BackendKind::nvshmem, .rank_kind = RankKind::processes, .hops = Hops::two, .window = -1};
constexpr Setup kOneHop{
    .backend = BackendKind::nvshmem, .rank_kind = RankKind::processes, .hops = Hops::one, .window = -1};
constexpr Setup kAutomatic{.backend = BackendKind::nvshmem, .rank_kind = RankKind::processes, .window = -1};
constexpr double kDeadline = 4;  // seconds, of calls

TestCase nvshmem_case(std::uint64_t number, const std::vector<int>& nodes, int window) {
  TestCase c;
  c.seed = seed_of(number);
  c.nodes = nodes;
  c.ranks = static_cast<int>(nodes.size());
  c.config.experts = 3 * c.ranks;
  c.config.top_k = 4;
  c.config.hidden = 256;
  c.config.max_tokens = 24;
  c.masked = 0.1;
  kSetup.choose_backend(c.config);
  c.config.window = window;
  c.config.deadline = kDeadline;
  return c;
}

// With max_tokens of 1,024 or more, the hops use blocks of 1,024 threads and more channels.
TestCase case_of_larger_blocks(std::uint64_t number, const std::vector<int>& nodes) {
  TestCase c = nvshmem_case(number, nodes, 0);
  c.config.max_tokens = 1100;
  c.full = true;
  return c;
}

class NvshmemExchange : public testing::TestWithParam<Nodes> {
 protected:
  void SetUp() override {
    if (const std::string reason = skip_reason(kSetup); !reason.empty()) GTEST_SKIP() << reason;
    const int ranks = static_cast<int>(GetParam().of_rank.size());
    if (const std::string reason = no_nvshmem_for(ranks); !reason.empty()) GTEST_SKIP() << reason;
  }
  const std::vector<int>& nodes() const { return GetParam().of_rank; }
};
std::string name_of(const testing::TestParamInfo<Nodes>& nodes) {
  return nodes.param.name;
}
INSTANTIATE_TEST_SUITE_P(Nodes, NvshmemExchange, testing::ValuesIn(kNodes), name_of);

// Windows of 1, 7 and 64 messages; phases with far more tokens than a window holds; two random cases.
TEST_P(NvshmemExchange, DeliversTheBytesOfOneHost) {
  std::vector<TestCase> cases;
  for (const int window : {1, 7, 64})
    cases.push_back(nvshmem_case(static_cast<std::uint64_t>(window), nodes(), window));
  TestCase many = nvshmem_case(2, nodes(), 1);
  many.config.max_tokens = 300;
  many.full = true;
  many.split_phases = true;
  cases.push_back(many);
  for (const ReductionLevel level : {ReductionLevel::rank, ReductionLevel::node}) {
    cases.push_back(case_of_larger_blocks(4, nodes()));
    cases.back().config.reduction_level = level;
  }
  cases.push_back(case_of_larger_blocks(5, nodes()));
  cases.back().split_phases = true;
  TestCase fp8 = nvshmem_case(3, nodes(), 7);
  fp8.config.format = Format::fp8_e4m3();
  cases.push_back(fp8);
  for (std::uint64_t drawn = 0, seed = 0; drawn < 2; ++seed) {
    TestCase c = draw_case(seed_of(5000 + seed), CaseSize::small);
    if (c.ranks != static_cast<int>(nodes().size())) continue;
    ++drawn;
    c.nodes = nodes();
    c.config.deadline = kDeadline;
    cases.push_back(c);
  }
  run_sequences(kSetup, cases);
}

class NvshmemOneHop : public NvshmemExchange {};
INSTANTIATE_TEST_SUITE_P(Nodes, NvshmemOneHop, testing::Values(kNodes[0], kNodes[1]), name_of);

// Messages go straight to their ranks; sums of nodes are made where they arrive.
TEST_P(NvshmemOneHop, DeliversTheBytesOfOneHost) {
  std::vector<TestCase> cases;
  for (const int window : {1, 64}) {
    for (const ReductionLevel level : {ReductionLevel::rank, ReductionLevel::node}) {
      TestCase c = nvshmem_case(static_cast<std::uint64_t>(window + 20), nodes(), window);
      c.config.reduction_level = level;
      cases.push_back(c);
    }
  }
  cases.push_back(case_of_larger_blocks(31, nodes()));
  run_sequences(kOneHop, cases);
}

TEST_P(NvshmemOneHop, IsTheDefaultForFewTokens) {
  TestCase c = nvshmem_case(30, nodes(), 7);
  kAutomatic.choose_backend(c.config);
  EXPECT_EQ(chosen_hops(c.config, Topology(c.nodes)), Hops::one);
  run_sequences(kAutomatic, {c});
}

class NvshmemCalls : public NvshmemExchange {};
INSTANTIATE_TEST_SUITE_P(Nodes, NvshmemCalls, testing::Values(kNodes[0]), name_of);

TEST_P(NvshmemCalls, GraphsAndLanes) {
  TestCase c = nvshmem_case(6, nodes(), 7);
  c.config.lanes = 2;
  for (const int lane : {0, 1}) {
    c.lane = lane;
    replay_often(c, {.setup = kSetup, .replays = 20});
  }
}

// Rank 1 makes one call and then no more, because it sleeps or is killed. The call of the other ends with an
// error that names it, and its process stays usable: another backend works there.
void expect_usable_after_loss(const std::vector<int>& nodes, bool killed) {
  struct Report {
    std::atomic<int> peer, usable;
  };
  void* const memory =
      mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const report = static_cast<Report*>(memory);
  report->peer = -2;
  TestCase c = nvshmem_case(8, nodes, 7);
  c.config.deadline = killed ? kDeadline : 0.5;
  const StepInputs step = make_inputs(c);
  TestCase alone;
  alone.ranks = 1;
  alone.config.backend = BackendKind::cuda;
  alone.config.reduction_level = ReductionLevel::rank;
  const StepInputs own = make_inputs(alone);
  const oracle::ExpertOutputs own_outputs = make_expert_outputs(alone, own);
  try {
    Group::processes(Topology(nodes, true)).run([&](Rank rank) {
      const device::RankScope scope(device_number(rank, BackendKind::nvshmem));
      {
        SyncExchange exchange(rank, c.config);
        DispatchRun(exchange, c, step).run();
        rank.barrier();  // no rank is still in this call, which a death would end too
        if (rank.index() == 1) {
          if (killed) raise(SIGKILL);
          std::this_thread::sleep_for(std::chrono::milliseconds(2500));
          return;
        }
        try {
          DispatchRun(exchange, c, step).run();
        } catch (const TimeoutError& error) {
          report->peer = error.record.peer;
        } catch (const PeerLostError& error) {
          report->peer = error.record.peer;
        }
      }
      Group::threads(1).run([&](Rank single) {
        SyncExchange exchange(single, alone.config);
        dispatch_and_combine(exchange, alone, own, own_outputs);
        report->usable = 1;
      });
    });
  } catch (const std::exception&) {
    // The group has failed, as it should.
  }
  EXPECT_EQ(report->peer, 1);
  EXPECT_EQ(report->usable, 1);
  munmap(memory, sizeof(Report));
}

TEST_P(NvshmemCalls, AMissingRankIsNamedAndOtherBackendsStayUsable) {
  expect_usable_after_loss(nodes(), false);
}

TEST_P(NvshmemCalls, AKilledRankIsNamedAndOtherBackendsStayUsable) {
  expect_usable_after_loss(nodes(), true);
}

TEST(NvshmemExchangeWithoutGpu, IsBuiltAsANamedBackend) {
  EXPECT_STREQ(to_string(BackendKind::nvshmem), "nvshmem");
  const Config config = nvshmem_case(1, {0, 0, 1, 1}, 7).config;
  const Topology topology({0, 0, 1, 1});
  const Sizes sizes = size_of(config, topology, 1);
  EXPECT_GT(sizes.dispatch_staging, 0);
  EXPECT_EQ(sizes.combine_staging, 0);
}

// The memory does not depend on the number of tokens, although the number of channels in use does.
TEST(NvshmemExchangeWithoutGpu, MemoryForManyRanksIsKnown) {
  for (const int ranks : {2, 4, 8, 16, 32, 64, 256}) {
    std::vector<int> nodes;
    for (int rank = 0; rank < ranks; ++rank) nodes.push_back(ranks <= 8 ? rank % 2 : rank / 8);
    Config config = nvshmem_case(9, nodes, 0).config;
    config.max_tokens = 1000;
    config.hidden = 7168;
    const Topology topology(nodes, true);
    const Sizes sizes = size_of(config, topology, ranks - 1);
    // At most 48 MiB of windows, of both hops, and 128 MiB of send staging. NVSHMEM's heap has 1 GiB by
    // default.
    EXPECT_GT(sizes.dispatch_staging, 0) << ranks;
    EXPECT_LT(sizes.dispatch_staging, std::int64_t{192} << 20) << ranks;
    config.max_tokens = 4096;
    EXPECT_EQ(size_of(config, topology, ranks - 1).dispatch_staging, sizes.dispatch_staging) << ranks;
  }
}

// On every rank, before NVSHMEM is looked for. The error says how many ranks there may be, and what takes
// more.
TEST(NvshmemExchangeWithoutGpu, MoreRanksThanItsKernelsServeAreRefused) {
  std::vector<int> nodes(257);
  for (std::size_t rank = 0; rank < nodes.size(); ++rank) nodes[rank] = static_cast<int>(rank / 16);
  const TestCase c = nvshmem_case(9, nodes, 7);
  std::atomic<int> refused = 0;
  Group::threads(Topology(nodes, true)).run([&](Rank rank) {
    try {
      const ferry::Exchange exchange(rank, c.config);
    } catch (const UnsupportedError& error) {
      const std::string said = error.what();
      refused += said.find("256 ranks") != std::string::npos && said.find("257") != std::string::npos &&
                 said.find("collective") != std::string::npos;
    }
  });
  EXPECT_EQ(refused, 257);
}

}  // namespace
}  // namespace ferry::contract
