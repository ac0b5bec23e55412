// What arrived on a GPU, in memory that the processor reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"

namespace ferry::app {

class ResultOnHost {
 public:
  // Copies everything of a dispatch that has ended, the plan too, and returns when it is done. What the call
  // before returned is gone then.
  DispatchResult copy(const DispatchResult& received, const Config& config);
  // Without the parts and the plan, which stay where they are.
  DispatchResult copy_row_positions(const DispatchResult& received, const Config& config);

 private:
  template <class T>
  void bring(T*& pointer, std::int64_t count);
  void* copied(const void* device, std::int64_t bytes);

  std::vector<std::vector<std::byte>> copies_;
};

}  // namespace ferry::app
