// Binds the calls and handles of normal mode.

#include "base/text.hpp"
#include "bindings.hpp"
#include "casters.hpp"
#include "deep_ep/normal.hpp"
#include "ferry/error.hpp"
#include "host_parts.hpp"

namespace ferry::python {

using namespace nb::literals;

void NormalCalls::require_open() const {
  if (closed_) throw UsageError("Buffer: used after destroy()");
}

void NormalCalls::close() {
  closed_ = true;
  current_ = {};
}

const NormalCalls::LayoutOf& NormalCalls::layout_for(const nb::object& experts, std::int64_t tokens) {
  const int number = integer_from(1, experts, "num_experts", kMostExperts);
  for (LayoutOf& known : layouts_) {
    if (known.experts != number) continue;
    if (known.tokens != tokens) known.shapes = LayoutShapes(known.placement, tokens);
    known.tokens = tokens;
    return known;
  }
  const Placement placement = Placement::blocks(number, ranks_);
  return layouts_.emplace_back(LayoutOf{number, tokens, placement, LayoutShapes(placement, tokens)});
}

nb::tuple NormalCalls::layout(const NormalLayout& given) {
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  const bool async_finish = is_true(given.async_finish);
  Array ids = inspect_matrix(given.topk_idx, "topk_idx");
  if (ids.element != kInt32 && ids.element != kInt64)
    throw UsageError("topk_idx: expected int32 or int64, got " + name_of(ids.element));
  require_slots(ids);
  const LayoutOf& of = layout_for(given.experts, ids.shape[0]);
  timer.emplace(HostPart::streams);
  // Layouts are no calls between ranks, and so need no order: without an event they run like any operation of
  // PyTorch.
  const EventHandle* const previous = event_of(given.previous_event);
  std::optional<StreamedCall> streamed;
  if (previous != nullptr || async_finish)
    streamed.emplace(streams(), ids.framework, ids.device, previous, async_finish);
  timer.emplace(HostPart::arguments);
  if (!is_dense(ids)) ids = inspect_matrix(dense_array(given.topk_idx, ids), "topk_idx");
  const Stream stream = streamed ? streamed->stream() : stream_of(nb::none(), ids.framework, ids.device);
  const bool by_node = topology_.nodes() > 1;
  const PyDispatchLayout made =
      layout_of(ids, of.placement, of.shapes, by_node ? &topology_ : nullptr, stream);
  timer.emplace(HostPart::results);
  std::vector<nb::object> results = {made.tokens_per_rank, made.routes_per_expert, made.token_in_rank};
  if (by_node) results.push_back(made.tokens_per_node);
  nb::object event = streamed ? streamed->finish({ids.owner}, results) : event_overlap(nb::none());
  return nb::make_tuple(made.tokens_per_rank, made.tokens_per_node, made.routes_per_expert,
                        made.token_in_rank, std::move(event));
}

namespace {

nb::object normal_element(const nb::object& self, Py_ssize_t index) {
  auto& handle = nb::cast<NormalHandle&>(self);
  if (index == (handle.topology.nodes() > 1 ? 0 : 4)) return handle.is_token_in_rank;
  nb::object& made = handle.elements[static_cast<std::size_t>(index)];
  static CachedAttribute make;
  if (!made.is_valid()) made = make.get("ferry.deep_ep._normal", "element")(self, index);
  return made;
}

nb::object normal_item(const nb::object& self, const nb::object& index) {
  const Py_ssize_t count = nb::cast<const NormalHandle&>(self).size();
  return item_of(index, count, [&](Py_ssize_t at) { return normal_element(self, at); });
}

void bind_normal_handle(nb::module_& module) {
  nb::class_<NormalHandle>(
      module, "NormalHandle",
      "(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, "
      "is_token_in_rank, send_head) of a dispatch; between nodes (is_token_in_rank, "
      "rdma_channel_prefix_matrix, gbl_channel_prefix_matrix, recv_rdma_channel_prefix_matrix, "
      "recv_rdma_rank_prefix_sum, recv_gbl_channel_prefix_matrix, recv_gbl_rank_prefix_sum, recv_src_meta, "
      "send_rdma_head, send_nvl_head). Each is computed on first access.")
      .def("__len__", &NormalHandle::size)
      .def("__getitem__", &normal_item, "index"_a,
           nb::sig("def __getitem__(self, index: typing.Any) -> typing.Any"))
      .def_ro("exchange", &NormalHandle::owner, "The Exchange that the dispatch used.",
              nb::sig("def exchange(self) -> Exchange"))
      .def_ro("plan", &NormalHandle::plan, "The Plan of the dispatch.")
      .def_ro("rows", &NormalHandle::rows, "Received rows, or with num_worst_tokens their bound.")
      .def_ro("is_token_in_rank", &NormalHandle::is_token_in_rank, "As given to the dispatch.",
              nb::sig("def is_token_in_rank(self) -> typing.Any"))
      .def_ro("tokens_of_ranks", &NormalHandle::tokens_of_ranks,
              "N of every rank; empty after num_worst_tokens, where the host does not know them.")
      .def_ro("channels", &NormalHandle::channels, "C of the matrices by channel.")
      .def_ro("topology", &NormalHandle::topology, "The nodes of the group.")
      .def_ro(
          "node_routes", &NormalHandle::node_routes,
          "Between nodes: int32 [R, 1 + T or more], every rank's N, then for each of its tokens the ranks of "
          "this node that it goes to, as bits by local rank. None if a node has more than 31 ranks.",
          nb::sig("def node_routes(self) -> typing.Any"));
}

}  // namespace

void bind_normal(nb::module_& module) {
  bind_normal_handle(module);
  module.attr("_MUST_AGREE") = kMustAgree;
  module.attr("_MOST_SLOTS") = kMaxTopK;  // of a token
  nb::class_<NormalCalls> calls(module, "_NormalCalls", "For ferry.deep_ep: normal mode of a Buffer.");
  calls.def(nb::init<nb::object, nb::object, const Topology&>()).def("close", &NormalCalls::close);
  define_unread(calls, "layout", &NormalCalls::layout);
  define_unread(calls, "dispatch", &NormalCalls::dispatch);
  define_unread(calls, "dispatch_by_handle", &NormalCalls::dispatch_by_handle);
  define_unread(calls, "combine", &NormalCalls::combine);
}

}  // namespace ferry::python
