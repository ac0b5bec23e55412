#include "apps/ferry/progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace ferry::app {

namespace {

constexpr std::chrono::milliseconds kPeriod{200};  // what is over sooner shows nothing

}  // namespace

Progress::Progress(std::string what, std::int64_t total, bool shown)
    : what_(std::move(what)), total_(total), shown_(shown && isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (written_) fmt::print(stderr, "\r\033[K");
}

void Progress::advance() {
  ++done_;
  const Clock::time_point now = Clock::now();
  if (!shown_ || now - last_ < kPeriod) return;
  last_ = now;
  written_ = true;
  fmt::print(stderr, "\r\033[K{}: {} of {}", what_, done_, total_);
  std::fflush(stderr);
}

}  // namespace ferry::app
