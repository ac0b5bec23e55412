// Exchange::all_gather_v and reduce_scatter_v: the checks of their arguments.
#include "exchange/gather.hpp"

#include <cerrno>

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

std::int64_t sum_of_counts(std::span<const GatherTerms> ranks) {
  std::int64_t sum = 0;
  for (const GatherTerms& rank : ranks) sum += rank.count;
  return sum;
}

// Every rank checks the terms of all ranks.
void check_terms(const GatherCall& call, std::span<const GatherTerms> ranks) {
  const auto count = static_cast<int>(ranks.size());
  for (int rank = 0; rank < count; ++rank) {
    const GatherTerms& terms = ranks[static_cast<std::size_t>(rank)];
    check_told(call.operation, "count", terms.count, kMostRowsToGather, rank);
    check_told(call.operation, "rows held", terms.held, kMostRowsToGather * count, rank);
  }
  for (int rank = 0; rank < count; ++rank) {
    const auto group = SubGroup::of(rank, call.sub_group, count);
    const GatherTerms& terms = ranks[static_cast<std::size_t>(rank)];
    const std::int64_t sum = sum_of_counts(group.terms(ranks)),
                       own = sum_of_counts(
                           ranks.subspan(group.first, static_cast<std::size_t>(rank) - group.first));
    const bool fits = call.adds() && terms.exact != 0 ? terms.held == sum : terms.held >= sum;
    if (!fits) raise_rows_held(call.operation, rank, terms.held, sum);
    if (terms.place >= 0 && terms.count > 0 && terms.place != own)
      raise_misplaced(call.operation, rank, terms.place, own);
  }
}

}  // namespace

void check_told(Operation operation, const char* name, std::int64_t value, std::int64_t most, int rank) {
  if (value >= 0 && value <= most) return;
  throw SystemError(str(to_string(operation), ": ", name, " = ", value, " of rank ", rank,
                        " is not in the range 0 to ", most, ": what the ranks tell each other is damaged"),
                    EIO);
}

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

GatherRounds::GatherRounds(const GatherCall& call, int me, std::vector<GatherTerms> terms)
    : call_(call),
      group_(SubGroup::of(me, call.sub_group, static_cast<int>(terms.size()))),
      terms_(std::move(terms)) {
  check_terms(call, terms_);
  own_bytes_ = terms_[static_cast<std::size_t>(me)].count * call.row_bytes;
  const auto* data = static_cast<const std::byte*>(call.rows);
  for (std::size_t peer = 0; peer < terms_.size(); ++peer) {
    const std::int64_t theirs = terms_[peer].count * call.row_bytes;
    const bool receives = group_.holds(static_cast<int>(peer));
    blocks_.push_back({data, !receives ? 0 : call.adds() ? theirs : own_bytes_});
    if (call.adds()) data += blocks_.back().bytes;
    largest_ = std::max(largest_, theirs);
  }
}

std::int64_t GatherRounds::gathered() const {
  return sum_of_counts(group_.terms(terms_));
}

// Checks a call and carries it out. Errors name the arguments as the interface does.
std::int64_t Exchange::State::gather(GatherCall call) {
  idle_lane(call.options.lane);
  check_or_refuse(call.operation, call.options, [&] {
    const int me = rank.index();
    const char *const name = to_string(call.operation), *const out = call.adds() ? "sums" : "gathered";
    const std::int64_t input = call.adds() ? call.held : call.count,
                       output = call.adds() ? call.count : call.held;
    if (call.adds() && call.type != DType::bf16 && call.type != DType::fp16 && call.type != DType::fp32) {
      throw UsageError(str(name, ": type ", static_cast<int>(call.type), " on rank ", me,
                           " does not exist, expected bf16, fp16 or fp32"));
    }
    check_row_count(name, "count", call.count, kMostRowsToGather, me);
    check_row_count(name, call.adds() ? "total" : "capacity", call.held, kMostRowsToGather * rank.size(), me);
    if (call.adds()) call.row_bytes = config.hidden * bytes_of(call.type);
    if (call.row_bytes < 1 || call.row_bytes > kMostRowsToGather) {
      throw UsageError(str(name, ": row_bytes = ", call.row_bytes, " on rank ", me,
                           ", must be in the range 1 to ", kMostRowsToGather));
    }
    check_row_memory(name, "rows", call.rows, input, me);
    check_row_memory(name, out, call.out, output, me);
    if (call.device_count != nullptr && plan_in() == PlanIn::host) {
      throw UnsupportedError(
          str(name, ": this backend cannot read a count from device memory: pass the count itself"));
    }
    call.place = call.adds() ? row_in(call.rows, input, call.out, output, call.row_bytes)
                             : row_in(call.out, output, call.rows, input, call.row_bytes);
    CallArrays arrays;
    if (call.place < 0) arrays.read("rows", call.rows, input, call.row_bytes);
    arrays.read("device_count", call.device_count, 1, 4);
    arrays.write(out, call.out, output, call.row_bytes);
    arrays.require_apart(str(name, ": ").c_str(), me);
  });
  return backend->run(call).gathered;
}

std::int64_t Exchange::all_gather_v(const AllGather& arguments, const CallOptions& call) {
  const ProfilerRange range("all_gather_v");
  return state_->gather({.options = call,
                         .rows = arguments.rows,
                         .out = arguments.gathered,
                         .count = arguments.count,
                         .held = arguments.capacity,
                         .row_bytes = arguments.row_bytes,
                         .device_count = arguments.device_count});
}

void Exchange::reduce_scatter_v(const ReduceScatter& arguments, const CallOptions& call) {
  const ProfilerRange range("reduce_scatter_v");
  state_->gather({.operation = Operation::reduce_scatter_v,
                  .options = call,
                  .rows = arguments.rows,
                  .out = arguments.sums,
                  .count = arguments.count,
                  .held = arguments.total,
                  .type = arguments.type,
                  .device_count = arguments.device_count});
}

}  // namespace ferry
