// The relay's part of a combine in two hops that adds by node: it adds the sums of its node's ranks for a
// token, and sends the source rank one row. Rows of such a combine say themselves which token they belong to,
// so the relay needs no plan.
#pragma once

#include <vector>

#include "backends/cpu/lane.hpp"

namespace ferry::cpu {

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
