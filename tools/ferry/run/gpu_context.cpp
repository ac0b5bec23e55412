#include "tools/ferry/run/gpu_experts.hpp"

#include "backends/cpu/kernels.hpp"
#include "tools/ferry/run/experts.hpp"

namespace ferry::app {

DeviceExperts::DeviceExperts(const Job& job, int rank, std::int64_t rows, const DeviceStream& stream)
    : job_(job),
      experts_(job.config.placement.experts_of(rank)),
      rank_major_(job.config.layout == Layout::rank_major),
      stream_(stream),
      multiply_(stream.get()),
      outputs_(rows * job.row_bytes()) {
  const std::int64_t slots = rank_major_ ? rows * job.config.top_k : 0;
  const std::int64_t routes = rank_major_ ? slots : rows;
  const bool as_they_lie = !rank_major_ && job.config.format.kind != FormatKind::fp8_e4m3;
  inputs_ = DeviceArray(as_they_lie ? 0 : routes * job.row_bytes());
  gate_ = DeviceArray(routes * job.options.inner * 4);
  up_ = DeviceArray(gate_.bytes());
  inner_ = DeviceArray(routes * job.options.inner * bytes_of(job.type));
  routed_ = DeviceArray(slots * job.row_bytes());
  picked_ = DeviceArray(slots * 4);
  positions_ = DeviceArray(slots * 4);
  bring_weights();
}

void DeviceExperts::bring_weights() {
  const std::int64_t matrix = std::int64_t{job_.config.hidden} * job_.options.inner;
  const std::int64_t bytes = 3 * matrix * bytes_of(job_.type);  // of an expert
  const auto locals = static_cast<std::int64_t>(experts_.size());
  weights_ = DeviceArray(locals * bytes);
  factors_ = DeviceArray(locals * 4);
  std::vector<std::byte> converted(static_cast<std::size_t>(locals * bytes));
  std::vector<float> factors;
  for (const int expert : experts_) {
    std::byte* to = converted.data() + static_cast<std::int64_t>(factors.size()) * bytes;
    for (const float* from :
         {job_.weights.gate(expert), job_.weights.up(expert), job_.weights.down(expert)}) {
      cpu::kernels().convert_row(to, job_.type, from, DType::fp32, matrix, cpu::Store::cached);
      to += matrix * bytes_of(job_.type);
    }
    factors.push_back(factor_of(expert));
  }
  weights_.fill_from(converted.data(), weights_.bytes());
  factors_.fill_from(factors.data(), factors_.bytes());
}

void DeviceExperts::multiply(const DispatchResult& received) {
  const DeviceRows rows = rows_of(received);
  if (rank_major_) {
    return scale_and_add_rows(rows, slots_of(received), factors_.as<float>(), received.host->total,
                              outputs_.as(), stream_.get());
  }
  const std::vector<Group> groups = groups_of(received);
  for (std::size_t local = 0; local < groups.size(); ++local) {
    scale_rows(rows, groups[local].first, groups[local].count, factor_of(experts_[local]), outputs_.as(),
               stream_.get());
  }
}

void DeviceExperts::swiglu(const DispatchResult& received) {
  const DeviceRows rows = rows_of(received);
  const std::vector<Group> groups = rank_major_ ? pick(received) : groups_of(received);
  if (!rank_major_ && rows.quantised)
    pick_rows(rows, nullptr, received.host->total, inputs_.as(), stream_.get());
  const bool as_they_lie = inputs_.bytes() == 0;
  const auto* x = as_they_lie ? static_cast<const std::byte*>(received.data) : inputs_.as();
  const DeviceArray& out = rank_major_ ? routed_ : outputs_;
  for (std::size_t local = 0; local < groups.size(); ++local) {
    const auto [first, count] = groups[local];
    if (count > 0) apply(static_cast<int>(local), x + first * job_.row_bytes(), count, row(out, first));
  }
  if (!rank_major_) return;
  add_rows(rows, slots_of(received), routed_.as(), positions_.as<std::int32_t>(), received.host->total,
           outputs_.as(), stream_.get());
}

// out = down(silu(x gate) * (x up))
void DeviceExperts::apply(int local, const void* x, std::int64_t rows, void* out) const {
  const int hidden = job_.config.hidden, inner = job_.options.inner;
  const std::int64_t matrix = std::int64_t{hidden} * inner * bytes_of(job_.type);
  const std::byte* gate = weights_.as() + 3 * local * matrix;
  const DeviceProduct into{.a = x,
                           .b = gate,
                           .out = gate_.as(),
                           .rows = rows,
                           .inner = hidden,
                           .columns = inner,
                           .type = job_.type,
                           .out_type = DType::fp32};
  DeviceProduct up = into;
  up.b = gate + matrix;
  up.out = up_.as();
  multiply_.multiply(into);
  multiply_.multiply(up);
  gate_values(gate_.as<float>(), up_.as<float>(), rows * inner, job_.type, inner_.as(), stream_.get());
  multiply_.multiply({.a = inner_.as(),
                      .b = gate + 2 * matrix,
                      .out = out,
                      .rows = rows,
                      .inner = inner,
                      .columns = hidden,
                      .type = job_.type,
                      .out_type = job_.type});
}

DeviceRows DeviceExperts::rows_of(const DispatchResult& received) const {
  const Format& format = job_.config.format;
  DeviceRows rows{};
  rows.values = received.data;
  rows.type = job_.type;
  rows.hidden = job_.config.hidden;
  rows.quantised = format.kind == FormatKind::fp8_e4m3;
  if (!rows.quantised) return rows;
  rows.packed = format.fp8.packed;
  rows.scales = received.parts[1].data;
  rows.scale_part = parts_of(format, job_.config.hidden).part[1];
  rows.scale_leading = received.parts[1].leading_dimension;
  return rows;
}

DeviceSlots DeviceExperts::slots_of(const DispatchResult& received) const {
  return {.local_ids = received.local_ids, .weights = received.weight, .top_k = job_.config.top_k};
}

std::vector<DeviceExperts::Group> DeviceExperts::groups_of(const DispatchResult& received) const {
  std::vector<std::int32_t> counts(experts_.size()), offsets(experts_.size());
  const auto bytes = static_cast<std::int64_t>(experts_.size()) * 4;
  copy_to_host(counts.data(), received.counts, bytes);
  copy_to_host(offsets.data(), received.row_offsets, bytes);
  std::vector<Group> groups;
  for (std::size_t local = 0; local < counts.size(); ++local)
    groups.push_back({offsets[local], counts[local]});
  return groups;
}

// Puts the rows of each local expert side by side in inputs_, and notes in places_ where each slot's is.
std::vector<DeviceExperts::Group> DeviceExperts::pick(const DispatchResult& received) {
  const std::int64_t top_k = job_.config.top_k, slots = received.host->total * top_k;
  std::vector<std::int32_t> locals(static_cast<std::size_t>(slots)), picked, positions(locals.size(), -1);
  copy_to_host(locals.data(), received.local_ids, slots * 4);
  std::vector<Group> groups;
  for (std::int32_t local = 0; local < static_cast<std::int32_t>(experts_.size()); ++local) {
    const auto first = static_cast<std::int64_t>(picked.size());
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      if (locals[static_cast<std::size_t>(slot)] != local) continue;
      positions[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(picked.size());
      picked.push_back(static_cast<std::int32_t>(slot / top_k));
    }
    groups.push_back({first, static_cast<std::int64_t>(picked.size()) - first});
  }
  const auto routes = static_cast<std::int64_t>(picked.size());
  picked_.fill_from(picked.data(), routes * 4);
  positions_.fill_from(positions.data(), slots * 4);
  pick_rows(rows_of(received), picked_.as<std::int32_t>(), routes, inputs_.as(), stream_.get());
  return groups;
}

}  // namespace ferry::app
