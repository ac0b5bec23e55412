#include "tools/ferry/run/runner.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "tools/ferry/common/random.hpp"
#include "tools/ferry/run/combine_check.hpp"
#include "tools/ferry/run/dispatch_check.hpp"

namespace ferry::app {

namespace {

std::uint64_t hash_of(std::span<const std::byte> bytes) {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {  // rows are multiples of 16 bytes
    std::uint64_t word = 0;
    std::memcpy(&word, &bytes[i], sizeof word);
    hash = mix(hash ^ word);
  }
  return hash;
}

}  // namespace

struct Player::Step {
  int number;
  StepInputs inputs;
};

Player::Player(const Rank& rank, const Job& job, Clock::time_point start, const Board& board,
               const Stages& stages)
    : rank_(rank),
      job_(job),
      start_(start),
      board_(board),
      stages_(stages),
      mine_(board.rank(rank.index())),
      site_(job.config.backend == BackendKind::cuda ? make_device_site(rank, job)
                                                    : make_host_site(rank, job)),
      hashes_(static_cast<std::size_t>(job.options.steps)) {
  stages_.starting.advance();
}

void Player::play() {
  check_steps();
  time_steps();
}

Player::Step Player::make_step(int number) const {
  return {number, {make_tokens(job_, number, rank_.index()), make_routes(job_, number, rank_.index())}};
}

// ---- checked

void Player::check_steps() {
  rank_.barrier();  // all have started
  stages_.checking.tick();
  for (int number = 0; number < job_.options.steps; ++number) {
    const Step step = make_step(number);
    StepOracle oracle(job_, number);
    const std::vector<float> x = oracle.arriving(rank_.index());
    stages_.checking.advance();
    check_exact(step, oracle, x);
    stages_.checking.advance();
    check_swiglu(step, x);
    stages_.checking.advance();
  }
}

void Player::check_exact(const Step& step, StepOracle& oracle, const std::vector<float>& x) {
  const int me = rank_.index();
  site_->take(step.inputs);
  site_->dispatch();
  oracle.check(me, site_->received(), mine_.dispatch);
  site_->multiply();
  combine();
  check_rows(job_, step.number, me, expected_products(job_, step.inputs.routes, x), site_->result(),
             mine_.combine);
}

void Player::check_swiglu(const Step& step, const std::vector<float>& x) {
  const int me = rank_.index();
  const Routes& routes = step.inputs.routes;
  site_->take(step.inputs);
  site_->dispatch();
  site_->swiglu();
  combine();
  const std::span<const std::byte> result = site_->result();
  hashes_[static_cast<std::size_t>(step.number)] = hash_of(result);
  check_dense(job_, step.number, me, routes, dense_swiglu(job_, routes, x), result, mine_.dense);
}

// Not before all experts have ended: on a GPU of several ranks, what the first of them loads would wait for
// kernels that wait for this rank.
void Player::combine() {
  rank_.barrier();
  site_->combine();
}

// ---- timed

void Player::time_steps() {
  const WireCounts before = site_->exchange().wire_counts();
  const std::span<const std::int64_t> routes = site_->exchange().load().experts;
  const std::vector<std::int64_t> routes_before(routes.begin(), routes.end());
  for (int number = 0; number < job_.options.steps; ++number) {
    time_step(make_step(number), board_.times(number, rank_.index()));
    stages_.timing.advance();
  }
  const WireCounts after = site_->exchange().wire_counts();
  mine_.dispatch_wire_bytes = after.dispatch_bytes - before.dispatch_bytes;
  mine_.dispatch_messages = after.dispatch_messages - before.dispatch_messages;
  mine_.combine_wire_bytes = after.combine_bytes - before.combine_bytes;
  mine_.combine_messages = after.combine_messages - before.combine_messages;
  if (rank_.index() != 0) return;
  const LoadCounts load = site_->exchange().load();
  std::transform(load.experts.begin(), load.experts.end(), routes_before.begin(), board_.routes().begin(),
                 std::minus<>());
}

// Ranks meet before each phase, so that a phase's time is its own and not what a peer was late with before.
void Player::time_step(const Step& step, report::StepTimes& times) {
  auto timed = [&](report::Phase phase, auto&& work) {
    rank_.barrier();
    times[phase].begin_us = now_us();
    work();
    times[phase].end_us = now_us();
  };
  site_->take(step.inputs);
  timed(report::Phase::dispatch, [&] { site_->dispatch(); });
  timed(report::Phase::experts, [&] { site_->swiglu(); });
  timed(report::Phase::combine, [&] { site_->combine(); });
  count(site_->received());
  if (hash_of(site_->result()) == hashes_[static_cast<std::size_t>(step.number)])
    return mine_.repeated.right(1);
  mine_.repeated.fail(1, fmt::format("step {}, rank {}", step.number, rank_.index()));
}

void Player::count(const DispatchResult& received) {
  for (int group = 0; group < received.groups; ++group) mine_.rows += received.counts[group];
  if (rank_.index() != 0) return;
  board_.dropped() += received.plan.dropped();
  const int ranks = rank_.size(), experts = job_.config.experts;
  const std::span<const std::int32_t> tokens = received.plan.tokens_between(),
                                      routes = received.plan.counts();
  const std::span<std::int64_t> out = board_.dispatch_messages(), back = board_.combine_messages();
  for (int i = 0; i < ranks * ranks; ++i) {
    out[i] += tokens[i];
    if (job_.config.reduction == Reduction::partial) back[i % ranks * ranks + i / ranks] += tokens[i];
  }
  if (job_.config.reduction == Reduction::partial) return;
  for (int i = 0; i < ranks * experts; ++i) {
    back[job_.config.placement.place(i % experts).rank * ranks + i / experts] += routes[i];
  }
}

double Player::now_us() const {
  return std::chrono::duration<double, std::micro>(Clock::now() - start_).count();
}

}  // namespace ferry::app
