#include "ferry/plan.hpp"

#include <cstring>
#include <new>

#include "ferry/error.hpp"
#include "layout/plan_layout.hpp"

namespace ferry {
namespace {

// Trusts a plan that is not empty: check_plan() of src/exchange checks a plan's header.
const PlanHeader& header_of(const void* storage) {
  if (storage == nullptr) throw UsageError("plan: empty: it has no contents");
  return *static_cast<const PlanHeader*>(storage);
}

PlanView view_of(void* storage) {
  return view_plan(storage, header_of(storage).shape);
}

}  // namespace

Plan Plan::copy() const {
  if (empty()) return {};
  constexpr std::align_val_t kAlign{64};
  std::shared_ptr<void> owner(::operator new(bytes_, kAlign), [](void* p) { ::operator delete(p, kAlign); });
  std::memcpy(owner.get(), storage_, bytes_);
  void* storage = owner.get();
  return {storage, bytes_, std::move(owner)};
}

int Plan::rank() const {
  return header_of(storage_).rank;
}
int Plan::ranks() const {
  return header_of(storage_).shape.ranks;
}
int Plan::tokens() const {
  return header_of(storage_).tokens;
}
std::uint64_t Plan::placement_version() const {
  return header_of(storage_).placement_version;
}
std::int64_t Plan::total() const {
  return header_of(storage_).total;
}
std::int64_t Plan::dropped() const {
  return header_of(storage_).dropped;
}

std::span<const std::int32_t> Plan::counts() const {
  const PlanShape& shape = header_of(storage_).shape;
  return {view_of(storage_).counts,
          static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.experts)};
}

std::span<const std::int32_t> Plan::tokens_between() const {
  const auto ranks = static_cast<std::size_t>(header_of(storage_).shape.ranks);
  return {view_of(storage_).tokens_between, ranks * ranks};
}

std::span<const Source> Plan::sources() const {
  return {view_of(storage_).sources, static_cast<std::size_t>(total())};
}

int Plan::destination(int token, int slot) const {
  return view_of(storage_).route_rank[std::int64_t{token} * header_of(storage_).shape.top_k + slot];
}

std::int64_t Plan::row(int token, int slot) const {
  return view_of(storage_).route_row[std::int64_t{token} * header_of(storage_).shape.top_k + slot];
}

}  // namespace ferry
