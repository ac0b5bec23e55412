// Experts with replicas (Placement::replicas): an exchange whose experts are the replicas, and in front of it
// the choice of a replica for every route.
#pragma once

#include <memory>
#include <vector>

#include "exchange/backend.hpp"
#include "plan/replica_choice.hpp"

namespace ferry {

// The configuration inside: P experts, of which number p is replica p of the placement. `config` is complete.
Config replica_config(const Config& config);

// Memory in front of a lane, where the choice is made: on the host, or on a device.
class ReplicaLane {
 public:
  virtual ~ReplicaLane() = default;

  virtual std::byte* memory() = 0;                                         // zeroed, replica_lane_bytes()
  virtual void write(void* to, const void* from, std::int64_t bytes) = 0;  // before the first call
  // Throw UsageError for memory of the caller that the choice cannot read.
  virtual void check_pointers(const DispatchCall&) const {}
  virtual void check_pointers(const DispatchCountsCall&) const {}
  // On a device enqueued on the call's stream.
  virtual void choose(const ReplicaChoice& choice, const CallOptions& call) = 0;
};
std::int64_t replica_lane_bytes(const Config& config, int rank);

// Wraps the backend `inner`, whose configuration is replica_config(config). `lanes`: one for each of its
// lanes.
std::unique_ptr<Backend> wrap_in_replicas(const Rank& rank, const Config& config,
                                          std::unique_ptr<Backend> inner,
                                          std::vector<std::unique_ptr<ReplicaLane>> lanes);
// wrap_in_replicas() with lanes in host memory, and with lanes in the memory of a cuda backend.
std::unique_ptr<Backend> make_replica_backend(const Rank& rank, const Config& config,
                                              std::unique_ptr<Backend> inner);
std::unique_ptr<Backend> make_device_replica_backend(const Rank& rank, const Config& config,
                                                     std::unique_ptr<Backend> inner);
Sizes replica_backend_sizes(const Config& config, int rank, const Sizes& inner);

}  // namespace ferry
