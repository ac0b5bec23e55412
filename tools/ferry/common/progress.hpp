// One line on stderr that says how far a long piece of work is; nothing unless stderr is a terminal.
#pragma once

#include <cstdint>
#include <string>

#include "memory/mapping.hpp"

namespace ferry::app {

// Made before ranks are started, and advanced by all of them: threads and forked processes count together,
// and whoever comes first after a while writes the line.
class Progress {
 public:
  // `parts`: how often advance() is called for each of the `total`. Without a total only `what` is said.
  explicit Progress(std::string what, std::int64_t total = 0, std::int64_t parts = 1);
  ~Progress();  // takes the line away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show() const;  // now, also before anything is done
  void tick() const;  // shows where it stands, if nothing has been shown for a while
  void advance() const;

 private:
  struct Shared;
  Shared& shared() const;

  std::string what_;
  std::int64_t total_, parts_;
  bool terminal_;
  Mapping memory_;  // that forked ranks share
};

}  // namespace ferry::app
