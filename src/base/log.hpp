// What an observer sees of a run: log lines on stderr, and ranges on a profiler's timeline.
#pragma once

#include <string>

namespace ferry {

// Log lines, if FERRY_LOG is set: whether they are wanted. The variable is read once.
bool log_enabled() noexcept;

// Writes "ferry: `line`" in one piece. For lines whose text costs time, ask log_enabled() first.
void log_line(const std::string& line) noexcept;

// For profilers that read NVTX, such as Nsight Systems: a range of the calling thread in the domain "ferry",
// for as long as the object lives. Only with FERRY_NVTX, and where the toolkit of the build had NVTX;
// otherwise it costs one branch.
class ProfilerRange {
 public:
  // `name` outlives the object.
  explicit ProfilerRange(const char* name) noexcept;
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  const bool open_;
};

}  // namespace ferry
