// Ranges on the timeline of a profiler that reads NVTX, such as Nsight Systems.
#pragma once

namespace ferry {

// A range of the calling thread in the domain "ferry", for as long as the object lives. Only with FERRY_NVTX,
// and where the toolkit of the build had NVTX; otherwise it costs one branch.
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
