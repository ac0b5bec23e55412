#include "oracle/dispatch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "oracle/indexed_rows.hpp"
#include "oracle/numbers.hpp"
#include "oracle/scale_tiles.hpp"

namespace ferry::oracle {
namespace {

// rank_major: appends the local expert and the weight of each slot of a row; -1 and 0 if the slot's expert is
// on another rank.
void append_slots(const GlobalInputs& inputs, const RowPositions& positions, int rank, const RowInfo& row,
                  RowMetadata& metadata) {
  for (int slot = 0; slot < positions.top_k; ++slot) {
    const bool kept = row.state == RowState::kept;
    const bool local = kept && positions.route(row.source.rank, row.source.token, slot).destination == rank;
    metadata.local_ids.push_back(local ? positions.route(row.source.rank, row.source.token, slot).local : -1);
    if (!inputs.weighted) continue;
    const auto& weights = inputs.ranks[local ? row.source.rank : rank].weights;
    metadata.weight.push_back(local ? weights[std::int64_t{row.source.token} * positions.top_k + slot]
                                    : 0.0f);
  }
}

const float* weight_of(const GlobalInputs& inputs, const RowPositions& positions, const Source& source) {
  static constexpr float kOne = 1.0f;
  if (source.slot >= positions.top_k) return &kOne;  // of a shared expert
  return &inputs.ranks[source.rank].weights[std::int64_t{source.token} * positions.top_k + source.slot];
}

void write_elements(const PartShape& shape, std::int64_t row, const std::vector<std::byte>& bytes,
                    std::byte* memory) {
  for (std::int64_t e = 0; e < shape.elements; ++e) {
    std::memcpy(memory + shape.offset(row, e), bytes.data() + e * shape.element_bytes,
                static_cast<std::size_t>(shape.element_bytes));
  }
}

// The scale of the group's expert, or null without input_scales.
const float* scale_of_group(const GlobalInputs& inputs, const RankRows& here, std::size_t group) {
  return inputs.input_scales.empty() ? nullptr : &inputs.input_scales[here.group_expert[group]];
}

// The tiles of all groups.
void write_tiles(const GlobalInputs& inputs, const RowPositions& positions, int rank, int part,
                 const PartShape& shape, std::byte* memory) {
  const RankRows& here = positions.ranks[rank];
  const std::vector<std::int32_t> first = group_tiles(inputs, positions, rank);
  for (std::size_t group = 0; group < here.counts.size(); ++group) {
    std::vector<std::vector<std::uint8_t>> scales;
    for (std::int32_t i = 0; i < here.counts[group]; ++i) {
      const Source& source = here.rows[here.row_offsets[group] + i].source;
      const auto bytes =
          encoded_part(inputs, source.rank, source.token, part, nullptr, scale_of_group(inputs, here, group));
      const auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
      scales.emplace_back(data, data + shape.tile_blocks);
    }
    write_tiled(scales, shape.tile_blocks,
                reinterpret_cast<std::uint8_t*>(memory + first[group] * shape.row_bytes()));
  }
}

std::vector<float> loaded(DType type, const std::byte* row, std::int64_t count) {
  std::vector<float> values(count);
  for (std::int64_t c = 0; c < count; ++c) values[c] = load(type, row + c * bytes_of(type));
  return values;
}

}  // namespace

RowMetadata row_metadata(const GlobalInputs& inputs, const RowPositions& positions, int rank) {
  RowMetadata metadata;
  const bool by_source = inputs.config.layout == Layout::rank_major;
  for (const RowInfo& row : positions.ranks[rank].rows) {
    const bool kept = row.state == RowState::kept;
    metadata.source.push_back(row.source);
    metadata.group_of_row.push_back(kept ? row.group : -1);
    if (by_source) {
      append_slots(inputs, positions, rank, row, metadata);
    } else if (inputs.weighted) {
      metadata.weight.push_back(kept ? *weight_of(inputs, positions, row.source) : 0.0f);
    }
  }
  return metadata;
}

std::vector<std::int32_t> group_tiles(const GlobalInputs& inputs, const RowPositions& positions, int rank) {
  const RankRows& here = positions.ranks[rank];
  std::vector<std::int64_t> counts(here.counts.begin(), here.counts.end());
  if (inputs.config.layout == Layout::expert_padded) std::fill(counts.begin(), counts.end(), here.capacity);
  const std::vector<std::int64_t> offsets = tile_offsets(counts);
  return {offsets.begin(), offsets.end()};
}

std::vector<PartShape> received_shapes(const GlobalInputs& inputs, const RowPositions& positions, int rank) {
  const RankRows& rows_of_rank = positions.ranks[rank];
  const bool padded = inputs.config.layout == Layout::expert_padded;
  const bool indexed = inputs.config.layout == Layout::expert_indexed;
  const std::int64_t rows =
      indexed ? indexed_rows(inputs, positions, rank).capacity
              : rows_of_rank.capacity * (padded ? static_cast<std::int64_t>(rows_of_rank.counts.size()) : 1);
  std::vector<PartShape> shapes =
      part_shapes(inputs.format, inputs.config.hidden, rows, padded ? rows_of_rank.capacity : 0);
  if (inputs.format.kind == FormatKind::fp8_e4m3 && !inputs.input_scales.empty()) shapes.resize(1);
  return shapes;
}

void write_part(const GlobalInputs& inputs, const RowPositions& positions, int rank, int part,
                std::byte* memory) {
  const PartShape shape = received_shapes(inputs, positions, rank)[part];
  if (shape.tile_blocks > 0) return write_tiles(inputs, positions, rank, part, shape, memory);
  if (inputs.config.layout == Layout::expert_indexed) {
    const std::vector<Source> sources = indexed_rows(inputs, positions, rank).source;
    for (std::size_t r = 0; r < sources.size(); ++r)
      write_elements(shape, static_cast<std::int64_t>(r),
                     encoded_part(inputs, sources[r].rank, sources[r].token, part, nullptr), memory);
    return;
  }
  const std::vector<std::byte> zero(shape.elements * shape.element_bytes);
  const std::vector<RowInfo>& rows = positions.ranks[rank].rows;
  for (std::int64_t r = 0; r < static_cast<std::int64_t>(rows.size()); ++r) {
    if (rows[r].state == RowState::kept) {
      const float* weight = inputs.apply_weights ? weight_of(inputs, positions, rows[r].source) : nullptr;
      const Source& source = rows[r].source;
      const float* scale = scale_of_group(inputs, positions.ranks[rank], rows[r].group);
      write_elements(shape, r, encoded_part(inputs, source.rank, source.token, part, weight, scale), memory);
    } else if (rows[r].state == RowState::padding && inputs.config.zero_padding) {
      write_elements(shape, r, zero, memory);
    }
  }
}

float dot(const std::vector<float>& x, const std::vector<float>& v) {
  std::array<float, 256> sum{};
  for (std::size_t c = 0; c < x.size(); ++c) sum[c % 256] = std::fma(x[c], v[c], sum[c % 256]);
  for (const int step : {4, 2, 1}) {  // within each group of eight
    for (int group = 0; group < 256; group += 8) {
      for (int i = 0; i < step; ++i) sum[group + i] += sum[group + i + step];
    }
  }
  for (const int step : {16, 8, 4, 2, 1}) {  // across the 32 groups
    for (int i = 0; i < step; ++i) sum[8 * i] += sum[8 * (i + step)];
  }
  float canonical = 0;
  store(DType::fp32, sum[0], reinterpret_cast<std::byte*>(&canonical));
  return canonical;
}

std::vector<float> row_dots(const GlobalInputs& inputs, const RowPositions& positions, int rank,
                            const std::byte* v, DType type) {
  const std::vector<RowInfo>& rows = positions.ranks[rank].rows;
  const std::int64_t hidden = inputs.config.hidden;
  std::vector<float> dots(rows.size());
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].state != RowState::kept) continue;
    const Source& source = rows[r].source;
    if (source.slot >= positions.top_k) continue;  // of a shared expert
    const std::byte* x =
        inputs.ranks[source.rank].parts[0].data() + source.token * hidden * bytes_of(inputs.type);
    dots[r] = dot(loaded(inputs.type, x, hidden),
                  loaded(type, v + static_cast<std::int64_t>(r) * hidden * bytes_of(type), hidden));
  }
  return dots;
}

}  // namespace ferry::oracle
