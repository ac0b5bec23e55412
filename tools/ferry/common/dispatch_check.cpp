#include "tools/ferry/common/dispatch_check.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "oracle/dispatch.hpp"
#include "oracle/indexed_rows.hpp"

namespace ferry::app {

DispatchCheck::DispatchCheck(oracle::GlobalInputs inputs, std::string name)
    : inputs_(std::move(inputs)), name_(std::move(name)), positions_(oracle::find_row_positions(inputs_)) {}

std::int64_t DispatchCheck::rows(int rank) const {
  const std::vector<std::int32_t>& counts = positions_.ranks[at(rank)].counts;
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

void DispatchCheck::run(int rank, const DispatchResult& received, CheckCounter& counter,
                        const TokenParts& token, bool weighted) const {
  if (!check_tables(rank, received, counter)) return;  // without offsets the rows cannot be located
  check_metadata(rank, received, counter, weighted);
  if (token) check_values(rank, received, counter, token);
}

bool DispatchCheck::check_tables(int rank, const DispatchResult& received, CheckCounter& counter) const {
  bool all_equal = true;
  auto same = [&](const char* name, const std::vector<std::int32_t>& expected, const std::int32_t* found) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] == found[i]) {
        counter.pass(1);
        continue;
      }
      all_equal = false;
      counter.fail(1, fmt::format("{}, rank {}: {}[{}] is {}, expected {}", name_, rank, name, i, found[i],
                                  expected[i]));
    }
  };
  const oracle::RankRows& here = positions_.ranks[at(rank)];
  same("counts", here.counts, received.counts);
  same("row_offsets", here.row_offsets, received.row_offsets);
  same("group_expert", here.group_expert, received.group_expert);
  same("total", {here.row_offsets.back()}, received.total);
  return all_equal;
}

void DispatchCheck::check_metadata(int rank, const DispatchResult& received, CheckCounter& counter,
                                   bool weighted) const {
  const oracle::RowMetadata expected = oracle::row_metadata(inputs_, positions_, rank);
  const std::vector<oracle::RowInfo>& rows = positions_.ranks[at(rank)].rows;
  const bool by_slot = inputs_.config.layout == Layout::rank_major;
  const auto per_row = by_slot ? at(inputs_.config.top_k) : 1;
  const bool indexed = inputs_.config.layout == Layout::expert_indexed;
  if (indexed) check_index(rank, received, counter);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    if (!indexed) record(received.source[row] == rows[row].source, rank, row, "the source", counter);
    for (std::size_t i = row * per_row; i < (row + 1) * per_row; ++i) {
      if (by_slot)
        record(received.local_ids[i] == expected.local_ids[i], rank, row, "a local expert", counter);
      if (weighted)
        record(std::memcmp(&received.weight[i], &expected.weight[i], sizeof(float)) == 0, rank, row,
               "the weight", counter);
    }
  }
}

// expert_indexed: the row of every position, and the token of every row.
void DispatchCheck::check_index(int rank, const DispatchResult& received, CheckCounter& counter) const {
  const oracle::IndexedRows expected = oracle::indexed_rows(inputs_, positions_, rank);
  for (std::size_t i = 0; i < expected.index.size(); ++i)
    record(received.index[i] == expected.index[i] && received.slot[i] == expected.slot[i], rank, i,
           "the index", counter);
  const auto same = [&](const std::vector<std::int32_t>& values, const std::int32_t* found,
                        const char* name) {
    const bool equal = std::equal(values.begin(), values.end(), found);
    equal ? counter.pass(1) : counter.fail(1, fmt::format("{}, rank {}: {} differs", name_, rank, name));
  };
  same(expected.block_group, received.block_group, "block_group");
  same(expected.source_offsets, received.source_offsets, "source_offsets");
  for (std::size_t row = 0; row < expected.source.size(); ++row) {
    if (received.source[row] == expected.source[row]) {
      counter.pass(1);
    } else {
      counter.fail(1, fmt::format("{}, rank {}: the source of row {} differs", name_, rank, row));
    }
  }
}

void DispatchCheck::check_values(int rank, const DispatchResult& received, CheckCounter& counter,
                                 const TokenParts& token) const {
  const std::vector<oracle::PartShape> shapes = oracle::received_shapes(inputs_, positions_, rank);
  const std::vector<std::int32_t> tiles = oracle::group_tiles(inputs_, positions_, rank);
  const oracle::RankRows& here = positions_.ranks[at(rank)];
  const bool indexed = inputs_.config.layout == Layout::expert_indexed;
  const oracle::IndexedRows index =
      indexed ? oracle::indexed_rows(inputs_, positions_, rank) : oracle::IndexedRows{};
  for (std::size_t row = 0; row < here.rows.size(); ++row) {
    if (here.rows[row].state != oracle::RowState::kept) continue;
    const Parts expected = token(here.rows[row].source.rank, here.rows[row].source.token);
    const auto group = at(here.rows[row].group), in_group = row - at(here.row_offsets[group]);
    for (std::size_t part = 0; part < shapes.size(); ++part) {
      const oracle::PartShape& shape = shapes[part];
      const auto* found = static_cast<const std::byte*>(received.parts[part].data);
      const std::size_t place = shape.tile_blocks > 0 ? 128 * at(tiles[group]) + in_group
                                : indexed             ? at(index.index[row])
                                                      : row;
      bool equal = true;
      for (std::int64_t e = 0; e < shape.elements; ++e) {
        equal =
            equal && std::memcmp(found + shape.offset(static_cast<std::int64_t>(place), e),
                                 &expected[part][at(e * shape.element_bytes)], at(shape.element_bytes)) == 0;
      }
      record(equal, rank, row, part == 0 ? "a value" : "a scale", counter);
    }
  }
}

void DispatchCheck::record(bool equal, int rank, std::size_t row, const char* what,
                           CheckCounter& counter) const {
  if (equal) return counter.pass(1);
  const Source& from = positions_.ranks[at(rank)].rows[row].source;
  counter.fail(1, fmt::format("{}, rank {}, row {} (from rank {}, token {}, slot {}): {} differs", name_,
                              rank, row, from.rank, from.token, from.slot, what));
}

}  // namespace ferry::app
