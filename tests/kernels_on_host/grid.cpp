#include "kernels_on_host/grid.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ferry::on_host {
namespace {

constexpr std::size_t kStackBytes = 128 << 10;
constexpr unsigned kLongestPause = 40;
constexpr int kMostTurns = 200'000;  // of a fiber, before a test fails because its kernels do not end

}  // namespace

struct Grid::Fiber {
  Block* block;
  unsigned thread;
  const std::function<void(unsigned)>* kernel;
  std::unique_ptr<std::byte[]> stack;
  ucontext_t context{};
  // Sleeps while `*awaited` has this value; null: awake.
  const std::uint64_t* awaited = nullptr;
  std::uint64_t value = 0;
  bool ended = false;
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
      auto fiber =
          std::make_unique<Fiber>(Fiber{.block = blocks_.back().get(),
                                        .thread = t,
                                        .kernel = shared.get(),
                                        .stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes)});
      prepare(*fiber);
      fibers_.push_back(std::move(fiber));
    }
  }
}

void Grid::prepare(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = &scheduler_;
  makecontext(&fiber.context, &Grid::enter, 0);
}

void Grid::enter() {
  Fiber& fiber = *running_->current_;
  (*fiber.kernel)(fiber.block->index);
  fiber.ended = true;
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
  std::vector<Fiber*> left;
  for (const auto& fiber : fibers_) left.push_back(fiber.get());
  for (int turn = 0; !left.empty(); ++turn) {
    if (turn == kMostTurns) throw std::runtime_error("the kernels do not end");
    std::shuffle(left.begin(), left.end(), random_);
    if (shared_ != nullptr) {
      std::shuffle(blocks_.begin(), blocks_.end(), random_);
      for (std::size_t b = 0; b < blocks_.size(); ++b) blocks_[b]->turn = b;
      std::ranges::stable_sort(left, {}, [](const Fiber* fiber) { return fiber->block->turn; });
    }
    // Some blocks are much slower than others.
    for (const auto& block : blocks_) {
      if (block->pause > 0) {
        --block->pause;
      } else if (random_() % 128 == 0) {
        block->pause = static_cast<unsigned>(random_() % kLongestPause);
      }
    }
    for (Fiber* fiber : left) {
      if (fiber->block->pause > 0) continue;
      if (fiber->awaited != nullptr && *fiber->awaited == fiber->value) continue;
      current_ = fiber;
      enter_block(fiber->block);
      swapcontext(&scheduler_, &fiber->context);
    }
    std::erase_if(left, [](const Fiber* fiber) { return fiber->ended; });
  }
  running_ = nullptr;
  in_shared_ = nullptr;
  fibers_.clear();
  blocks_.clear();
  kernels_.clear();
}

void Grid::yield() {
  Grid& grid = *running_;
  swapcontext(&grid.current_->context, &grid.scheduler_);
}

void Grid::sleep_while(const std::uint64_t& word, std::uint64_t value) {
  Fiber& fiber = *running_->current_;
  fiber.value = value;
  fiber.awaited = &word;
  while (word == value) yield();
  fiber.awaited = nullptr;
}

unsigned Grid::thread() {
  return running_->current_->thread;
}
Block& Grid::block() {
  return *running_->current_->block;
}

}  // namespace ferry::on_host
