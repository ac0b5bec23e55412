// Arguments of combine, in both forms, and of what goes backward.
#include "combine.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/text.hpp"
#include "config.hpp"
#include "dispatch.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

const PyPlan& plan_of(const nb::object& given) {
  PyPlan* plan = nullptr;
  if (nb::try_cast(given, plan) && plan != nullptr) {
    plan->usable();
    return *plan;
  }
  PyErr_Clear();
  throw UsageError(str("plan: expected a Plan, got ", nb::cast<std::string>(nb::type_name(given.type()))));
}

void read_outputs(const nb::object& given, const nb::object& plan, const Config& config, CombineInput& in) {
  const Array& array = in.arguments.rows(given, "outputs", config.hidden, {kBf16, kFp16, kFp32});
  const RowsOf rows = rows_of(array, "outputs");
  require_rows(plan, rows.count, "outputs", config, in.rank);
  in.outputs = {array.data, *value_type_of(array.element), rows.stride};
}

// [N, H], or unreduced [N, K, H].
Shape shape_of_result(const Config& config, std::int64_t tokens, Reduction reduction) {
  if (reduction == Reduction::unreduced) return {tokens, config.top_k, config.hidden};
  return {tokens, config.hidden};
}

void read_result(const nb::object& given, const Config& config, Reduction reduction, CombineInput& in) {
  const Shape shape = shape_of_result(config, in.plan->tokens, reduction);
  in.made = given;
  if (given.is_none()) {
    in.made = new_array(in.arguments.framework(), element_of(in.outputs.type), shape, in.plan->device);
  }
  const Array& array = in.arguments.rows(in.made, "result", config.hidden, {kBf16, kFp16, kFp32});
  require_writable(array, "result");
  if (array.shape != shape) {
    throw UsageError(str("result: expected shape ", text_of(shape), ", got ", text_of(array.shape)));
  }
  const RowsOf rows = rows_of(array, "result");
  in.result = {array.data, *value_type_of(array.element), rows.stride};
}

const float* row_numbers(const nb::object& given, const char* name, const nb::object& plan,
                         const Config& config, CombineInput& in) {
  if (given.is_none()) return nullptr;
  const Array& array = in.arguments.dense(given, name, kFp32, {-1},
                                          ": one number a row; those of shape [N, K] are topk_weights");
  require_rows(plan, array.shape[0], name, config, in.rank);
  return static_cast<const float*>(array.data);
}

const float* slot_numbers(PyExchange& self, const nb::object& given, const char* name, std::int64_t tokens,
                          Arguments& arguments) {
  if (given.is_none()) return nullptr;
  const Array& array = arguments.dense(given, name, kFp32, {tokens, self.config().top_k});
  if (array.data == nullptr) return self.spare(arguments.framework());
  return static_cast<const float*>(array.data);
}

float* new_route_values(PyExchange& self, std::int64_t tokens, Framework framework, nb::object& made) {
  made = new_array(framework, kFp32, {tokens, self.config().top_k}, self.state().where);
  float* data = static_cast<float*>(look_at(made, "route_values").data);
  return data != nullptr ? data : self.spare(framework);
}

}  // namespace

void read_combine(PyExchange& self, InCall& call, const CombineArguments& given, CombineInput& in) {
  const Config& config = self.config();
  in.rank = call.exchange().rank().index();
  in.plan = &plan_of(given.plan);
  const Reduction reduction = given.reduction ? reduction_named(*given.reduction) : config.reduction;
  in.options.reduction = reduction;
  in.options.lane = given.lane;
  in.options.sm_limit = given.sm_limit;
  if (!given.outputs.is_none()) read_outputs(given.outputs, given.plan, config, in);
  in.options.row_values = row_numbers(given.row_values, "row_values", given.plan, config, in);
  call.use(stream_of(given.stream, in.arguments.any() ? in.arguments.framework() : self.framework(),
                     call.where()));
  in.options.row_weights = row_numbers(given.row_weights, "row_weights", given.plan, config, in);
  in.options.topk_weights =
      slot_numbers(self, given.topk_weights, "topk_weights", in.plan->tokens, in.arguments);
  if (given.outputs.is_none() && given.row_values.is_none()) {
    throw UsageError("combine: neither outputs nor row_values are given");
  }
  in.made = nb::none();
  if (!given.outputs.is_none()) read_result(given.result, config, reduction, in);
  if (!given.row_values.is_none()) {
    in.options.route_values =
        new_route_values(self, in.plan->tokens, in.arguments.framework(), in.route_values);
  }
  self.set_framework(in.arguments.framework());
}

nb::object given_back(const CombineInput& in) {
  if (!in.route_values.is_valid()) return in.made;
  return nb::make_tuple(in.made, in.route_values);
}

namespace {

nb::object combine(PyExchange& self, const CombineArguments& given) {
  InCall call(self, given.lane);
  CombineInput in(call.where());
  call.or_refuse({Operation::combine}, [&] { read_combine(self, call, given, in); });
  {
    const nb::gil_scoped_release unlocked;
    call.exchange().combine(in.outputs, in.plan->plan, in.result, in.options, call.stream());
  }
  return given_back(in);
}

void combine_send(PyExchange& self, const CombineArguments& given) {
  InCall call(self, given.lane);
  CombineInput in(call.where());
  call.or_refuse({Operation::combine}, [&] { read_combine(self, call, given, in); });
  {
    const nb::gil_scoped_release unlocked;
    call.exchange().combine_send(in.outputs, in.plan->plan, in.result, in.options, call.stream());
  }
  Pending& pending = self.pending(given.lane);
  pending.owners = in.arguments.owners();
  pending.owners.push_back(given.plan);
  pending.result = given_back(in);
}

nb::object combine_receive(PyExchange& self, int lane, const nb::object& stream) {
  InCall call(self, lane);
  call.use(stream_of(stream, self.framework(), call.where()));
  {
    const nb::gil_scoped_release unlocked;
    call.exchange().combine_receive(lane, call.stream());
  }
  const nb::object result = self.pending(lane).result;
  self.pending(lane) = {};
  return result;
}

nb::object route_values(PyExchange& self, const nb::object& values, const nb::object& plan, int lane,
                        const nb::object& stream) {
  InCall call(self, lane);
  Arguments arguments(call.where());
  const float* from = nullptr;
  float* to = nullptr;
  nb::object made;
  call.or_refuse({Operation::route_values}, [&] {
    const PyPlan& used = plan_of(plan);
    from = slot_numbers(self, values, "values", used.tokens, arguments);
    call.use(stream_of(stream, arguments.framework(), call.where()));
    made = new_array(arguments.framework(), kFp32, {used.shape.capacity}, call.where());
    to = static_cast<float*>(look_at(made, "row_values").data);
    if (to == nullptr) to = self.spare(arguments.framework());
  });
  const Plan& used = nb::cast<PyPlan&>(plan).plan;
  {
    const nb::gil_scoped_release unlocked;
    call.exchange().route_values(from, used, to, lane, call.stream());
  }
  return made;
}

std::pair<PyDispatchResult, nb::object> combine_backward(
    PyExchange& self, const nb::object& d_result, const nb::object& plan, const nb::object& topk_weights,
    const nb::object& outputs, std::optional<std::string> format, int lane, int sm_limit,
    const nb::object& memory, const nb::object& stream) {
  const DispatchArguments given{.tokens = d_result,
                                .ids = plan,
                                .weights = topk_weights,
                                .format = std::move(format),
                                .lane = lane,
                                .sm_limit = sm_limit,
                                .memory = memory,
                                .stream = stream};
  InCall call(self, lane);
  DispatchInput in(call.where());
  Outputs rows;
  nb::object d_weights;
  float* routes = nullptr;
  const auto read = [&] {
    plan_of(plan);
    read_dispatch(self, call, given, in);
    const Config& config = self.config();
    const Array& array =
        in.arguments.rows(outputs, "outputs", config.hidden, {element_of(config.combine_type)});
    require_dense(array, "outputs");
    require_rows(plan, rows_of(array, "outputs").count, "outputs", config, in.rank);
    rows = {array.data, config.combine_type, 0};
    routes = new_route_values(self, in.tokens.count, in.arguments.framework(), d_weights);
  };
  if (is_host(call.where())) {
    call.or_refuse({Operation::dispatch}, read);
  } else {
    // The peers have put both of its operations on their streams.
    call.or_refuse({Operation::dispatch, Operation::combine}, read);
  }
  begin_dispatch(self, in);
  DispatchResult received;
  {
    const nb::gil_scoped_release unlocked;
    received = call.bring([&] {
      return call.exchange().combine_backward(in.tokens, in.plan, in.weights, rows, routes, in.options,
                                              call.stream());
    });
  }
  return {self.received(lane, received), d_weights};
}

constexpr const char* kCombineDoc = R"(Brings the experts' outputs home and adds them.

outputs        [rows, H] of bfloat16, float16 or float32, row for row as the arrivals lay; rows may lie apart, H elements
               or more and a multiple of 16 bytes; None to bring row_values alone home
plan           of the dispatch whose rows they are
row_weights    float32 [rows]: the weights that travelled, arrivals.weight
topk_weights   float32 [N, K] instead; neither: every weight is 1
reduction      'partial', 'exact' or 'unreduced'; default the exchange's
row_values     float32 [rows]: one number a row that comes home
result         [N, H], unreduced [N, K, H], to write to; default a new array of outputs' type

Returns the result; with row_values (result, route_values), float32 [N, K], 0 where masked or dropped. Rows past the
plan's total are never read. On the host it blocks until the peers have come, for the exchange's `deadline` at most,
without the interpreter's lock. Raises UsageError for arguments that do not fit (the peers' call ends with it too, but for
a bad `lane` or a misspelt keyword), BadSourceError for a damaged plan.)";

constexpr const char* kCombineParameters =
    "(self, outputs: typing.Any, plan: Plan, *, row_weights: typing.Any | None = None, "
    "topk_weights: typing.Any | None = None, reduction: str | None = None, "
    "row_values: typing.Any | None = None, result: typing.Any | None = None, lane: int = 0, "
    "sm_limit: int = 0, stream: typing.Any | None = None) -> ";

template <class Function>
void define_combine(nb::class_<PyExchange>& exchange, const char* name, const char* returned, const char* doc,
                    const Function& function) {
  exchange.def(
      name,
      [function](PyExchange& self, nb::object outputs, nb::object plan, nb::object row_weights,
                 nb::object topk_weights, std::optional<std::string> reduction, nb::object row_values,
                 nb::object result, int lane, int sm_limit, nb::object stream) {
        return function(self, {.outputs = std::move(outputs),
                               .plan = std::move(plan),
                               .row_weights = std::move(row_weights),
                               .topk_weights = std::move(topk_weights),
                               .reduction = std::move(reduction),
                               .row_values = std::move(row_values),
                               .result = std::move(result),
                               .lane = lane,
                               .sm_limit = sm_limit,
                               .stream = std::move(stream)});
      },
      "outputs"_a.none(), "plan"_a.none(), nb::kw_only(), "row_weights"_a = nb::none(),
      "topk_weights"_a = nb::none(), "reduction"_a = nb::none(), "row_values"_a = nb::none(),
      "result"_a = nb::none(), "lane"_a = 0, "sm_limit"_a = 0, "stream"_a = nb::none(), doc,
      nb::sig(str("def ", name, kCombineParameters, returned).c_str()));
}

}  // namespace

void bind_combine(nb::class_<PyExchange>& exchange) {
  define_combine(exchange, "combine", "typing.Any", kCombineDoc, combine);
  define_combine(
      exchange, "combine_send", "None",
      "The send half of combine, with its arguments. Outputs may be reused after it; topk_weights with "
      "'partial'\n"
      "are refused.",
      combine_send);
  exchange
      .def("combine_receive", &combine_receive, nb::kw_only(), "lane"_a = 0, "stream"_a = nb::none(),
           "The receive half of combine: returns what combine would.",
           nb::sig(
               "def combine_receive(self, *, lane: int = 0, stream: typing.Any | None = None) -> typing.Any"))
      .def("route_values", &route_values, "values"_a.none(), "plan"_a.none(), nb::kw_only(), "lane"_a = 0,
           "stream"_a = nb::none(),
           "Carries float32 [N, K], one number a route, to its row: returns float32 [rows], 0 on padding.",
           nb::sig("def route_values(self, values: typing.Any, plan: Plan, *, lane: int = 0, "
                   "stream: typing.Any | None = None) -> typing.Any"))
      .def("combine_backward", &combine_backward, "d_result"_a.none(), "plan"_a.none(),
           "topk_weights"_a.none(), "outputs"_a.none(), nb::kw_only(), "format"_a = nb::none(), "lane"_a = 0,
           "sm_limit"_a = 0, "memory"_a = nb::none(), "stream"_a = nb::none(),
           R"(Gradients of combine: (arrivals, d_weights).

d_result [N, H] goes to the rows by the plan, each row times its weight of topk_weights, float32 [N, K]; d_weights,
float32 [N, K], are the products of d_result with `outputs`, the rows that combine was given, dense, of combine_type.)",
           nb::sig("def combine_backward(self, d_result: typing.Any, plan: Plan, topk_weights: typing.Any, "
                   "outputs: typing.Any, *, format: str | None = None, lane: int = 0, sm_limit: int = 0, "
                   "memory: ReceiveBuffers | None = None, stream: typing.Any | None = None) -> "
                   "tuple[DispatchResult, typing.Any]"));
}

}  // namespace ferry::python
