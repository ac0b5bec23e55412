// Reads the arguments of combine and of its gradients, runs them, and binds them.
#include "combine.hpp"
#include "casters.hpp"

#include "base/enumerators.hpp"
#include "base/text.hpp"
#include "call_binding.hpp"
#include "cast.hpp"
#include "dispatch.hpp"
#include "ferry/error.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"
#include "setting_values.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

const PyPlan& plan_of(const nb::object& given) {
  const PyPlan& plan = cast_argument<PyPlan>(given, "plan", "a Plan");
  plan.checked();
  return plan;
}

void read_outputs(const nb::object& given, const Config& config, CombineInput& in) {
  const Array& array = in.arguments.rows(given, "outputs", config.hidden, {kBf16, kFp16, kFp32});
  const StridedRows rows = strided_rows(array, "outputs");
  require_rows(in.plan, rows.count, "outputs", in.capacity);
  in.outputs = {array.data, *value_type_of(array.element), rows.stride, rows.count};
}

Shape result_shape(const Config& config, std::int64_t tokens, Reduction reduction) {
  if (reduction == Reduction::unreduced) return {tokens, config.top_k, config.hidden};
  return {tokens, config.hidden};
}

void make_or_read_result(const nb::object& given, const Config& config, Reduction reduction,
                         CombineInput& in) {
  const Shape shape = result_shape(config, in.plan->result_tokens(), reduction);
  in.result_array = given;
  if (given.is_none()) {
    in.result_array =
        new_array(in.arguments.framework(), element_of(in.outputs.type), shape, in.plan->device);
  }
  read_result(shape, "result", in);
}

void read_shared_outputs(const nb::object& given, const Config& config, CombineInput& in) {
  if (given.is_none()) return;
  if (in.result_array.is_none()) throw UsageError("combine: shared_outputs needs outputs");
  const Array& array = in.arguments.dense(given, "shared_outputs", element_of(in.result.type),
                                          {config.shared_experts, in.plan->result_tokens(), config.hidden});
  require_writable(array, "shared_outputs");
  in.options.shared_outputs = array.data;
}

void read_epilogue(const PyCombineArguments& given, const Config& config, CombineInput& in) {
  double scale = 1;
  if (!nb::try_cast(given.scale, scale)) refuse_type("scale", "a number", given.scale);
  in.options.epilogue.scale = static_cast<float>(scale);
  if (given.residual.is_none()) return;
  const Array& array =
      in.arguments.rows(given.residual, "residual", config.hidden, {element_of(in.result.type)});
  const Shape shape{in.plan->result_tokens(), config.hidden};
  if (array.shape != shape)
    throw UsageError(str("residual: expected shape ", shape_text(shape), ", got ", shape_text(array.shape)));
  in.options.epilogue.residual = array.data;
  in.options.epilogue.stride = strided_rows(array, "residual").stride;
}

const float* read_row_values(const nb::object& given, const char* name, CombineInput& in) {
  if (given.is_none()) return nullptr;
  const Array& array = in.arguments.numbers(
      given, name, kFp32, {-1}, ": one number a row is expected; for router weights [N, K] use topk_weights");
  require_rows(in.plan, array.shape[0], name, in.capacity);
  return static_cast<const float*>(array.data);
}

const float* read_route_values(const PyExchange& self, const nb::object& given, const char* name,
                               std::int64_t tokens, Arguments& arguments) {
  if (given.is_none()) return nullptr;
  return static_cast<const float*>(arguments.numbers(given, name, kFp32, {tokens, self.config().top_k}).data);
}

float* new_route_values(const PyExchange& self, std::int64_t tokens, Framework framework, nb::object& array) {
  array = new_array(framework, kFp32, {tokens, self.config().top_k}, self.state().device);
  return static_cast<float*>(inspect(array, "route_values").data);
}

}  // namespace

void read_result(const Shape& shape, const char* name, CombineInput& in) {
  const Array& array = in.arguments.rows(in.result_array, name, shape.back(), {kBf16, kFp16, kFp32});
  require_writable(array, name);
  if (array.shape != shape) {
    throw UsageError(str(name, ": expected shape ", shape_text(shape), ", got ", shape_text(array.shape)));
  }
  const StridedRows rows = strided_rows(array, name);
  in.result = {array.data, *value_type_of(array.element), rows.stride};
}

void read_combine(PyExchange& self, LaneCall& call, const PyCombineArguments& given, const PyPlan& plan,
                  CombineInput& in) {
  const Config& config = self.config();
  in.capacity = self.receive_sizes().rows;
  in.plan = &plan;
  in.arguments.set_stream(given.stream);
  const std::optional<std::string> named = text_in(given.reduction, "reduction");
  const Reduction reduction = named ? enumerator_named<Reduction>("reduction", *named) : config.reduction;
  in.options.reduction = reduction;
  const int sm_limit = int_of("sm_limit", given.sm_limit);
  if (given.outputs.is_none())
    throw UsageError("combine: needs outputs: for row_values alone call return_values()");
  read_outputs(given.outputs, config, in);
  in.options.row_values = read_row_values(given.row_values, "row_values", in);
  call.set_stream(stream_of(given.stream, in.arguments.any() ? in.arguments.framework() : self.framework(),
                            call.device()));
  in.options.call = call.options(sm_limit);
  in.options.row_weights = read_row_values(given.row_weights, "row_weights", in);
  in.options.topk_weighted = !given.topk_weights.is_none();
  in.options.topk_weights =
      read_route_values(self, given.topk_weights, "topk_weights", in.plan->result_tokens(), in.arguments);
  make_or_read_result(given.result, config, reduction, in);
  read_shared_outputs(given.shared_outputs, config, in);
  read_epilogue(given, config, in);
  if (!given.row_values.is_none()) {
    in.options.route_values =
        new_route_values(self, in.plan->result_tokens(), in.arguments.framework(), in.route_values_array);
  }
  self.set_framework(in.arguments.framework());
}

nb::object combine_return_value(const CombineInput& in) {
  if (!in.route_values_array.is_valid()) return in.result_array;
  return nb::make_tuple(in.result_array, in.route_values_array);
}

namespace {

nb::object combine(PyExchange& self, const GivenBesides& besides, const PyCombineArguments& given) {
  LaneCall call(self, {Operation::combine}, besides);
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  CombineInput in(call.device());
  call.read_or_refuse({Operation::combine},
                      [&] { read_combine(self, call, given, plan_of(given.plan), in); });
  timer.emplace(HostPart::exchange);
  {
    const GilRelease unlocked;
    call.exchange().combine(in.outputs, in.plan->plan, in.result, in.options);
  }
  return combine_return_value(in);
}

void combine_send(PyExchange& self, const GivenBesides& besides, const PyCombineArguments& given) {
  LaneCall call(self, {Operation::combine}, besides);
  CombineInput in(call.device());
  call.read_or_refuse({Operation::combine},
                      [&] { read_combine(self, call, given, plan_of(given.plan), in); });
  {
    const GilRelease unlocked;
    call.exchange().combine_send(in.outputs, in.plan->plan, in.result, in.options);
  }
  PendingCall& pending = self.pending(call.lane());
  pending.owners = in.arguments.owners();
  pending.owners.push_back(given.plan);
  pending.result = combine_return_value(in);
}

nb::object combine_receive(PyExchange& self, const GivenBesides& besides, const ReceiveArguments& given) {
  LaneCall call(self, {Operation::combine}, besides.of_receive_phase());
  const int lane = call.lane();
  call.read_or_refuse({Operation::combine},
                      [&] { call.set_stream(stream_of(given.stream, self.framework(), call.device())); });
  {
    const GilRelease unlocked;
    call.exchange().combine_receive(call.options());
  }
  const nb::object result = self.pending(lane).result;
  self.pending(lane) = {};
  return result;
}

// The arguments of route_values and of return_values.
struct ValuesArguments {
  nb::object values, plan, stream;
};

nb::object route_values(PyExchange& self, const GivenBesides& besides, const ValuesArguments& given) {
  LaneCall call(self, {Operation::route_values}, besides);
  Arguments arguments(call.device());
  arguments.set_stream(given.stream);
  const float* from = nullptr;
  float* to = nullptr;
  nb::object row_values;
  call.read_or_refuse({Operation::route_values}, [&] {
    const PyPlan& used = plan_of(given.plan);
    from = read_route_values(self, given.values, "values", used.result_tokens(), arguments);
    call.set_stream(stream_of(given.stream, arguments.framework(), call.device()));
    row_values = new_array(arguments.framework(), kFp32, {used.shape.capacity}, call.device());
    to = static_cast<float*>(inspect(row_values, "row_values").data);
  });
  const Plan& routes = nb::cast<PyPlan&>(given.plan).plan;
  {
    const GilRelease unlocked;
    call.exchange().route_values(from, routes, to, call.options());
  }
  return row_values;
}

nb::object return_values(PyExchange& self, const GivenBesides& besides, const ValuesArguments& given) {
  LaneCall call(self, {Operation::return_values}, besides);
  CombineInput in(call.device());
  in.arguments.set_stream(given.stream);
  const float* from = nullptr;
  float* to = nullptr;
  call.read_or_refuse({Operation::return_values}, [&] {
    in.plan = &plan_of(given.plan);
    in.capacity = self.receive_sizes().rows;
    from = read_row_values(given.values, "row_values", in);
    call.set_stream(stream_of(given.stream, in.arguments.framework(), call.device()));
    to = new_route_values(self, in.plan->result_tokens(), in.arguments.framework(), in.route_values_array);
  });
  {
    const GilRelease unlocked;
    call.exchange().return_values(from, in.plan->plan, to, call.options());
  }
  return in.route_values_array;
}

struct BackwardArguments {
  nb::object d_result, plan, topk_weights, outputs, format, sm_limit, memory, stream;
};

std::pair<PyDispatchResult, nb::object> combine_backward(PyExchange& self, const GivenBesides& besides,
                                                         const BackwardArguments& given) {
  // It is a dispatch and a return_values. Peers whose calls end after they have returned have enqueued both.
  static constexpr std::initializer_list<Operation> kFirst = {Operation::dispatch},
                                                    kBoth = {Operation::dispatch, Operation::return_values};
  const auto operations = has_kernels(self.config().backend) ? kBoth : kFirst;
  LaneCall call(self, operations, besides);
  const PyDispatchArguments dispatched{.tokens = given.d_result,
                                       .ids = given.plan,
                                       .weights = given.topk_weights,
                                       .format = given.format,
                                       .sm_limit = given.sm_limit,
                                       .memory = given.memory,
                                       .stream = given.stream};
  DispatchInput in(call.device());
  Outputs rows;
  nb::object d_weights;
  float* d_weights_data = nullptr;
  call.read_or_refuse(operations, [&] {
    const PyPlan& used = plan_of(given.plan);
    read_dispatch(self, call, dispatched, in, {.tokens = "d_result", .weights = "topk_weights"});
    const Config& config = self.config();
    const Array& array =
        in.arguments.rows(given.outputs, "outputs", config.hidden, {element_of(config.combine_type)});
    require_dense(array, "outputs");
    rows = {self.address_of(array), config.combine_type, 0, strided_rows(array, "outputs").count};
    require_rows(&used, rows.rows, "outputs", in.capacity);
    d_weights_data = new_route_values(self, in.tokens.count, in.arguments.framework(), d_weights);
  });
  const DispatchResult received = run_dispatch(self, call, in, [&] {
    return call.exchange().combine_backward(in.tokens, in.plan, in.weights, rows, d_weights_data, in.options);
  });
  return {self.make_result(call.lane(), received), d_weights};
}

constexpr const char* kCombineDoc =
    R"(Returns the experts' outputs to their source ranks and sums them by token. Collective.

outputs        [rows, H] of bfloat16, float16 or float32, in the row order of the dispatch. The step from row to row may
               be larger than H, in multiples of 16 bytes
plan           of the dispatch whose rows these are
row_weights    float32 [rows]: a weight for each row, as DispatchResult.weight
topk_weights   float32 [N, K] on the source rank, instead of row_weights. With neither, every weight is 1
reduction      'partial', 'exact' or 'unreduced'; default: the exchange's
row_values     float32 [rows]: one more number for each row
result         [N, H], unreduced [N, K, H], to write to; default: a new array of outputs' type. It may be `residual`, and may
               share no memory with other arrays of the call
shared_outputs [shared_experts, N, H] of the result's type, to which the outputs of the shared experts are written instead
               of being added; needed with 'unreduced'
residual       [N, H] of the result's type: the result is rounded, multiplied by `scale` and added to it in fp32, and rounded
scale          again. Not with 'unreduced'
sm_limit       'cuda': the most blocks the call uses at once; 0: the share of its lane
stream         'cuda': default the current stream of the arrays' framework

Returns the result; with row_values the pair (result, route_values), route_values float32 [N, K], 0 where a slot is masked
or its row was dropped. Rows past the plan's total are never read.
Host backends block, without the GIL, until the peers have taken part, for `deadline` seconds at most; 'cuda' does not
block.
Raises UsageError for arguments that do not fit; the peers' calls end with it too, unless the mistake is a bad
`lane` of an exchange with several. Raises BadSourceError for a damaged plan.)";

constexpr const char* kCombineParameters =
    "(self, outputs: ferry._typing.Array, plan: Plan, *, row_weights: ferry._typing.Array | None = "
    "None, "
    "topk_weights: ferry._typing.Array | None = None, reduction: typing.Literal['partial', 'exact', "
    "'unreduced'] | None = None, "
    "row_values: ferry._typing.Array | None = None, result: ferry._typing.Array | None = None, "
    "shared_outputs: ferry._typing.Array | None = None, residual: ferry._typing.Array | None = None, "
    "scale: float = 1.0, lane: int = 0, sm_limit: int = 0, stream: typing.Any | None = None) -> ";

}  // namespace

void bind_combine(nb::class_<PyExchange>& exchange) {
  const std::string parameters = kCombineParameters;
  define_call<PyCombineArguments, 2>(exchange, "combine", parameters + "typing.Any", kCombineDoc, combine);
  define_call<PyCombineArguments, 2>(
      exchange, "combine_send", parameters + "None",
      R"(The send phase of combine, with its arguments. `outputs` may be reused when it returns.

Raises UsageError for topk_weights with the reduction 'partial', which need a round trip of their own.)",
      combine_send);
  define_call<ReceiveArguments, 0>(exchange, "combine_receive",
                                   "(self, *, lane: int = 0, stream: typing.Any | None = None) -> typing.Any",
                                   R"(The receive phase of combine: returns what combine returns.

Arguments that do not fit raise UsageError after the phase.)",
                                   combine_receive);
  define_call<ValuesArguments, 2>(exchange, "route_values",
                                  "(self, values: ferry._typing.Array, plan: Plan, *, lane: int = 0, stream: "
                                  "typing.Any | None = None) -> typing.Any",
                                  "Sends one number a route, float32 [N, K], to the route's row: returns "
                                  "float32 [rows], 0 on padding. Collective.",
                                  route_values);
  define_call<ValuesArguments, 2>(
      exchange, "return_values",
      "(self, row_values: ferry._typing.Array, plan: Plan, *, lane: int = 0, stream: typing.Any | None = "
      "None) -> typing.Any",
      "Returns one number a row, float32 [rows], to the row's source rank: returns float32 [N, K], 0 where a "
      "slot is masked or its row was dropped. Collective.",
      return_values);
  define_call<BackwardArguments, 4>(
      exchange, "combine_backward",
      "(self, d_result: ferry._typing.Array, plan: Plan, topk_weights: ferry._typing.Array, "
      "outputs: ferry._typing.Array, *, format: str | None = None, lane: int = 0, sm_limit: int = 0, "
      "memory: ReceiveBuffers | None = None, stream: typing.Any | None = None) -> tuple[DispatchResult, "
      "typing.Any]",
      R"(Gradients of combine: the pair (DispatchResult, d_weights). Collective.

d_result [N, H] is dispatched by the plan and each row multiplied by its weight in topk_weights, float32 [N, K].
d_weights, float32 [N, K], holds the dot products of d_result with `outputs`, the rows that combine was given: dense, of
combine_type. They may not lie in the memory of the received rows, which this call writes. Other arguments as dispatch.)",
      combine_backward);
}

}  // namespace ferry::python
