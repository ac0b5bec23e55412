#include "tools/ferry/common/progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <utility>

namespace ferry::app {

namespace {

constexpr std::int64_t kPeriod = 200;  // milliseconds: what is over sooner shows nothing

std::int64_t now_ms() {
  using std::chrono::milliseconds;
  return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// Zero bytes are nothing done and nothing written.
struct Progress::Shared {
  std::atomic<std::int64_t> done;
  std::atomic<std::int64_t> last;  // when the line was last written
  std::atomic<bool> written;
};

Progress::Progress(std::string what, std::int64_t total, std::int64_t parts)
    : what_(std::move(what)),
      total_(total),
      parts_(parts),
      terminal_(isatty(STDERR_FILENO) == 1),
      memory_(Mapping::anonymous_shared(sizeof(Shared))) {
  shared().last = now_ms();
}

Progress::~Progress() {
  if (shared().written) fmt::print(stderr, "\r\033[K");
}

Progress::Shared& Progress::shared() const {
  return *reinterpret_cast<Shared*>(memory_.data());
}

void Progress::show() const {
  if (!terminal_) return;
  shared().written = true;
  std::string line = "\r\033[K" + what_;
  if (total_ > 0) line += fmt::format(": {} of {}", shared().done / parts_, total_);
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

void Progress::tick() const {
  const std::int64_t now = now_ms();
  std::int64_t last = shared().last;
  if (now - last >= kPeriod && shared().last.compare_exchange_strong(last, now)) show();
}

void Progress::advance() const {
  ++shared().done;
  tick();
}

}  // namespace ferry::app
