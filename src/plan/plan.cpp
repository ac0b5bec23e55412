#include "ferry/plan.hpp"

#include <cstring>
#include <new>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "layout/plan_layout.hpp"
#include "plan/plan_checks.hpp"

namespace ferry {
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
