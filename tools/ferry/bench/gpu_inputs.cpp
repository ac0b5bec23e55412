#include "tools/ferry/bench/gpu_inputs.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "tools/ferry/commands/commands.hpp"

namespace ferry::app {

namespace {

GpuBuffer copy_to_gpu(const void* host, std::int64_t bytes) {
  GpuBuffer array(bytes);
  if (bytes > 0) array.fill_from(host, bytes);
  return array;
}

GpuBuffer copy_to_gpu(const std::vector<std::byte>& bytes) {
  return copy_to_gpu(bytes.data(), static_cast<std::int64_t>(bytes.size()));
}

}  // namespace

GpuInputs::GpuInputs(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs)
    : rank_(rank),
      point_(point),
      inputs_(inputs),
      positions_(std::int64_t{point.ranks} * point.tokens * point.config.top_k *
                 static_cast<std::int64_t>(sizeof(RowToken))),
      wrong_(sizeof(WrongRows)) {}

// The ranks of a process share the tables.
void GpuInputs::write_tables(TokenTables& tables, int set) {
  rank_.barrier();
  for (int rank = 0; rank < point_.ranks; ++rank) {
    if (rank == rank_.index() || !rank_.same_process()) tables.write(inputs_, set, rank);
  }
  rank_.barrier();
}

void GpuInputs::upload(TokenTables& tables) {
  const int me = rank_.index();
  const std::int64_t routes = std::int64_t{point_.tokens} * point_.config.top_k;
  for (int set_index = 0; set_index < BenchInputs::kSets; ++set_index) {
    write_tables(tables, set_index);
    GpuInputSet& set = (*this)[set_index];
    set.tokens = copy_to_gpu(tables.tokens_of(me), point_.tokens * point_.token_bytes());
    set.ids = copy_to_gpu(inputs_.ids(set_index, me), routes * 4);
    set.weights = copy_to_gpu(inputs_.weights(set_index, me), routes * 4);
    set.messages = copy_to_gpu(tables.messages());
    set.plan = GpuBuffer(plan_bytes(point_.config, point_.ranks));
  }
  rank_.barrier();
}

void GpuInputs::record_rows(int set_index, const DispatchResult& local) {
  GpuInputSet& set = (*this)[set_index];
  set.positions.clear();
  for (int group = 0; group < local.groups; ++group) {
    for (std::int32_t row = local.row_offsets[group]; row < local.row_offsets[group] + local.counts[group];
         ++row) {
      const Source& source = local.source[row];
      set.positions.push_back({row, source.rank * point_.tokens + source.token});
    }
  }
  if (local.weight != nullptr) set.row_weights = copy_to_gpu(local.weight, *local.total * 4);
}

void GpuInputs::make_outputs(TokenTables& tables, std::int64_t rows, const cuda::CudaStream& stream) {
  const bool quantised = tables.quantised();
  GpuBuffer tokens;
  for (int set_index = 0; set_index < BenchInputs::kSets; ++set_index) {
    GpuInputSet& set = (*this)[set_index];
    if (quantised) {
      write_tables(tables, set_index);
      tokens = copy_to_gpu(tables.tokens());
    }
    set.outputs = GpuBuffer(rows * point_.token_bytes());
    upload_rows(set.positions);
    copy_rows(positions_.as<RowToken>(), static_cast<std::int64_t>(set.positions.size()),
              (quantised ? tokens : set.messages).as(), set.outputs.as(), point_.token_bytes(), stream.get());
    stream.synchronize();
  }
  rank_.barrier();
}

void GpuInputs::upload_rows(const std::vector<RowToken>& positions) {
  const auto bytes = static_cast<std::int64_t>(positions.size() * sizeof(RowToken));
  if (bytes > 0) positions_.fill_from(positions.data(), bytes);
}

void GpuInputs::check_bytes(int set_index, const DispatchResult& on_device, const cuda::CudaStream& stream) {
  const GpuInputSet& set = (*this)[set_index];
  RowParts rows{.parts = parts_of(point_.config.format, point_.config.hidden),
                .data = {},
                .leading = {},
                .groups = ScaleGroups::of(on_device)};
  for (int p = 0; p < rows.parts.count; ++p) {
    const ReceivedPart& part = on_device.parts[static_cast<std::size_t>(p)];
    rows.data[p] = part.data;
    rows.leading[p] = part.leading_dimension;
  }
  upload_rows(set.positions);
  WrongRows wrong{0, kNoRow};
  wrong_.fill_from(&wrong, sizeof wrong);
  count_wrong_rows(positions_.as<RowToken>(), static_cast<std::int64_t>(set.positions.size()),
                   set.messages.as(), rows, wrong_.as<WrongRows>(), stream.get());
  stream.synchronize();
  copy_to_host(&wrong, wrong_.as(), sizeof wrong);
  if (wrong.count == 0) return;
  throw CheckFailed(
      fmt::format("check failed: set {}, rank {}: {} of {} rows differ from their tokens, first row {}",
                  set_index, rank_.index(), wrong.count, set.positions.size(), wrong.first));
}

}  // namespace ferry::app
