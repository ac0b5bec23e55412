// Notices when a peer's process ends, whether or not it said so: by its lock, which is marked as soon as it
// is killed; and by its descriptor, which tells more slowly of those that do not hold their lock yet, or no
// longer.
#pragma once

#include <mutex>
#include <vector>

namespace ferry {

class GroupControl;

class ProcessWatch {
 public:
  explicit ProcessWatch(const GroupControl& control);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;  // owns descriptors
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // A rank whose process has ended (a zombie counts) or is just ending, without a word, or -1. Never blocks.
  // Ranks that are threads of this process are not found: they cannot end that way.
  int find_device_error();

  // Whether the process of `rank` has ended, is just ending, or ends within this time.
  bool ends_within(int rank, int milliseconds);

 private:
  bool open(int rank);
  bool ended(int rank, int milliseconds);

  const GroupControl& control_;
  std::mutex mutex_;              // lanes may wait in threads of their own
  std::vector<int> descriptors_;  // [ranks] pidfd, or -1
};

}  // namespace ferry
