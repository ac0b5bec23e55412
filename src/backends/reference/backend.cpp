// The reference backend: the oracle behind the Backend interface. Slow: every rank reads the whole inputs of
// all ranks.
#include "exchange/backend.hpp"

#include <deque>
#include <utility>

#include "backends/reference/lane.hpp"
#include "exchange/configuration.hpp"
#include "group/fault_points.hpp"

namespace ferry {
namespace reference {
namespace {

// Bytes of a lane's own receive buffers.
std::int64_t received_bytes(const Config& config, int rank) {
  if (!config.own_receive_buffers) return 0;
  const std::int64_t rows = row_capacity(config, rank);
  const std::int64_t group_rows = config.layout == Layout::expert_padded ? group_capacity(config, rank) : 0;
  std::int64_t bytes = 0;
  for (const oracle::PartShape& shape : oracle::part_shapes(config.format, config.hidden, rows, group_rows))
    bytes += shape.bytes_of(rows, groups_of(config, rank));
  return bytes;
}

// Bytes of a lane's plan and of the metadata of its rows.
std::int64_t plan_and_metadata_bytes(const Config& config, int rank) {
  const std::int64_t slots = config.layout == Layout::rank_major ? config.top_k : 1;
  const std::int64_t row_bytes =
      sizeof(Source) + 8 * slots + 8;  // source; weight and local id of each slot; group; dot
  return view_plan(nullptr, plan_shape(config)).bytes + row_capacity(config, rank) * row_bytes +
         16 * groups_of(config, rank);
}

class ReferenceBackend final : public Backend, private GatherOperations {
 public:
  ReferenceBackend(const Rank& rank, const Config& config)
      : context_{.rank = rank,
                 .config = config,
                 .staging = StagingLayout(config),
                 .memory = SymmetricMemory(rank, config.lanes * StagingLayout(config).lane_bytes())} {
    for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(context_, lane);
    fault_point(FaultPoint::construct_mapped, rank.index());
  }

  Capabilities capabilities() const override { return {}; }
  Sizes sizes() const override { return reference_backend_sizes(context_.config, context_.me()); }

  DispatchResult dispatch(const DispatchCall& call, Stream) override {
    lanes_[call.lane].dispatch_send(call);
    return lanes_[call.lane].dispatch_receive();
  }
  void combine(const CombineCall& call, Stream) override {
    lanes_[call.lane].combine_send(call);
    lanes_[call.lane].combine_receive();
  }
  void dispatch_send(const DispatchCall& call, Stream) override { lanes_[call.lane].dispatch_send(call); }
  DispatchResult dispatch_receive(int lane, Stream) override { return lanes_[lane].dispatch_receive(); }
  void combine_send(const CombineCall& call, Stream) override { lanes_[call.lane].combine_send(call); }
  void combine_receive(int lane, Stream) override { lanes_[lane].combine_receive(); }

  void route_values(const float* values, const Plan& plan, float* row_values, int lane, Stream) override {
    lanes_[lane].route_values(values, plan, row_values);
  }
  DispatchCounts dispatch_counts(const Ids& ids, std::int32_t tokens, int lane, Stream) override {
    return lanes_[lane].dispatch_counts(ids, tokens);
  }
  const StepMetadata* metadata(const MetadataCall& call, Stream) override {
    return lanes_[call.lane].metadata(call.count);
  }
  const void* received_rows(int lane) const override { return lanes_[lane].received_rows(); }
  GatherOperations& gather_operations() override { return *this; }
  void refuse(Operation operation, int lane, const Error& error, Stream) noexcept override {
    if (lane >= 0 && lane < context_.config.lanes) lanes_[lane].refuse(operation, error);
  }
  CallDiagnostics take_diagnostics(int lane) override { return std::exchange(lanes_[lane].diagnostics, {}); }

  LoadCounts load_counts() const override {
    LoadCounts sum = no_load(context_.config.placement);
    for (const Lane& lane : lanes_) lane.counts.add_to(context_.config.placement, sum);
    return sum;
  }

  WireCounts wire_counts() const override {
    WireCounts all;
    for (const Lane& lane : lanes_) lane.counts.add_to(all);
    return all;
  }

 private:
  std::int64_t all_gather_v(const AllGatherCall& call, Stream) override {
    return lanes_[call.lane].all_gather_v(call);
  }
  void reduce_scatter_v(const ReduceScatterCall& call, Stream) override {
    lanes_[call.lane].reduce_scatter_v(call);
  }

  const ReferenceContext context_;
  std::deque<Lane> lanes_;  // a deque: lanes hold channels, which cannot move
};

}  // namespace
}  // namespace reference

std::unique_ptr<Backend> make_reference_backend(const Rank& rank, const Config& config) {
  return std::make_unique<reference::ReferenceBackend>(rank, config);
}

Sizes reference_backend_sizes(const Config& config, int rank) {
  const reference::StagingLayout staging(config);
  const std::int64_t lanes = config.lanes;
  return {.dispatch_staging = 2 * lanes * staging.dispatch,
          .combine_staging = 2 * lanes * staging.combine,
          .signals = lanes * staging.channel,
          .results = lanes * reference::received_bytes(config, rank),
          .plans = lanes * reference::plan_and_metadata_bytes(config, rank)};
}

}  // namespace ferry
