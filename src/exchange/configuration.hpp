// Fills in a configuration's defaults, checks it, and compares it across the ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "plan/shapes.hpp"

namespace ferry {

inline constexpr int kMostExperts = 1 << 20;  // of an exchange, and of a recorded trace

// Checks the fields that need no number of ranks: sizes, types and formats. Throws UsageError.
void check_alone(const Config& config);

// Returns the configuration with every default filled in that does not depend on the group's nodes, after all
// checks that one rank can make by itself.
// Throws UsageError or UnsupportedError.
Config complete_config(const Config& config, int ranks);

// The configuration of the backend inside, where experts are in slices or have replicas; else `config`, which
// is complete.
Config inner_config(const Config& config);

// Throws UsageError or UnsupportedError if `format` has its scales in tiles and the configuration, which need
// not be complete, has no place for them.
void check_tiles(const Config& config, const Format& format);

// Config::memory with `automatic` resolved: host or device.
MemoryKind chosen_memory(const Config& config);

// Resolves what depends on the ranks' hosts and nodes in a configuration from complete_config(): backend,
// engine, hops and reduction_level. `one_host`: as RankState::one_host(). Returns false, with these fields
// left as they are, if the backend depends on what every rank can load: then choose_device_backend() comes
// first.
bool resolve_by_hosts(Config& config, const Topology& topology, bool one_host);

// What keeps a rank from each backend for device memory on several hosts; empty: nothing.
struct DeviceBackendFaults {
  std::string nvshmem, nccl;
};
DeviceBackendFaults device_backend_faults(const Config& config);
// Replaces the backend `automatic` by nvshmem if no rank has a fault of it, else by collective over NCCL.
// Throws UnsupportedError, with both faults, if a rank has one of that too.
void choose_device_backend(Config& config, std::span<const DeviceBackendFaults> by_rank);

// Config::hops with `automatic` resolved: one or two.
Hops chosen_hops(const Config& config, const Topology& topology);

// Whether relays pass on messages between nodes. They do if there are several nodes, and messages take two
// hops.
bool has_relays(const Config& config, const Topology& topology);

// Config::reduction_level with `automatic` resolved: rank or node.
ReductionLevel chosen_level(const Config& config, const Topology& topology);

// Throws UsageError unless 0 <= rank < ranks.
void check_rank(int rank, int ranks);

// Collective. Completes this rank's configuration, with all defaults, and compares it with those of the other
// ranks. If one rank refuses its own, or two differ, every rank throws a UsageError that names the first
// difference.
Config agree_on_config(const Rank& rank, const Config& config);

// Collective. Takes part in agree_on_config() for a rank whose configuration could not even be read, so that
// the other ranks throw `error` instead of waiting.
void refuse_configuration(const Rank& rank, const Error& error);

inline constexpr int kMostLayers = 4096;
// Most lanes of an exchange: bounds Config::lanes and the lanes that the steps of a program name.
inline constexpr int kMaxLanes = 64;

// Most values (max_tokens * hidden) of a rank's tokens for which nvshmem takes one hop by default. A relay
// costs two more flags and carries the bytes once more within the node; one hop sends a token more often
// between nodes.
//
// Not measured: no run has had a network. `ferry model` has the two even at about two tokens of 7,168 values
// on nodes of 4 and 8 ranks, and at more on nodes of 2.
inline constexpr std::int64_t kOneHopValues = 2 * 7168;

}  // namespace ferry
