#include "ferry/plan.hpp"

#include <cstring>
#include <limits>
#include <new>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"
#include "layout/plan_layout.hpp"
#include "plan/plan_checks.hpp"

namespace ferry {

namespace {

void check_number(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw UsageError(
      str("plan: damaged: its header says ", name, " = ", value, ", must be ", least, " to ", most));
}

// The bounds of a configuration: within them the size of the tables does not overflow.
void check_shape(const PlanShape& shape) {
  check_number("ranks", shape.ranks, 1, 1 << 20);
  check_number("experts", shape.experts, 1, 1 << 20);
  check_number("top_k", shape.top_k, 1, kMaxTopK);
  check_number("max_tokens", shape.max_tokens, 1, 1 << 24);
  check_number("shared_experts", shape.shared_experts, 0, kMaxSharedExperts);
  check_number("to_every_rank", shape.to_every_rank, 0, 1);
  check_number("capacity", shape.capacity, 0, std::numeric_limits<std::int32_t>::max());
}

}  // namespace

bool is_intact(const PlanHeader& header) {
  return is_complete(header) && header.check == header_check(header);
}

void check_plan_address(const void* address) {
  constexpr std::size_t kAlign = 16;
  if (reinterpret_cast<std::uintptr_t>(address) % kAlign == 0) return;
  throw UsageError(str("plan: the address of the storage, ", address, ", is not a multiple of ", kAlign));
}

void check_plan_call(const Plan& plan, const PlanHeader& header) {
  if (plan.call() == 0 || plan.call() == header.call) return;
  throw UsageError(str("plan: it is of call ", plan.call(), ", and call ", header.call,
                       " has overwritten its storage: copy a plan that is used after the next dispatch, or "
                       "pass memory for it"));
}

const PlanHeader& checked_header(const Plan& plan) {
  const void* const storage = plan.storage();
  const std::size_t bytes = plan.bytes();
  if (storage == nullptr) throw UsageError("plan: empty: it has no storage");
  check_plan_address(storage);
  if (bytes < sizeof(PlanHeader)) {
    throw UsageError(
        str("plan: storage of ", counted(bytes, "byte"), ", a plan takes at least ", sizeof(PlanHeader)));
  }
  const PlanHeader& header = *static_cast<const PlanHeader*>(storage);
  if (!is_intact(header)) {
    throw UsageError("plan: unfinished or damaged: the checksum of its header is wrong");
  }
  check_plan_call(plan, header);
  check_shape(header.shape);
  check_number("rank", header.rank, 0, header.shape.ranks - 1);
  check_number("tokens", header.tokens, 0, header.shape.max_tokens);
  check_number("total", header.total, 0, header.shape.capacity);
  const auto needed = static_cast<std::size_t>(view_plan(nullptr, header.shape).bytes);
  if (bytes < needed)
    throw UsageError(str("plan: storage of ", counted(bytes, "byte"), ", this plan takes ", needed));
  return header;
}

namespace {

PlanView view_of(const Plan& plan) {
  return view_plan(plan.storage(), checked_header(plan).shape);
}

// Index of a route in the plan's tables.
std::int64_t route_index(const PlanHeader& header, int token, int slot) {
  if (token < 0 || token >= header.tokens || slot < 0 || slot >= header.shape.top_k) {
    throw UsageError(str("plan: token ", token, ", slot ", slot, " does not exist: the plan has ",
                         counted(header.tokens, "token"), " with ", counted(header.shape.top_k, "slot"),
                         " each"));
  }
  return std::int64_t{token} * header.shape.top_k + slot;
}

}  // namespace

Plan Plan::copy() const {
  if (empty()) return {};
  constexpr std::align_val_t kAlign{64};
  std::shared_ptr<void> owner(::operator new(bytes_, kAlign), [](void* p) { ::operator delete(p, kAlign); });
  std::memcpy(owner.get(), storage_, bytes_);
  void* storage = owner.get();
  return {storage, bytes_, call_, std::move(owner)};
}

int Plan::rank() const {
  return checked_header(*this).rank;
}
int Plan::ranks() const {
  return checked_header(*this).shape.ranks;
}
int Plan::tokens() const {
  return checked_header(*this).tokens;
}
std::uint64_t Plan::placement_version() const {
  return checked_header(*this).placement_version;
}
std::int64_t Plan::total() const {
  return checked_header(*this).total;
}
std::int64_t Plan::dropped() const {
  return checked_header(*this).dropped;
}

std::span<const std::int32_t> Plan::counts() const {
  const PlanShape& shape = checked_header(*this).shape;
  return {view_of(*this).counts,
          static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.experts)};
}

std::span<const std::int32_t> Plan::tokens_between() const {
  const auto ranks = static_cast<std::size_t>(checked_header(*this).shape.ranks);
  return {view_of(*this).tokens_between, ranks * ranks};
}

std::span<const Source> Plan::sources() const {
  return {view_of(*this).sources, static_cast<std::size_t>(total())};
}

int Plan::destination(int token, int slot) const {
  const PlanHeader& header = checked_header(*this);
  return view_plan(storage_, header.shape).route_rank[route_index(header, token, slot)];
}

std::int64_t Plan::row(int token, int slot) const {
  const PlanHeader& header = checked_header(*this);
  return view_plan(storage_, header.shape).route_row[route_index(header, token, slot)];
}

}  // namespace ferry
