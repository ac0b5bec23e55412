// Dispatch on the CPU. A rank sends each token once to every rank that holds one of its experts, as a message
// in the receiver's staging. The receiver copies the message to the token's row in each expert's segment.
#pragma once

#include <vector>

#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/kernels/kernels.hpp"
#include "backends/cpu/lane.hpp"
#include "backends/cpu/relay.hpp"
#include "format/encoding.hpp"
#include "layout/exchange_layout.hpp"
#include "plan/planning.hpp"

namespace ferry::cpu {

// Encodes a received row with the scale of its expert (DispatchOptions::input_scales).
class ExpertScaleEncoder {
 public:
  explicit ExpertScaleEncoder(const Kernels& kernels) : kernels_(kernels) {}

  // Two levels: g = scale. mxfp8: the block rule on in / scale. fp8: e4m3(in / scale), and no scales. Returns
  // whether every scale of a block could be formed, as Kernels::encode_row.
  bool encode(const EncodedRow& to, const void* in, DType type, std::int64_t columns,
              const Encoding& encoding, float scale);

 private:
  const Kernels& kernels_;
  std::vector<float> quotients_;  // of one row
};

class Dispatch {
 public:
  explicit Dispatch(Lane& lane)
      : lane_(lane), context_(lane.context), expert_encoder_(lane.context.kernels), relay_(lane.context) {}

  // `split`: the caller may reuse its memory after this, so this rank's own tokens are staged as well.
  void send(const DispatchCall& call, bool split);
  DispatchResult receive();

 private:
  // A token's data, in a message or in the caller's memory.
  struct TokenData {
    const std::byte* parts[kMaxParts];
    const std::int32_t* ids;  // [K] global
    const float* weights;     // [K]
  };

  // dispatch_send.cpp
  void start_plan(std::uint64_t call);
  void write_summary(int peer, std::int64_t max_messages) const;
  std::int64_t max_messages_to_peer();
  void list_tokens_for_nodes();
  std::span<const std::int32_t> tokens_to_send(int destination);
  void reserve_messages();
  void stage_chunk(std::int64_t begin, std::int64_t end);
  void stage_messages(int destination, std::int64_t begin, std::int64_t end);
  void encode(std::int64_t token, std::byte* message) const;
  const std::byte* caller_part(int part, std::int64_t token) const;
  int rank_position(std::int64_t token, int rank) const;

  // dispatch_receive.cpp
  void read_summary(int peer);
  void finish_plan();
  void copy_valid_counts();
  void receive_chunks();
  std::int64_t messages_from(int source);
  void receive_messages(int source, std::int64_t begin, std::int64_t end, RowAssigner& assigner);
  void add_relay_diagnostics();
  void drop_rows(std::int32_t* rows) const;
  void drop_own_rows(std::int32_t token) const;
  TokenData staged_token(const std::byte* message) const;
  TokenData caller_token(std::int64_t token);

  // dispatch_result.cpp
  void prepare_parts();
  void prepare_result();
  void write_shared_rows();
  void write_groups();
  void prepare_shared_tiles(const SharedRows& shared);
  void prepare_tiles();
  void clear_tiles(int begin_group, int end_group);
  std::int64_t row_tile_limit() const;
  void write_shared_metadata(std::int64_t begin, std::int64_t end);
  void write_expert_rows(const TokenData& token, const std::int32_t* rows);
  void write_rank_major_row(const TokenData& token, const std::int32_t* rows);
  void write_parts(const TokenData& token, const std::int32_t* rows, int count);
  void write_encoded(const TokenData& token, std::int32_t row, int expert);
  std::int64_t stored_row(int part, std::int64_t row) const;
  void store_part(int part, std::int32_t row, const void* in);
  int expert_of_row(std::int32_t row) const;
  void write_weighted(const TokenData& token, std::int32_t row, float weight) const;
  void write_computed(const TokenData& token, std::int32_t row, float weight);
  void write_padding(std::int64_t begin, std::int64_t end);

  // dispatch_indexed.cpp
  bool keeps_all_own_tokens() const;
  void list_own_tokens();
  void prepare_index();
  void write_indexed_row(int source, std::int64_t i, std::int32_t token_number, const TokenData& token,
                         const std::int32_t* rows);

  Lane& lane_;
  const CpuContext& context_;

  // The current call.
  DispatchCall call_;
  bool split_ = false;
  bool by_plan_ = false;  // dispatch from a plan
  PlanView plan_{};
  // By plan: a copy of the checked header, because the caller may change its plan between the phases.
  PlanHeader header_{};
  PartList parts_;          // of received rows
  PartList message_parts_;  // of messages: the same, or with input_scales the tokens as they are
  Encoding encoding_;
  std::vector<float> input_scales_;  // [E + S], or empty
  MessageLayout layout_{};
  Store staging_store_ = Store::cached, row_store_ = Store::cached;
  ChunkSchedule chunks_;
  RowOffsetTable row_offsets_;
  ExpertScaleEncoder expert_encoder_;
  std::vector<std::byte> scale_row_;  // of one row
  ScaleTiles tiles_;                  // of formats with scales as tiles
  DispatchResult result_;
  std::int64_t stored_rows_ = 0;            // rows from here on are not stored: ReceiveBuffers::rows
  std::vector<std::int32_t> row_limits_;    // [R] of each rank: DispatchCall::row_limit()
  std::vector<std::int32_t> valid_counts_;  // by plan: the plan's counts, invalid ones replaced
  std::vector<std::int32_t> own_tokens_;    // with keeps_all_own_tokens()
  std::vector<std::byte> scratch_;          // one message
  std::vector<std::int64_t> bytes_to_;      // [R] of messages

  // Two hops.
  DispatchRelay relay_;
  std::vector<std::vector<std::int32_t>> tokens_to_node_;  // [nodes] this rank's tokens with an expert there
};

}  // namespace ferry::cpu
