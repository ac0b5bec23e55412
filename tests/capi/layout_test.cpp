// The layout of every struct of the C interface, on which existing programs depend. A struct with a `size`
// field may grow at its end: then its size here may be raised. Structs with `reserved` fields keep their size
// and give these a meaning. Any other failure here means that existing programs break.
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
EXPECT_AT(ferry_config, reduction, 136);
EXPECT_AT(ferry_config, deadline, 144);
EXPECT_AT(ferry_config, manual_check, 156);
EXPECT_AT(ferry_config, engine, 160);
EXPECT_AT(ferry_config, reduction_level, 164);
EXPECT_AT(ferry_config, hops, 168);
EXPECT_AT(ferry_config, window, 172);
EXPECT_AT(ferry_config, memory, 176);
EXPECT_AT(ferry_config, shared_experts, 180);
EXPECT_AT(ferry_config, input, 184);
EXPECT_AT(ferry_config, transfer, 192);
EXPECT_AT(ferry_config, expert_slices, 196);

EXPECT_AT(ferry_sizes, dispatch_staging, 8);
EXPECT_AT(ferry_sizes, total, 48);
EXPECT_AT(ferry_sizes, messages, 56);
EXPECT_AT(ferry_sizes, capacity, 64);
EXPECT_AT(ferry_sizes, plan_bytes, 72);

EXPECT_AT(ferry_plan_info, rank, 8);
EXPECT_AT(ferry_plan_info, tokens, 24);
EXPECT_AT(ferry_plan_info, counts, 56);
EXPECT_AT(ferry_plan_info, sources, 72);

EXPECT_AT(ferry_dispatch_result, data, 8);
EXPECT_AT(ferry_dispatch_result, parts, 16);
EXPECT_AT(ferry_dispatch_result, groups, 176);
EXPECT_AT(ferry_dispatch_result, counts, 192);
EXPECT_AT(ferry_dispatch_result, source, 224);
EXPECT_AT(ferry_dispatch_result, host, 264);
EXPECT_AT(ferry_dispatch_result, plan, 280);

EXPECT_AT(ferry_call_options, sm_limit, 4);
EXPECT_AT(ferry_call_options, stream, 8);

EXPECT_AT(ferry_epilogue, residual, 8);
EXPECT_AT(ferry_epilogue, scale, 24);
EXPECT_AT(ferry_encoder_call, tokens, 8);
EXPECT_AT(ferry_encoder_call, device_rows, 40);
EXPECT_AT(ferry_encoder_call, stream, 144);

EXPECT_AT(ferry_dispatch_args, call, 8);
EXPECT_AT(ferry_dispatch_args, tokens, 40);
EXPECT_AT(ferry_dispatch_args, ids, 144);
EXPECT_AT(ferry_dispatch_args, plan, 152);
EXPECT_AT(ferry_dispatch_args, weights, 192);
EXPECT_AT(ferry_dispatch_args, id_type, 200);
EXPECT_AT(ferry_dispatch_args, format, 216);
EXPECT_AT(ferry_dispatch_args, memory, 272);
EXPECT_AT(ferry_dispatch_args, dot_rows, 400);
EXPECT_AT(ferry_dispatch_args, result, 432);
EXPECT_AT(ferry_dispatch_args, global_scale, 408);

EXPECT_AT(ferry_combine_args, call, 8);
EXPECT_AT(ferry_combine_args, outputs, 40);
EXPECT_AT(ferry_combine_args, result, 88);
EXPECT_AT(ferry_combine_args, plan, 136);
EXPECT_AT(ferry_combine_args, row_weights, 176);
EXPECT_AT(ferry_combine_args, topk_weighted, 192);
EXPECT_AT(ferry_combine_args, row_values, 200);
EXPECT_AT(ferry_combine_args, epilogue, 224);

EXPECT_AT(ferry_combine_backward_args, d_result, 40);
EXPECT_AT(ferry_combine_backward_args, plan, 144);
EXPECT_AT(ferry_combine_backward_args, format, 216);
EXPECT_AT(ferry_combine_backward_args, result, 400);
EXPECT_AT(ferry_combine_backward_args, output_rows, 200);

EXPECT_AT(ferry_route_values_args, plan, 48);
EXPECT_AT(ferry_return_values_args, row_values, 40);
EXPECT_AT(ferry_dispatch_layout_args, tokens, 16);
EXPECT_AT(ferry_dispatch_layout_args, expert_rank, 40);
EXPECT_AT(ferry_dispatch_layout_args, tokens_per_node, 80);
EXPECT_AT(ferry_dispatch_layout_args, stream, 96);
EXPECT_AT(ferry_metadata_args, count, 40);
EXPECT_AT(ferry_metadata_args, metadata, 48);
EXPECT_AT(ferry_metadata_args, device_count, 56);
EXPECT_AT(ferry_metadata_args, into, 64);
EXPECT_AT(ferry_all_gather_v_args, count, 48);
EXPECT_AT(ferry_all_gather_v_args, gathered, 64);
EXPECT_AT(ferry_reduce_scatter_v_args, total, 48);
EXPECT_AT(ferry_reduce_scatter_v_args, count, 64);
EXPECT_AT(ferry_reduce_scatter_v_args, type, 72);
EXPECT_AT(ferry_max_dispatch_result, output_tokens, 8);
EXPECT_AT(ferry_max_dispatch_result, row_offsets, 176);
EXPECT_AT(ferry_max_dispatch_result, counts, 200);
EXPECT_AT(ferry_max_dispatch_result, ranks, 224);
EXPECT_AT(ferry_max_dispatch_result, tile_offsets, 232);
EXPECT_AT(ferry_max_dispatch_result, capacity, 240);
EXPECT_AT(ferry_max_dispatch_args, topk_ids, 144);
EXPECT_AT(ferry_max_dispatch_args, result, 160);
EXPECT_AT(ferry_max_dispatch_args, format, 168);
EXPECT_AT(ferry_max_combine_args, src_info, 88);
EXPECT_AT(ferry_max_combine_args, number, 112);
EXPECT_AT(ferry_max_combine_args, topk_ids, 128);
EXPECT_AT(ferry_max_combine_args, output_tokens, 144);
EXPECT_AT(ferry_max_combine_args, shared_outputs, 200);
EXPECT_AT(ferry_nvfuser_dispatch_result, recv_topk_idx, 16);
EXPECT_AT(ferry_nvfuser_dispatch_result, rows, 56);
EXPECT_AT(ferry_nvfuser_dispatch_args, ids, 112);
EXPECT_AT(ferry_nvfuser_dispatch_args, result, 128);
EXPECT_AT(ferry_nvfuser_combine_args, row_count, 16);
EXPECT_AT(ferry_nvfuser_combine_args, tokens, 56);

// A struct that may grow has no padding at its end. Otherwise a new field could start in padding that older
// programs have not initialised.
static_assert(sizeof(ferry_error_record) == offsetof(ferry_error_record, wait_node) + 8);
static_assert(sizeof(ferry_bootstrap) == offsetof(ferry_bootstrap, host_id) + 8);
static_assert(offsetof(ferry_config, local_slots) == offsetof(ferry_config, expert_slices) + 4);
EXPECT_AT(ferry_config, local_slots, 200);
EXPECT_AT(ferry_config, held_counts, 216);
static_assert(sizeof(ferry_config) == offsetof(ferry_config, count_waits) + 8);
static_assert(sizeof(ferry_load_statistics) == offsetof(ferry_load_statistics, idle) + 8);
static_assert(sizeof(ferry_sizes) == offsetof(ferry_sizes, plan_bytes) + 8);
EXPECT_AT(ferry_dispatch_layout_args, node_of_rank, 104);
static_assert(sizeof(ferry_dispatch_layout_args) == offsetof(ferry_dispatch_layout_args, source) + 8);
static_assert(sizeof(ferry_plan_info) == offsetof(ferry_plan_info, sources) + 8);
static_assert(offsetof(ferry_dispatch_result, tile_offsets) ==
              offsetof(ferry_dispatch_result, plan) + sizeof(ferry_plan));
static_assert(sizeof(ferry_dispatch_result) == offsetof(ferry_dispatch_result, row_capacity) + 8);
static_assert(sizeof(ferry_dispatch_args) == offsetof(ferry_dispatch_args, layer) + 8);
static_assert(sizeof(ferry_epilogue) == offsetof(ferry_epilogue, scale) + 8);
static_assert(sizeof(ferry_encoder_call) == offsetof(ferry_encoder_call, stream) + 8);
static_assert(sizeof(ferry_combine_args) == offsetof(ferry_combine_args, epilogue) + 8);
static_assert(sizeof(ferry_route_values_args) == offsetof(ferry_route_values_args, row_values) + 8);
static_assert(sizeof(ferry_return_values_args) == offsetof(ferry_return_values_args, route_values) + 8);
static_assert(sizeof(ferry_metadata_args) == offsetof(ferry_metadata_args, into) + 8);
static_assert(sizeof(ferry_all_gather_v_args) == offsetof(ferry_all_gather_v_args, device_count) + 8);
static_assert(sizeof(ferry_reduce_scatter_v_args) == offsetof(ferry_reduce_scatter_v_args, device_count) + 8);
static_assert(sizeof(ferry_dispatch_counts_args) == offsetof(ferry_dispatch_counts_args, result) + 8);
static_assert(sizeof(ferry_dispatch_counts_result) == offsetof(ferry_dispatch_counts_result, ranks) + 8);
static_assert(sizeof(ferry_trace_info) == offsetof(ferry_trace_info, sequences) + 8);
static_assert(sizeof(ferry_trace_partition_args) == offsetof(ferry_trace_partition_args, first_token) + 8);
static_assert(sizeof(ferry_max_dispatch_result) == offsetof(ferry_max_dispatch_result, capacity) + 8);
static_assert(sizeof(ferry_max_dispatch_args) == offsetof(ferry_max_dispatch_args, input_scale_count) + 8);
static_assert(sizeof(ferry_max_combine_args) == offsetof(ferry_max_combine_args, epilogue) + 8);
static_assert(sizeof(ferry_nvfuser_dispatch_result) == offsetof(ferry_nvfuser_dispatch_result, rows) + 8);
static_assert(sizeof(ferry_nvfuser_dispatch_args) == offsetof(ferry_nvfuser_dispatch_args, stream) + 8);
static_assert(sizeof(ferry_counts) == offsetof(ferry_counts, combine_waits) + 8);
static_assert(sizeof(ferry_topology) == offsetof(ferry_topology, nodes) + 4);
static_assert(sizeof(ferry_nvfuser_combine_args) == offsetof(ferry_nvfuser_combine_args, stream) + 8);

TEST(Layout, OfStructsHasNotChanged) {
  const std::map<std::string, std::size_t> recorded = {
      {"ferry_wait_record", 40},
      {"ferry_bad_id", 32},
      {"ferry_bad_source", 24},
      {"ferry_overflow", 32},
      {"ferry_error_record", 176},
      {"ferry_bootstrap", 48},
      {"ferry_format", 56},
      {"ferry_config", 240},
      {"ferry_sizes", 80},
      {"ferry_plan", 40},
      {"ferry_source", 12},
      {"ferry_plan_info", 80},
      {"ferry_tokens", 104},
      {"ferry_rows", 48},
      {"ferry_receive_buffers", 128},
      {"ferry_received_part", 40},
      {"ferry_host_totals", 16},
      {"ferry_dispatch_result", 376},
      {"ferry_dispatch_args", 448},
      {"ferry_epilogue", 32},
      {"ferry_combine_args", 232},
      {"ferry_combine_backward_args", 408},
      {"ferry_route_values_args", 96},
      {"ferry_return_values_args", 96},
      {"ferry_step_metadata", 12},
      {"ferry_dispatch_layout_args", 136},
      {"ferry_metadata_args", 72},
      {"ferry_all_gather_v_args", 88},
      {"ferry_reduce_scatter_v_args", 88},
      {"ferry_max_dispatch_result", 248},
      {"ferry_max_dispatch_args", 248},
      {"ferry_max_combine_args", 216},
      {"ferry_nvfuser_dispatch_result", 64},
      {"ferry_nvfuser_dispatch_args", 152},
      {"ferry_nvfuser_combine_args", 80},
      {"ferry_dispatch_counts_args", 72},
      {"ferry_dispatch_counts_result", 48},
      {"ferry_encoder_call", 152},
      {"ferry_call_options", 32},
      {"ferry_counts", 120},
      {"ferry_topology", 16},
      {"ferry_trace_info", 80},
      {"ferry_trace_partition_args", 64},
  };
  std::size_t compared = 0;
  for (const from_c_size* type = from_c_sizes; type->name != nullptr; ++type, ++compared) {
    ASSERT_TRUE(recorded.contains(type->name)) << type->name;
    EXPECT_EQ(type->bytes, recorded.at(type->name)) << type->name;
  }
  EXPECT_EQ(compared, recorded.size());
}

}  // namespace
