// The compiled part of ferry.max: the index of groups, and the plan of a combine from src_info.
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "bindings.hpp"
#include "dispatch_result.hpp"
#include "exchange.hpp"
#include "exchange/overlap.hpp"
#include "exchange/source_operations.hpp"
#include "ferry/error.hpp"
#include "ferry/max.hpp"
#include "interpreter.hpp"
#include "max/returned_rows.hpp"
#include "max/words.hpp"
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
    const GilRelease unlocked;
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
                    const HostArray<const float, 1>& route_tags, const HostArray<const float, 1>& returned) {
  max::ReturnTags tags;
  tags.routes.assign(route_tags.data(), route_tags.data() + returned.size());
  max::check_returned(self.config(), view_storage(self, storage), tags, {returned.data(), returned.size()});
}

// Raises UsageError if one of the arrays that a combine writes overlaps one that it reads; each is a dict of
// names and dense arrays. Those of every combine are compared by the exchange.
void require_apart(const nb::dict& written, const nb::dict& read) {
  std::deque<std::string> names;
  CallArrays arrays;
  const auto add = [&](const nb::dict& given, auto take) {
    for (const auto& [name, object] : given) {
      if (object.is_none()) continue;
      const char* const kept = names.emplace_back(nb::cast<std::string>(name)).c_str();
      const Array array = inspect(object, kept);
      take(kept, array.data,
           std::accumulate(array.shape.begin(), array.shape.end(), array.element_bytes(),
                           std::multiplies<>()));
    }
  };
  add(read,
      [&](const char* name, const void* data, std::int64_t bytes) { arrays.read(name, data, 1, bytes); });
  add(written,
      [&](const char* name, const void* data, std::int64_t bytes) { arrays.write(name, data, 1, bytes); });
  arrays.require_apart("", -1);
}

// On device memory arrays are addresses: the Python code has checked them, and keeps them alive.
using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

SourceOperations& operations_of(const PyExchange& self) {
  SourceOperations* const operations = source_operations(self.state().exchange);
  if (operations != nullptr) return *operations;
  throw UnsupportedError("max: this backend has host memory");
}

Stream stream_at(Address address) {
  return {at<void>(address)};
}

Ids ids_at(Address address, bool wide) {
  return wide ? Ids(at<const std::int64_t>(address)) : Ids(at<const std::int32_t>(address));
}

void keep_ids(const PyExchange& self, int lane, Address ids, bool wide, std::int64_t tokens, Address kept_ids,
              Address kept_tokens, Address stream) {
  operations_of(self).keep_ids({.lane = lane,
                                .ids = ids_at(ids, wide),
                                .tokens = tokens,
                                .kept_ids = at<std::int64_t>(kept_ids),
                                .kept_tokens = at<std::int32_t>(kept_tokens)},
                               stream_at(stream));
}

void describe_rows(const PyExchange& self, int lane, const PyDispatchResult& received, Address row_offsets,
                   Address expert_ids, Address expert_usage_stats, Address src_info, Address counts,
                   Address stream) {
  operations_of(self).describe_rows({.lane = lane,
                                     .received = received.received,
                                     .row_offsets = at<std::uint32_t>(row_offsets),
                                     .expert_ids = at<std::int32_t>(expert_ids),
                                     .expert_usage_stats = at<std::uint32_t>(expert_usage_stats),
                                     .src_info = at<std::int32_t>(src_info),
                                     .counts = at<std::int32_t>(counts)},
                                    stream_at(stream));
}

Plan plan_at(const PyExchange& self, Address storage) {
  const std::int64_t bytes = view_plan(nullptr, plan_shape(self.config())).bytes;
  return Plan::over(at<void>(storage), static_cast<std::size_t>(bytes));
}

void plan_return_on_device(const PyExchange& self, int lane, Address src_info, Address row_offsets,
                           Address counts, Address ids, bool wide, std::int64_t tokens, Address device_tokens,
                           Address plan, Address row_tags, Address scratch, Address stream) {
  operations_of(self).plan_return({.lane = lane,
                                   .src_info = at<const std::int32_t>(src_info),
                                   .row_offsets = at<const std::uint32_t>(row_offsets),
                                   .counts = at<const std::int32_t>(counts),
                                   .ids = ids_at(ids, wide),
                                   .tokens = tokens,
                                   .device_tokens = at<const std::int32_t>(device_tokens),
                                   .plan = plan_at(self, plan),
                                   .row_tags = at<float>(row_tags),
                                   .scratch = at<std::byte>(scratch)},
                                  stream_at(stream));
}

void check_returned_on_device(const PyExchange& self, int lane, Address plan, Address returned,
                              Address stream) {
  operations_of(self).check_returned(
      {.lane = lane, .plan = plan_at(self, plan), .returned = at<const float>(returned)}, stream_at(stream));
}

}  // namespace

void bind_max(nb::module_& module) {
  nb::list words;
  for (const auto& [from, to] : max::kWords) words.append(nb::make_tuple(from, to));
  module.attr("_MAX_WORDS") = words;
  module.def("_max_group_index", &group_index, "counts"_a, "alignment"_a);
  module.def("_max_plan_return", &plan_return, "exchange"_a, "storage"_a, "src_info"_a, "row_offsets"_a,
             "counts"_a, "topk_ids"_a, "combine"_a, "row_tags"_a, "route_tags"_a);
  module.def("_max_require_apart", &require_apart, "written"_a, "read"_a);
  module.def("_max_check_returned", &check_returned, "exchange"_a, "storage"_a, "route_tags"_a, "returned"_a);
  module.def("_max_scratch_bytes",
             [](const PyExchange& self) { return operations_of(self).scratch_bytes(); });
  module.def("_max_keep_ids", &keep_ids);
  module.def("_max_describe_rows", &describe_rows);
  module.def("_max_plan_return_on_device", &plan_return_on_device);
  module.def("_max_check_returned_on_device", &check_returned_on_device);
}

}  // namespace ferry::python
