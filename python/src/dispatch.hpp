// Dispatch as Python calls it, and as the library takes it.
#pragma once

#include <optional>
#include <string>

#include "exchange.hpp"
#include "lane_call.hpp"

namespace ferry::python {

// The arguments of Exchange.dispatch, unread.
struct DispatchArguments {
  nb::object tokens, ids{}, weights = nb::none();
  std::optional<std::string> format{};
  int lane = 0;
  int sm_limit = 0;
  nb::object memory = nb::none();
  bool apply_weights = false;
  nb::object dot_rows = nb::none(), count = nb::none(), stream = nb::none();
};

// The same, checked and converted. Either `ids` or `plan` is set.
struct DispatchInput {
  explicit DispatchInput(Device device, Gradients gradients = Gradients::refused)
      : arguments(device, gradients) {}

  Arguments arguments;
  std::int64_t capacity = 0;  // rows of this rank
  Format format;
  std::array<Element, kMaxParts> elements{};
  Tokens tokens;
  Ids ids;
  Plan plan;
  const float* weights = nullptr;
  DispatchOptions options;
  DispatchContext context;
};

// Throws UsageError for arguments that do not fit.
void read_dispatch(PyExchange& self, LaneCall& call, const DispatchArguments& given, DispatchInput& in);

// Records the call as the lane's last dispatch, and which plan it overwrites.
void begin_dispatch(PyExchange& self, const DispatchInput& in);

// Throws UsageError if `count` rows are fewer than a call with the plan (None: any plan, up to `capacity`)
// may touch.
void require_rows(const nb::object& plan, std::int64_t count, const char* name, std::int64_t capacity);

// The value type of elements that are bfloat16, float16 or float32.
std::optional<DType> value_type_of(Element element);

}  // namespace ferry::python
