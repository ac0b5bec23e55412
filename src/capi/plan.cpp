#include "ferry/plan.hpp"

#include <cstring>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::capi {
namespace {

constexpr std::size_t kAlign = 16;

void check_storage(const void* storage) {
  if (reinterpret_cast<std::uintptr_t>(storage) % kAlign != 0) {
    throw UsageError(str("plan: the address of the storage, ", storage, ", is not a multiple of ", kAlign));
  }
}

// Checks the plan, because the C++ accessors trust theirs.
const PlanHeader& checked_header(const ferry_plan* given) {
  const ferry_plan& plan = required(given, "ferry_plan");
  if (plan.storage == nullptr) throw UsageError("plan: empty: its storage is NULL");
  check_storage(plan.storage);
  if (plan.bytes < sizeof(PlanHeader)) {
    throw UsageError(
        str("plan: storage of ", plan.bytes, " bytes, a plan takes at least ", sizeof(PlanHeader)));
  }
  const PlanHeader& header = *static_cast<const PlanHeader*>(plan.storage);
  if (header.magic != kPlanMagic || header.check != header_check(header)) {
    throw UsageError("plan: unfinished or damaged: the checksum of its header is wrong");
  }
  const auto bytes = static_cast<std::size_t>(view_plan(nullptr, header.shape).bytes);
  if (plan.bytes < bytes) {
    throw UsageError(str("plan: storage of ", plan.bytes, " bytes, this plan takes ", bytes));
  }
  return header;
}

}  // namespace

extern "C" {

ferry_status ferry_plan_query(const ferry_plan* given, ferry_plan_info* info) {
  return guarded([&] {
    const PlanHeader& header = checked_header(given);
    const Plan plan = to_plan(*given);
    ferry_plan_info c{};
    c.rank = plan.rank();
    c.ranks = plan.ranks();
    c.experts = header.shape.experts;
    c.top_k = header.shape.top_k;
    c.tokens = plan.tokens();
    c.placement_version = plan.placement_version();
    c.total = plan.total();
    c.dropped = plan.dropped();
    c.counts = plan.counts().data();
    c.tokens_between = plan.tokens_between().data();
    c.sources = reinterpret_cast<const ferry_source*>(plan.sources().data());
    write_sized(info, c, "ferry_plan_info");
  });
}

ferry_status ferry_plan_route(const ferry_plan* given, int token, int slot, int32_t* rank, int64_t* row) {
  return guarded([&] {
    const PlanHeader& header = checked_header(given);
    if (token < 0 || token >= header.tokens || slot < 0 || slot >= header.shape.top_k) {
      throw UsageError(str("plan: token ", token, ", slot ", slot, " does not exist: the plan has ",
                           header.tokens, " tokens with ", header.shape.top_k, " slots each"));
    }
    required(rank, "rank");
    required(row, "row");
    const Plan plan = to_plan(*given);
    *rank = plan.destination(token, slot);
    *row = plan.row(token, slot);
  });
}

ferry_status ferry_plan_copy(const ferry_plan* plan, void* storage, size_t bytes, ferry_plan* copy) {
  return guarded([&] {
    const PlanHeader& header = checked_header(plan);
    const auto needed = static_cast<std::size_t>(view_plan(nullptr, header.shape).bytes);
    required(copy, "copy");
    if (storage == nullptr || bytes < needed) {
      throw UsageError(
          str("plan: storage of ", storage == nullptr ? 0 : bytes, " bytes for a copy that takes ", needed));
    }
    check_storage(storage);
    std::memcpy(storage, plan->storage, needed);
    *copy = {storage, needed};
  });
}

}  // extern "C"

}  // namespace ferry::capi
