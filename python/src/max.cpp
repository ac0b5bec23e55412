// What ferry.max needs of compiled code: the index of groups, and the plan of a combine from src_info.
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "base/text.hpp"
#include "bindings.hpp"
#include "exchange.hpp"
#include "ferry/error.hpp"
#include "ferry/max.hpp"
#include "max/returned_rows.hpp"
#include "plan/shapes.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

template <class T, std::size_t Dimensions>
using HostArray = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu, nb::numpy>;

PlanView view_storage(const PyExchange& self, const HostArray<std::uint8_t, 1>& storage) {
  const PlanShape shape = plan_shape(self.config());
  const std::int64_t needed = view_plan(nullptr, shape).bytes;
  if (static_cast<std::int64_t>(storage.size()) < needed)
    throw UsageError(str("storage: has ", storage.size(), " bytes, a plan takes ", needed));
  return view_plan(storage.data(), shape);
}

nb::tuple group_index(const std::vector<std::int32_t>& counts, int alignment) {
  max::GroupIndex index = max::group_index(counts, alignment);
  return nb::make_tuple(std::move(index.row_offsets), std::move(index.expert_ids));
}

void copy_to(const std::vector<float>& from, const HostArray<float, 1>& to, const char* name) {
  if (to.size() < from.size())
    throw UsageError(str(name, ": has room for ", to.size(), " numbers, needs ", from.size()));
  std::ranges::copy(from, to.data());
}

// Returns the number of rows.
std::int64_t plan_return(const PyExchange& self, const HostArray<std::uint8_t, 1>& storage,
                         const HostArray<const std::int32_t, 2>& src_info,
                         const HostArray<const std::uint32_t, 1>& row_offsets,
                         const HostArray<const std::int32_t, 2>& counts,
                         const HostArray<const std::int64_t, 2>& topk_ids, std::uint64_t combine,
                         const HostArray<float, 1>& row_tags, const HostArray<float, 1>& route_tags) {
  const PlanView plan = view_storage(self, storage);
  const int rank = self.state().exchange.rank().index();
  max::ReturnTags tags;
  {
    const nb::gil_scoped_release unlocked;
    max::plan_return(self.config(), rank,
                     {.src_info = {src_info.data(), src_info.size()},
                      .row_offsets = {row_offsets.data(), row_offsets.size()},
                      .counts = {counts.data(), counts.size()},
                      .topk_ids = topk_ids.data(),
                      .tokens = static_cast<std::int64_t>(topk_ids.shape(0))},
                     combine, plan, tags);
  }
  copy_to(tags.rows, row_tags, "row_tags");
  copy_to(tags.routes, route_tags, "route_tags");
  return plan.header->total;
}

void check_returned(const PyExchange& self, const HostArray<std::uint8_t, 1>& storage,
                    const HostArray<const float, 1>& route_tags, const HostArray<const float, 1>& came) {
  max::ReturnTags tags;
  tags.routes.assign(route_tags.data(), route_tags.data() + came.size());
  max::check_returned(self.config(), view_storage(self, storage), tags, {came.data(), came.size()});
}

}  // namespace

void bind_max(nb::module_& module) {
  module.def("_max_group_index", &group_index, "counts"_a, "alignment"_a);
  module.def("_max_plan_return", &plan_return, "exchange"_a, "storage"_a, "src_info"_a, "row_offsets"_a,
             "counts"_a, "topk_ids"_a, "combine"_a, "row_tags"_a, "route_tags"_a);
  module.def("_max_check_returned", &check_returned, "exchange"_a, "storage"_a, "route_tags"_a, "came"_a);
}

}  // namespace ferry::python
