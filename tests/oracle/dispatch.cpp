#include "oracle/dispatch.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "oracle/numbers.hpp"

namespace ferry::oracle {
namespace {

// Local expert and weight of every slot of a rank_major row; -1 and 0 where the slot's expert is elsewhere.
void note_slots(const GlobalInputs& global, const RowPositions& positions, int rank, const RowInfo& row,
                RowMetadata& notes) {
  for (int slot = 0; slot < positions.top_k; ++slot) {
    const bool kept = row.state == RowState::kept;
    const bool here = kept && positions.route(row.source.rank, row.source.token, slot).destination == rank;
    notes.local_ids.push_back(here ? positions.route(row.source.rank, row.source.token, slot).local : -1);
    if (!global.weighted) continue;
    const auto& weights = global.ranks[here ? row.source.rank : rank].weights;
    notes.weight.push_back(here ? weights[std::int64_t{row.source.token} * positions.top_k + slot] : 0.0f);
  }
}

const float* weight_of(const GlobalInputs& global, const RowPositions& positions, const Source& source) {
  return &global.ranks[source.rank].weights[std::int64_t{source.token} * positions.top_k + source.slot];
}

void write_elements(const PartShape& shape, std::int64_t row, const std::vector<std::byte>& bytes,
                    std::byte* memory) {
  for (std::int64_t e = 0; e < shape.elements; ++e) {
    std::memcpy(memory + row * shape.row_step + e * shape.element_step,
                bytes.data() + e * shape.element_bytes, static_cast<std::size_t>(shape.element_bytes));
  }
}

std::vector<float> loaded(DType type, const std::byte* row, std::int64_t count) {
  std::vector<float> values(count);
  for (std::int64_t c = 0; c < count; ++c) values[c] = load(type, row + c * bytes_of(type));
  return values;
}

}  // namespace

RowMetadata row_metadata(const GlobalInputs& global, const RowPositions& positions, int rank) {
  RowMetadata notes;
  const bool by_source = global.config.layout == Layout::rank_major;
  for (const RowInfo& row : positions.ranks[rank].rows) {
    const bool kept = row.state == RowState::kept;
    notes.source.push_back(row.source);
    notes.group_of_row.push_back(kept ? row.group : -1);
    if (by_source) {
      note_slots(global, positions, rank, row, notes);
    } else if (global.weighted) {
      notes.weight.push_back(kept ? *weight_of(global, positions, row.source) : 0.0f);
    }
  }
  return notes;
}

std::vector<PartShape> arrived_shapes(const GlobalInputs& global, const RowPositions& positions, int rank) {
  const RankRows& here = positions.ranks[rank];
  const bool padded = global.config.layout == Layout::expert_padded;
  const std::int64_t rows = here.capacity * (padded ? static_cast<std::int64_t>(here.counts.size()) : 1);
  return part_shapes(global.format, global.config.hidden, rows);
}

void write_part(const GlobalInputs& global, const RowPositions& positions, int rank, int part,
                std::byte* memory) {
  const PartShape shape = arrived_shapes(global, positions, rank)[part];
  const std::vector<std::byte> zero(shape.elements * shape.element_bytes);
  const std::vector<RowInfo>& rows = positions.ranks[rank].rows;
  for (std::int64_t r = 0; r < static_cast<std::int64_t>(rows.size()); ++r) {
    if (rows[r].state == RowState::kept) {
      const float* weight = global.apply_weights ? weight_of(global, positions, rows[r].source) : nullptr;
      const Source& from = rows[r].source;
      write_elements(shape, r, encoded_part(global, from.rank, from.token, part, weight), memory);
    } else if (rows[r].state == RowState::padding && global.config.zero_padding) {
      write_elements(shape, r, zero, memory);
    }
  }
}

float dot(const std::vector<float>& x, const std::vector<float>& v) {
  std::array<float, 256> sum{};
  for (std::size_t c = 0; c < x.size(); ++c) sum[c % 256] = std::fma(x[c], v[c], sum[c % 256]);
  for (const int step : {4, 2, 1}) {  // inside each group of eight neighbours
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

std::vector<float> row_dots(const GlobalInputs& global, const RowPositions& positions, int rank,
                            const std::byte* v, DType type) {
  const std::vector<RowInfo>& rows = positions.ranks[rank].rows;
  const std::int64_t hidden = global.config.hidden;
  std::vector<float> dots(rows.size());
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].state != RowState::kept) continue;
    const Source& from = rows[r].source;
    const std::byte* x =
        global.ranks[from.rank].parts[0].data() + from.token * hidden * bytes_of(global.type);
    dots[r] = dot(loaded(global.type, x, hidden),
                  loaded(type, v + static_cast<std::int64_t>(r) * hidden * bytes_of(type), hidden));
  }
  return dots;
}

}  // namespace ferry::oracle
