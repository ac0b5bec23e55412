// Messages to another node in two hops: one bundle to the node's relay, which holds each token's payload
// once. The relay makes a message from it for each rank of the node.
//
//   bundle   | entries for the node's first rank | ... for its last rank | payloads |
//   entry    | slot metadata | number of the payload, int64 | 8 bytes unused |
//   message  | payload | slot metadata |
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda {

// Bytes; multiples of 16.
struct BundleSizes {
  std::int32_t payload, metadata;

  FERRY_HD constexpr std::int32_t message() const { return payload + metadata; }
  FERRY_HD constexpr std::int32_t entry() const { return metadata + 16; }
};

// The ranks of a node, and the messages that this rank has stored for them.
struct NodeMessages {
  int ranks;
  std::int32_t rank[kMaxDeviceRanks];          // ascending
  std::int32_t count[kMaxDeviceRanks];         // messages to it
  const std::byte* messages[kMaxDeviceRanks];  // to it
};

struct NumberPayloadsArguments {
  NodeMessages to;
  const std::int32_t* sent_tokens;  // [R, T] as of the plan
  std::int32_t max_tokens;
  std::int32_t*
      payload_of;          // [R, T], out: number of a message's payload; -1 - number if an earlier one has it
  std::int32_t* payloads;  // out, in pinned memory: number of payloads, at most T
};

// Numbers the payloads of a bundle: one for each token.
void launch_number_payloads(const NumberPayloadsArguments& arguments, cudaStream_t stream);

struct WriteBundleArguments {
  NodeMessages to;
  BundleSizes sizes;
  std::int32_t max_tokens;
  const std::int32_t* payload_of;
  std::byte* bundle;    // out
  std::byte* payloads;  // in it
};

void launch_write_bundle(const WriteBundleArguments& arguments, cudaStream_t stream);

struct OpenBundleArguments {
  BundleSizes sizes;
  const std::byte* payloads;
  std::int64_t payload_count;
  int ranks;
  std::int32_t count[kMaxDeviceRanks];  // entries for each rank of the node
  const std::byte* entries[kMaxDeviceRanks];
  std::byte* messages[kMaxDeviceRanks];  // out; null: this rank does not need them
};

// An entry whose payload is not in the bundle becomes a message without one.
void launch_open_bundle(const OpenBundleArguments& arguments, cudaStream_t stream);

}  // namespace ferry::cuda
