// A program for mpirun: a rank of a group on the backend `collective` over MPI stalls, throws, leaves or is
// killed. The argument says which. The others print the error that they got. With `lose DIRECTORY VICTIM` all
// ranks make steps until a rank or a link is lost, and write the error to files. With `work WAY` they make
// steps for a second, as kWays has it.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "ferry/evaluator.hpp"
#include "ferry/ferry.hpp"
#include "group/mpi_library.hpp"
#include "harness/device.hpp"
#include "harness/guarded_buffer.hpp"
#include "program/two_batches.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr int kHidden = 64, kTokens = 16, kFaultyRank = 1;
constexpr double kDeadline = 1;       // where a rank stalls
constexpr double kLongDeadline = 20;  // where only the end of a rank may end the others' waits
// The longest time until an error, without times in which this thread had no processor. A lost rank may get
// none for long before it is lost, so the others have more time there, far below the deadline.
constexpr double kLongestStall = kDeadline + 1, kLongestLoss = kLongDeadline / 4;

// A dispatch and a combine in which every rank sends to every rank.
void step(Exchange& exchange, Stream stream = {}) {
  constexpr std::size_t kValues = kTokens * kHidden;
  std::vector<std::int32_t> expert(kTokens);
  for (int token = 0; token < kTokens; ++token) expert[token] = token % exchange.rank().size();
  auto tokens = contract::GuardedBuffer::of(std::vector<float>(kValues, 1));
  auto ids = contract::GuardedBuffer::of(expert);
  contract::GuardedBuffer result(tokens.bytes());
  const DispatchResult rows =
      exchange.dispatch(Tokens::rows(tokens.data(), kTokens, DType::fp32), ids.as<std::int32_t>(), nullptr,
                        {.call = {.stream = stream}});
  exchange.combine({rows.data, DType::fp32}, rows.plan, {result.data(), DType::fp32},
                   {.call = {.stream = stream}});
  exchange.synchronize({.stream = stream});
  FERRY_CHECK(std::ranges::equal(result.span(), tokens.span()), "the rows came back changed");
}

void fail(const std::string& how) {
  if (how == "stall") return sleep_seconds(3 * kDeadline);
  if (how == "leave") return;
  if (how == "kill") std::raise(SIGKILL);
  throw std::runtime_error("enough");
}

// The same as a program in two micro-batches. The faulty rank is killed in its first function.
void run_program(Exchange& exchange, bool fails) {
  const Program program = program_in_two_batches();
  Evaluator layer(program, exchange, {{"experts", [&](auto inputs, auto outputs) {
                                         if (fails) std::raise(SIGKILL);
                                         outputs[0]->data = inputs[0]->received.data;
                                       }}});
  const std::vector<float> tokens(kTokens * kHidden, 1);
  std::vector<std::int32_t> ids(kTokens);
  for (int token = 0; token < kTokens; ++token) ids[token] = token % exchange.rank().size();
  const auto inputs = {ProgramValue::tokens(tokens.data(), kTokens, DType::fp32),
                       ProgramValue::ids(ids.data(), kTokens)};
  layer.run(std::span(inputs));
}

void run_rank(const Rank& rank, const std::string& how) {
  Exchange exchange(rank, {.experts = rank.size(),
                           .top_k = 1,
                           .hidden = kHidden,
                           .max_tokens = kTokens,
                           .backend = BackendKind::collective,
                           .format = Format::fp32(),
                           .combine_type = DType::fp32,
                           .lanes = 2,
                           .deadline = how == "stall" ? kDeadline : kLongDeadline});
  const bool in_program = how == "kill_in_program", faulty = rank.index() == kFaultyRank;
  Stopwatch watch;
  try {
    // The faulty rank may fail while another is still in its third step, which may then end early too.
    for (int i = 0; i < 3; ++i) step(exchange);
    if (in_program) run_program(exchange, false);
    if (faulty && !in_program) return fail(how);
    watch = {};
    in_program ? run_program(exchange, faulty) : step(exchange);
    FERRY_CHECK(false, "a step without all ranks ended");
  } catch (const Error& error) {
    const double longest = how == "stall" ? kLongestStall : kLongestLoss;
    FERRY_CHECK(watch.own_seconds() < longest, str(watch.own_seconds(), " s until ", error.what()));
    std::cout << str("rank ", rank.index(), ": ", to_string(error.code()), ": ", error.what(), "\n")
              << std::flush;
    sleep_seconds(1);  // mpirun ends the others when it sees one exit
  }
}

// As mpi_ranks does with barriers: marks that round 20 has begun, in which the rank `victim` (-1: none) is
// killed, and writes the error, and how long the last step took.
void lose_a_rank(const Rank& rank, const std::string& directory, int victim) {
  constexpr double kStepDeadline = 2;  // as namespaces_test.py has it
  Exchange exchange(rank, {.experts = rank.size(),
                           .top_k = 1,
                           .hidden = kHidden,
                           .max_tokens = kTokens,
                           .backend = BackendKind::collective,
                           .format = Format::fp32(),
                           .combine_type = DType::fp32,
                           .deadline = kStepDeadline});
  Stopwatch last;
  std::string text;
  try {
    for (int round = 0;; ++round) {
      if (round == 20) std::ofstream(str(directory, "/started.", rank.index()));
      if (round == 20 && rank.index() == victim) std::raise(SIGKILL);
      sleep_seconds(0.01);
      last = {};
      step(exchange);
    }
  } catch (const Error& error) {
    text = str(to_string(error.code()), ": ", error.what());
  }
  std::ofstream(str(directory, "/error.", rank.index())) << last.seconds() << " " << text << std::endl;
  sleep_seconds(5);  // mpirun may end the others when it sees one exit
}

struct Way {
  const char* name;
  BackendKind backend;
  EngineKind engine = EngineKind::automatic;
  MemoryKind memory = MemoryKind::automatic;
  bool two_hosts = false;  // simulated
};
constexpr Way kWays[] = {
    {"cpu", BackendKind::cpu},
    {"collective", BackendKind::collective},
    {"hosts", BackendKind::collective, EngineKind::automatic, MemoryKind::automatic, true},
    {"cuda", BackendKind::cuda},
    {"device", BackendKind::collective, EngineKind::mpi, MemoryKind::device},
    {"nccl", BackendKind::collective, EngineKind::nccl},
    {"nvshmem", BackendKind::nvshmem, EngineKind::automatic, MemoryKind::automatic, true},
};

const Way& way_named(const std::string& name) {
  const auto* way = std::ranges::find(kWays, name, &Way::name);
  if (way == std::end(kWays)) throw std::invalid_argument("no way to work is called " + name);
  return *way;
}

// The test kills a rank from outside.
void work(const Way& way) {
  if (way.two_hosts) setenv("FERRY_HOST_ID", open_mpi().rank % 2 == 0 ? "even" : "odd", 1);
  Group::mpi().run([&](const Rank& rank) {
    std::optional<contract::device::RankScope> device;
    const bool on_device =
        has_kernels(way.backend) || way.engine == EngineKind::nccl || way.memory == MemoryKind::device;
    if (on_device) device.emplace(rank.index());
    Exchange exchange(rank, {.experts = rank.size(),
                             .top_k = 1,
                             .hidden = kHidden,
                             .max_tokens = kTokens,
                             .backend = way.backend,
                             .engine = way.engine,
                             .memory = way.memory,
                             .format = Format::fp32(),
                             .combine_type = DType::fp32,
                             .deadline = 3});
    try {
      const Stream stream = on_device ? contract::device::stream(rank.index()) : Stream{};
      for (int i = 0; i < 200; ++i) {
        step(exchange, stream);
        sleep_seconds(0.005);
      }
    } catch (const Error& error) {
      std::cout << str("rank ", rank.index(), ": ", to_string(error.code()), ": ", error.what(), "\n")
                << std::flush;
    }
  });
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  try {
    const bool loses = argc == 4 && std::string(argv[1]) == "lose";
    const bool works = argc == 3 && std::string(argv[1]) == "work";
    if (argc != 2 && !loses && !works) {
      throw std::invalid_argument(
          "needed: stall, throw, leave, kill or kill_in_program, lose with a folder and a rank, or work with "
          "a way");
    }
    if (works) {
      ferry::test::work(ferry::test::way_named(argv[2]));
      return 0;
    }
    ferry::Group::mpi().run([&](const ferry::Rank& rank) {
      loses ? ferry::test::lose_a_rank(rank, argv[2], std::stoi(argv[3]))
            : ferry::test::run_rank(rank, argv[1]);
    });
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
