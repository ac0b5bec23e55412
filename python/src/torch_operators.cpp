// The kernels of the operators that ferry.torch registers, each one call from Python. They return
// whole-capacity tensors in memory of their own, because autograd may keep them for any length of time.
#include <cstring>

#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "combine.hpp"
#include "dispatch.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "interpreter.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

void require_differentiable(const Config& config) {
  const bool sums = config.reduction != Reduction::unreduced;
  if (config.format.value_type() && sums && has_route_rows(config.layout)) return;
  throw UsageError(str(
      "ferry.torch: needs layout 'expert_major' or 'expert_padded', format bf16, fp16 or fp32, and reduction "
      "'partial' or 'exact'; the exchange has ",
      to_string(config.layout), ", ", to_string(config.format), " and ", to_string(config.reduction)));
}

Element value_element_of(const Format& format) {
  const DType type = format.value_type().value();
  return type == DType::bf16 ? kBf16 : type == DType::fp16 ? kFp16 : kFp32;
}

nb::object converted_to(const nb::object& tensor, Element element) {
  if (inspect(tensor, "tensor").element == element) return tensor;
  return tensor.attr("to")(type_object(Framework::torch, element));
}

// A contiguous tensor with the values of `given`; other objects as they are, which are refused later.
nb::object contiguous(const nb::object& given) {
  return framework_of(given) == Framework::torch ? given.attr("contiguous")() : given;
}

void require_tensors(const Arguments& arguments, const char* operation) {
  if (arguments.framework() == Framework::torch) return;
  throw UsageError(str("ferry.torch.", operation, ": expected tensors of PyTorch, got arrays of ",
                       to_string(arguments.framework())));
}

void clear_memory(const DeviceRange& first, const DeviceRange& second, Device device, Stream stream) {
  if (!is_host(device)) return clear_on_device(first, second, stream.handle);
  for (const DeviceRange& memory : {first, second}) {
    if (memory.bytes > 0) std::memset(memory.data, 0, static_cast<std::size_t>(memory.bytes));
  }
}

// The tensors that the dispatch operator returns: receive buffers allocated for this call alone.
class OperatorOutputs {
 public:
  OperatorOutputs(const PyExchange& self, Element element)
      : sizes_(self.receive_sizes()), device_(self.state().device) {
    const std::int64_t rows = sizes_.rows;
    const NewArrays tensors(Framework::torch, device_);
    memory.parts = tensors.make({element, sizes_.shape}, buffers.parts[0]);
    memory.weight = tensors.make(sizes_.weight, buffers.weight);
    memory.counts = tensors.make(sizes_.counts, buffers.counts);
    memory.row_offsets = tensors.make(sizes_.row_offsets, buffers.row_offsets);
    memory.plan = tensors.make(sizes_.plan, buffers.plan);
    data_bytes_ = rows * sizes_.shape.back() * element.bits / 8;
  }

  // Rows past the total must be zero, not undefined: times a zero gradient they must give zero, not NaN.
  void clear_rows(Stream stream) const {
    clear_memory({buffers.parts[0], data_bytes_}, {buffers.weight, sizes_.rows * 4}, device_, stream);
  }

  nb::tuple all() const {
    return nb::make_tuple(memory.parts, memory.weight, memory.counts, memory.row_offsets, memory.plan);
  }

  PyReceiveBuffers memory;  // the tensors
  ReceiveBuffers buffers;   // pointers to their data

 private:
  const ReceiveSizes& sizes_;
  Device device_;
  std::int64_t data_bytes_ = 0;
};

nb::tuple operator_dispatch(PyExchange& self, const nb::object& x, const nb::object& ids,
                            const nb::object& weights, const nb::object& lane) {
  require_differentiable(self.config());
  LaneCall call(self, {Operation::dispatch}, lane);
  const PyDispatchArguments given{.tokens = x, .ids = ids, .weights = weights};
  DispatchInput in(call.device(), Gradients::recorded);
  std::optional<OperatorOutputs> outputs;
  call.read_or_refuse({Operation::dispatch}, [&] {
    read_dispatch(self, call, given, in, {.tokens = "x"});
    require_tensors(in.arguments, "dispatch");
    outputs.emplace(self, in.elements[0]);
  });
  in.context.memory = outputs->memory;
  in.options.memory = outputs->buffers;
  run_dispatch(self, call, in, [&] {
    outputs->clear_rows(call.stream());
    return call.exchange().dispatch(in.tokens, in.ids, in.weights, in.options);
  });
  return outputs->all();
}

PyPlan plan_with_bound(const PyExchange& self, const nb::object& storage, std::int64_t tokens,
                       std::int64_t rows) {
  PyPlan plan = plan_over(self, storage, tokens);
  plan.row_bound = rows;
  return plan;
}

// Backward of combine: (d_result dispatched by the plan, its dot products with `outputs` or None), zero past
// the total. Combine accepts outputs of any type; here they are converted to the types the exchange sends.
nb::tuple operator_combine_backward(PyExchange& self, const nb::object& d_result, const nb::object& outputs,
                                    const nb::object& storage, std::int64_t rows, const nb::object& lane) {
  LaneCall call(self, {Operation::dispatch}, lane);
  PyDispatchArguments given{.tokens = d_result};
  DispatchInput in(call.device(), Gradients::recorded);
  const ReceiveSizes& sizes = self.receive_sizes();
  PyReceiveBuffers memory;
  ReceiveBuffers buffers;
  call.read_or_refuse({Operation::dispatch}, [&] {
    const Config& config = self.config();
    given.tokens = contiguous(converted_to(d_result, value_element_of(config.format)));
    if (!outputs.is_none())
      given.dot_rows = contiguous(converted_to(outputs, element_of(config.combine_type)));
    const Shape shape = inspect(d_result, "tokens").shape;
    given.ids = nb::cast(plan_with_bound(self, storage, shape.empty() ? -1 : shape[0], rows));
    read_dispatch(self, call, given, in, {.tokens = "gradient of the result"});
    const NewArrays tensors(Framework::torch, call.device());
    memory.parts = tensors.make({in.elements[0], sizes.shape}, buffers.parts[0]);
    if (!outputs.is_none()) memory.dots = tensors.make(sizes.weight, buffers.dots);
  });
  in.context.memory = memory;
  in.options.memory = buffers;
  run_dispatch(self, call, in, [&] {
    const std::int64_t row_bytes = sizes.shape.back() * in.elements[0].bits / 8;
    const DeviceRange dots = {buffers.dots, buffers.dots == nullptr ? 0 : sizes.rows * 4};
    clear_memory({buffers.parts[0], sizes.rows * row_bytes}, dots, call.device(), call.stream());
    return call.exchange().dispatch(in.tokens, in.plan, nullptr, in.options);
  });
  return nb::make_tuple(memory.parts, memory.dots);
}

// The caller asserts that the plan has no more rows than `outputs`.
nb::object operator_combine(PyExchange& self, const nb::object& outputs, const nb::object& row_weights,
                            const nb::object& storage, std::int64_t tokens, const nb::object& lane,
                            const nb::object& row_values) {
  require_differentiable(self.config());
  LaneCall call(self, {Operation::combine}, lane);
  CombineInput in(call.device(), Gradients::recorded);
  PyCombineArguments given{.outputs = outputs};
  PyPlan plan;
  call.read_or_refuse({Operation::combine}, [&] {
    given.outputs = contiguous(outputs);
    given.row_weights = contiguous(row_weights);
    given.row_values = contiguous(row_values);
    std::int64_t elements = 1;
    for (const std::int64_t length : inspect(outputs, "outputs").shape) elements *= length;
    plan = plan_with_bound(self, storage, tokens, elements / self.config().hidden);
    plan.checked();
    read_combine(self, call, given, plan, in);
    require_tensors(in.arguments, "combine");
  });
  {
    const GilRelease unlocked;
    call.exchange().combine(in.outputs, in.plan->plan, in.result, in.options);
  }
  return combine_return_value(in);
}

// An attribute of tensors that is true or false.
class TensorFlag {
 public:
  explicit TensorFlag(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  bool of(const nb::object& tensor) const {
    const nb::object value = nb::steal(PyObject_GetAttr(tensor.ptr(), name_));
    if (!value.is_valid()) throw nb::python_error();
    return value.ptr() == Py_True;
  }

 private:
  PyObject* name_;
};

// Whether a kernel may be called directly with this tensor or None: a tensor of no subclass, on the host or a
// GPU.
bool is_plain(const nb::object& tensor) {
  if (tensor.is_none()) return true;
  static CachedAttribute type;
  if (type.get("torch", "Tensor").ptr() != reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()))) return false;
  static const TensorFlag is_cuda("is_cuda"), is_cpu("is_cpu");
  return is_cuda.of(tensor) || is_cpu.of(tensor);
}

bool needs_gradient(const nb::object& first, const nb::object& second) {
  static const TensorFlag requires_grad("requires_grad");
  return (requires_grad.of(first) || (!second.is_none() && requires_grad.of(second))) &&
         gradients_are_recorded();
}

// Whether no mode, transform, tracer or profiler observes operators. The way through PyTorch's dispatcher
// leads through several layers of Python, which take longer than the kernel's host work.
bool is_unobserved() {
  static CachedAttribute dispatch_modes, function_modes, level, tracer, profiler;
  return nb::cast<int>(dispatch_modes.get("torch._C", "_len_torch_dispatch_stack")()) == 0 &&
         nb::cast<int>(function_modes.get("torch._C", "_len_torch_function_stack")()) == 0 &&
         level.get("torch._C._functorch", "maybe_current_level")().is_none() &&
         tracer.get("torch._C", "_get_tracing_state")().is_none() &&
         !nb::cast<bool>(profiler.get("torch.autograd", "_profiler_enabled")());
}

// The exchange itself or that of a handle.
nb::object exchange_object(const nb::object& exchange_or_handle) {
  if (nb::isinstance<PyExchange>(exchange_or_handle)) return exchange_or_handle;
  static CachedAttribute exchange_of, handle_of;
  constexpr const char* kModule = "ferry.torch._registry";
  if (PyLong_Check(exchange_or_handle.ptr()) == 0)
    handle_of.get(kModule, "handle_of")(exchange_or_handle);  // throws
  return exchange_of.get(kModule, "exchange_of")(exchange_or_handle);
}

// The dispatch of ferry.torch, (data, weight, counts, row_offsets, plan, N), where nothing observes it and no
// gradient is recorded; else None.
nb::object direct_dispatch(const nb::object& exchange, const nb::object& x, const nb::object& ids,
                           const nb::object& weights, const nb::object& lane) {
  if (x.is_none() || ids.is_none() || !is_plain(x) || !is_plain(ids) || !is_plain(weights) ||
      needs_gradient(x, weights) || !is_unobserved())
    return nb::none();
  const nb::object used = exchange_object(exchange);
  const nb::tuple made = operator_dispatch(nb::cast<PyExchange&>(used), x, ids, weights, lane);
  return nb::make_tuple(made[0], made[1], made[2], made[3], made[4], inspect(x, "x").shape[0]);
}

// The combine of ferry.torch, under the same conditions.
nb::object direct_combine(const nb::object& exchange, const nb::object& outputs,
                          const nb::object& row_weights, const nb::object& plan, std::int64_t tokens,
                          const nb::object& lane) {
  if (outputs.is_none() || !is_plain(outputs) || !is_plain(row_weights) || !is_plain(plan) ||
      needs_gradient(outputs, row_weights) || !is_unobserved())
    return nb::none();
  const nb::object used = exchange_object(exchange);
  return operator_combine(nb::cast<PyExchange&>(used), outputs, row_weights, plan, tokens, lane, nb::none());
}

// The experts of the groups of a lane's dispatches, in the lane's memory, which keeps them for good.
nb::object group_expert(const PyExchange& self, int lane) {
  const ExchangeState& state = self.state();
  const DispatchResult& last = state.exchange.last_dispatch_result(lane);
  static constexpr std::int32_t kNone = 0;
  const std::int32_t* const experts = last.groups == 0 ? &kNone : last.group_expert;
  return view_of(Framework::torch, const_cast<std::int32_t*>(experts), kInt32, {last.groups}, {},
                 state.device, owner_of(self.shared()));
}

}  // namespace

void bind_operators(nb::module_& module) {
  const PlanView view = view_plan(nullptr, {});
  module.attr("_PLAN_SOURCES_OFFSET") = reinterpret_cast<std::uintptr_t>(view.sources);
  module.def("_is_unobserved", &is_unobserved,
             "For ferry.torch: whether nothing observes operators, so that a kernel may be called directly.");
  define_unnamed(module, "_direct_dispatch", &direct_dispatch,
                 "For ferry.torch: dispatch, if nothing observes it and no gradient is recorded; else None.");
  define_unnamed(module, "_direct_combine", &direct_combine,
                 "For ferry.torch: combine, under the same conditions.");
  define_unnamed(module, "_group_expert", &group_expert,
                 "For ferry.torch: int32 [G], the expert of each group of the lane's dispatches.");
  define_unnamed(module, "_operator_dispatch", &operator_dispatch,
                 "For ferry.torch: dispatch into new tensors (data, weight, counts, row_offsets, plan).");
  define_unnamed(
      module, "_operator_combine_backward", &operator_combine_backward,
      "For ferry.torch: (d_result dispatched to its rows, their dot products with outputs or None).");
  define_unnamed(module, "_operator_combine", &operator_combine,
                 "For ferry.torch: Exchange.combine by a plan's storage.");
}

}  // namespace ferry::python
