// The layout of every struct of the C interface, on which existing programs depend. A struct with a `size`
// field may grow at its end: then its size here may be raised. Any other failure here means that existing
// programs break.
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <string>

#include "capi/from_c.h"

namespace {

// A struct that may grow must keep the offset of every field.
#define EXPECT_AT(type, field, offset) static_assert(offsetof(type, field) == (offset))

EXPECT_AT(ferry_error_record, size, 0);
EXPECT_AT(ferry_error_record, status, 8);
EXPECT_AT(ferry_error_record, kind, 12);
EXPECT_AT(ferry_error_record, wait, 16);
EXPECT_AT(ferry_error_record, bad_id, 56);
EXPECT_AT(ferry_error_record, bad_source, 88);
EXPECT_AT(ferry_error_record, overflow, 112);
EXPECT_AT(ferry_error_record, error_number, 144);
EXPECT_AT(ferry_error_record, wait_via, 152);
EXPECT_AT(ferry_error_record, wait_role, 160);
EXPECT_AT(ferry_error_record, wait_node, 168);

EXPECT_AT(ferry_bootstrap, size, 0);
EXPECT_AT(ferry_bootstrap, rank, 8);
EXPECT_AT(ferry_bootstrap, all_gather, 16);
EXPECT_AT(ferry_bootstrap, user, 32);

EXPECT_AT(ferry_config, size, 0);
EXPECT_AT(ferry_config, experts, 8);
EXPECT_AT(ferry_config, backend, 24);
EXPECT_AT(ferry_config, expert_rank, 32);
EXPECT_AT(ferry_config, placement_version, 48);
EXPECT_AT(ferry_config, capacity, 56);
EXPECT_AT(ferry_config, combine_type, 76);
EXPECT_AT(ferry_config, format, 80);
EXPECT_AT(ferry_config, reduction, 120);
EXPECT_AT(ferry_config, deadline, 128);
EXPECT_AT(ferry_config, manual_check, 140);
EXPECT_AT(ferry_config, engine, 144);
EXPECT_AT(ferry_config, reduction_level, 152);
EXPECT_AT(ferry_config, hops, 160);
EXPECT_AT(ferry_config, window, 164);
EXPECT_AT(ferry_config, memory, 168);

EXPECT_AT(ferry_sizes, dispatch_staging, 8);
EXPECT_AT(ferry_sizes, total, 48);
EXPECT_AT(ferry_sizes, messages, 56);

EXPECT_AT(ferry_plan_info, rank, 8);
EXPECT_AT(ferry_plan_info, tokens, 24);
EXPECT_AT(ferry_plan_info, counts, 56);
EXPECT_AT(ferry_plan_info, sources, 72);

EXPECT_AT(ferry_dispatch_result, data, 8);
EXPECT_AT(ferry_dispatch_result, parts, 16);
EXPECT_AT(ferry_dispatch_result, groups, 112);
EXPECT_AT(ferry_dispatch_result, counts, 128);
EXPECT_AT(ferry_dispatch_result, source, 160);
EXPECT_AT(ferry_dispatch_result, host, 200);
EXPECT_AT(ferry_dispatch_result, plan, 216);

EXPECT_AT(ferry_dispatch_args, tokens, 8);
EXPECT_AT(ferry_dispatch_args, ids, 88);
EXPECT_AT(ferry_dispatch_args, plan, 96);
EXPECT_AT(ferry_dispatch_args, weights, 120);
EXPECT_AT(ferry_dispatch_args, id_type, 128);
EXPECT_AT(ferry_dispatch_args, format, 136);
EXPECT_AT(ferry_dispatch_args, memory, 176);
EXPECT_AT(ferry_dispatch_args, dot_rows, 240);
EXPECT_AT(ferry_dispatch_args, lane, 248);
EXPECT_AT(ferry_dispatch_args, sm_limit, 252);
EXPECT_AT(ferry_dispatch_args, stream, 256);
EXPECT_AT(ferry_dispatch_args, result, 264);
EXPECT_AT(ferry_dispatch_args, more_memory, 272);
EXPECT_AT(ferry_dispatch_args, device_count, 320);
EXPECT_AT(ferry_dispatch_args, global_scale, 328);

EXPECT_AT(ferry_dispatch_receive_args, lane, 8);
EXPECT_AT(ferry_dispatch_receive_args, stream, 16);
EXPECT_AT(ferry_dispatch_receive_args, result, 24);

EXPECT_AT(ferry_combine_args, outputs, 8);
EXPECT_AT(ferry_combine_args, result, 32);
EXPECT_AT(ferry_combine_args, plan, 56);
EXPECT_AT(ferry_combine_args, row_weights, 80);
EXPECT_AT(ferry_combine_args, lane, 112);
EXPECT_AT(ferry_combine_args, stream, 128);
EXPECT_AT(ferry_combine_args, output_rows, 152);
EXPECT_AT(ferry_combine_args, topk_weighted, 160);

EXPECT_AT(ferry_combine_receive_args, lane, 8);
EXPECT_AT(ferry_combine_receive_args, stream, 16);

EXPECT_AT(ferry_combine_backward_args, d_result, 8);
EXPECT_AT(ferry_combine_backward_args, plan, 88);
EXPECT_AT(ferry_combine_backward_args, format, 136);
EXPECT_AT(ferry_combine_backward_args, lane, 240);
EXPECT_AT(ferry_combine_backward_args, result, 256);
EXPECT_AT(ferry_combine_backward_args, output_rows, 264);
EXPECT_AT(ferry_combine_backward_args, more_memory, 272);

EXPECT_AT(ferry_route_values_args, plan, 16);
EXPECT_AT(ferry_route_values_args, lane, 48);
EXPECT_AT(ferry_return_values_args, row_values, 32);
EXPECT_AT(ferry_return_values_args, lane, 48);
EXPECT_AT(ferry_dispatch_layout_args, tokens, 16);
EXPECT_AT(ferry_dispatch_layout_args, expert_rank, 40);
EXPECT_AT(ferry_dispatch_layout_args, tokens_per_node, 80);
EXPECT_AT(ferry_dispatch_layout_args, stream, 96);
EXPECT_AT(ferry_metadata_args, count, 8);
EXPECT_AT(ferry_metadata_args, metadata, 24);
EXPECT_AT(ferry_metadata_args, device_count, 32);
EXPECT_AT(ferry_metadata_args, into, 40);
EXPECT_AT(ferry_all_gather_v_args, count, 16);
EXPECT_AT(ferry_all_gather_v_args, gathered, 32);
EXPECT_AT(ferry_all_gather_v_args, lane, 48);
EXPECT_AT(ferry_reduce_scatter_v_args, total, 16);
EXPECT_AT(ferry_reduce_scatter_v_args, count, 32);
EXPECT_AT(ferry_reduce_scatter_v_args, type, 40);
EXPECT_AT(ferry_max_dispatch_result, output_tokens, 8);
EXPECT_AT(ferry_max_dispatch_result, row_offsets, 112);
EXPECT_AT(ferry_max_dispatch_result, counts, 136);
EXPECT_AT(ferry_max_dispatch_result, ranks, 160);
EXPECT_AT(ferry_max_dispatch_result, tile_offsets, 168);
EXPECT_AT(ferry_max_dispatch_result, capacity, 176);
EXPECT_AT(ferry_max_dispatch_args, topk_ids, 88);
EXPECT_AT(ferry_max_dispatch_args, result, 104);
EXPECT_AT(ferry_max_dispatch_args, format, 112);
EXPECT_AT(ferry_max_dispatch_args, device_count, 176);
EXPECT_AT(ferry_max_dispatch_wait_args, result, 16);
EXPECT_AT(ferry_max_combine_args, src_info, 32);
EXPECT_AT(ferry_max_combine_args, number, 56);
EXPECT_AT(ferry_max_combine_args, topk_ids, 72);
EXPECT_AT(ferry_max_combine_args, output_tokens, 88);
EXPECT_AT(ferry_max_combine_args, shared_outputs, 120);
EXPECT_AT(ferry_nvfuser_dispatch_result, recv_topk_idx, 16);
EXPECT_AT(ferry_nvfuser_dispatch_result, rows, 56);
EXPECT_AT(ferry_nvfuser_dispatch_args, ids, 88);
EXPECT_AT(ferry_nvfuser_dispatch_args, result, 104);
EXPECT_AT(ferry_nvfuser_combine_args, row_count, 16);
EXPECT_AT(ferry_nvfuser_combine_args, tokens, 56);
EXPECT_AT(ferry_load_counts, dispatches, 24);
EXPECT_AT(ferry_wire_counts, combine_messages, 32);
EXPECT_AT(ferry_wire_counts, combine_messages_between_nodes, 64);

// A struct that may grow has no padding at its end. Otherwise a new field could start in padding that older
// programs have not initialised.
static_assert(sizeof(ferry_error_record) == offsetof(ferry_error_record, wait_node) + 8);
static_assert(sizeof(ferry_bootstrap) == offsetof(ferry_bootstrap, host_id) + 8);
static_assert(offsetof(ferry_config, shared_experts) == offsetof(ferry_config, memory) + 8);
static_assert(offsetof(ferry_config, input) == offsetof(ferry_config, shared_experts) + 8);
static_assert(offsetof(ferry_config, transfer) == offsetof(ferry_config, shared_split) + 4);
static_assert(offsetof(ferry_config, expert_slices) == offsetof(ferry_config, transfer) + 8);
static_assert(offsetof(ferry_config, local_slots) == offsetof(ferry_config, expert_slices) + 8);
static_assert(sizeof(ferry_config) == offsetof(ferry_config, local_slots) + 8);
static_assert(sizeof(ferry_load_statistics) == offsetof(ferry_load_statistics, idle) + 8);
static_assert(sizeof(ferry_sizes) == offsetof(ferry_sizes, messages) + 8);
static_assert(sizeof(ferry_dispatch_layout_args) == offsetof(ferry_dispatch_layout_args, node_of_rank) + 8);
static_assert(sizeof(ferry_plan_info) == offsetof(ferry_plan_info, sources) + 8);
static_assert(offsetof(ferry_dispatch_result, tile_offsets) == offsetof(ferry_dispatch_result, plan) + 24);
static_assert(sizeof(ferry_dispatch_result) == offsetof(ferry_dispatch_result, tile_offsets) + 8);
static_assert(offsetof(ferry_dispatch_args, input_scales) == offsetof(ferry_dispatch_args, global_scale) + 8);
static_assert(sizeof(ferry_dispatch_args) == offsetof(ferry_dispatch_args, weighted) + 8);
static_assert(sizeof(ferry_dispatch_receive_args) == offsetof(ferry_dispatch_receive_args, result) + 8);
static_assert(offsetof(ferry_combine_args, shared_outputs) == offsetof(ferry_combine_args, stream) + 8);
static_assert(sizeof(ferry_combine_args) == offsetof(ferry_combine_args, topk_weighted) + 8);
static_assert(sizeof(ferry_combine_receive_args) == offsetof(ferry_combine_receive_args, stream) + 8);
static_assert(sizeof(ferry_combine_backward_args) ==
              offsetof(ferry_combine_backward_args, more_memory) + sizeof(ferry_more_receive_buffers));
static_assert(sizeof(ferry_route_values_args) == offsetof(ferry_route_values_args, stream) + 8);
static_assert(sizeof(ferry_return_values_args) == offsetof(ferry_return_values_args, stream) + 8);
static_assert(sizeof(ferry_metadata_args) == offsetof(ferry_metadata_args, into) + 8);
static_assert(sizeof(ferry_all_gather_v_args) == offsetof(ferry_all_gather_v_args, device_count) + 8);
static_assert(sizeof(ferry_reduce_scatter_v_args) == offsetof(ferry_reduce_scatter_v_args, device_count) + 8);
static_assert(sizeof(ferry_dispatch_counts_args) == offsetof(ferry_dispatch_counts_args, result) + 8);
static_assert(sizeof(ferry_dispatch_counts_result) == offsetof(ferry_dispatch_counts_result, ranks) + 8);
static_assert(sizeof(ferry_trace_info) == offsetof(ferry_trace_info, sequences) + 8);
static_assert(sizeof(ferry_trace_partition_args) == offsetof(ferry_trace_partition_args, first_token) + 8);
static_assert(sizeof(ferry_max_dispatch_result) == offsetof(ferry_max_dispatch_result, capacity) + 8);
static_assert(sizeof(ferry_max_dispatch_args) == offsetof(ferry_max_dispatch_args, stream) + 8);
static_assert(sizeof(ferry_max_dispatch_wait_args) == offsetof(ferry_max_dispatch_wait_args, stream) + 8);
static_assert(sizeof(ferry_max_combine_args) == offsetof(ferry_max_combine_args, stream) + 8);
static_assert(sizeof(ferry_nvfuser_dispatch_result) == offsetof(ferry_nvfuser_dispatch_result, rows) + 8);
static_assert(sizeof(ferry_nvfuser_dispatch_args) == offsetof(ferry_nvfuser_dispatch_args, result) + 8);
static_assert(sizeof(ferry_nvfuser_combine_args) == offsetof(ferry_nvfuser_combine_args, result) + 8);
static_assert(sizeof(ferry_load_counts) == offsetof(ferry_load_counts, dispatches) + 8);
static_assert(sizeof(ferry_wire_counts) == offsetof(ferry_wire_counts, combine_messages_between_nodes) + 8);

TEST(Layout, OfStructsHasNotChanged) {
  const std::map<std::string, std::size_t> recorded = {
      {"ferry_wait_record", 40},
      {"ferry_bad_id", 32},
      {"ferry_bad_source", 24},
      {"ferry_overflow", 32},
      {"ferry_error_record", 176},
      {"ferry_bootstrap", 48},
      {"ferry_format", 40},
      {"ferry_config", 216},
      {"ferry_sizes", 64},
      {"ferry_plan", 24},
      {"ferry_source", 12},
      {"ferry_plan_info", 80},
      {"ferry_tokens", 80},
      {"ferry_rows", 24},
      {"ferry_receive_buffers", 64},
      {"ferry_more_receive_buffers", 48},
      {"ferry_received_part", 24},
      {"ferry_host_totals", 16},
      {"ferry_dispatch_result", 248},
      {"ferry_dispatch_args", 360},
      {"ferry_dispatch_receive_args", 32},
      {"ferry_epilogue", 24},
      {"ferry_combine_args", 168},
      {"ferry_combine_receive_args", 24},
      {"ferry_combine_backward_args", 320},
      {"ferry_route_values_args", 64},
      {"ferry_return_values_args", 64},
      {"ferry_step_metadata", 12},
      {"ferry_dispatch_layout_args", 112},
      {"ferry_metadata_args", 48},
      {"ferry_all_gather_v_args", 72},
      {"ferry_reduce_scatter_v_args", 64},
      {"ferry_max_dispatch_result", 184},
      {"ferry_max_dispatch_args", 192},
      {"ferry_max_dispatch_wait_args", 32},
      {"ferry_max_combine_args", 144},
      {"ferry_nvfuser_dispatch_result", 64},
      {"ferry_nvfuser_dispatch_args", 112},
      {"ferry_nvfuser_combine_args", 72},
      {"ferry_dispatch_counts_args", 48},
      {"ferry_dispatch_counts_result", 48},
      {"ferry_trace_info", 80},
      {"ferry_trace_partition_args", 64},
      {"ferry_load_counts", 32},
      {"ferry_wire_counts", 72},
  };
  std::size_t compared = 0;
  for (const from_c_size* type = from_c_sizes; type->name != nullptr; ++type, ++compared) {
    ASSERT_TRUE(recorded.contains(type->name)) << type->name;
    EXPECT_EQ(type->bytes, recorded.at(type->name)) << type->name;
  }
  EXPECT_EQ(compared, recorded.size());
}

}  // namespace
