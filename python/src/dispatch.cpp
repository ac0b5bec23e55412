// Runs dispatch, fused and in two phases, and binds it.
#include "dispatch.hpp"
#include "casters.hpp"

#include "base/text.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

using namespace nb::literals;

void record_dispatch(PyExchange& self, const DispatchInput& in) {
  const int lane = in.context.lane;
  self.set_framework(in.context.framework);
  self.context(lane) = in.context;
  if (!in.plan.empty()) return;
  if (in.context.memory.plan.is_none()) {
    ++self.state().lanes[static_cast<std::size_t>(lane)].plan_version;
  } else {
    count_write(in.options.memory.plan);
  }
}

namespace {

PyDispatchResult dispatch(PyExchange& self, LaneCall& call, const PyDispatchArguments& given) {
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  DispatchInput in(call.device());
  call.read_or_refuse({Operation::dispatch}, [&] { read_dispatch(self, call, given, in); });
  timer.emplace(HostPart::exchange);
  const DispatchResult received = run_dispatch(self, call, in, [&] {
    return in.plan.empty()
               ? call.exchange().dispatch(in.tokens, in.ids, in.weights, in.options, call.stream())
               : call.exchange().dispatch(in.tokens, in.plan, in.weights, in.options, call.stream());
  });
  timer.emplace(HostPart::results);
  return self.make_result(given.lane, received);
}

void dispatch_send(PyExchange& self, LaneCall& call, const PyDispatchArguments& given) {
  DispatchInput in(call.device());
  call.read_or_refuse({Operation::dispatch}, [&] { read_dispatch(self, call, given, in); });
  run_dispatch(self, call, in, [&] {
    if (in.plan.empty()) {
      call.exchange().dispatch_send(in.tokens, in.ids, in.weights, in.options, call.stream());
    } else {
      call.exchange().dispatch_send(in.tokens, in.plan, in.weights, in.options, call.stream());
    }
    return DispatchResult{};
  });
  self.pending(given.lane).owners = in.arguments.owners();
}

PyDispatchResult dispatch_receive(PyExchange& self, const nb::args& surplus, const nb::object& given_lane,
                                  const nb::object& stream, const nb::kwargs& unknown) {
  LaneCall call(self, {Operation::dispatch}, {"dispatch_receive", given_lane, surplus, unknown, true});
  const int lane = call.lane();
  call.read_or_refuse({Operation::dispatch}, [&] {
    call.set_stream(stream_of(stream, self.context(lane).framework, call.device()));
  });
  DispatchResult received;
  {
    const GilRelease unlocked;
    received = call.exchange().dispatch_receive(lane, call.stream());
  }
  self.pending(lane) = {};
  return self.make_result(lane, received);
}

constexpr const char* kDispatchDoc =
    R"(Sends every token to the ranks of its experts; returns the received rows, grouped by expert. Collective.

tokens         [N, H] of bfloat16, float16 or float32. The step from row to row may be larger than H, in multiples of
               16 bytes. For raw formats a tuple of up to four arrays [N, ...], whose bytes are moved unchanged
ids            int32 or int64 [N, K], C-contiguous; -1 masks a slot. Or a Plan: its routes are used again
weights        float32 [N, K], C-contiguous: router weights, sent with the rows; on every rank or on none, also with N = 0
format         of this call, see Config; default: the exchange's
memory         ReceiveBuffers for the result; default: the lane's own memory
apply_weights  multiply the received values by their weight
global_scale   format 'nvfp4': g, a number or float32 [1], the same on all ranks; on GPUs an array there; default
               1. Values are element * scale * g
input_scales   formats 'fp8', 'mxfp8' and 'nvfp4': float32 [E + S] where the tokens lie, a scale of each expert, shared
               ones last. Tokens travel as they are; each rank encodes the rows it receives with its experts' scales
dot_rows       [rows, H] of combine_type: result.dots[row] = dot(token, dot_rows[row]), before apply_weights
count          'cuda': int32 [1] in device memory, N as read when the call runs; the rows of `tokens` bound it
sm_limit       'cuda': the most blocks the call uses at once; 0: no limit
stream         'cuda': default the current stream of the arrays' framework

Host backends block, without the GIL, until the peers have taken part, for `deadline` seconds at most; 'cuda' does not
block.
Raises UsageError for arguments that do not fit; the peers' calls end with it too, unless the mistake is a bad
`lane` of an exchange with several, or a `global_scale` or a scale of `input_scales` with which a block cannot be encoded. Raises BadIdError for
ids out of range and OverflowError for rows past the capacity, which are dropped: both after the call, whose result
last_dispatch_result() then returns.)";

constexpr const char* kDispatchParameters =
    "(self, tokens: ferry._typing.Array | Sequence[ferry._typing.Array], ids: ferry._typing.Array | Plan, "
    "weights: ferry._typing.Array | None = None, *, "
    "format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, "
    "apply_weights: bool = False, dot_rows: ferry._typing.Array | None = None, count: ferry._typing.Array | "
    "None = None, global_scale: float | ferry._typing.Array | None = None, "
    "input_scales: ferry._typing.Array | None = None, "
    "stream: typing.Any | None = None) -> ";

template <class Function>
void define_dispatch(nb::class_<PyExchange>& exchange, const char* name, const char* returned,
                     const char* doc, const Function& function) {
  exchange.def(
      name,
      [function, name](PyExchange& self, nb::object tokens, nb::object ids, nb::object weights,
                       const nb::args& surplus, nb::object format, const nb::object& lane,
                       nb::object sm_limit, nb::object memory, nb::object apply_weights, nb::object dot_rows,
                       nb::object count, nb::object global_scale, nb::object input_scales, nb::object stream,
                       const nb::kwargs& unknown) {
        LaneCall call(self, {Operation::dispatch}, {name, lane, surplus, unknown});
        return function(self, call,
                        {.tokens = std::move(tokens),
                         .ids = std::move(ids),
                         .weights = std::move(weights),
                         .format = std::move(format),
                         .lane = call.lane(),
                         .sm_limit = std::move(sm_limit),
                         .memory = std::move(memory),
                         .apply_weights = std::move(apply_weights),
                         .dot_rows = std::move(dot_rows),
                         .count = std::move(count),
                         .global_scale = std::move(global_scale),
                         .input_scales = std::move(input_scales),
                         .stream = std::move(stream)});
      },
      "tokens"_a = nb::none(), "ids"_a = nb::none(), "weights"_a = nb::none(), "surplus"_a,
      "format"_a = nb::none(), nb::arg("lane").none() = 0, nb::arg("sm_limit").none() = 0,
      "memory"_a = nb::none(), nb::arg("apply_weights").none() = false, "dot_rows"_a = nb::none(),
      "count"_a = nb::none(), "global_scale"_a = nb::none(), "input_scales"_a = nb::none(),
      "stream"_a = nb::none(), "unknown"_a, doc,
      nb::sig(str("def ", name, kDispatchParameters, returned).c_str()));
}

}  // namespace

void bind_dispatch(nb::class_<PyExchange>& exchange) {
  define_dispatch(exchange, "dispatch", "DispatchResult", kDispatchDoc, dispatch);
  define_dispatch(exchange, "dispatch_send", "None",
                  "The send phase of dispatch, with its arguments, which may be reused when it returns. Does "
                  "not wait for peers.",
                  dispatch_send);
  exchange.def(
      "dispatch_receive", &dispatch_receive, "surplus"_a, nb::arg("lane").none() = 0, "stream"_a = nb::none(),
      "unknown"_a,
      R"(The receive phase of dispatch: returns its result. May run in another thread or on another stream.

Arguments that do not fit raise UsageError after the phase; last_dispatch_result() then returns its result.)",
      nb::sig("def dispatch_receive(self, *, lane: int = 0, stream: typing.Any | None = None) -> "
              "DispatchResult"));
}

}  // namespace ferry::python
