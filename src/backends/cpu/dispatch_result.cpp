// Builds the DispatchResult: where each array is, and the writes to rows, groups and padding.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backends/cpu/dispatch.hpp"
#include "format/numbers.hpp"

namespace ferry::cpu {

bool ExpertScaleEncoder::encode(const EncodedRow& to, const void* in, DType type, std::int64_t columns,
                                const Encoding& encoding, float scale) {
  if (encoding.is_two_level()) return kernels_.encode_row(to, in, type, columns, encoding, scale);
  quotients_.resize(static_cast<std::size_t>(columns));
  kernels_.convert_row(quotients_.data(), DType::fp32, in, type, columns, Store::cached);
  for (float& x : quotients_) x = x / scale;
  if (encoding.is_mx())
    return kernels_.encode_row(to, quotients_.data(), DType::fp32, columns, encoding, 1.0f);
  auto* const values = static_cast<std::uint8_t*>(to.values);
  for (std::int64_t c = 0; c < columns; ++c)
    values[c] = fp32_to_e4m3(quotients_[static_cast<std::size_t>(c)]);
  return true;
}

void Dispatch::prepare_parts() {
  const Config& config = context_.config;
  const int me = context_.me();
  const RowRoom room = row_room(config, me);
  const ReceiveBuffers& buffers = call_.memory;
  result_ = {};
  result_.capacity = group_capacity(config, me);
  std::int64_t end = lane_.arrays.parts;
  for (int p = 0; p < parts_.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    void* own = config.own_receive_buffers ? lane_.array<std::byte>(end) : nullptr;
    end = align_up(end + part_bytes_total(parts_.part[p], room), 64);
    result_.parts[i] = {.data = buffers.parts[i] != nullptr ? buffers.parts[i] : own,
                        .row_bytes = received_row_bytes(parts_.part[p]),
                        .leading_dimension = leading_dimension(parts_.part[p], room)};
  }
  result_.data = result_.parts[0].data;
  stored_rows_ = by_plan_ || buffers.rows == 0 ? row_capacity(config, me) : buffers.rows;
}

void Dispatch::prepare_result() {
  const Config& config = context_.config;
  const int me = context_.me();
  const bool rank_major = config.layout == Layout::rank_major;
  const ReceiveBuffers& buffers = call_.memory;
  result_.groups = groups_of(config, me);
  result_.counts =
      buffers.counts != nullptr ? buffers.counts : lane_.array<std::int32_t>(lane_.arrays.counts);
  result_.row_offsets = buffers.row_offsets != nullptr ? buffers.row_offsets
                                                       : lane_.array<std::int32_t>(lane_.arrays.row_offsets);
  result_.total = result_.row_offsets + result_.groups;
  result_.group_expert = lane_.array<std::int32_t>(lane_.arrays.group_expert);
  result_.source = plan_.sources;
  if (call_.weighted) {
    result_.weight = buffers.weight != nullptr ? buffers.weight : lane_.array<float>(lane_.arrays.weight);
  }
  if (rank_major) {
    result_.local_ids =
        buffers.local_ids != nullptr ? buffers.local_ids : lane_.array<std::int32_t>(lane_.arrays.local_ids);
  }
  result_.group_of_row = buffers.group_of_row;
  if (call_.dot_rows != nullptr) {
    result_.dots = buffers.dots != nullptr ? buffers.dots : lane_.array<float>(lane_.arrays.dots);
  }
  result_.host = &lane_.totals;
  result_.call = lane_.link->call();
  result_.plan =
      by_plan_ ? call_.plan : Plan::over(plan_.header, static_cast<std::size_t>(plan_.bytes), result_.call);
  row_store_ = store_for(std::int64_t{plan_.header->total} * parts_.part[0].row_bytes);
}

// Rows of tiles in the memory of the scales. A plan's rows may be fewer than the capacity: the caller has
// memory for those.
std::int64_t Dispatch::row_tile_limit() const {
  const std::int64_t rows = by_plan_ ? header_.total : row_capacity(context_.config, context_.me());
  return row_tiles(rows) + groups_of(context_.config, context_.me());
}

// Zeroes the tiles that hold rows of these groups, before the rows are stored.
void Dispatch::clear_tiles(int begin_group, int end_group) {
  for (int p = 0; p < parts_.count; ++p) {
    if (!parts_.part[p].tiles) continue;
    const ReceivedPart& out = result_.parts[static_cast<std::size_t>(p)];
    for (int group = begin_group; group < end_group; ++group) {
      const auto g = static_cast<std::size_t>(group);
      std::memset(static_cast<std::byte*>(out.data) + tiles_.first()[g] * out.row_bytes, 0,
                  static_cast<std::size_t>(tiles_.used(g) * out.row_bytes));
    }
  }
}

// The tiles of the shared experts come first, so they follow from this rank's tokens alone.
void Dispatch::prepare_shared_tiles(const SharedRows& shared) {
  if (!encoding_.scale_tiles) return;
  std::vector<std::int32_t> offsets, counts;
  const int groups = context_.config.shared_experts;
  for (int group = 0; group < groups; ++group) {
    const std::int64_t offset = std::min(group * shared.stride, shared.capacity);
    offsets.push_back(static_cast<std::int32_t>(offset));
    counts.push_back(
        static_cast<std::int32_t>(std::min({shared.count, shared.stride, shared.capacity - offset})));
  }
  tiles_.compute(context_.config.layout, offsets, counts, group_capacity(context_.config, context_.me()),
                 row_tile_limit());
  clear_tiles(0, groups);
}

void Dispatch::prepare_tiles() {
  if (!encoding_.scale_tiles) return;
  const auto groups = static_cast<std::size_t>(result_.groups);
  tiles_.compute(context_.config.layout, {result_.row_offsets, groups}, {result_.counts, groups},
                 result_.capacity, row_tile_limit());
  auto* const offsets = lane_.array<std::int32_t>(lane_.arrays.tile_offsets);
  std::copy(tiles_.first().begin(), tiles_.first().end(), offsets);
  result_.tile_offsets = offsets;
  clear_tiles(context_.config.shared_experts, result_.groups);
}

// The rows of shared experts are this rank's tokens. Their positions follow from N, so they are written while
// the messages are on their way, in the send phase.
void Dispatch::write_shared_rows() {
  const Config& config = context_.config;
  const SharedRows shared = shared_rows(config, context_.me(), plan_.header->tokens);
  row_store_ = store_for(config.shared_experts * shared.count * parts_.part[0].row_bytes);
  prepare_shared_tiles(shared);
  // A plan's rows may be fewer than the capacity: the caller has memory for those.
  const std::int64_t end = by_plan_ ? header_.total : shared.capacity;
  const auto first = static_cast<std::int32_t>(shared.first),
             last = static_cast<std::int32_t>(shared.first + shared.count);
  for (std::int32_t token = first; token < last && config.shared_experts > 0; ++token) {
    std::int32_t rows[kMaxSharedExperts];
    int count = 0;
    for (std::int32_t expert = 0; expert < config.shared_experts; ++expert) {
      const std::int64_t row = shared.row(expert, token);
      if (row < 0 || row >= end) continue;
      rows[count++] = static_cast<std::int32_t>(row);
      if (!by_plan_) plan_.sources[row] = {context_.me(), token, config.top_k + expert};
    }
    if (config.layout == Layout::expert_indexed) continue;  // stored with the messages
    const TokenData data = caller_token(token);
    if (!input_scales_.empty()) {
      for (int i = 0; i < count; ++i)
        write_encoded(data, rows[i], config.experts + static_cast<int>(rows[i] / shared.stride));
      continue;
    }
    if (!call_.apply_weights) write_parts(data, rows, count);
    for (int i = 0; i < count && call_.apply_weights; ++i) write_weighted(data, rows[i], 1.0f);
  }
}

// The weight of a shared row is 1, and its dot product 0.
void Dispatch::write_shared_metadata(std::int64_t begin, std::int64_t end) {
  end = std::min(end, plan_.header->total);
  for (std::int64_t row = begin; row < end; ++row) {
    if (result_.weight != nullptr) const_cast<float*>(result_.weight)[row] = 1;
    if (result_.dots != nullptr) const_cast<float*>(result_.dots)[row] = 0;
  }
}

// expert_major, expert_padded: writes the token to its row in the segment of each local expert. `rows` [K].
void Dispatch::write_expert_rows(const TokenData& token, const std::int32_t* rows) {
  const std::int64_t total = plan_.header->total;
  std::int32_t valid_rows[kMaxTopK];
  int count = 0;
  auto* weight = const_cast<float*>(result_.weight);
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    if (rows[slot] == -1 ||
        !lane_.valid_entry(rows[slot], total, rows - plan_.received_rows_of_message + slot))
      continue;
    valid_rows[count++] = rows[slot];
    if (weight != nullptr) weight[rows[slot]] = token.weights[slot];
    if (call_.apply_weights || call_.dot_rows != nullptr) {
      write_computed(token, rows[slot], call_.apply_weights ? token.weights[slot] : 1.0f);
    }
  }
  if (!call_.apply_weights) write_parts(token, valid_rows, count);
}

// rank_major: writes the token to its one row, with the local expert and weight of each slot. `rows` [K].
void Dispatch::write_rank_major_row(const TokenData& token, const std::int32_t* rows) {
  const int top_k = context_.config.top_k;
  std::int32_t row = -1;
  for (int slot = 0; slot < top_k && row < 0; ++slot) row = rows[slot];
  if (row == -1 || !lane_.valid_entry(row, plan_.header->total, rows - plan_.received_rows_of_message))
    return;
  auto* ids = const_cast<std::int32_t*>(result_.local_ids) + std::int64_t{row} * top_k;
  float* weight =
      result_.weight != nullptr ? const_cast<float*>(result_.weight) + std::int64_t{row} * top_k : nullptr;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int32_t id = token.ids[slot];
    const bool local = id >= 0 && id < context_.config.experts &&
                       context_.config.placement.location(id).rank == context_.me();
    ids[slot] = local ? context_.config.placement.location(id).local : -1;
    if (weight != nullptr) weight[slot] = local ? token.weights[slot] : 0.0f;
  }
  write_parts(token, &row, 1);
}

// The expert of a row of a routed expert. By a damaged plan it may be a row of an empty slot, for which any
// expert will do.
int Dispatch::expert_of_row(std::int32_t row) const {
  const std::int32_t* const end = result_.row_offsets + result_.groups;
  const auto group = std::upper_bound(result_.row_offsets, end, row) - result_.row_offsets - 1;
  return std::max(result_.group_expert[group], 0);
}

// Encodes a row with the scale of its expert.
void Dispatch::write_encoded(const TokenData& token, std::int32_t row, int expert) {
  scale_row_.resize(static_cast<std::size_t>(parts_.part[1].wire_bytes));
  const EncodedRow to{static_cast<std::byte*>(result_.data) + row * parts_.part[0].row_bytes,
                      scale_row_.data(), nullptr};
  const float scale = input_scales_[static_cast<std::size_t>(expert)];
  if (!expert_encoder_.encode(to, token.parts[0], call_.tokens.type, context_.config.hidden, encoding_,
                              scale))
    lane_.diagnostics.record({.rank = context_.me(), .expert = expert, .scale = scale});
  if (parts_.count > 1) store_part(1, row, scale_row_.data());
}

// The row of a part that holds a received row, for element_offset(); -1 if no tile holds it.
std::int64_t Dispatch::stored_row(int part, std::int64_t row) const {
  const PartLayout& layout = parts_.part[part];
  if (layout.tiles) return tiles_.tile_row(row);
  const bool by_group = context_.config.layout == Layout::expert_padded;
  return column_row(layout, row, by_group ? result_.capacity : 0,
                    result_.parts[static_cast<std::size_t>(part)].leading_dimension);
}

// Stores one row of a part by elements.
void Dispatch::store_part(int part, std::int32_t row, const void* in) {
  const ReceivedPart& out = result_.parts[static_cast<std::size_t>(part)];
  const std::int64_t place = stored_row(part, row);
  if (place >= 0) store_part_row(parts_.part[part], out.data, place, out.leading_dimension, in);
}

void Dispatch::write_parts(const TokenData& token, const std::int32_t* rows, int count) {
  if (!input_scales_.empty()) {
    for (int i = 0; i < count; ++i) write_encoded(token, rows[i], expert_of_row(rows[i]));
    return;
  }
  for (int p = 0; p < parts_.count; ++p) {
    const PartLayout& part = parts_.part[p];
    const ReceivedPart& out = result_.parts[static_cast<std::size_t>(p)];
    if (part.columns || part.tiles) {
      for (int i = 0; i < count; ++i) store_part(p, rows[i], token.parts[p]);
      continue;
    }
    void* outs[std::max(kMaxTopK, kMaxSharedExperts)];
    for (int i = 0; i < count; ++i) {
      outs[i] = static_cast<std::byte*>(out.data) + element_offset(part, rows[i], 0, out.leading_dimension);
    }
    context_.kernels.copy_to_many(outs, count, token.parts[p], part.row_bytes, row_store_);
  }
}

void Dispatch::write_weighted(const TokenData& token, std::int32_t row, float weight) const {
  context_.kernels.apply_weight(static_cast<std::byte*>(result_.data) + row * parts_.part[0].row_bytes,
                                token.parts[0], call_.tokens.type, weight, context_.config.hidden,
                                row_store_);
}

// Backward of combine: writes the row times its weight, and its dot product with the row's expert output.
void Dispatch::write_computed(const TokenData& token, std::int32_t row, float weight) {
  const DType type = call_.tokens.type;
  const std::int64_t hidden = context_.config.hidden;
  if (call_.apply_weights) write_weighted(token, row, weight);
  if (call_.dot_rows != nullptr) {
    const DType dot_type = context_.config.combine_type;
    const auto* output = static_cast<const std::byte*>(call_.dot_rows) + row * hidden * bytes_of(dot_type);
    const_cast<float*>(result_.dots)[row] =
        context_.kernels.dot(token.parts[0], type, output, dot_type, hidden);
  }
}

void Dispatch::write_groups() {
  const Config& config = context_.config;
  const int me = context_.me();
  auto* counts = const_cast<std::int32_t*>(result_.counts);
  auto* offsets = const_cast<std::int32_t*>(result_.row_offsets);
  const int shared = config.shared_experts;
  const bool padded = config.layout == Layout::expert_padded;
  for (int group = 0; group < result_.groups; ++group) {
    counts[group] = static_cast<std::int32_t>(row_offsets_.count(me, group));
    if (call_.memory.count_sums != nullptr) call_.memory.count_sums[group] += counts[group];
    offsets[group] = static_cast<std::int32_t>(row_offsets_.offset(me, group));
  }
  offsets[result_.groups] = static_cast<std::int32_t>(row_offsets_.total(me));
  prepare_tiles();
  prepare_index();
  for (int group = 0; group < result_.groups; ++group) {
    const std::int64_t begin = offsets[group], filled = begin + counts[group];
    // expert_padded: rows up to the aligned count are padding; rows beyond it are not written.
    const std::int64_t end =
        padded ? begin + std::min(align_up(counts[group], config.alignment), result_.capacity)
               : offsets[group + 1];
    if (result_.group_of_row != nullptr) {
      std::fill(call_.memory.group_of_row + std::min(begin, stored_rows_),
                call_.memory.group_of_row + std::min(filled, stored_rows_), group);
    }
    if (group < shared) write_shared_metadata(begin, filled);
    write_padding(filled, end);
  }
}

// By a damaged plan the groups may end past the total, and with it past the caller's memory.
void Dispatch::write_padding(std::int64_t begin, std::int64_t end) {
  end = std::min(end, plan_.header->total);
  for (std::int64_t row = begin; row < end; ++row) {
    plan_.sources[row] = {};
    if (row >= stored_rows_) continue;
    if (result_.weight != nullptr) const_cast<float*>(result_.weight)[row] = 0;
    if (result_.dots != nullptr) const_cast<float*>(result_.dots)[row] = 0;
    if (result_.group_of_row != nullptr) call_.memory.group_of_row[row] = -1;
    if (result_.index != nullptr) {
      const_cast<std::int32_t*>(result_.index)[row] = static_cast<std::int32_t>(result_.row_capacity);
      const_cast<std::int32_t*>(result_.slot)[row] = -1;
    }
    if (!context_.config.zero_padding) continue;
    for (int p = 0; p < parts_.count; ++p) {
      if (parts_.part[p].tiles) continue;  // zeroed with their tiles
      const ReceivedPart& out = result_.parts[static_cast<std::size_t>(p)];
      zero_part_row(parts_.part[p], out.data, stored_row(p, row), out.leading_dimension);
    }
  }
}

}  // namespace ferry::cpu
