// A lane of an exchange of experts in slices. It routes a slice of the tokens through a lane of the backend
// inside, and gathers and adds in the sub-group.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/sliced/segments.hpp"
#include "exchange/backend.hpp"
#include "exchange/gather.hpp"
#include "exchange/lane_counts.hpp"
#include "exchange/sliced.hpp"
#include "layout/plan_layout.hpp"
#include "memory/local_memory.hpp"

namespace ferry::sliced {

// What all lanes share. Constant after construction.
struct SlicedContext {
  Rank rank;
  Config config;
  Backend* inner;

  int me() const { return rank.index(); }
  int ranks() const { return rank.size(); }
  int tp() const { return config.placement.tp(); }
  int tp_rank() const { return me() % tp(); }
};

// Offsets of a lane's arrays in its local memory. The size query and the construction both use this.
struct LocalArrays {
  std::int64_t parts = 0, source = 0, weight = 0, counts = 0, row_offsets = 0;
  std::int64_t result_bytes = 0;  // of all above
  std::int64_t ids = 0;           // int64 [T / tp, K] of the slice
  std::int64_t own = 0;           // what this rank brings to a gather, or takes from one that adds
  std::int64_t all = 0;           // the same of the sub-group
  std::int64_t row_weights = 0;
  std::int64_t bytes = 0;
};
LocalArrays local_arrays(const Config& config, int rank);

class Lane {
 public:
  Lane(const SlicedContext& context, int index);

  DispatchResult dispatch(DispatchCall call, Stream stream);
  void combine(CombineCall call, Stream stream);
  CallDiagnostics take_diagnostics();
  OwnArrays own_arrays() const;

  LaneCounts sent{1};  // of rows sent within the sub-group

 private:
  template <class T>
  T* array(std::int64_t offset) const {
    return reinterpret_cast<T*>(memory_.data() + offset);
  }
  // All-gathers one struct a rank, [R].
  template <class Terms>
  std::vector<Terms> exchange_terms(Operation operation, const Terms& mine) const;
  // Returns N of all ranks.
  std::vector<std::int64_t> agree_on_tokens(const DispatchCall& call) const;
  const std::int64_t* slice_of_ids(const DispatchCall& call, const TokenSlice& slice) const;
  // Packs the rows of the slice's routes into `own`, each followed by its source and weight. Returns the
  // bytes of a row.
  std::int64_t pack(const DispatchResult& routed, const DispatchCall& call,
                    const std::vector<std::int64_t>& tokens) const;
  DispatchResult unpack(const DispatchResult& routed, const DispatchCall& call, const Segments& segments,
                        std::int64_t row_bytes);
  std::vector<std::int64_t> agree_on_combine(const CombineCall& call, const SegmentsOfPlan& rows) const;
  // Copies the experts' rows to `all`, in gathered order. Returns their type there.
  DType pack_outputs(const CombineCall& call, const Segments& segments) const;
  const float* own_row_weights(const CombineCall& call, const Segments& segments) const;

  // Counts rows of `bytes` bytes that go to every other rank of the sub-group, `rows(tp_rank)` each.
  template <class Rows>
  void count_sent(bool dispatch, std::int64_t bytes, Rows rows);

  const SlicedContext& context_;
  const int index_;
  const LocalArrays arrays_;
  LocalMemory memory_;
  std::int64_t first_token_ = 0;  // of the last dispatch's slice
  HostTotals totals_;
};

template <class Terms>
std::vector<Terms> Lane::exchange_terms(Operation operation, const Terms& mine) const {
  std::vector<Terms> all(static_cast<std::size_t>(context_.ranks()));
  context_.inner->run(GatherCall{.lane = index_,
                                 .rows = &mine,
                                 .out = all.data(),
                                 .count = 1,
                                 .held = context_.ranks(),
                                 .row_bytes = sizeof mine},
                      {});
  for (std::size_t r = 0; r < all.size(); ++r)
    check_told(operation, "tokens", all[r].tokens, context_.config.max_tokens, static_cast<int>(r));
  return all;
}

template <class Rows>
void Lane::count_sent(bool dispatch, std::int64_t bytes, Rows rows) {
  const Topology& topology = context_.rank.topology();
  const int first = context_.me() - context_.tp_rank();
  for (int i = 0; i < context_.tp(); ++i) {
    if (i == context_.tp_rank()) continue;
    const Traffic traffic{.messages = rows(i), .bytes = rows(i) * bytes};
    const bool between_nodes = topology.node_of(first + i) != topology.node_of(context_.me());
    if (dispatch) {
      sent.count_dispatch(traffic, between_nodes);
    } else {
      sent.count_combine(traffic, between_nodes);
    }
  }
}

}  // namespace ferry::sliced
