#include "plan/plan_checks.hpp"

#include <limits>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"

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
  return header.magic == kPlanMagic && header.check == header_check(header);
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

}  // namespace ferry
