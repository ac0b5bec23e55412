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

nb::tuple NormalCalls::layout(const nb::object& topk_idx, const nb::object& experts,
                              const nb::object& previous_event, bool async_finish) {
  std::optional<PartTimer> timer(std::in_place, HostPart::arguments);
  require_open();
  Array ids = inspect_matrix(topk_idx, "topk_idx");
  if (ids.element != kInt32 && ids.element != kInt64)
    throw UsageError("topk_idx: expected int32 or int64, got " + name_of(ids.element));
  require_slots(ids);
  const LayoutOf& of = layout_for(experts, ids.shape[0]);
  timer.emplace(HostPart::streams);
  // Layouts are no calls between ranks, and so need no order: without an event they run like any operation of
  // PyTorch.
  const EventHandle* const previous = event_of(previous_event);
  std::optional<StreamedCall> streamed;
  if (previous != nullptr || async_finish)
    streamed.emplace(streams(), ids.framework, ids.device, previous, async_finish);
  timer.emplace(HostPart::arguments);
  if (!is_dense(ids)) ids = inspect_matrix(dense_array(topk_idx, ids), "topk_idx");
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
  using Object = const nb::object&;
  constexpr const char* kBufferArguments =
      "config: typing.Any, default_sms: typing.Any, previous_event: typing.Any, async_finish: typing.Any, "
      "allocate_on_comm_stream: typing.Any) -> tuple";
  const auto signature = [](const char* name, const char* arguments, const char* settings) {
    return str("def ", name, "(self, ", arguments, ", ", settings);
  };
  nb::class_<NormalCalls>(module, "_NormalCalls", "For ferry.deep_ep: normal mode of a Buffer.")
      .def(nb::init<nb::object, nb::object, const Topology&>(), "streams"_a, "exchanges"_a, "topology"_a)
      .def(
          "layout",
          [](NormalCalls& self, Object topk_idx, Object experts, Object previous_event, Object async_finish) {
            return self.layout(topk_idx, experts, previous_event, is_true(async_finish));
          },
          "topk_idx"_a.none(), "experts"_a.none(), "previous_event"_a.none(), "async_finish"_a.none(),
          nb::sig("def layout(self, topk_idx: typing.Any, experts: typing.Any, previous_event: typing.Any, "
                  "async_finish: typing.Any) -> tuple"))
      .def(
          "dispatch",
          [](NormalCalls& self, Object x, Object tokens_per_rank, Object tokens_per_node,
             Object is_token_in_rank, Object routes_per_expert, Object topk_idx, Object topk_weights,
             Object alignment, Object worst, Object config, Object default_sms, Object previous_event,
             Object async_finish, Object allocate_on_comm_stream) {
            return self.dispatch(
                {x, tokens_per_rank, tokens_per_node, is_token_in_rank, routes_per_expert, topk_idx,
                 topk_weights, alignment, worst},
                {config, default_sms, previous_event, async_finish, allocate_on_comm_stream});
          },
          "x"_a.none(), "tokens_per_rank"_a.none(), "tokens_per_node"_a.none(), "is_token_in_rank"_a.none(),
          "routes_per_expert"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(), "alignment"_a.none(),
          "worst"_a.none(), "config"_a.none(), "default_sms"_a.none(), "previous_event"_a.none(),
          "async_finish"_a.none(), "allocate_on_comm_stream"_a.none(),
          nb::sig(signature("dispatch",
                            "x: typing.Any, tokens_per_rank: typing.Any, tokens_per_node: typing.Any, "
                            "is_token_in_rank: typing.Any, routes_per_expert: typing.Any, topk_idx: "
                            "typing.Any, topk_weights: typing.Any, "
                            "alignment: typing.Any, worst: typing.Any",
                            kBufferArguments)
                      .c_str()))
      .def(
          "dispatch_by_handle",
          [](NormalCalls& self, Object x, Object handle, bool with_ids, Object config, Object default_sms,
             Object previous_event, Object async_finish, Object allocate_on_comm_stream) {
            return self.dispatch_by_handle(
                x, handle, with_ids,
                {config, default_sms, previous_event, async_finish, allocate_on_comm_stream});
          },
          "x"_a.none(), "handle"_a.none(), "with_ids"_a, "config"_a.none(), "default_sms"_a.none(),
          "previous_event"_a.none(), "async_finish"_a.none(), "allocate_on_comm_stream"_a.none(),
          nb::sig(signature("dispatch_by_handle", "x: typing.Any, handle: typing.Any, with_ids: bool",
                            kBufferArguments)
                      .c_str()))
      .def(
          "combine",
          [](NormalCalls& self, Object x, Object handle, Object topk_weights, Object bias, Object config,
             Object default_sms, Object previous_event, Object async_finish, Object allocate_on_comm_stream) {
            return self.combine(x, handle, topk_weights, bias,
                                {config, default_sms, previous_event, async_finish, allocate_on_comm_stream});
          },
          "x"_a.none(), "handle"_a.none(), "topk_weights"_a.none(), "bias"_a.none(), "config"_a.none(),
          "default_sms"_a.none(), "previous_event"_a.none(), "async_finish"_a.none(),
          "allocate_on_comm_stream"_a.none(),
          nb::sig(signature("combine",
                            "x: typing.Any, handle: typing.Any, topk_weights: typing.Any, bias: typing.Any",
                            kBufferArguments)
                      .c_str()))
      .def("close", &NormalCalls::close);
}

}  // namespace ferry::python
