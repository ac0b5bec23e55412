// An engine for ranks that are threads of one process: it copies memory between them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "ferry/engine.hpp"

namespace ferry::test {

class ThreadEngine {
 public:
  using Copy = std::function<void(void* to, const void* from, std::int64_t bytes)>;

  // ordered_lanes: as of EngineFunctions. The engine then does not look at the lane: calls of different lanes
  // that meet are mixed up, as in a library that knows no lanes.
  // `copy`: copies device memory too, and the engine takes it. Without it the engine takes host memory.
  explicit ThreadEngine(int ranks, bool ordered_lanes = false, Copy copy = {});

  // The functions that rank `rank` passes to Group::custom. A transfer whose byte counts differ between two
  // ranks throws.
  EngineFunctions functions(int rank) const;

 private:
  struct Shared;

  std::shared_ptr<Shared> shared_;
};

}  // namespace ferry::test
