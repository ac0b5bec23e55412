// How the messages of a lane's calls get to other ranks where kernels do not store them there themselves: by
// an engine, or by a launch in two hops. A call is then a send phase, which stores messages in the lane's
// memory (EngineLayout), the carrying, and a receive phase.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "base/errors.hpp"
#include "exchange/backend.hpp"
#include "exchange/compared_options.hpp"
#include "layout/device_signals.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cuda {

struct ExchangeState;
class Lane;

// A call begins and ends with its only part, or with two: weights that travel, and then the rows of their
// combine.
enum class CallPart { whole, first, last };

// What a send phase has stored. Call headers travel with every content.
struct Stored {
  enum class Content { headers, messages, rows };

  Content content = Content::headers;
  LaunchShape shape{};  // of the phases
  // Messages:
  LaneView lane{};  // as the phases see it
  PlanView plan{};
  bool by_plan = false;         // the plan says how many messages there are; otherwise the call headers do
  bool returns = false;         // by plan: an answer to each of its messages, from where it has arrived
  std::int64_t part_bytes = 0;  // of a message; 0: values of routes
  std::int32_t *counts = nullptr, *row_offsets = nullptr;  // of a dispatch's result
  int hash_option = -1;  // replicated input, from ids: index of the option that the call headers hold
  // Rows:
  bool own_rows = false;      // those for this rank are packed too
  bool adds_by_node = false;  // the rows of a node are added
};

class Carrier {
 public:
  virtual ~Carrier() = default;

  // The steps of each part of a call, in this order. A wait for peers throws the errors of Backend.
  virtual void begin(Operation operation, const ComparedOptions& options, CallPart part, Stream stream) = 0;
  // The send phase is enqueued. `split`: the receive phase comes later.
  virtual void post(const Stored& stored, bool split, Stream stream) = 0;
  // Enqueues what the receive phase must follow.
  virtual void deliver(Stream stream) = 0;

  // Whether the receive phase may read the inputs of this rank, if they stay as they are until then.
  virtual bool keeps_inputs() const = 0;
  // The call header of a rank in host memory, after deliver() and, if the carrier enqueues, after that.
  virtual const std::byte* received_header(int source) = 0;
  // Carries out a whole small call on the host. Empty: the lane does so by phases.
  virtual std::optional<SmallResult> run_on_host(const SmallCall&) { return std::nullopt; }
  // Refuses the call that has begun, or else the next one.
  virtual void refuse(Operation operation, const ErrorRecord& error, cudaStream_t stream) = 0;
  virtual void add_wire(WireCounts& counts) const = 0;
};

// Gives every lane of an exchange its carrier. Collective.
using SetCarriers = std::function<void(const ExchangeState& exchange, std::deque<Lane>& lanes)>;

// Call headers (layout/device_signals.hpp) as the host reads them.

inline LLPacket header_packet(const std::byte* header, int i) {
  LLPacket packet;
  std::memcpy(&packet, header + i * static_cast<std::int64_t>(sizeof packet), sizeof packet);
  return packet;
}

// Word `i`; 0 if the kernels of the header's call have not written it.
inline std::uint64_t header_word(const std::byte* header, int i) {
  const LLPacket packet = header_packet(header, i);
  return packet.call == header_packet(header, kHeaderFacts).call ? packet.word : 0;
}

// Number `i` among the counts.
inline std::int32_t header_count(const std::byte* header, int i) {
  return static_cast<std::int32_t>(header_word(header, kHeaderCounts + i / 2) >> (32 * (i % 2)));
}

}  // namespace ferry::cuda
