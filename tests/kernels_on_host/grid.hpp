// Runs the blocks of kernels on the host: each thread of a block is a fiber, and all fibers take turns on one
// host thread. A fiber runs until it waits: at a barrier, in a function of the whole warp, or in a pause.
//
// So the logic of a kernel runs as on a GPU, with as many ranks, blocks and threads, in any order of their
// turns. Memory orders are not tested: every store is seen at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace ferry::on_host {

struct Index3 {
  unsigned x = 0;
};

struct Fiber;  // a thread of a block

// A barrier that also reduces one flag of each thread, as __syncthreads_or() and its like.
class Barrier {
 public:
  explicit Barrier(unsigned count) : threads_(count) {}

  struct Flags {
    bool any, all;
  };
  // Returns when all threads have called it.
  Flags wait(bool flag);

 private:
  const unsigned threads_;
  std::vector<Fiber*> waiting_;
  std::uint64_t round_ = 0;
  Flags current_{false, true};
  std::array<Flags, 2> of_round_{};  // the last two rounds: a thread may be slow to read its result
};

struct Warp {
  Barrier barrier{32};
  std::array<std::uint64_t, 32> values{};  // one of each thread
};

// The asynchronous loads of a thread, which arrive as late as they may: when they are waited for.
class AsyncLoads {
 public:
  void load(void* to, const void* from) { open_.emplace_back(to, from); }
  void commit() { groups_.push_back(std::exchange(open_, {})); }
  // Until all groups but the latest `latest` have arrived.
  void wait_but(std::size_t latest) {
    for (; groups_.size() > latest; groups_.pop_front())
      for (const auto& [to, from] : groups_.front()) std::memcpy(to, from, 16);
  }

 private:
  using Group = std::vector<std::pair<void*, const void*>>;
  Group open_;
  std::deque<Group> groups_;
};

struct Block {
  Block(unsigned block, unsigned of_blocks, unsigned block_threads)
      : index(block),
        blocks(of_blocks),
        threads(block_threads),
        barrier(block_threads),
        warps(block_threads / 32),
        async_loads(block_threads) {}

  // Barrier `number` of sync_threads_of(), for `count` threads.
  Barrier& barrier_of(int number, unsigned count) {
    return barriers.try_emplace(number, count).first->second;
  }

  const unsigned index, blocks, threads;
  unsigned pause = 0;         // turns that the block still misses
  std::vector<Fiber*> awake;  // those that take part in the next turn
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<AsyncLoads> async_loads;  // of each thread
  std::map<int, Barrier> barriers;
  std::vector<std::byte> memory;  // what the block has in the memory of give_each_block() while others run
};

// Where a stack goes on: the memory of __builtin_setjmp().
struct Suspended {
  void* words[5];
};

// All blocks of all launches that run at the same time.
class Grid {
 public:
  // `seed`: of the order in which fibers take turns.
  explicit Grid(std::uint64_t seed);
  ~Grid();
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  // Adds a launch. `kernel(block)`: what every thread of block `block` runs.
  void add(unsigned blocks, unsigned threads, std::function<void(unsigned block)> kernel);

  // Makes an array stand for the memory that the threads of a block share: each block finds its own contents
  // there. The threads of a block then take turns one after the other. Before run().
  void give_each_block(std::byte* memory, std::size_t bytes);

  // Runs everything to its end. @throws std::runtime_error  it does not end
  void run();

  // Act on the fiber that is running.
  static void yield();
  static void sleep();                 // until another fiber of its block wakes it
  static std::uint64_t nanoseconds();  // 10 us a turn
  static unsigned thread();
  static Block& block();
  static Warp& warp() { return block().warps[thread() / 32]; }
  static Fiber& current() { return *running_->current_; }
  static void wake(Fiber& fiber);

 private:
  static void start(Fiber& fiber);
  void pause_blocks();
  void take_turns();
  void run_fiber(Fiber& fiber);
  void enter_block(Block* block);
  static void enter();

  static thread_local Grid* running_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::shared_ptr<std::function<void(unsigned)>>> kernels_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::size_t left_ = 0;       // fibers that have not ended
  std::vector<Fiber*> turns_;  // that run in this turn: of one block if blocks have memory, else of all
  std::size_t position_ = 0;   // in `turns_`
  Fiber* current_ = nullptr;
  int turn_ = 0;
  std::byte* shared_ = nullptr;  // see give_each_block()
  std::size_t shared_bytes_ = 0;
  Block* in_shared_ = nullptr;  // the block whose contents are there
  Suspended scheduler_{};
};

// [warp] Gives `read` the values of all threads of the warp.
template <class Read>
auto with_values(std::uint64_t mine, Read read) {
  Warp& warp = Grid::warp();
  warp.values[Grid::thread() % 32] = mine;
  warp.barrier.wait(true);
  const auto result = read(warp.values);
  warp.barrier.wait(true);  // before the next values are stored
  return result;
}

}  // namespace ferry::on_host
