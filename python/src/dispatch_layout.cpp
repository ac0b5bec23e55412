// Binds dispatch_layout().
#include "dispatch_layout.hpp"
#include "casters.hpp"

#include "arrays/arguments.hpp"
#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "device.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/error.hpp"
#include "host_parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

nb::tuple dispatch_layout_of(const nb::object& ids, const Placement& placement, const Topology* topology,
                             int source, const nb::object& stream) {
  Arguments arguments(inspect(ids, "ids").device);
  arguments.set_stream(stream);
  const Array& given = arguments.add_numbers(ids, "ids");
  if (given.element != kInt32 && given.element != kInt64)
    throw UsageError(str("ids: expected int32 or int64, got ", name_of(given.element)));
  if (given.shape.size() != 2)
    throw UsageError(str("ids: expected an array of shape [N, K], got ", shape_text(given.shape)));
  require_dense(given, "ids");
  const Stream on = stream_of(stream, given.framework, given.device);
  PyDispatchLayout layout =
      layout_of(given, placement, LayoutShapes(placement, given.shape[0]), topology, on, source);
  return nb::make_tuple(layout.tokens_per_rank, layout.routes_per_expert, layout.token_in_rank,
                        layout.tokens_per_node);
}

}  // namespace

PyDispatchLayout layout_of(const Array& ids, const Placement& placement, const LayoutShapes& shapes,
                           const Topology* topology, Stream stream, int source) {
  DispatchLayout result;
  PyDispatchLayout layout;
  {
    const PartTimer timer(HostPart::allocation);
    const NewArrays results(ids.framework, ids.device);
    layout.tokens_per_rank = results.make(shapes.tokens_per_rank, result.tokens_per_rank);
    layout.routes_per_expert = results.make(shapes.routes_per_expert, result.routes_per_expert);
    layout.token_in_rank = results.make(shapes.token_in_rank, result.token_in_rank);
    if (topology != nullptr)
      layout.tokens_per_node = results.make({kInt32, {topology->nodes()}}, result.tokens_per_node);
  }
  const Ids read = ids.element == kInt32 ? Ids(static_cast<const std::int32_t*>(ids.data))
                                         : Ids(static_cast<const std::int64_t*>(ids.data));
  const PartTimer timer(HostPart::exchange);
  const GilRelease unlocked;
  const DeviceGuard guard(ids.device);
  dispatch_layout({.ids = read,
                   .tokens = ids.shape[0],
                   .top_k = static_cast<int>(ids.shape[1]),
                   .placement = placement,
                   .topology = topology,
                   .source = source},
                  result, is_host(ids.device) ? MemoryKind::host : MemoryKind::device, stream);
  return layout;
}

void bind_dispatch_layout(nb::module_& module) {
  module.def(
      "dispatch_layout", &dispatch_layout_of, "ids"_a, "placement"_a, nb::kw_only(),
      "topology"_a = nb::none(), "source"_a = 0, "stream"_a = nb::none(),
      R"((tokens_per_rank, routes_per_expert, token_in_rank, tokens_per_node) of ids [N, K]. Not collective.

int32 [R]: tokens with an expert on the rank; int32 [E], or with replicas [P], where `source` is the ids' rank; bool [N, R]: whether the token has an expert on the rank; int32
[nodes]: tokens with an expert on the node, or None without `topology`. Slots of -1 and ids out of range are not counted. For ids on a GPU
the counts are made on `stream`, by default the current one of the ids' framework, without waiting for it.)",
      nb::sig("def dispatch_layout(ids: ferry._typing.Array, placement: Placement, *, topology: Topology | "
              "None = None, source: int = 0, "
              "stream: typing.Any | None = None) -> tuple[typing.Any, typing.Any, typing.Any, "
              "typing.Any | None]"));
}

}  // namespace ferry::python
