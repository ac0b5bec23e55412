// Creates the backend that a configuration names, if this build has it.
#include <string>
#include <vector>

#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"
#include "exchange/encoder_staging.hpp"
#include "exchange/replicas.hpp"
#include "ferry/error.hpp"
#include "format/registry.hpp"
#include "group/rank_state.hpp"

namespace ferry {

#if !FERRY_HAS_CUDA
void require_nvshmem() {
  throw UnsupportedError(kNoCudaBackend);
}

void require_nccl() {
  throw UnsupportedError(kNoCudaBackend);
}

std::unique_ptr<Backend> make_cuda_backend(const Rank&, const Config&) {
  throw UnsupportedError(kNoCudaBackend);
}

std::unique_ptr<Backend> make_nvshmem_backend(const Rank&, const Config&) {
  throw UnsupportedError(kNoCudaBackend);
}

std::unique_ptr<Backend> make_device_collective_backend(const Rank&, const Config&, Engine*) {
  throw UnsupportedError(kNoCudaBackend);
}

std::unique_ptr<Backend> make_device_sliced_backend(const Rank&, const Config&, std::unique_ptr<Backend>) {
  throw UnsupportedError(kNoCudaBackend);
}

std::unique_ptr<Backend> make_device_replica_backend(const Rank&, const Config&, std::unique_ptr<Backend>) {
  throw UnsupportedError(kNoCudaBackend);
}
#endif

namespace {

// The backends of Ferry. A new one is a line here.
struct BackendEntry {
  BackendKind kind;
  bool needs_one_host;  // the ranks share memory or map each other's
  bool adds_by_node;    // has ReductionLevel::node in one hop too
  std::unique_ptr<Backend> (*make)(const Rank& rank, const Config& config);
  Sizes (*sizes)(const Config& config, const Topology& topology, int rank);
};

constexpr BackendEntry kBackends[] = {
    {BackendKind::cpu, true, true, make_cpu_backend, cpu_backend_sizes},
    {BackendKind::cuda, true, false, make_cuda_backend, cuda_backend_sizes},
    {BackendKind::nvshmem, false, true, make_nvshmem_backend, nvshmem_backend_sizes},
    {BackendKind::collective, false, true, make_collective_backend, collective_backend_sizes},
};

const BackendEntry& entry_of(BackendKind kind) {
  for (const BackendEntry& entry : kBackends)
    if (entry.kind == kind) return entry;
  std::string names = to_string(BackendKind::automatic);
  for (const BackendEntry& entry : kBackends) names += str(", ", to_string(entry.kind));
  throw UsageError(
      str("backend = ", to_string(kind), " (", static_cast<int>(kind), "), must be one of ", names));
}

// The configuration as backends see it: registered formats become raw ones.
Config backend_config(const Config& config) {
  Config seen = config;
  seen.format = as_raw(config.format, config.hidden);
  return seen;
}

Sizes sizes_of(const Config& given, const Topology& topology, int rank) {
  Config config = backend_config(given);
  const bool one_host = topology.nodes() == 1 || topology.simulated();
  if (!resolve_by_hosts(config, topology, one_host)) {
    const DeviceBackendFaults mine = device_backend_faults(config);
    choose_device_backend(config, {&mine, 1});
    resolve_by_hosts(config, topology, one_host);
  }
  const BackendEntry& entry = entry_of(config.backend);
  Sizes sizes = entry.sizes(inner_config(config), topology, rank);
  if (config.placement.tp() > 1) sizes = sliced_backend_sizes(config, rank, sizes);
  if (config.placement.has_replicas()) sizes = replica_backend_sizes(config, rank, sizes);
  sizes.plans += EncoderStaging::bytes(given);
  return sizes;
}

}  // namespace

void check_backend(BackendKind kind) {
  if (kind != BackendKind::automatic) entry_of(kind);
}

std::unique_ptr<Backend> make_backend(const Rank& rank, const Config& given) {
  const Config config = backend_config(given);
  const BackendEntry& entry = entry_of(config.backend);
  if (entry.needs_one_host && !rank.state().one_host()) {
    throw UnsupportedError(
        str("the backend ", to_string(config.backend), " needs all ranks on one host; these ",
            counted(rank.size(), "rank"), " are on ", counted(rank.topology().nodes(), "host"),
            ": use the backend collective", has_kernels(config.backend) ? ", or nvshmem" : ""));
  }
  const bool adds_by_node = entry.adds_by_node || has_relays(config, rank.topology());
  if (!adds_by_node && config.reduction_level == ReductionLevel::node) {
    throw UnsupportedError(str("the backend ", to_string(config.backend),
                               " has no reduction_level node, the default of a group of several nodes (this "
                               "one has ",
                               rank.topology().nodes(),
                               "), in one hop: pass reduction_level rank, or hops two"));
  }
  const bool on_device = config.memory == MemoryKind::device;
  if (config.placement.has_replicas()) {
    const auto make = on_device ? make_device_replica_backend : make_replica_backend;
    return make(rank, config, entry.make(rank, inner_config(config)));
  }
  if (config.placement.tp() == 1) return entry.make(rank, config);
  const bool over_windows = config.backend == BackendKind::nvshmem && rank.topology().nodes() > 1;
  if (over_windows || (has_kernels(config.backend) && has_relays(config, rank.topology()))) {
    throw UnsupportedError(
        "experts in slices take one hop of the backend cuda on device memory: use cuda with hops one, or the "
        "backend cpu");
  }
  std::unique_ptr<Backend> inner = entry.make(rank, inner_config(config));
  const auto make = on_device ? make_device_sliced_backend : make_sliced_backend;
  return make(rank, config, std::move(inner));
}

Sizes size_of(const Config& given, int ranks, int rank) {
  const Config config = complete_config(given, ranks);
  check_rank(rank, ranks);
  return sizes_of(config, Topology(std::vector<int>(static_cast<std::size_t>(ranks))), rank);
}

Sizes size_of(const Config& given, const Topology& topology, int rank) {
  const Config config = complete_config(given, topology.ranks());
  check_rank(rank, topology.ranks());
  return sizes_of(config, topology, rank);
}

}  // namespace ferry
