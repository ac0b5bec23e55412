// The cost model: the time of a call from its shape, its loads, a machine's limits and measured constants.
// docs/model.md explains every term.
#pragma once

#include "ferry/config.hpp"
#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/model/constants.hpp"
#include "tools/ferry/model/loads.hpp"

namespace ferry::app {

// The network between nodes, seen from one rank. Zero bytes: a single node.
struct Network {
  std::string name, text{};
  double bytes_per_second = 0;     // that a rank sends, and receives at the same time
  double latency_us = 0;           // of a put and its flag, one way
  double messages_per_second = 0;  // that a rank posts
};

// The networks known by name.
const std::vector<Network>& networks();

struct ModelCall {
  TimedCall call;
  Format format = Format::bf16();
  Layout layout = Layout::expert_major;
  int hidden = 7168;
  RoutingShape shape;
  Hops hops = Hops::one;  // of several nodes

  std::int64_t message_bytes() const;  // dispatch: values and scales of a row
  std::int64_t row_bytes() const;      // combine, and a token before quantisation
};

// Microseconds. Fields other than `total` are the terms before they are combined; of a pair, their sums.
struct Cost {
  double start = 0;    // launch, dependent steps, latencies
  double link = 0;     // the busiest rank's bytes within its node
  double network = 0;  // the busiest rank's bytes between nodes
  double sms = 0;      // its rows, by its SMs
  double memory = 0;   // its bytes in memory
  double total = 0;

  const char* largest() const;  // the name of the largest term
};

// @throws UsageError  work that the model does not have: metadata, nccl
Cost cost_of(const ModelCall& call, const Loads& loads, const Constants& constants, const GpuLimits& limits,
             const Network& network = {});

// Bytes that the busiest rank sends or receives between nodes, and within its node, in a dispatch or combine.
struct LinkBytes {
  double between = 0, within = 0;
};
LinkBytes link_bytes(const ModelCall& call, const Loads& loads);

}  // namespace ferry::app
