#include "runtime/support.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.hpp"

namespace ferry::test {

void fail_check(const char* file, int line, const char* condition, const std::string& text) {
  throw std::runtime_error(str(file, ":", line, ": ", condition, ": ", text));
}

double seconds_without_processor() {
  std::int64_t running = 0, waiting = 0;  // nanoseconds; a kernel without the file says nothing
  std::ifstream("/proc/thread-self/schedstat") >> running >> waiting;
  return static_cast<double>(waiting) * 1e-9;
}

void sleep_seconds(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

struct TestBootstrap::Shared {
  std::atomic<int> written[2];
  std::atomic<int> read[2];

  std::byte* slot(int parity, int ranks, int rank) {
    return reinterpret_cast<std::byte*>(this + 1) + static_cast<std::size_t>(parity * ranks + rank) * kBytes;
  }
};

TestBootstrap::TestBootstrap(int ranks) : ranks_(ranks) {
  const std::size_t bytes = sizeof(Shared) + 2 * static_cast<std::size_t>(ranks) * kBytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot map the memory of the bootstrap");
  shared_ = std::shared_ptr<Shared>(static_cast<Shared*>(memory), [bytes](Shared* p) { munmap(p, bytes); });
}

// Yields, then naps longer and longer, so that many ranks leave a few processors to those that are awaited.
template <class Condition>
static void wait_for(int ranks, Condition condition) {
  const double nap = 1e-5 * std::max(1, ranks / 64);
  for (int i = 0; !condition(); ++i)
    i < 50 ? std::this_thread::yield() : sleep_seconds(std::min(i, 500) * nap);
}

Bootstrap TestBootstrap::bootstrap(int rank) const {
  auto round = std::make_shared<int>(0);
  // Slots of one parity are written again only after every rank has read them.
  const auto all_gather = [shared = shared_, ranks = ranks_, rank, round](const void* mine, void* all,
                                                                          std::size_t bytes) {
    if (bytes > kBytes) throw std::runtime_error("all_gather of more than kBytes bytes");
    const int use = *round / 2 + 1, parity = *round % 2;
    ++*round;
    wait_for(ranks, [&] { return shared->read[parity].load() >= (use - 1) * ranks; });
    std::memcpy(shared->slot(parity, ranks, rank), mine, bytes);
    ++shared->written[parity];
    wait_for(ranks, [&] { return shared->written[parity].load() >= use * ranks; });
    for (int peer = 0; peer < ranks; ++peer) {
      std::memcpy(static_cast<std::byte*>(all) + peer * bytes, shared->slot(parity, ranks, peer), bytes);
    }
    ++shared->read[parity];
  };
  Bootstrap bootstrap;
  bootstrap.rank = rank;
  bootstrap.ranks = ranks_;
  bootstrap.all_gather = all_gather;
  bootstrap.barrier = [all_gather, ranks = ranks_] {
    const char mine = 0;
    std::vector<char> all(ranks);
    all_gather(&mine, all.data(), 1);
  };
  return bootstrap;
}

std::string name(GroupKind kind) {
  switch (kind) {
    case GroupKind::threads:
      return "threads";
    case GroupKind::processes:
      return "processes";
    case GroupKind::custom_threads:
      return "custom_threads";
    case GroupKind::custom_processes:
      return "custom_processes";
  }
  return "unknown";
}

namespace {

void run_custom(Bootstrap bootstrap, double deadline, const std::function<void(Rank)>& body) {
  Group group = Group::custom(std::move(bootstrap));
  group.set_deadline(deadline);
  group.run(body);
}

void run_custom_threads(const std::vector<std::string>& hosts, double deadline,
                        const std::function<void(Rank)>& body) {
  const int ranks = static_cast<int>(hosts.size());
  const TestBootstrap meeting(ranks);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Bootstrap bootstrap = meeting.bootstrap(rank);
        bootstrap.host_id = hosts[rank];
        run_custom(std::move(bootstrap), deadline, body);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

[[noreturn]] void run_as_process(const std::function<void()>& body) {
  int status = 0;
  try {
    body();
  } catch (const std::exception& error) {
    std::cerr << "process " << getpid() << ": " << error.what() << std::endl;
    status = 1;
  }
  std::cout.flush();
  _exit(status);
}

void run_custom_processes(const std::vector<std::string>& hosts, double deadline,
                          const std::function<void(Rank)>& body) {
  const int ranks = static_cast<int>(hosts.size());
  const TestBootstrap meeting(ranks);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    processes.push_back(fork());
    if (processes.back() != 0) continue;
    run_as_process([&] {
      setenv("FERRY_HOST_ID", hosts[rank].c_str(), 1);
      run_custom(meeting.bootstrap(rank), deadline, body);
    });
  }
  std::string failures;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    waitpid(processes[rank], &status, 0);
    if (status != 0) failures += str(" rank ", rank, " with status ", status);
  }
  if (!failures.empty()) throw std::runtime_error("ended badly:" + failures);
}

}  // namespace

void run_ranks(GroupKind kind, int ranks, double deadline, const std::function<void(Rank)>& body) {
  seed();  // draws it before forking, so that all processes have the same
  if (kind == GroupKind::custom_threads || kind == GroupKind::custom_processes)
    return run_hosts(kind, std::vector<std::string>(static_cast<std::size_t>(ranks)), deadline, body);
  Group group = kind == GroupKind::threads ? Group::threads(ranks) : Group::processes(ranks);
  group.set_deadline(deadline);
  group.run(body);
}

void run_hosts(GroupKind kind, const std::vector<std::string>& hosts, double deadline,
               const std::function<void(Rank)>& body) {
  seed();
  const auto run = kind == GroupKind::custom_threads ? run_custom_threads : run_custom_processes;
  run(hosts, deadline, body);
}

pid_t start_process(const std::function<void()>& body) {
  const pid_t process = fork();
  if (process == 0) run_as_process(body);
  return process;
}

int status_of_process(pid_t process) {
  int status = 0;
  waitpid(process, &status, 0);
  return status;
}

int run_process(const std::function<void()>& body) {
  return status_of_process(start_process(body));
}

}  // namespace ferry::test
