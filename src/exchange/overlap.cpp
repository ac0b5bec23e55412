#include "exchange/overlap.hpp"

#include <algorithm>
#include <string>

#include "base/text.hpp"
#include "exchange/checks.hpp"
#include "format/encoding.hpp"
#include "layout/plan_layout.hpp"
#include "plan/shapes.hpp"

namespace ferry {
namespace {

bool extents_meet(const CallArray& a, const CallArray& b) {
  return a.begin < b.end && b.begin < a.end;
}

std::int64_t floor_of(std::int64_t value, std::int64_t divisor) {
  return value / divisor - (value % divisor < 0 ? 1 : 0);
}

// Whether the bytes [begin, begin + bytes), counted from the first row of `array`, share one with a row.
bool meets_row(const CallArray& array, std::int64_t begin, std::int64_t bytes) {
  const std::int64_t before = floor_of(begin, array.stride);  // the row at or before `begin`
  const bool in_it = before >= 0 && before < array.rows && begin - before * array.stride < array.row_bytes;
  const std::int64_t next = std::max<std::int64_t>(before + 1, 0);
  return in_it || (next < array.rows && next * array.stride < begin + bytes);
}

// Whether two arrays whose extents meet share a byte: rows of one may lie between rows of the other.
bool rows_meet(const CallArray& a, const CallArray& b) {
  if (a.rows == 1 && b.rows == 1) return true;
  const CallArray &more = a.rows >= b.rows ? a : b, &fewer = a.rows >= b.rows ? b : a;
  const auto begin = static_cast<std::int64_t>(fewer.begin - more.begin);
  if (a.stride == b.stride) {
    // Row j of `fewer` lies in `more` as row 0 does, `shift` rows on; behind row `shift + j` or in it.
    const std::int64_t shift = floor_of(begin, more.stride), within = begin - shift * more.stride;
    const auto pair_exists = [&](std::int64_t rows_on) {
      return rows_on < more.rows && rows_on + fewer.rows > 0;
    };
    return (within < more.row_bytes && pair_exists(shift)) ||
           (within + fewer.row_bytes > more.stride && pair_exists(shift + 1));
  }
  for (std::int64_t row = 0; row < fewer.rows; ++row)
    if (meets_row(more, begin + row * fewer.stride, fewer.row_bytes)) return true;
  return false;
}

std::string place_of(const CallArray& array) {
  return str(array.name, " (", counted(array.end - array.begin, "byte"), " at ", array.address, ")");
}

[[noreturn]] void raise_overlap(const char* call, int rank, const CallArray& written,
                                const CallArray& other) {
  throw UsageError(str(call, place_of(written), ", which the call writes, overlaps ", place_of(other),
                       other.written ? ", which it writes too" : ", which it reads",
                       rank >= 0 ? str(", on rank ", rank) : "", ": ",
                       written.of_lane || other.of_lane
                           ? "copy it out of the lane's memory first, or receive in memory of your own"
                           : "pass memory that they do not share"));
}

}  // namespace

void CallArrays::require_apart(const char* call, int rank) const {
  for (int later = 1; later < count_; ++later) {
    for (int earlier = 0; earlier < later; ++earlier) {
      const CallArray &a = arrays_[earlier], &b = arrays_[later];
      if (!extents_meet(a, b)) continue;  // first, because it decides nearly every pair
      // The lane's own arrays lie apart.
      if ((!a.written && !b.written) || (a.of_lane && b.of_lane) || !rows_meet(a, b)) continue;
      raise_overlap(call, rank, a.written ? a : b, a.written ? b : a);
    }
  }
}

namespace {

void add_plan(const Plan& plan, CallArrays& arrays) {
  arrays.read("plan", plan.storage(), 1, static_cast<std::int64_t>(plan.bytes()));
}

void add_tokens(const Config& config, const DispatchCall& call, CallArrays& arrays) {
  const std::int64_t tokens = call.tokens.count;
  const PartList parts = parts_of(call.format, config.hidden);
  const bool quantised = call.format.quantises();
  for (int p = 0; p < (quantised ? 1 : parts.count); ++p) {
    const auto i = static_cast<std::size_t>(p);
    arrays.read(call.backward ? "d_result" : kTokenParts[i], call.tokens.parts[i], tokens,
                quantised ? config.hidden * bytes_of(call.tokens.type) : parts.part[p].row_bytes,
                call.tokens.strides[i]);
  }
  if (call.plan.empty()) arrays.read("ids", call.ids.data, tokens, config.top_k * bytes_of(call.ids.type));
  arrays.read(call.backward ? "topk_weights" : "weights", call.weights, tokens,
              4 * std::int64_t{config.top_k});
  arrays.read("device_count", call.tokens.device_count, 1, 4);
  arrays.read("global_scale", call.global_scale, 1, 4);
  arrays.read("input_scales", call.input_scales.data(), static_cast<std::int64_t>(call.input_scales.size()),
              4);
}

// Received rows. Scales in columns: each column is a run of elements, one for a row.
// `held`: the rows that are here; `room`: those of the capacity.
void write_part(const char* name, const void* data, const PartLayout& part, const RowRoom& held,
                const RowRoom& room, CallArrays& arrays) {
  if (held.rows < 0) return arrays.write(name, data, kUnknownRows, 1);
  // The groups of expert_padded fill no more than their capacity.
  if (part.tiles && room.group_rows > 0)
    return arrays.write(name, data, room.groups * row_tiles(room.group_rows), row_tile_bytes(part));
  if (!part.columns) return arrays.write(name, data, 1, part_bytes_total(part, held));
  const bool by_group = room.group_rows > 0;
  arrays.write(name, data, elements_of(part) * (by_group ? room.groups : 1),
               (by_group ? room.group_rows : held.rows) * part.element_bytes,
               leading_dimension(part, room) * part.element_bytes);
}

}  // namespace

CallArrays arrays_of(const Config& config, int rank, const DispatchCall& call, const OwnArrays& own,
                     const KnownRows& known) {
  CallArrays arrays;
  add_tokens(config, call, arrays);
  const bool by_plan = !call.plan.empty(), rank_major = config.layout == Layout::rank_major;
  const RowRoom room = row_room(config, rank);
  const std::int64_t capacity = row_capacity(config, rank);
  const bool indexed = config.layout == Layout::expert_indexed;
  // Rows that the caller's memory holds: by a plan those of the plan, else as many as the caller says.
  std::int64_t rows = call.memory.rows > 0 ? call.memory.rows : capacity;
  if (by_plan) rows = known.total;
  if (by_plan) add_plan(call.plan, arrays);
  arrays.read(call.backward ? "outputs" : "dot_rows", call.dot_rows,
              call.output_rows > 0 ? call.output_rows : known.total,
              config.hidden * bytes_of(config.combine_type));
  arrays.write("d_weights", call.d_weights, call.tokens.count, 4 * std::int64_t{config.top_k});

  const ReceiveBuffers& memory = call.memory;
  // Each group of a plan may be empty.
  const RowRoom held{.rows = !indexed  ? rows
                             : by_plan ? kUnknownRows
                                       : room.rows,
                     .groups = by_plan ? 0 : room.groups};
  const PartList parts = received_parts(config, call);
  bool own_parts = false;
  for (int p = 0; p < parts.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    own_parts = own_parts || memory.parts[i] == nullptr;
    write_part(kReceivedParts[i], memory.parts[i], parts.part[p], held, room, arrays);
  }
  if (own_parts)
    arrays.write_own("the lane's received rows", own.parts.data(),
                     static_cast<std::int64_t>(own.parts.size()));
  // `given`: the caller's array of `count` elements of `bytes` bytes; null: the lane's, of `own_count`.
  const auto write = [&](const char* name, const void* given, std::int64_t count, const char* own_name,
                         const void* of_lane, std::int64_t own_count, std::int64_t bytes) {
    arrays.write(name, given, 1, count * bytes);
    if (given == nullptr) arrays.write_own(own_name, of_lane, own_count * bytes);
  };
  const std::int64_t groups = room.groups, slots = rank_major ? config.top_k : 1;
  write("memory.weight", memory.weight, rows * slots, "the lane's weight", own.weight, capacity * slots, 4);
  if (rank_major) {
    write("memory.local_ids", memory.local_ids, rows * slots, "the lane's local_ids", own.local_ids,
          capacity * slots, 4);
  }
  if (call.dot_rows != nullptr)
    write("memory.dots", memory.dots, rows, "the lane's dots", own.dots, capacity, 4);
  write("memory.counts", memory.counts, groups, "the lane's counts", own.counts, groups, 4);
  write("memory.row_offsets", memory.row_offsets, groups + 1, "the lane's row_offsets", own.row_offsets,
        groups + 1, 4);
  const auto plan_bytes = static_cast<std::int64_t>(own.plan.size());
  if (!by_plan)
    write("memory.plan", memory.plan, plan_bytes, "the lane's plan", own.plan.data(), plan_bytes, 1);
  arrays.write("memory.group_of_row", memory.group_of_row, rows, 4);
  arrays.write("memory.count_sums", memory.count_sums, groups, 4);
  if (encoding_of(call.format).scale_tiles)
    arrays.write_own("the lane's tile_offsets", own.tile_offsets, 4 * (groups + 1));
  arrays.write_own("the lane's index", own.index.data(), static_cast<std::int64_t>(own.index.size()));
  arrays.write_own("the lane's source", own.source, capacity * static_cast<std::int64_t>(sizeof(Source)));
  arrays.write_own("the lane's HostTotals", own.totals, sizeof(HostTotals));
  return arrays;
}

void add_result(const char* name, const Result& result, std::int64_t rows, std::int64_t row_bytes,
                const Epilogue& epilogue, CallArrays& arrays) {
  arrays.write(name, result.data, rows, row_bytes, result.stride);
  const auto apart = [&](std::int64_t stride) { return stride != 0 ? stride : row_bytes; };
  if (epilogue.residual == result.data && apart(epilogue.stride) == apart(result.stride)) return;
  arrays.read("residual", epilogue.residual, rows, row_bytes, epilogue.stride);
}

CallArrays arrays_of(const Config& config, const CombineCall& call, const KnownRows& known) {
  const std::int64_t hidden = config.hidden, slots = 4 * std::int64_t{config.top_k};
  CallArrays arrays;
  arrays.read("outputs", call.outputs.data, call.outputs.rows > 0 ? call.outputs.rows : known.total,
              hidden * bytes_of(call.outputs.type), call.outputs.stride);
  add_plan(call.plan, arrays);
  arrays.read("row_weights", call.row_weights, known.total, 4);
  arrays.read("topk_weights", call.topk_weights, known.tokens, slots);
  arrays.read("row_values", call.row_values, known.total, 4);
  const std::int64_t results = call.reduction == Reduction::unreduced ? config.top_k : 1,
                     result_row = hidden * bytes_of(call.result.type);
  add_result("result", call.result, known.tokens * results, result_row, call.epilogue, arrays);
  arrays.write("route_values", call.route_values, known.tokens, slots);
  arrays.write("shared_outputs", call.shared_outputs, config.shared_experts * known.tokens, result_row);
  return arrays;
}

CallArrays arrays_of(const Config& config, const RouteValuesCall& call, const KnownRows& known) {
  const std::int64_t slots = 4 * std::int64_t{config.top_k};
  CallArrays arrays;
  if (call.returns()) {
    arrays.read("row_values", call.from, known.total, 4);
    arrays.write("route_values", call.to, known.tokens, slots);
  } else {
    arrays.read("values", call.from, known.tokens, slots);
    arrays.write("row_values", call.to, known.total, 4);
  }
  add_plan(call.plan, arrays);
  return arrays;
}

std::int64_t row_in(const void* whole, std::int64_t rows, const void* part, std::int64_t part_rows,
                    std::int64_t row_bytes) {
  const auto offset = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(part) -
                                                reinterpret_cast<std::uintptr_t>(whole));
  if (whole == nullptr || part == nullptr || part_rows == 0 || offset < 0 || offset % row_bytes != 0)
    return -1;
  return offset / row_bytes <= rows - part_rows ? offset / row_bytes : -1;
}

}  // namespace ferry
