// One line on stderr that says how far a long piece of work is; nothing unless stderr is a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace ferry::app {

class Progress {
 public:
  // `shown` false makes it silent: of many ranks, one reports.
  Progress(std::string what, std::int64_t total, bool shown = true);
  ~Progress();  // takes the line away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance();

 private:
  using Clock = std::chrono::steady_clock;

  std::string what_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  bool shown_;
  bool written_ = false;
  Clock::time_point last_ = Clock::now();
};

}  // namespace ferry::app
