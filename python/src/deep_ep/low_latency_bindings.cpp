// Binds the low-latency calls of ferry.deep_ep.
#include "bindings.hpp"
#include "deep_ep/arguments.hpp"
#include "deep_ep/low_latency.hpp"
#include "ferry/error.hpp"
#include "host_parts.hpp"

namespace ferry::python {

using namespace nb::literals;

void LowLatencyCalls::require_open() const {
  if (closed_) throw UsageError("Buffer: used after destroy()");
}

std::shared_ptr<LowLatencyPool> LowLatencyCalls::pool_of(const LowLatencyShape& shape) {
  for (const auto& pool : pools_->all) {
    if (pool->shape == shape) return pool;
  }
  return pools_->all.emplace_back(std::make_shared<LowLatencyPool>(shape));
}

void LowLatencyCalls::refuse(Operation operation, const nb::object& error) {
  if (last_ && last_->may_acquire()) {
    LaneCall call(*pools_->acquire(*last_).exchange, 0);
    call.set_stream(
        stream_of(nb::none(), last_->shape.on_device ? Framework::torch : Framework::numpy, call.device()));
    call.read_or_refuse({operation}, [&] { raise(error); });
  } else if (!last_ && operation == Operation::dispatch) {
    // The peers' hosts gather their arguments. Before the first dispatch no rank has a handle to combine.
    python_.attr("refuse_first_low_latency")(error);
  }
  raise(error);
}

nb::object LowLatencyCalls::finish(Device device, Stream stream, Stream current, bool async_finish,
                                   std::vector<nb::object> used) {
  if (!async_finish) return event_overlap(nb::none());
  const PartTimer timer(HostPart::streams);
  return streams().end(device, stream, current, std::move(used));
}

namespace {

// An element of (src_info, layout_range, M, H, E).
nb::object low_latency_element(const nb::object& self, Py_ssize_t index) {
  auto& handle = nb::cast<LowLatencyHandle&>(self);
  const LowLatencyShape& shape = handle.pool->shape;
  if (index == 2) return nb::int_(shape.max_tokens);
  if (index == 3) return nb::int_(shape.hidden);
  if (index == 4) return nb::int_(shape.experts);
  nb::object& made = handle.elements[index];
  if (made.is_valid()) return made;
  handle.require_received();
  static CachedAttribute src_info, layout_range;
  constexpr const char* kModule = "ferry.deep_ep._low_latency";
  made =
      index == 0 ? src_info.get(kModule, "src_info")(self) : layout_range.get(kModule, "layout_range")(self);
  return made;
}

nb::object low_latency_item(const nb::object& self, const nb::object& index) {
  return item_of(index, 5, [&](Py_ssize_t at) { return low_latency_element(self, at); });
}

constexpr const char* kDispatchSignature =
    "def dispatch(self, x: typing.Any, topk_idx: typing.Any, max_tokens: typing.Any, experts: typing.Any, "
    "stats: typing.Any, use_fp8: typing.Any, round_scale: typing.Any, use_ue8m0: typing.Any, "
    "use_nvfp4: typing.Any, x_global_scale: typing.Any, use_ue8m0_for_sf: typing.Any, async_finish: "
    "typing.Any, hooked: typing.Any) -> tuple";
constexpr const char* kCombineSignature =
    "def combine(self, x: typing.Any, topk_idx: typing.Any, topk_weights: typing.Any, handle: typing.Any, "
    "use_logfmt: typing.Any, zero_copy: typing.Any, async_finish: typing.Any, hooked: typing.Any, "
    "out: typing.Any) -> tuple";

}  // namespace

void bind_low_latency(nb::module_& module) {
  nb::class_<LowLatencyHandle>(
      module, "LowLatencyHandle",
      "(src_info, layout_range, M, H, E) of a low-latency dispatch; the first two are computed on first "
      "access.")
      .def("__len__", [](const LowLatencyHandle&) { return 5; })
      .def("__getitem__", &low_latency_item, "index"_a,
           nb::sig("def __getitem__(self, index: typing.Any) -> typing.Any"))
      .def_ro("exchange", &LowLatencyHandle::exchange, "The Exchange that the dispatch used.",
              nb::sig("def exchange(self) -> Exchange"))
      .def_ro("plan", &LowLatencyHandle::plan, "The Plan of the dispatch.")
      .def_prop_ro(
          "shape",
          [](const LowLatencyHandle& self) {
            return nb::make_tuple(self.pool->local_experts, self.pool->capacity);
          },
          "(L, R*M).", nb::sig("def shape(self) -> tuple[int, int]"));
  nb::class_<ReceiveHook>(
      module, "ReceiveHook",
      "Runs the receive phase of a low-latency call, once, on the stream that was current "
      "when the call was made.")
      .def("__call__", &ReceiveHook::call);
  nb::class_<LowLatencyCalls>(module, "_LowLatencyCalls",
                              "For ferry.deep_ep: the low-latency calls of a Buffer.")
      .def(nb::init<nb::object, nb::object>(), "streams"_a, "exchanges"_a)
      .def(
          "dispatch",
          [](LowLatencyCalls& self, const nb::object& x, const nb::object& topk_idx,
             const nb::object& max_tokens, const nb::object& experts, const nb::object& stats,
             const nb::object& use_fp8, const nb::object& round_scale, const nb::object& use_ue8m0,
             const nb::object& use_nvfp4, const nb::object& x_global_scale,
             const nb::object& use_ue8m0_for_sf, const nb::object& async_finish, const nb::object& hooked) {
            return self.dispatch(
                x, topk_idx, max_tokens, experts, stats,
                {use_fp8, round_scale, use_ue8m0, use_nvfp4, x_global_scale, use_ue8m0_for_sf}, async_finish,
                hooked);
          },
          "x"_a.none(), "topk_idx"_a.none(), "max_tokens"_a.none(), "experts"_a.none(), "stats"_a.none(),
          "use_fp8"_a.none(), "round_scale"_a.none(), "use_ue8m0"_a.none(), "use_nvfp4"_a.none(),
          "x_global_scale"_a.none(), "use_ue8m0_for_sf"_a.none(), "async_finish"_a.none(), "hooked"_a.none(),
          nb::sig(kDispatchSignature))
      .def(
          "combine",
          [](LowLatencyCalls& self, const nb::object& x, const nb::object& topk_idx,
             const nb::object& topk_weights, const nb::object& handle, const nb::object& use_logfmt,
             const nb::object& zero_copy, const nb::object& async_finish, const nb::object& hooked,
             const nb::object& out) {
            return self.combine(x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish,
                                hooked, out);
          },
          "x"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(), "handle"_a.none(),
          "use_logfmt"_a.none(), "zero_copy"_a.none(), "async_finish"_a.none(), "hooked"_a.none(),
          "out"_a.none(), nb::sig(kCombineSignature))
      .def("next_combine_buffer", &LowLatencyCalls::next_combine_buffer, "handle"_a.none(),
           nb::sig("def next_combine_buffer(self, handle: typing.Any) -> typing.Any"))
      .def("close", &LowLatencyCalls::close);
}

}  // namespace ferry::python
