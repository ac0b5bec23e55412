// Exchange::all_gather_v and reduce_scatter_v: the checks of their arguments.
#include "exchange/gather.hpp"

#include <algorithm>
#include <cerrno>
#include <limits>

#include "base/log.hpp"
#include "exchange/configuration.hpp"
#include "exchange/exchange_state.hpp"
#include "exchange/overlap.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kMostRowsToGather = std::numeric_limits<std::int32_t>::max();

void check_row_count(const char* operation, const char* name, std::int64_t rows, std::int64_t most,
                     int rank) {
  if (rows >= 0 && rows <= most) return;
  throw UsageError(
      str(operation, ": ", name, " = ", rows, " on rank ", rank, ", must be in the range 0 to ", most));
}

void check_row_memory(const char* operation, const char* name, const void* memory, std::int64_t rows,
                      int rank) {
  if (memory != nullptr || rows == 0) return;
  throw UsageError(str(operation, ": ", name, " is null for the ", counted(rows, "row"), " of rank ", rank));
}

void check_device_count(const char* operation, const std::int32_t* device_count, PlanIn memory) {
  if (device_count == nullptr || memory == PlanIn::device) return;
  throw UnsupportedError(
      str(operation, ": this backend cannot read a count from device memory: pass the count itself"));
}

void check_terms(Operation operation, std::span<const GatherTerms> ranks) {
  const auto most = kMostRowsToGather * static_cast<std::int64_t>(ranks.size());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const int r = static_cast<int>(rank);
    check_told(operation, "count", ranks[rank].count, kMostRowsToGather, r);
    check_told(operation, "rows held", ranks[rank].held, most, r);
  }
}

}  // namespace

void check_told(Operation operation, const char* name, std::int64_t value, std::int64_t most, int rank) {
  if (value >= 0 && value <= most) return;
  throw SystemError(str(to_string(operation), ": ", name, " = ", value, " of rank ", rank,
                        " is not in the range 0 to ", most, ": what the ranks tell each other is damaged"),
                    EIO);
}

std::int64_t sum_of_counts(std::span<const GatherTerms> ranks) {
  std::int64_t sum = 0;
  for (const GatherTerms& rank : ranks) sum += rank.count;
  return sum;
}

std::int64_t largest_count(std::span<const GatherTerms> ranks) {
  std::int64_t largest = 0;
  for (const GatherTerms& rank : ranks) largest = std::max(largest, rank.count);
  return largest;
}

namespace {

// Calls check(rank, sum of the counts of its sub-group), then checks the place of its rows.
template <class Check>
void check_each(Operation operation, std::span<const GatherTerms> ranks, int sub_group, Check check) {
  check_terms(operation, ranks);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const int index = static_cast<int>(rank);
    const auto of = SubGroup::of(index, sub_group, static_cast<int>(ranks.size()));
    check(index, sum_of_counts(of.terms(ranks)));
    const std::int64_t own = sum_of_counts(ranks.subspan(of.first, rank - of.first));
    if (ranks[rank].place >= 0 && ranks[rank].count > 0 && ranks[rank].place != own)
      raise_misplaced(operation, index, ranks[rank].place, own);
  }
}

}  // namespace

void raise_rows_held(Operation operation, int rank, std::int64_t held, std::int64_t sum) {
  if (operation == Operation::all_gather_v) {
    throw UsageError(str("all_gather_v: gathered has room for ", counted(held, "row"), " on rank ", rank,
                         ", but all ranks together have ", sum,
                         ": pass memory for as many (Exchange::metadata returns the sum)"));
  }
  throw UsageError(str("reduce_scatter_v: rank ", rank, " passes ", counted(held, "row"),
                       ", but the ranks' counts add up to ", sum,
                       ": every rank passes one row for each row of all ranks"));
}

void raise_misplaced(Operation operation, int rank, std::int64_t place, std::int64_t own) {
  const bool gathers = operation == Operation::all_gather_v;
  throw UsageError(str(to_string(operation), ": ", gathers ? "rows" : "sums", " of rank ", rank,
                       " lie at row ", place, " of its ", gathers ? "gathered" : "rows",
                       gathers ? ", where rows of other ranks are written" : ", which the call reads",
                       ": pass other memory, or row ", own,
                       " of it, the sum of the counts of the ranks before"));
}

void check_all_gather(std::span<const GatherTerms> ranks, int sub_group) {
  check_each(Operation::all_gather_v, ranks, sub_group, [&](int rank, std::int64_t sum) {
    const std::int64_t held = ranks[static_cast<std::size_t>(rank)].held;
    if (held < sum) raise_rows_held(Operation::all_gather_v, rank, held, sum);
  });
}

void check_reduce_scatter(std::span<const GatherTerms> ranks, int sub_group) {
  check_each(Operation::reduce_scatter_v, ranks, sub_group, [&](int rank, std::int64_t sum) {
    const std::int64_t held = ranks[static_cast<std::size_t>(rank)].held;
    if (held != sum) raise_rows_held(Operation::reduce_scatter_v, rank, held, sum);
  });
}

std::int64_t Exchange::all_gather_v(const void* rows, std::int64_t count, std::int64_t row_bytes,
                                    void* gathered, std::int64_t capacity, int lane, Stream stream,
                                    const std::int32_t* device_count) {
  const ProfilerRange range("all_gather_v");
  state_->idle_lane(lane);
  std::int64_t place = -1;
  state_->check_or_refuse(Operation::all_gather_v, lane, stream, [&] {
    const int me = state_->rank.index();
    check_row_count("all_gather_v", "count", count, kMostRowsToGather, me);
    check_row_count("all_gather_v", "capacity", capacity, kMostRowsToGather * state_->rank.size(), me);
    if (row_bytes < 1 || row_bytes > kMostRowsToGather) {
      throw UsageError(str("all_gather_v: row_bytes = ", row_bytes, " on rank ", me,
                           ", must be in the range 1 to ", kMostRowsToGather));
    }
    check_row_memory("all_gather_v", "rows", rows, count, me);
    check_row_memory("all_gather_v", "gathered", gathered, capacity, me);
    check_device_count("all_gather_v", device_count, state_->plan_in());
    place = row_in(gathered, capacity, rows, count, row_bytes);
    CallArrays arrays;
    if (place < 0) arrays.read("rows", rows, count, row_bytes);
    arrays.read("device_count", device_count, 1, 4);
    arrays.write("gathered", gathered, capacity, row_bytes);
    arrays.require_apart("all_gather_v: ", me);
  });
  return state_->backend->gather_operations().all_gather_v({.lane = lane,
                                                            .rows = rows,
                                                            .count = count,
                                                            .row_bytes = row_bytes,
                                                            .gathered = gathered,
                                                            .capacity = capacity,
                                                            .device_count = device_count,
                                                            .place = place},
                                                           stream);
}

void Exchange::reduce_scatter_v(const void* rows, std::int64_t total, DType type, void* sums,
                                std::int64_t count, int lane, Stream stream,
                                const std::int32_t* device_count) {
  const ProfilerRange range("reduce_scatter_v");
  state_->idle_lane(lane);
  std::int64_t place = -1;
  state_->check_or_refuse(Operation::reduce_scatter_v, lane, stream, [&] {
    const int me = state_->rank.index();
    if (type != DType::bf16 && type != DType::fp16 && type != DType::fp32) {
      throw UsageError(str("reduce_scatter_v: type ", static_cast<int>(type), " on rank ", me,
                           " does not exist, expected bf16, fp16 or fp32"));
    }
    check_row_count("reduce_scatter_v", "count", count, kMostRowsToGather, me);
    check_row_count("reduce_scatter_v", "total", total, kMostRowsToGather * state_->rank.size(), me);
    check_row_memory("reduce_scatter_v", "rows", rows, total, me);
    check_row_memory("reduce_scatter_v", "sums", sums, count, me);
    check_device_count("reduce_scatter_v", device_count, state_->plan_in());
    const std::int64_t row_bytes = state_->config.hidden * bytes_of(type);
    place = row_in(rows, total, sums, count, row_bytes);
    CallArrays arrays;
    if (place < 0) arrays.read("rows", rows, total, row_bytes);
    arrays.read("device_count", device_count, 1, 4);
    arrays.write("sums", sums, count, row_bytes);
    arrays.require_apart("reduce_scatter_v: ", me);
  });
  state_->backend->gather_operations().reduce_scatter_v({.lane = lane,
                                                         .rows = rows,
                                                         .total = total,
                                                         .type = type,
                                                         .sums = sums,
                                                         .count = count,
                                                         .device_count = device_count,
                                                         .place = place},
                                                        stream);
}

}  // namespace ferry
