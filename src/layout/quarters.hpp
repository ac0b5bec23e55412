// Shares of a row that are announced apart.
#pragma once

#include "layout/device_signals.hpp"
#include "layout/host_device.hpp"

namespace ferry {

// Quarters [first, last) of a row.
struct Quarters {
  int first, last;

  // Share `share` of 1 << splits.
  FERRY_HD static Quarters of(int share, int splits) {
    return {(kQuarters >> splits) * share, (kQuarters >> splits) * (share + 1)};
  }
  FERRY_HD int count() const { return last - first; }
};

}  // namespace ferry
