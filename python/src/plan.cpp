#include "plan.hpp"
#include "casters.hpp"

#include <unordered_map>

#include "base/text.hpp"
#include "bindings.hpp"
#include "ferry/error.hpp"

namespace ferry::python {
namespace {

// Writes by address. The GIL guards it.
std::unordered_map<const void*, std::uint64_t>& all_writes() {
  static std::unordered_map<const void*, std::uint64_t> writes;
  return writes;
}

using Table = std::int32_t* PlanView::*;

nb::object table(const PyPlan& self, Table which, const Shape& shape) {
  const PlanView view = view_plan(self.checked().storage(), self.shape);
  return view_of(self.framework, view.*which, kInt32, shape, {}, self.device, self.owner);
}

nb::object storage(const PyPlan& self) {
  return view_of(self.framework, self.checked().storage(), kByte,
                 {static_cast<std::int64_t>(self.plan.bytes())}, {}, self.device, self.owner);
}

PyPlan copy(const PyPlan& self) {
  PyPlan copied = self;
  if (self.framework == Framework::dlpack) copied.framework = Framework::numpy;
  const nb::object from =
      view_of(copied.framework, self.checked().storage(), kByte,
              {static_cast<std::int64_t>(self.plan.bytes())}, {}, self.device, self.owner);
  copied.owner = from.attr(self.framework == Framework::torch ? "clone" : "copy")();
  copied.plan = Plan::over(inspect(copied.owner, "plan").data, self.plan.bytes());
  copied.state.reset();  // no lane overwrites a copy
  copied.lane = -1;
  copied.storage_writes = write_count(copied.plan.storage());
  return copied;
}

}  // namespace

const Plan& PyPlan::checked() const {
  const PlanHeader* header = is_host(device) ? view_plan(plan.storage(), shape).header : nullptr;
  // A dispatch that fails or is not received yet may have begun to write its plan: then the header is not
  // complete.
  const bool unfinished = header != nullptr && !is_complete(*header);
  const bool changed = header != nullptr && header->check != header_check;
  if (state &&
      (unfinished || changed || state->lanes[static_cast<std::size_t>(lane)].plan_version != plan_version)) {
    throw UsageError(
        str("plan: a later dispatch of lane ", lane,
            " has overwritten it: keep a plan.copy(), or dispatch with ReceiveBuffers(plan=...)"));
  }
  if (unfinished || storage_writes != write_count(plan.storage()))
    throw UsageError("plan: a later dispatch has written another plan to its memory");
  // The caller may have changed the storage since. N decides how long results are, so it must not change.
  if (header != nullptr && header->tokens != tokens)
    throw UsageError(
        str("plan: had ", counted(tokens, "token"), ", but its memory now holds a plan of ", header->tokens));
  return plan;
}

std::uint64_t write_count(const void* storage) {
  const auto found = all_writes().find(storage);
  return found == all_writes().end() ? 0 : found->second;
}

void count_write(const void* storage) {
  ++all_writes()[storage];
}

std::int64_t PyPlan::total() const {
  if (is_host(device)) return checked().total();
  if (known_total >= 0) return known_total;
  throw UsageError(
      "plan: its total is in device memory and not yet known to the host: call DispatchResult.wait_total(), "
      "or "
      "read the array DispatchResult.total");
}

std::int64_t max_rows_touched(const PyPlan& plan) {
  if (plan.gathered_total >= 0) return plan.gathered_total;
  const bool known = is_host(plan.device) || plan.known_total >= 0;
  if (known) return std::min(plan.total(), plan.shape.capacity);
  return plan.row_bound >= 0 ? plan.row_bound : plan.shape.capacity;
}

void bind_plan(nb::module_& module) {
  nb::class_<PyPlan>(module, "Plan",
                     R"(The routing of one dispatch: destinations, row positions, counts, drops.

A plan serves any number of dispatches and combines, in any format, of exchanges that agree on placement and sizes. The
plan of a call lies in the lane's memory until the lane's next dispatch: copy() it to keep it longer. Its tables are
arrays of the call's framework, on the exchange's device.)")
      .def_ro("tokens", &PyPlan::tokens, "N, the tokens of this rank; experts in slices: of its slice.")
      .def_prop_ro("total", &PyPlan::total,
                   "Rows on this rank, padding between groups included. With 'cuda' only after wait_total().")
      .def_prop_ro(
          "counts",
          [](const PyPlan& self) {
            return table(self, &PlanView::counts, {self.shape.ranks, self.shape.experts});
          },
          "int32 [R, E]: routes from each rank to each expert, drops included; with replicas [R, P], to "
          "each.")
      .def_prop_ro(
          "tokens_between",
          [](const PyPlan& self) {
            return table(self, &PlanView::tokens_between, {self.shape.ranks, self.shape.ranks});
          },
          "int32 [R, R]: tokens sent from rank s to rank d, at [s, d].")
      .def_prop_ro(
          "destinations",
          [](const PyPlan& self) {
            return table(self, &PlanView::route_rank, {self.tokens, self.shape.top_k});
          },
          "int32 [N, K]: the rank that holds each route's expert; -1 for masked slots.")
      .def_prop_ro(
          "rows",
          [](const PyPlan& self) {
            return table(self, &PlanView::route_row, {self.tokens, self.shape.top_k});
          },
          "int32 [N, K]: each route's row on that rank; -1 if masked or dropped.")
      .def_prop_ro(
          "sources",
          [](const PyPlan& self) {
            const PlanView view = view_plan(self.checked().storage(), self.shape);
            return view_of(self.framework, view.sources, kInt32, {self.shape.capacity, 3}, {}, self.device,
                           self.owner);
          },
          "int32 [capacity, 3]: source rank, token and slot of each row on this rank; undefined past the "
          "total.")
      .def_prop_ro(
          "storage", &storage,
          "uint8 [bytes]: the plan itself, without pointers. Exchange.plan_over() makes a Plan of it again.")
      .def(
          "set_row_bound",
          [](PyPlan& self, std::int64_t rows) {
            if (rows < 0) throw UsageError(str("rows = ", rows, ", must be 0 or more"));
            self.row_bound = rows;
          },
          nb::arg("rows"),
          R"(Asserts that the plan's total is at most `rows`.

Where only the device knows the total, calls then accept arrays of that many rows instead of `capacity`. If the total is
larger, the call reads past the end of such an array.)")
      .def("copy", &copy, "Returns a copy, which no later dispatch overwrites.")
      .def("__repr__", [](const PyPlan& self) {
        return str("Plan(", counted(self.tokens, "token"), ", ", counted(self.shape.ranks, "rank"), ", ",
                   counted(self.shape.experts, "expert"), ")");
      });
}

}  // namespace ferry::python
