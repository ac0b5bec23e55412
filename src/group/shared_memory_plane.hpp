// The control plane of a group whose ranks are all on one host: slots in the control block.
#pragma once

#include <cstdint>

#include "group/control_block.hpp"
#include "group/control_plane.hpp"
#include "group/waiter.hpp"

namespace ferry {

class SharedMemoryPlane : public ControlPlane {
 public:
  // A collective fails after `deadline` seconds. Keeps both references.
  SharedMemoryPlane(ControlBlock& control, Waiter& waiter, int rank, double deadline)
      : control_(control), waiter_(waiter), rank_(rank), deadline_(deadline) {}

  void all_gather(const void* mine, void* all, std::size_t bytes) override;

 private:
  void gather_part(const std::byte* mine, std::byte* all, std::size_t bytes, std::size_t stride);

  ControlBlock& control_;
  Waiter& waiter_;
  int rank_;
  double deadline_;
  std::uint64_t step_ = 0;  // one for every part
};

}  // namespace ferry
