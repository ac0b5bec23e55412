// A rank that `ferry launch` starts. Its argument says what it does.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/ferry.h"
#include "ferry/group.hpp"

namespace {

// All ranks meet twice, in two groups, and gather a megabyte each.
int gather() {
  for (int round = 0; round < 2; ++round) {
    ferry::Group::launched().run([](const ferry::Rank& rank) {
      const std::vector<unsigned char> mine(1 << 20, static_cast<unsigned char>(rank.index() + 1));
      std::vector<unsigned char> all(mine.size() * static_cast<std::size_t>(rank.size()));
      rank.all_gather(mine.data(), all.data(), mine.size());
      int sum = 0;
      for (int peer = 0; peer < rank.size(); ++peer) sum += all[mine.size() * static_cast<std::size_t>(peer)];
      std::printf("rank %d of %d: %d\n", rank.index(), rank.size(), sum);
    });
  }
  return 0;
}

// Rank 1 ends before the ranks have met; the others are told why they cannot meet.
int end_early() {
  ferry::Group group = ferry::Group::launched();
  if (std::string(getenv("FERRY_LAUNCH")).starts_with("1/")) return 3;
  try {
    group.join();
  } catch (const ferry::PeerLostError& error) {
    std::printf("%s\n", error.what());
    return 5;
  }
  return 0;
}

int by_c() {
  ferry_group* group = nullptr;
  ferry_rank* rank = nullptr;
  const bool joined = ferry_group_launched(&group) == FERRY_OK &&
                      ferry_group_join(group, &rank) == FERRY_OK && ferry_rank_barrier(rank) == FERRY_OK;
  if (joined) std::printf("joined\n");
  ferry_rank_leave(rank);
  ferry_group_destroy(group);
  return joined ? 0 : 1;
}

// Says its process number once only SIGKILL can end or stop it.
int ignore_signals() {
  for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM}) std::signal(signal, SIG_IGN);
  std::printf("%d\n", getpid());
  std::fflush(stdout);
  sleep(60);
  return 0;
}

volatile std::sig_atomic_t interrupts = 0;

// Counts SIGINT, until a second after the first.
int count_interrupts() {
  std::signal(SIGINT, [](int) { interrupts = interrupts + 1; });
  std::printf("%d\n", getpid());
  std::fflush(stdout);
  while (interrupts == 0) usleep(1000);
  for (int i = 0; i < 100; ++i) usleep(10000);
  std::printf("%d interrupts\n", static_cast<int>(interrupts));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string task = argc > 1 ? argv[1] : "";
  if (task == "gather") return gather();
  if (task == "end-early") return end_early();
  if (task == "c") return by_c();
  if (task == "ignore-signals") return ignore_signals();
  if (task == "count-interrupts") return count_interrupts();
  return 2;
}
