// Kills a process at a random moment.
#pragma once

#include <signal.h>
#include <time.h>

namespace ferry::test {

// The system kills the calling process after this many microseconds. No thread of the process takes part.
inline void kill_this_process_in(int microseconds) {
  timer_t timer;
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_create(CLOCK_MONOTONIC, &event, &timer);
  const itimerspec when{{0, 0}, {0, 1000L * microseconds}};
  timer_settime(timer, 0, &when, nullptr);
}

}  // namespace ferry::test
