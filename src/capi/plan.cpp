#include "ferry/plan.hpp"

#include <cstring>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "plan/plan_checks.hpp"

namespace ferry::capi {
namespace {

const PlanHeader& header_of(const ferry_plan* given) {
  return checked_header(to_plan(required(given, "ferry_plan")));
}

}  // namespace

extern "C" {

ferry_status ferry_plan_query(const ferry_plan* given, ferry_plan_info* info) {
  return guarded([&] {
    const PlanHeader& header = header_of(given);
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
    const Plan plan = to_plan(required(given, "ferry_plan"));
    required(rank, "rank");
    required(row, "row");
    *rank = plan.destination(token, slot);
    *row = plan.row(token, slot);
  });
}

ferry_status ferry_plan_copy(const ferry_plan* plan, void* storage, size_t bytes, ferry_plan* copy) {
  return guarded([&] {
    const PlanHeader& header = header_of(plan);
    const auto needed = static_cast<std::size_t>(view_plan(nullptr, header.shape).bytes);
    required(copy, "copy");
    if (storage == nullptr || bytes < needed) {
      throw UsageError(str("plan: storage of ", counted(storage == nullptr ? 0 : bytes, "byte"),
                           " for a copy that takes ", needed));
    }
    check_plan_address(storage);
    std::memcpy(storage, plan->storage, needed);
    *copy = {storage, needed, plan->call};
  });
}

}  // extern "C"

}  // namespace ferry::capi
