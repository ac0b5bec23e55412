// The compiled part of ferry.max: the index of groups, and the operations of a combine by source.
#include <cstdlib>
#include <deque>
#include <string>
#include <tuple>
#include <vector>

#include "base/text.hpp"
#include "bindings.hpp"
#include "dispatch_result.hpp"
#include "exchange.hpp"
#include "exchange/configuration.hpp"
#include "exchange/overlap.hpp"
#include "exchange/source_operations.hpp"
#include "ferry/error.hpp"
#include "ferry/max.hpp"
#include "interpreter.hpp"
#include "max/host_operations.hpp"
#include "max/words.hpp"
#include "plan/shapes.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

nb::tuple group_index(const std::vector<std::int32_t>& counts, int alignment) {
  max::GroupIndex index = max::group_index(counts, alignment);
  return nb::make_tuple(std::move(index.row_offsets), std::move(index.expert_ids));
}

// Where the elements of an array lie: rows of one stride, or all bytes from the first to the last.
struct Extent {
  explicit Extent(const Array& array) {
    const std::int64_t size = array.element_bytes();
    std::int64_t low = 0, high = size;
    for (std::size_t d = 0; d < array.shape.size(); ++d) {
      if (array.shape[d] == 0) return;
      const std::int64_t last = (array.shape[d] - 1) * array.strides[d] * size;
      (last < 0 ? low : high) += last;
    }
    first = static_cast<const std::byte*>(array.data) + low;
    rows = 1;
    row_bytes = high - low;
    if (array.shape.size() != 2 || array.strides[1] != 1 || array.strides[0] == 0) return;
    rows = array.shape[0];
    row_bytes = array.shape[1] * size;
    stride = std::abs(array.strides[0]) * size;
  }

  const std::byte* first = nullptr;
  std::int64_t rows = 0, row_bytes = 0, stride = 0;
};

// Raises UsageError if one of the arrays that a combine writes overlaps one that it reads; each is a dict of
// names and arrays. An exchange compares those of its own combines.
void require_apart(const nb::dict& written, const nb::dict& read) {
  std::deque<std::string> names;
  CallArrays arrays;
  const auto add = [&](const nb::dict& given, bool write) {
    for (const auto& [name, object] : given) {
      if (object.is_none()) continue;
      const char* const kept = names.emplace_back(nb::cast<std::string>(name)).c_str();
      const Extent extent(inspect(object, kept));
      if (write) {
        arrays.write(kept, extent.first, extent.rows, extent.row_bytes, extent.stride);
      } else {
        arrays.read(kept, extent.first, extent.rows, extent.row_bytes, extent.stride);
      }
    }
  };
  add(read, false);
  add(written, true);
  arrays.require_apart("", -1);
}

// Arrays are addresses: the Python code has checked them, and keeps them alive.
using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Calls use(operations) of the exchange's memory.
template <class Use>
auto with_operations(const PyExchange& self, const Use& use) {
  const Exchange& exchange = self.state().exchange;
  max::HostOperations on_host(self.config(), exchange.rank().index());
  const bool on_device = chosen_memory(self.config()) == MemoryKind::device;
  return use(on_device ? *source_operations(exchange) : on_host);
}

Stream stream_at(Address address) {
  return {at<void>(address)};
}

Ids ids_at(Address address, bool wide) {
  return wide ? Ids(at<const std::int64_t>(address)) : Ids(at<const std::int32_t>(address));
}

void keep_ids(const PyExchange& self, int lane, Address ids, bool wide, std::int64_t tokens, Address kept_ids,
              Address kept_tokens, Address stream) {
  with_operations(self, [&](SourceOperations& operations) {
    operations.keep_ids({.options = {.lane = lane, .stream = stream_at(stream)},
                         .ids = ids_at(ids, wide),
                         .tokens = tokens,
                         .kept_ids = at<std::int64_t>(kept_ids),
                         .kept_tokens = at<std::int32_t>(kept_tokens)});
  });
}

void describe_rows(const PyExchange& self, int lane, const PyDispatchResult& received, Address row_offsets,
                   Address expert_ids, Address expert_usage_stats, Address src_info, Address counts,
                   Address stream) {
  with_operations(self, [&](SourceOperations& operations) {
    operations.describe_rows({.options = {.lane = lane, .stream = stream_at(stream)},
                              .received = received.received,
                              .row_offsets = at<std::uint32_t>(row_offsets),
                              .expert_ids = at<std::int32_t>(expert_ids),
                              .expert_usage_stats = at<std::uint32_t>(expert_usage_stats),
                              .src_info = at<std::int32_t>(src_info),
                              .counts = at<std::int32_t>(counts)});
  });
}

Plan plan_at(const PyExchange& self, Address storage) {
  const std::int64_t bytes = view_plan(nullptr, plan_shape(self.config())).bytes;
  return Plan::over(at<void>(storage), static_cast<std::size_t>(bytes));
}

using Lengths = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // of src_info, row_offsets, counts

void plan_return(const PyExchange& self, int lane, Address src_info, Address row_offsets, Address counts,
                 const Lengths& lengths, Address ids, bool wide, std::int64_t tokens, Address device_tokens,
                 Address plan, Address row_tags, Address scratch, std::uint64_t combine, Address stream) {
  const PlanReturnCall call{.options = {.lane = lane, .stream = stream_at(stream)},
                            .src_info = at<const std::int32_t>(src_info),
                            .row_offsets = at<const std::uint32_t>(row_offsets),
                            .counts = at<const std::int32_t>(counts),
                            .ids = ids_at(ids, wide),
                            .tokens = tokens,
                            .device_tokens = at<const std::int32_t>(device_tokens),
                            .plan = plan_at(self, plan),
                            .row_tags = at<float>(row_tags),
                            .scratch = at<std::byte>(scratch),
                            .combine = combine,
                            .lengths = {std::get<0>(lengths), std::get<1>(lengths), std::get<2>(lengths)}};
  const GilRelease unlocked;
  with_operations(self, [&](SourceOperations& operations) { operations.plan_return(call); });
}

void check_returned(const PyExchange& self, int lane, Address plan, Address returned, std::uint64_t combine,
                    Address stream) {
  with_operations(self, [&](SourceOperations& operations) {
    operations.check_returned({.options = {.lane = lane, .stream = stream_at(stream)},
                               .plan = plan_at(self, plan),
                               .returned = at<const float>(returned),
                               .combine = combine});
  });
}

}  // namespace

void bind_max(nb::module_& module) {
  nb::list words;
  for (const auto& [from, to] : max::kWords) words.append(nb::make_tuple(from, to));
  module.attr("_MAX_WORDS") = words;
  module.def("_max_group_index", &group_index, "counts"_a, "alignment"_a);
  module.def("_require_apart", &require_apart, "written"_a, "read"_a);
  module.def("_max_scratch_bytes", [](const PyExchange& self) {
    return with_operations(self, [](SourceOperations& operations) { return operations.scratch_bytes(); });
  });
  module.def("_max_keep_ids", &keep_ids);
  module.def("_max_describe_rows", &describe_rows);
  module.def("_max_next_call",
             [](const PyExchange& self, int lane) { return next_call(self.state().exchange, lane); });
  module.def("_max_plan_return", &plan_return);
  module.def("_max_check_returned", &check_returned);
}

}  // namespace ferry::python
