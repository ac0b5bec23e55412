// Experts with replicas (Placement::replicas) on host memory: an exchange whose experts are the replicas, and
// in front of it the choice of a replica for every route.
#pragma once

#include <memory>

#include "exchange/backend.hpp"

namespace ferry {

// The configuration inside: P experts, of which number p is replica p of the placement. `config` is complete.
Config replica_config(const Config& config);

// Throws UnsupportedError if `placement` has replicas: kernels do not choose between them. `what` names the
// call or configuration.
void refuse_replicas_on_device(const Placement& placement, const char* what);

// Wraps the backend `inner`, whose configuration is replica_config(config).
std::unique_ptr<Backend> make_replica_backend(const Rank& rank, const Config& config,
                                              std::unique_ptr<Backend> inner);
Sizes replica_backend_sizes(const Config& config, int rank, const Sizes& inner);

}  // namespace ferry
