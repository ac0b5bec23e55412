// Binds dispatch_layout().
#include "ferry/dispatch_layout.hpp"

#include <nanobind/stl/string.h>

#include "arrays/arguments.hpp"
#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "device.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

nb::tuple layout_of(const nb::object& ids, const Placement& placement, int ranks_per_node,
                    const nb::object& stream) {
  const Array given = inspect(ids, "ids");
  if (given.element != kInt32 && given.element != kInt64)
    throw UsageError(str("ids: expected int32 or int64, got ", name_of(given.element)));
  if (given.shape.size() != 2)
    throw UsageError(str("ids: expected an array of shape [N, K], got ", shape_text(given.shape)));
  require_dense(given, "ids");
  const std::int64_t tokens = given.shape[0], ranks = placement.ranks();
  const bool on_host = is_host(given.device);
  const NewArrays results(given.framework, given.device);
  DispatchLayout result;
  const nb::object per_rank = results.make({kInt32, {ranks}}, result.tokens_per_rank);
  const nb::object per_expert = results.make({kInt32, {placement.experts()}}, result.routes_per_expert);
  const nb::object in_rank = results.make({kBool, {tokens, ranks}}, result.token_in_rank);
  nb::object per_node = nb::none();
  if (ranks_per_node != 0) {
    const std::int64_t nodes = ranks_per_node > 0 ? ranks / ranks_per_node : 0;
    per_node = results.make({kInt32, {nodes}}, result.tokens_per_node);
  }
  const Ids read = given.element == kInt32 ? Ids(static_cast<const std::int32_t*>(given.data))
                                           : Ids(static_cast<const std::int64_t*>(given.data));
  const Stream on = stream_of(stream, given.framework, given.device);
  {
    const nb::gil_scoped_release unlocked;
    const DeviceGuard guard(given.device);
    dispatch_layout(read, tokens, static_cast<int>(given.shape[1]), placement, result, ranks_per_node,
                    on_host ? BackendKind::cpu : BackendKind::cuda, on);
  }
  return nb::make_tuple(per_rank, per_expert, in_rank, per_node);
}

}  // namespace

void bind_dispatch_layout(nb::module_& module) {
  module.def(
      "dispatch_layout", &layout_of, "ids"_a, "placement"_a, nb::kw_only(), "ranks_per_node"_a = 0,
      "stream"_a = nb::none(),
      R"((tokens_per_rank, routes_per_expert, token_in_rank, tokens_per_node) of ids [N, K]. Not collective.

int32 [R]: tokens with an expert on the rank; int32 [E]; bool [N, R]: whether the token has an expert on the rank; int32
[R / ranks_per_node], or None without ranks_per_node. Slots of -1 and ids out of range are not counted. For ids on a GPU
the counts are made on `stream`, by default the current one of the ids' framework, without waiting for it.)",
      nb::sig("def dispatch_layout(ids: typing.Any, placement: Placement, *, ranks_per_node: int = 0, "
              "stream: typing.Any | None = None) -> tuple[typing.Any, typing.Any, typing.Any, "
              "typing.Any | None]"));
}

}  // namespace ferry::python
