// Where arrived rows are written: parts, weights, sources, groups, padding.
#include <algorithm>

#include "backends/cpu/dispatch.hpp"

namespace ferry::cpu {

void Dispatch::prepare_received() {
  const Config& config = shared_.config;
  const int me = shared_.me();
  const bool rank_major = config.layout == Layout::rank_major;
  const std::int64_t rows = row_capacity(config, me);
  const ReceiveBuffers& memory = call_.memory;
  received_ = {};
  std::int64_t end = lane_.arrays.parts;
  for (int p = 0; p < parts_.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    void* own = config.own_receive_buffers ? lane_.array<std::byte>(end) : nullptr;
    end = align_up(end + part_bytes_total(parts_.part[p], rows), 64);
    received_.parts[i] = {
        .data = memory.parts[i] != nullptr ? memory.parts[i] : own,
        .row_bytes = parts_.part[p].columns ? parts_.part[p].element_bytes : parts_.part[p].row_bytes,
        .leading_dimension = leading_dimension(parts_.part[p], rows)};
  }
  received_.data = received_.parts[0].data;
  received_.groups = groups_of(config, me);
  received_.capacity = group_capacity(config, me);
  received_.counts =
      memory.counts != nullptr ? memory.counts : lane_.array<std::int32_t>(lane_.arrays.counts);
  received_.row_offsets = memory.row_offsets != nullptr ? memory.row_offsets
                                                        : lane_.array<std::int32_t>(lane_.arrays.row_offsets);
  received_.total = received_.row_offsets + received_.groups;
  received_.group_expert = lane_.array<std::int32_t>(lane_.arrays.group_expert);
  received_.source = plan_.sources;
  if (weights_.anywhere()) {
    received_.weight = memory.weight != nullptr ? memory.weight : lane_.array<float>(lane_.arrays.weight);
  }
  if (rank_major) {
    received_.local_ids =
        memory.local_ids != nullptr ? memory.local_ids : lane_.array<std::int32_t>(lane_.arrays.local_ids);
  }
  received_.group_of_row = memory.group_of_row;
  if (call_.dot_rows != nullptr) {
    received_.dots = memory.dots != nullptr ? memory.dots : lane_.array<float>(lane_.arrays.dots);
  }
  received_.host = &lane_.totals;
  received_.call = lane_.channel.call();
  received_.plan = replay_ ? call_.plan : Plan::over(plan_.header, static_cast<std::size_t>(plan_.bytes));
  const std::int64_t bytes = std::int64_t{plan_.header->total} * parts_.part[0].row_bytes;
  row_store_ = store_for(bytes);
}

void Dispatch::write_rows(const Row& row, const std::int32_t* rows) {
  const std::int64_t capacity = plan_.header->total;
  std::int32_t kept[kMaxTopK];
  int count = 0;
  auto* weight = const_cast<float*>(received_.weight);
  for (int slot = 0; slot < shared_.config.top_k; ++slot) {
    if (rows[slot] == -1 || !lane_.usable(rows[slot], capacity, rows - plan_.came_rows + slot)) continue;
    kept[count++] = rows[slot];
    if (weight != nullptr) weight[rows[slot]] = row.weights[slot];
    if (call_.apply_weights || call_.dot_rows != nullptr) {
      compute_row(row, rows[slot], call_.apply_weights ? row.weights[slot] : 1.0f);
    }
  }
  if (!call_.apply_weights) store_parts(row, kept, count);
}

void Dispatch::write_token_row(const Row& row, const std::int32_t* rows) {
  const int top_k = shared_.config.top_k;
  std::int32_t to = -1;
  for (int slot = 0; slot < top_k && to < 0; ++slot) to = rows[slot];
  if (to == -1 || !lane_.usable(to, plan_.header->total, rows - plan_.came_rows)) return;
  auto* ids = const_cast<std::int32_t*>(received_.local_ids) + std::int64_t{to} * top_k;
  float* weight =
      received_.weight != nullptr ? const_cast<float*>(received_.weight) + std::int64_t{to} * top_k : nullptr;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int32_t id = row.ids[slot];
    const bool here =
        id >= 0 && id < shared_.config.experts && shared_.config.placement.place(id).rank == shared_.me();
    ids[slot] = here ? shared_.config.placement.place(id).local : -1;
    if (weight != nullptr) weight[slot] = here ? row.weights[slot] : 0.0f;
  }
  store_parts(row, &to, 1);
}

void Dispatch::store_parts(const Row& row, const std::int32_t* rows, int count) {
  for (int p = 0; p < parts_.count; ++p) {
    const PartLayout& part = parts_.part[p];
    const ReceivedPart& to = received_.parts[static_cast<std::size_t>(p)];
    if (part.columns) {
      for (int i = 0; i < count; ++i)
        store_part_row(part, to.data, rows[i], to.leading_dimension, row.parts[p]);
      continue;
    }
    void* outs[kMaxTopK];
    for (int i = 0; i < count; ++i) {
      outs[i] = static_cast<std::byte*>(to.data) + element_offset(part, rows[i], 0, to.leading_dimension);
    }
    shared_.kernels.copy_to_many(outs, count, row.parts[p], part.row_bytes, row_store_);
  }
}

// Gradients: the row times its weight, and its inner product with the expert's output.
void Dispatch::compute_row(const Row& row, std::int32_t to, float weight) {
  const DType type = call_.tokens.type;
  const std::int64_t hidden = shared_.config.hidden;
  if (call_.apply_weights) {
    shared_.kernels.weigh_row(static_cast<std::byte*>(received_.data) + to * parts_.part[0].row_bytes,
                              row.parts[0], type, weight, hidden, row_store_);
  }
  if (call_.dot_rows != nullptr) {
    const DType wire = shared_.config.combine_type;
    const auto* other = static_cast<const std::byte*>(call_.dot_rows) + to * hidden * bytes_of(wire);
    const_cast<float*>(received_.dots)[to] = shared_.kernels.dot(row.parts[0], type, other, wire, hidden);
  }
}

void Dispatch::write_groups() {
  const Config& config = shared_.config;
  const int me = shared_.me();
  auto* counts = const_cast<std::int32_t*>(received_.counts);
  auto* offsets = const_cast<std::int32_t*>(received_.row_offsets);
  auto* experts = lane_.array<std::int32_t>(lane_.arrays.group_expert);
  const bool padded = config.layout == Layout::expert_padded;
  for (int group = 0; group < received_.groups; ++group) {
    counts[group] = static_cast<std::int32_t>(places_.count(me, group));
    offsets[group] = static_cast<std::int32_t>(places_.offset(me, group));
    experts[group] = config.layout == Layout::rank_major
                         ? -1
                         : config.placement.experts_of(me)[static_cast<std::size_t>(group)];
  }
  offsets[received_.groups] = static_cast<std::int32_t>(places_.total(me));
  for (int group = 0; group < received_.groups; ++group) {
    const std::int64_t begin = offsets[group], filled = begin + counts[group];
    // expert_padded: the rows up to the aligned count are padding, those beyond it are not touched.
    const std::int64_t end =
        padded ? begin + std::min(align_up(counts[group], config.alignment), received_.capacity)
               : offsets[group + 1];
    if (received_.group_of_row != nullptr) {
      std::fill(call_.memory.group_of_row + begin, call_.memory.group_of_row + filled, group);
    }
    write_padding(filled, end);
  }
}

void Dispatch::write_padding(std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    plan_.sources[row] = {};
    if (received_.weight != nullptr) const_cast<float*>(received_.weight)[row] = 0;
    if (received_.dots != nullptr) const_cast<float*>(received_.dots)[row] = 0;
    if (received_.group_of_row != nullptr) call_.memory.group_of_row[row] = -1;
    if (!shared_.config.zero_padding) continue;
    for (int p = 0; p < parts_.count; ++p) {
      const ReceivedPart& to = received_.parts[static_cast<std::size_t>(p)];
      zero_part_row(parts_.part[p], to.data, row, to.leading_dimension);
    }
  }
}

}  // namespace ferry::cpu
