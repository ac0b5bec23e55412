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
  bool asleep() const { return awaited != nullptr && *awaited == value; }

  Block* block;
  unsigned thread;
  bool started = false, ended = false;
  // Sleeps while `*awaited` has this value; null: awake.
  const std::uint64_t* awaited = nullptr;
  std::uint64_t value = 0;
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
  if (++arrived_ == threads_) {
    arrived_ = 0;
    of_round_[round % 2] = std::exchange(current_, Flags{false, true});
    ++round_;
  }
  Grid::sleep_while(round_, round);
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
  std::size_t left = fibers_.size();
  for (turn_ = 0; left > 0; ++turn_) {
    if (turn_ == kMostTurns) throw std::runtime_error("the kernels do not end");
    // Some blocks are much slower than others.
    for (const auto& block : blocks_) {
      if (block->pause > 0) {
        --block->pause;
      } else if (random_() % 128 == 0) {
        block->pause = static_cast<unsigned>(random_() % kLongestPause);
      }
    }
    order_fibers();
    for (Fiber* fiber : turns_) {
      if (!fiber->asleep()) run_fiber(*fiber);
    }
    left -= std::erase_if(fibers_, [](const auto& fiber) {
      if (fiber->ended) spare_stacks.push_back(std::move(fiber->stack));
      return fiber->ended;
    });
  }
  running_ = nullptr;
  in_shared_ = nullptr;
  blocks_.clear();
  kernels_.clear();
}

// The fibers of a turn, in random order; with memory of blocks, those of a block one after the other.
void Grid::order_fibers() {
  turns_.clear();
  if (shared_ == nullptr) {
    for (const auto& fiber : fibers_) {
      if (fiber->block->pause == 0) turns_.push_back(fiber.get());
    }
    std::shuffle(turns_.begin(), turns_.end(), random_);
    return;
  }
  for (const auto& block : blocks_) block->fibers.clear();
  for (const auto& fiber : fibers_) {
    if (fiber->block->pause == 0) fiber->block->fibers.push_back(fiber.get());
  }
  std::shuffle(blocks_.begin(), blocks_.end(), random_);
  for (const auto& block : blocks_) {
    std::shuffle(block->fibers.begin(), block->fibers.end(), random_);
    turns_.insert(turns_.end(), block->fibers.begin(), block->fibers.end());
  }
}

[[gnu::noinline]] void Grid::yield() {
  Grid& grid = *running_;
  if (__builtin_setjmp(grid.current_->suspended.words) == 0) resume(grid.scheduler_);
}

void Grid::sleep_while(const std::uint64_t& word, std::uint64_t value) {
  Fiber& fiber = *running_->current_;
  fiber.value = value;
  fiber.awaited = &word;
  while (word == value) yield();
  fiber.awaited = nullptr;
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
