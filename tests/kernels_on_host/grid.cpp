#include "kernels_on_host/grid.hpp"

#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ferry::on_host {
namespace {

constexpr std::size_t kStackBytes = 128 << 10;
constexpr unsigned kLongestPause = 40;
constexpr int kMostTurns = 200'000;  // of a fiber, before a test fails because its kernels do not end

// Goes on where a stack was suspended. swapcontext() does the same with two system calls, which would take
// most of a test's time; it only starts fibers here.
[[gnu::noinline]] void resume(Suspended& stack) {
  __builtin_longjmp(stack.words, 1);
}

// Stacks of fibers that have ended: the system clears new memory, which takes longer than a fiber's run.
thread_local std::vector<std::unique_ptr<std::byte[]>> spare_stacks;

std::unique_ptr<std::byte[]> new_stack() {
  if (spare_stacks.empty()) return std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
  auto stack = std::move(spare_stacks.back());
  spare_stacks.pop_back();
  return stack;
}

}  // namespace

struct Fiber {
  Block* block;
  unsigned thread;
  bool started = false, ended = false, asleep = false;
  int turn = -1;  // the latest in which it ran
  Suspended suspended{};
  const std::function<void(unsigned)>* kernel;
  std::unique_ptr<std::byte[]> stack;
};

thread_local Grid* Grid::running_ = nullptr;

Grid::Grid(std::uint64_t seed) : random_(seed) {}
Grid::~Grid() = default;

Barrier::Flags Barrier::wait(bool flag) {
  current_.any |= flag;
  current_.all &= flag;
  const std::uint64_t round = round_;
  if (waiting_.size() + 1 < threads_) {
    waiting_.push_back(&Grid::current());
    Grid::sleep();
  } else {
    of_round_[round % 2] = std::exchange(current_, Flags{false, true});
    ++round_;
    for (Fiber* fiber : waiting_) Grid::wake(*fiber);
    waiting_.clear();
  }
  return of_round_[round % 2];
}

void Grid::add(unsigned blocks, unsigned threads, std::function<void(unsigned)> kernel) {
  const auto shared = std::make_shared<std::function<void(unsigned)>>(std::move(kernel));
  kernels_.push_back(shared);
  for (unsigned b = 0; b < blocks; ++b) {
    blocks_.push_back(std::make_unique<Block>(b, blocks, threads));
    for (unsigned t = 0; t < threads; ++t) {
      auto fiber = std::make_unique<Fiber>(
          Fiber{.block = blocks_.back().get(), .thread = t, .kernel = shared.get(), .stack = new_stack()});
      blocks_.back()->awake.push_back(fiber.get());
      fibers_.push_back(std::move(fiber));
    }
  }
}

// Does not return.
void Grid::start(Fiber& fiber) {
  ucontext_t context{};
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, &Grid::enter, 0);
  setcontext(&context);
}

void Grid::enter() {
  Fiber& fiber = *running_->current_;
  (*fiber.kernel)(fiber.block->index);
  fiber.ended = true;
  resume(running_->scheduler_);
}

// Runs the fiber until it waits or ends. Not inlined: resume() restores no registers of a caller.
[[gnu::noinline]] void Grid::run_fiber(Fiber& fiber) {
  current_ = &fiber;
  enter_block(fiber.block);
  if (__builtin_setjmp(scheduler_.words) != 0) return;
  if (!std::exchange(fiber.started, true)) start(fiber);
  resume(fiber.suspended);
}

void Grid::give_each_block(std::byte* memory, std::size_t bytes) {
  shared_ = memory;
  shared_bytes_ = bytes;
}

void Grid::enter_block(Block* block) {
  if (shared_ == nullptr || block == in_shared_) return;
  if (in_shared_ != nullptr) in_shared_->memory.assign(shared_, shared_ + shared_bytes_);
  if (block->memory.empty()) block->memory.assign(shared_bytes_, std::byte{0xEE});
  std::memcpy(shared_, block->memory.data(), shared_bytes_);
  in_shared_ = block;
}

void Grid::run() {
  running_ = this;
  left_ = fibers_.size();
  for (turn_ = 0; left_ > 0; ++turn_) {
    if (turn_ == kMostTurns) throw std::runtime_error("the kernels do not end");
    pause_blocks();
    if (shared_ != nullptr) std::shuffle(blocks_.begin(), blocks_.end(), random_);
    turns_.clear();
    for (const auto& block : blocks_) {
      if (block->pause > 0) continue;
      turns_.insert(turns_.end(), block->awake.begin(), block->awake.end());
      block->awake.clear();
      if (shared_ != nullptr) take_turns();
    }
    take_turns();
  }
  running_ = nullptr;
  in_shared_ = nullptr;
  blocks_.clear();
  kernels_.clear();
  fibers_.clear();
}

// Some blocks are much slower than others.
void Grid::pause_blocks() {
  for (const auto& block : blocks_) {
    if (block->pause > 0) {
      --block->pause;
    } else if (random_() % 128 == 0) {
      block->pause = static_cast<unsigned>(random_() % kLongestPause);
    }
  }
}

// Runs the fibers in `turns_` in random order, and those that they wake, see wake().
void Grid::take_turns() {
  std::shuffle(turns_.begin(), turns_.end(), random_);
  for (position_ = 0; position_ < turns_.size(); ++position_) {
    Fiber& fiber = *turns_[position_];
    fiber.turn = turn_;
    run_fiber(fiber);
    if (fiber.ended) {
      --left_;
      spare_stacks.push_back(std::move(fiber.stack));
    } else if (!fiber.asleep) {
      fiber.block->awake.push_back(&fiber);
    }
  }
  turns_.clear();
}

// The fiber's place in this turn is as random as if it had been awake: it may be over.
void Grid::wake(Fiber& fiber) {
  Grid& grid = *running_;
  fiber.asleep = false;
  const std::size_t place = grid.random_() % grid.turns_.size();
  if (fiber.turn == grid.turn_ || place <= grid.position_) {
    fiber.block->awake.push_back(&fiber);
  } else {
    grid.turns_.push_back(std::exchange(grid.turns_[place], &fiber));
  }
}

[[gnu::noinline]] void Grid::yield() {
  Grid& grid = *running_;
  if (__builtin_setjmp(grid.current_->suspended.words) == 0) resume(grid.scheduler_);
}

void Grid::sleep() {
  running_->current_->asleep = true;
  yield();
}

std::uint64_t Grid::nanoseconds() {
  return (std::uint64_t{1} << 40) + 10'000 * static_cast<std::uint64_t>(running_->turn_);
}

unsigned Grid::thread() {
  return running_->current_->thread;
}
Block& Grid::block() {
  return *running_->current_->block;
}

}  // namespace ferry::on_host
