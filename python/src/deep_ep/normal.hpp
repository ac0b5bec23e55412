// Normal mode of ferry.deep_ep: layout, dispatch and combine, each one call from Python.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "deep_ep/normal_arguments.hpp"
#include "deep_ep/streams.hpp"
#include "dispatch_layout.hpp"
#include "lane_call.hpp"

namespace ferry::python {

// The Python class of handles. On one node: (rank_prefix_matrix, channel_prefix_matrix,
// recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank, send_head). On several: (is_token_in_rank,
// rdma_channel_prefix_matrix, gbl_channel_prefix_matrix, recv_rdma_channel_prefix_matrix,
// recv_rdma_rank_prefix_sum, recv_gbl_channel_prefix_matrix, recv_gbl_rank_prefix_sum, recv_src_meta,
// send_rdma_head, send_nvl_head). Python computes an element on first access.
struct NormalHandle {
  nb::object owner;  // the ferry.Exchange
  PyExchange* exchange;
  PyPlan plan;
  std::int64_t rows;  // received, or with num_worst_tokens their bound
  nb::object is_token_in_rank;
  std::vector<std::int32_t> tokens_of_ranks;  // empty after num_worst_tokens: the host does not know them
  int channels;
  Topology topology;
  // Several nodes: int32 [R, 1 + T or more], the routes of every rank to this node. A rank's N, then for each
  // of its tokens the ranks of this node that it goes to, as bits by local rank. None if a node is too large.
  nb::object node_routes = nb::none();
  std::array<nb::object, 10> elements{};

  Py_ssize_t size() const { return topology.nodes() > 1 ? 10 : 6; }
};

// The arguments of the calls, unread.
struct NormalLayout {
  const nb::object &topk_idx, &experts, &previous_event, &async_finish;
};
struct NormalDispatch {
  NewRoutes routes;
  CallSettings settings;
};
struct NormalDispatchByHandle {
  const nb::object &x, &handle, &with_ids;
  CallSettings settings;
};
struct NormalCombine {
  const nb::object &x, &handle, &topk_weights, &bias;
  CallSettings settings;
};

// The calls of normal mode of one Buffer.
class NormalCalls {
 public:
  // `python`: the ferry.deep_ep._exchanges.Exchanges of the Buffer.
  NormalCalls(nb::object streams, nb::object python, const Topology& topology)
      : streams_(std::move(streams)),
        python_(std::move(python)),
        topology_(topology),
        ranks_(topology.ranks()) {}

  nb::tuple layout(const NormalLayout& given);
  nb::tuple dispatch(const NormalDispatch& given);
  nb::tuple dispatch_by_handle(const NormalDispatchByHandle& given);
  nb::tuple combine(const NormalCombine& given);
  void close();

 private:
  // The exchange of the last dispatch with new routes, and what that had in common on all ranks.
  struct Current {
    nb::object owner;
    PyExchange* exchange = nullptr;
    NormalShape shape{};
  };
  // Facts about the layouts for one number of experts, with the shapes of the last one.
  struct LayoutOf {
    int experts;
    std::int64_t tokens;
    Placement placement;
    LayoutShapes shapes;
  };
  struct Received;

  void require_open() const;
  CallStreams& streams() const { return nb::cast<CallStreams&>(streams_); }
  const LayoutOf& layout_for(const nb::object& experts, std::int64_t tokens);
  // Where a call's arrays should be. `like`: its tokens, or any object.
  Place place_of(const nb::object& like) const;
  // The stream that the current exchange's framework would use; on the host, and without an exchange, none.
  Stream stream_of_exchange() const;
  // Whether the current exchange serves such a call with `tokens` tokens on a rank.
  bool fits(const NormalShape& shape, std::int64_t tokens) const;
  // Ends the peers' next call on the current exchange with `reason`.
  void refuse(const std::string& reason, Stream stream, Operation operation = Operation::dispatch);
  // The handle that a call was given. If it is something else, the peers' calls on the current exchange end
  // with the same error.
  const NormalHandle& handle_of(const nb::object& object, Operation operation);
  // Throws UsageError if num_rdma_bytes has no room for a call between nodes: rows of `row_bytes` with
  // `scales` float32 and `slots` ids and weights.
  void require_rdma_bytes(const CallSettings& settings, std::int64_t row_bytes, std::int64_t scales,
                          std::int64_t slots) const;
  // Collective: the ranks' hosts agree on an exchange with room for `tokens` of each. Raises the error of a
  // rank that has one; `error`: this rank's or None, `routes`: null if it has one.
  void agree(const nb::object& error, const Routes* routes, std::int64_t tokens);
  // Makes current an exchange with room for num_worst_tokens.
  void make_room(const nb::object& error, const Routes* routes, std::int64_t worst, Stream stream);
  // Counts the routes of all ranks. Nothing: the ranks' hosts must agree first.
  std::optional<DispatchCounts> count(LaneCall& call, const Routes& routes);
  // Runs a call that needs no agreement of the hosts. Where a peer's does, their calls differ, and all get an
  // error. `name`: of the call, in CALLS of ferry.deep_ep._exchanges.
  template <class Call>
  void run(const char* name, Call call) {
    try {
      const GilRelease unlocked;
      in_words(kNormalWords, call);
    } catch (const UsageError& refusal) {
      if (must_agree(refusal)) python_.attr("meet")(name);
      throw;
    }
  }
  // Dispatches. `counts`: null for num_worst_tokens.
  nb::tuple deliver(LaneCall& call, Routes& routes, Received& received, const DispatchCounts* counts,
                    const NewRoutes& given, StreamedCall& streamed, int num_sms);

  nb::object streams_, python_;
  const Topology topology_;
  int ranks_;
  Current current_;
  std::vector<LayoutOf> layouts_;
  bool closed_ = false;
};

}  // namespace ferry::python
