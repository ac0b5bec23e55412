// What a relay does between the hops of a call: it forwards a dispatch's tokens to the ranks of its node, and
// adds the sums of its node's ranks in a combine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/cpu/lane.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cpu {

// out = the sum of a node's ranks for a token: `count` rows of the combine type, in rank order, are added in
// fp32 from +0 and rounded once to the combine type.
void sum_on_node(const CpuContext& context, void* out, const void* const* rows, int count, Store store);

// The rows of the combine type that a token's source rank adds: sums of ranks in rank order, or of nodes.
struct PartialSums {
  const void* rows[kMaxTopK];
  int nodes[kMaxTopK];  // the node that each row comes from
  int count = 0;

  void add(const void* row, int node) {
    rows[count] = row;
    nodes[count++] = node;
  }
};

// Replaces the rows of each node by their sum, and sorts the sums by node. `scratch` has count / 2 rows, one
// every `stride` bytes; the sums may lie there.
void add_within_nodes(const CpuContext& context, PartialSums& sums, std::byte* scratch, std::int64_t stride);

// In a dispatch a token comes to this node once, and goes on to every rank here that holds one of its
// experts.
class DispatchRelay final : public Forwarder {
 public:
  explicit DispatchRelay(const CpuContext& context);

  // Starts a call.
  void start(const MessageLayout& layout);

  std::vector<ForwardedMessages> plan(std::span<const HeldMessages> held) override;
  void write(std::span<ForwardedMessages> forwards) override;

  // Expert ids that do not exist in messages of this call: a source rank's plan is damaged. [message index]
  const std::vector<std::int64_t>& bad_messages() const { return bad_messages_; }

 private:
  const CpuContext& context_;
  const int node_;
  MessageLayout layout_{};
  std::vector<std::int64_t> bad_messages_;
  // [R origins, ranks of this node] the messages to forward, in the order of the origin's tokens.
  std::vector<std::vector<const std::byte*>> messages_;

  std::vector<const std::byte*>& messages_for(int origin, int final);
};

// Index of `rank` in the ascending list of the ranks that hold a token's experts. `ids`: [K].
int position_of_rank(const Config& config, const std::int32_t* ids, int rank);

// Where the parts of packed rows are: first the values of all rows, then all tails.
struct PackedRows {
  std::int64_t value_bytes = 0, tail_bytes = 0;  // of a row

  std::int64_t row_bytes() const { return value_bytes + tail_bytes; }
};

// The begin of a row's tail. `slots`: bit k is set if slot k of the token has a row in the sum.
struct SumHead {
  std::int32_t token;
  std::uint32_t slots;
};
static_assert(kMaxTopK <= 32);

// In a combine that adds by node, the relay adds the sums of its node's ranks for a token and sends the
// source rank one row. Rows say themselves which token they belong to, so the relay needs no plan.
class CombineRelay final : public Forwarder {
 public:
  explicit CombineRelay(const CpuContext& context, const PeerLink& link) : context_(context), link_(link) {}

  // Starts a call.
  void start() { bad_rows_.clear(); }

  std::vector<ForwardedMessages> plan(std::span<const HeldMessages> held) override;
  void write(std::span<ForwardedMessages> forwards) override {
    for (const ForwardedMessages& sums : forwards) write_sums(sums.final, sums.out);
  }

  // Rows of this call without a valid token: the plan of a rank of this node is damaged. [source * T + row]
  const std::vector<std::int64_t>& bad_rows() const { return bad_rows_; }

 private:
  // A row of one rank.
  struct Row {
    const std::byte *values, *tail;
  };
  // The rows of one rank for a source rank.
  struct Queue {
    const HeldMessages* held;
    std::int64_t count, next;
    std::int32_t last_token;
  };
  // The rows of a token in rows_.
  struct Token {
    std::size_t first, count;
  };

  PackedRows packed_rows() const;
  const SumHead* head_of_next(Queue& queue);
  void merge(std::vector<Queue>& queues, std::vector<Token>& tokens);
  void write_sums(int source, std::byte* out) const;

  const CpuContext& context_;
  const PeerLink& link_;
  PackedRows format_;
  std::vector<Row> rows_;
  std::vector<std::vector<Token>> tokens_;  // [R] for each source rank
  SumHead head_{};
  std::vector<std::int64_t> bad_rows_;
};

}  // namespace ferry::cpu
