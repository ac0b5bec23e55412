// Combine on the CPU. The rank that holds the experts sends to the token's source rank: one sum for each
// (token, rank) with `partial`, one row for each route with `exact` and `unreduced`. The source rank adds
// them in the order that the contract fixes.
//
// Where a row lies depends on the link. In shared memory its place in the source rank's staging follows from
// its token. Where messages are packed, the rows of a pair are in the order of the pair's messages, then
// slots: first the values of all rows, then all tails. Both ranks go through the tokens in that order. In two
// hops with sums by node, tails begin with a SumHead, and a rank of another node gets the rows of a whole
// node from its relay, in the order of its tokens.
#pragma once

#include <vector>

#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/lane.hpp"
#include "backends/cpu/relay.hpp"
#include "layout/exchange_layout.hpp"
#include "plan/shapes.hpp"

namespace ferry::cpu {

// A row that was or will be sent. Both pointers are null if there is none.
struct StagedRow {
  std::byte* values = nullptr;
  std::byte* tail = nullptr;
};

class Combine {
 public:
  explicit Combine(Lane& lane) : lane_(lane), context_(lane.context), relay_(lane.context, *lane.link) {}

  // `split`: the caller may reuse outputs and weights after this, so rows of this rank's own tokens are
  // staged as well. `continues`: the call has begun with its weights.
  void send(const CombineCall& call, bool split, bool continues = false);
  void receive();

 private:
  // combine_send.cpp: on the rank of the experts. `source` is the token's source rank.
  void write_summary(int peer) const;
  void start_sending();
  std::int64_t count_rows(int source);
  std::int64_t tail_bytes(bool values) const;
  StagedRow outgoing_row(int source, std::int64_t token, std::int64_t index);
  void stage_chunk(std::int64_t begin, std::int64_t end);
  void stage_tokens(int source, std::int64_t begin, std::int64_t end);
  void stage_sum(int source, std::int64_t message, std::int32_t token, bool last);
  void stage_rows(int source, std::int64_t message, std::int32_t token);
  void count_row(int source, std::int64_t bytes);
  void write_sum_head(std::byte* tail, std::int32_t token, const std::int32_t* rows) const;
  void write_route_values_of_sum(std::byte* tail, const std::int32_t* rows) const;

  // Used by both phases.
  const void* output_row(std::int64_t row) const;
  int gather_rows(const std::int32_t* rows, std::int64_t entry, const void** outputs, float* weights);
  int rows_to_prefetch(const std::int32_t* rows, const void** outputs) const;
  void sum_on_rank(void* out, const std::int32_t* rows, std::int64_t entry, Store store,
                   const std::int32_t* next_rows);

  // Shared experts: on the token's own rank.
  const void* shared_output(int expert, std::int64_t token);
  std::byte* kept_shared_row(int expert, std::int64_t token) const;
  void save_shared_rows();
  void copy_shared_row(int expert, std::int64_t token, const void* row);
  int add_shared_rows(std::int64_t token, const void** rows, int count);

  // combine_receive.cpp: on the token's source rank
  void read_summaries();
  void start_receiving();
  void find_incoming_rows(std::int64_t token);
  StagedRow incoming_sum(int source, std::int32_t token);
  StagedRow incoming_node_sum(std::int64_t entry, std::int32_t token);
  bool was_left_out(std::int64_t route) const;
  StagedRow incoming_route(std::int64_t route);
  void require_all_read();
  void receive_token(std::int64_t token, std::int64_t end);
  int local_rows_to_prefetch(std::int64_t token, const void** outputs) const;
  void add_partial_sums(std::int64_t token, std::int64_t end);
  void add_rows(std::int64_t token);
  void copy_rows(std::int64_t token);
  void write_route_values(std::int64_t token);
  // Row `index` of a token in shared memory. partial: `index` is a position in the token's list of ranks;
  // otherwise a slot.
  std::int64_t shared_offset(std::int64_t token, std::int64_t index) const {
    return (chunks_.staging_index(token) * staged_rows_per_token_ + index) * layout_.bytes;
  }
  void local_rows(std::int64_t token, std::int32_t* rows);
  const RouteTail& incoming_tail(std::int64_t route) const;
  bool is_local(std::int64_t route) const;
  const void* row_of_route(std::int64_t route, int slot);
  float weight_of_route(std::int64_t route) const;
  void* result_row(std::int64_t row) const;
  const void* residual_row(std::int64_t token) const;

  // The rows that this rank sends to another one, or receives from it.
  struct PairRows {
    std::byte* first = nullptr;
    // Packed rows only:
    std::int64_t count = 0;
    std::int64_t next = 0;                         // the next row; receiving, with partial: the next message
    std::int64_t value_bytes = 0, tail_bytes = 0;  // of a row

    StagedRow row(std::int64_t i) const {
      return {first + i * value_bytes, first + count * value_bytes + i * tail_bytes};
    }
  };

  Lane& lane_;
  const CpuContext& context_;

  // The rows of one sum: a token's routed rows, then its shared ones.
  static constexpr int kMaxRows = kMaxTopK + kMaxSharedExperts;

  // The current call.
  CombineCall call_;
  bool split_ = false;
  PlanView plan_{};
  PlanHeader header_{};  // a copy of the checked header: the caller may change its plan between the phases
  CombineRowLayout layout_{};
  SharedRows shared_{};
  bool partial_ = true;
  std::int64_t staged_rows_per_token_ = 0;
  bool packs_ = false;       // of the link
  bool relays_add_ = false;  // rows of other nodes come as sums by node
  CombineRelay relay_;
  std::vector<PairRows> sent_, received_;    // [R]
  std::int64_t rows_end_ = 0;                // as SummaryHead::rows_end
  std::vector<std::int64_t> peer_rows_end_;  // [R] the peers' rows_end_
  std::vector<std::int64_t> bytes_to_;       // [R] of packed rows
  std::vector<StagedRow> incoming_;   // of the current token, by position (partial) or slot; null: no row
  std::vector<const void*> addends_;  // of the current token: sums of ranks or nodes, then shared rows
  Store staging_store_ = Store::cached, row_store_ = Store::cached;
  ChunkSchedule chunks_;
  std::vector<std::int64_t> next_;  // [R] index of the next message to each source rank
  OptionalArgument values_, weights_;
  std::vector<std::byte> scratch_;  // K + S rows of the combine type
};

}  // namespace ferry::cpu
