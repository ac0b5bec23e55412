// What the registered operators of ferry.torch do with tensors, each in one call from Python: whole
// capacities in memory of their own, for autograd keeps what they return as long as it likes.
#include <cstring>

#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "combine.hpp"
#include "dispatch.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

void require_differentiable(const Config& config) {
  const FormatKind kind = config.format.kind;
  const bool values = kind == FormatKind::bf16 || kind == FormatKind::fp16 || kind == FormatKind::fp32;
  const bool sums = config.reduction != Reduction::unreduced;
  if (values && sums && config.layout != Layout::rank_major) return;
  throw UsageError(str(
      "ferry.torch: layout 'expert_major' or 'expert_padded', format bf16, fp16 or fp32 and a reduction that "
      "adds are needed, the exchange has ",
      to_string(config.layout), ", ", to_string(config.format), " and ", to_string(config.reduction)));
}

Element values_of(const Format& format) {
  return format.kind == FormatKind::bf16 ? kBf16 : format.kind == FormatKind::fp16 ? kFp16 : kFp32;
}

nb::object with_type(const nb::object& tensor, Element element) {
  if (look_at(tensor, "tensor").element == element) return tensor;
  return tensor.attr("to")(type_object(Framework::torch, element));
}

void require_tensors(const Arguments& arguments, const char* operation) {
  if (arguments.framework() == Framework::torch) return;
  throw UsageError(str("ferry.torch.", operation, ": expected tensors of PyTorch, got arrays of ",
                       to_string(arguments.framework())));
}

void clear_memory(const Memory& first, const Memory& second, Device where, Stream stream) {
  if (!is_host(where)) return clear_on_device(first, second, stream.handle);
  for (const Memory& memory : {first, second}) {
    if (memory.bytes > 0) std::memset(memory.data, 0, static_cast<std::size_t>(memory.bytes));
  }
}

template <class T>
nb::object make(const NewTensors& tensors, Element element, const Shape& shape, T*& data) {
  void* memory = nullptr;
  nb::object made = tensors.make(element, shape, memory);
  data = static_cast<T*>(memory);
  return made;
}

// What a dispatch hands out, all of it in tensors of its own.
class NewRows {
 public:
  NewRows(const PyExchange& self, Element element)
      : sizes_(self.sizes_of_rows()), where_(self.state().where) {
    const std::int64_t rows = sizes_.rows;
    const NewTensors tensors(where_);
    memory.parts = make(tensors, element, sizes_.shape, to.parts[0]);
    memory.weight = make(tensors, kFp32, {rows}, to.weight);
    memory.counts = make(tensors, kInt32, {sizes_.groups}, to.counts);
    memory.row_offsets = make(tensors, kInt32, {sizes_.groups + 1}, to.row_offsets);
    memory.plan = make(tensors, kByte, {sizes_.plan_bytes}, to.plan);
    data_bytes_ = rows * sizes_.shape.back() * element.bits / 8;
  }

  // Rows past the last are zero and not undefined: products with a gradient of zero stay zero.
  void clear_rows(Stream stream) const {
    clear_memory({to.parts[0], data_bytes_}, {to.weight, sizes_.rows * 4}, where_, stream);
  }

  nb::tuple all() const {
    return nb::make_tuple(memory.parts, memory.weight, memory.counts, memory.row_offsets, memory.plan);
  }

  PyMemory memory;
  ReceiveBuffers to;

 private:
  const RowSizes& sizes_;
  Device where_;
  std::int64_t data_bytes_ = 0;
};

nb::tuple dispatch_rows(PyExchange& self, const nb::object& x, const nb::object& ids,
                        const nb::object& weights, int lane) {
  require_differentiable(self.config());
  const DispatchArguments given{.tokens = x, .ids = ids, .weights = weights, .lane = lane};
  InCall call(self, lane);
  DispatchInput in(call.where(), Gradients::recorded);
  std::optional<NewRows> made;
  call.or_refuse({Operation::dispatch}, [&] {
    read_dispatch(self, call, given, in);
    require_tensors(in.arguments, "dispatch");
    made.emplace(self, in.elements[0]);
  });
  in.context.memory = made->memory;
  in.options.memory = made->to;
  begin_dispatch(self, in);
  {
    const nb::gil_scoped_release unlocked;
    made->clear_rows(call.stream());
    call.bring(
        [&] { return call.exchange().dispatch(in.tokens, in.ids, in.weights, in.options, call.stream()); });
  }
  return made->all();
}

PyPlan plan_of_rows(const PyExchange& self, const nb::object& storage, std::int64_t tokens,
                    std::int64_t rows) {
  PyPlan plan = plan_over(self, storage, tokens);
  plan.most_rows = rows;
  return plan;
}

// Backward of combine: (d_result by the plan, its products with `outputs` or nothing), zero where no row is.
// Combine takes outputs of any type, for results of that type: here they get those that the exchange carries.
nb::tuple gradient_rows(PyExchange& self, const nb::object& d_result, const nb::object& outputs,
                        const nb::object& storage, std::int64_t rows, int lane) {
  InCall call(self, lane);
  DispatchArguments given{.tokens = d_result, .lane = lane};
  DispatchInput in(call.where(), Gradients::recorded);
  const RowSizes& sizes = self.sizes_of_rows();
  PyMemory memory;
  ReceiveBuffers to;
  call.or_refuse({Operation::dispatch}, [&] {
    const Config& config = self.config();
    given.tokens = with_type(d_result, values_of(config.format));
    if (!outputs.is_none()) given.dot_rows = with_type(outputs, element_of(config.combine_type));
    const Shape shape = look_at(d_result, "tokens").shape;
    given.ids = nb::cast(plan_of_rows(self, storage, shape.empty() ? -1 : shape[0], rows));
    read_dispatch(self, call, given, in);
    const NewTensors tensors(call.where());
    memory.parts = make(tensors, in.elements[0], sizes.shape, to.parts[0]);
    if (!outputs.is_none()) memory.dots = make(tensors, kFp32, {sizes.rows}, to.dots);
  });
  in.context.memory = memory;
  in.options.memory = to;
  begin_dispatch(self, in);
  {
    const nb::gil_scoped_release unlocked;
    const std::int64_t row_bytes = sizes.shape.back() * in.elements[0].bits / 8;
    const Memory dots = {to.dots, to.dots == nullptr ? 0 : sizes.rows * 4};
    clear_memory({to.parts[0], sizes.rows * row_bytes}, dots, call.where(), call.stream());
    call.bring(
        [&] { return call.exchange().dispatch(in.tokens, in.plan, nullptr, in.options, call.stream()); });
  }
  return nb::make_tuple(memory.parts, memory.dots);
}

// The caller's word is that there are no more rows than `outputs` has.
nb::object combine_rows(PyExchange& self, const nb::object& outputs, const nb::object& weights,
                        const nb::object& storage, std::int64_t tokens, int lane,
                        const nb::object& row_values) {
  require_differentiable(self.config());
  InCall call(self, lane);
  CombineInput in(call.where(), Gradients::recorded);
  CombineArguments given{.outputs = outputs, .row_weights = weights, .row_values = row_values, .lane = lane};
  call.or_refuse({Operation::combine}, [&] {
    std::int64_t elements = 1;
    for (const std::int64_t length : look_at(outputs, "outputs").shape) elements *= length;
    given.plan = nb::cast(plan_of_rows(self, storage, tokens, elements / self.config().hidden));
    read_combine(self, call, given, in);
    require_tensors(in.arguments, "combine");
  });
  {
    const nb::gil_scoped_release unlocked;
    call.exchange().combine(in.outputs, in.plan->plan, in.result, in.options, call.stream());
  }
  return given_back(in);
}

}  // namespace

void bind_operators(nb::module_& module) {
  const PlanView view = view_plan(nullptr, {});
  module.attr("_SOURCES_AT") = reinterpret_cast<std::uintptr_t>(view.sources);
  module.def("_dispatch_rows", &dispatch_rows, "exchange"_a, "x"_a, "ids"_a, "weights"_a.none(), "lane"_a,
             "Of ferry.torch: (data, weight, counts, row_offsets, plan), tensors of their own.");
  module.def("_gradient_rows", &gradient_rows, "exchange"_a, "d_result"_a, "outputs"_a.none(), "plan"_a,
             "rows"_a, "lane"_a, "Of ferry.torch: (rows of d_result, their products with outputs or None).");
  module.def("_combine_rows", &combine_rows, "exchange"_a, "outputs"_a, "weights"_a.none(), "plan"_a,
             "tokens"_a, "lane"_a, "row_values"_a = nb::none(),
             "Of ferry.torch: what Exchange.combine returns, for a plan's storage.");
}

}  // namespace ferry::python
