// Runs the combines of normal mode.
#include "base/text.hpp"
#include "combine.hpp"
#include "deep_ep/normal.hpp"
#include "ferry/error.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

namespace {

std::vector<nb::object> biases_of(const nb::object& bias) {
  std::vector<nb::object> biases;
  if (nb::isinstance<nb::tuple>(bias) || nb::isinstance<nb::list>(bias)) {
    for (const nb::handle term : bias) {
      if (!term.is_none()) biases.push_back(nb::borrow(term));
    }
  } else if (!bias.is_none()) {
    biases.push_back(bias);
  }
  if (biases.size() > 2) throw UsageError(str("bias: expected at most two arrays, got ", biases.size()));
  return biases;
}

// Throws UsageError unless `count` is the number of rows that the dispatch of the handle has returned; with
// num_worst_tokens it may leave out some that were not received.
void check_count(const char* name, std::int64_t count, const NormalHandle& handle) {
  const std::int64_t needed = max_rows_touched(handle.plan);
  if (count >= needed && count <= handle.rows) return;
  throw UsageError(
      str(name, ": expected the ", counted(handle.rows, "row"), " that the dispatch of the handle returned",
          needed < handle.rows ? str(", or of these the first ", needed, " or more") : "", ", got ", count));
}

void read_rows(const nb::object& x, const NormalHandle& handle, std::int64_t hidden, CombineInput& in) {
  const Array& array = in.arguments.rows(x, "x", hidden, {kBf16});
  const StridedRows rows = strided_rows(array, "x");
  check_count("x", rows.count, handle);
  in.outputs = {array.data, DType::bf16, rows.stride, rows.count};
}

// Arrays that PyTorch or NumPy reads: shape and type alone matter.
const Array& check_operand(const nb::object& object, const std::string& name, Element element,
                           const Shape& shape, CombineInput& in) {
  const Array& array = in.arguments.add(object, name.c_str());
  bool same = array.shape.size() == shape.size();
  for (std::size_t i = 0; same && i < shape.size(); ++i) same = shape[i] < 0 || shape[i] == array.shape[i];
  if (array.element == element && same) return array;
  const std::string wanted = shape[0] < 0 ? str("[any, ", shape[1], "]") : shape_text(shape);
  throw UsageError(str(name, ": expected ", name_of(element), " of shape ", wanted, ", got ",
                       name_of(array.element), " of shape ", shape_text(array.shape)));
}

}  // namespace

nb::tuple NormalCalls::combine(const nb::object& x, const nb::object& object, const nb::object& topk_weights,
                               const nb::object& bias, const CallSettings& settings) {
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  const NormalHandle& handle = handle_of(object, Operation::combine);
  const Config& config = handle.exchange->config();
  const Framework framework = handle.plan.framework;
  std::optional<StreamedCall> streamed;
  CombineInput in(handle.plan.device, Gradients::recorded);
  std::vector<nb::object> biases;
  {
    LaneCall call(*handle.exchange, 0);
    call.set_stream(stream_of(nb::none(), framework, call.device()));
    call.read_or_refuse({Operation::combine}, [&] {
      timer.emplace(HostPart::streams);
      streamed.emplace(streams(), framework, handle.plan.device, event_of(settings.previous_event),
                       settings.is_async());
      call.set_stream(streamed->stream());
      timer.emplace(HostPart::arguments);
      const int num_sms = settings.checked();
      in.options.sm_limit = is_host(call.device()) ? 0 : num_sms;
      read_rows(x, handle, config.hidden, in);
      require_rdma_bytes(settings, 2 * std::int64_t{config.hidden}, 0,
                         topk_weights.is_none() ? 0 : config.top_k);
      const Shape shape = {handle.plan.tokens, config.hidden};
      biases = biases_of(bias);
      for (std::size_t i = 0; i < biases.size(); ++i)
        check_operand(biases[i], str("bias[", i, "]"), kBf16, shape, in);
      if (!topk_weights.is_none()) {
        check_count("topk_weights",
                    check_operand(topk_weights, "topk_weights", kFp32, {-1, config.top_k}, in).shape[0],
                    handle);
      }
      const PartTimer allocating(HostPart::allocation);
      in.result_array = new_array(framework, biases.empty() ? kBf16 : kFp32, shape, call.device());
      read_result(shape, "result", in);
    });
    timer.emplace(HostPart::exchange);
    try {
      run("meet_in_combine", [&] {
        call.exchange().combine(in.outputs, handle.plan.plan, in.result, in.options, call.stream());
      });
    } catch (const Error& error) {
      // The peers' calls go on.
      if (LaneCall::delivers_result(error) && !topk_weights.is_none())
        python_.attr("combined_weights")(object, topk_weights);
      throw;
    }
  }
  timer.emplace(HostPart::results);
  nb::object result = in.result_array, weights = nb::none();
  std::vector<nb::object> inputs = in.arguments.owners(), outputs = {in.result_array};
  inputs.push_back(handle.plan.owner);
  if (!biases.empty()) {
    static CachedAttribute with_biases;
    result = with_biases.get("ferry.deep_ep._normal", "with_biases")(result, biases);
    outputs.push_back(result);
  }
  if (!topk_weights.is_none()) {
    weights = python_.attr("combined_weights")(object, topk_weights);
    outputs.push_back(weights);
  }
  timer.emplace(HostPart::streams);
  nb::object event = streamed->finish(std::move(inputs), outputs);
  return nb::make_tuple(std::move(result), std::move(weights), std::move(event));
}

}  // namespace ferry::python
