// The backend of experts in slices (Placement::ep_tp): another backend of host memory, which routes a slice
// of the tokens, and gathers within the sub-groups.
#include <deque>

#include "backends/sliced/lane.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace sliced {
namespace {

class SlicedBackend : public Backend, private GatherOperations {
 public:
  SlicedBackend(const Rank& rank, const Config& config, std::unique_ptr<Backend> inner)
      : inner_(std::move(inner)),
        context_{
            .rank = rank, .config = config, .inner = inner_.get(), .gather = &inner_->gather_operations()} {
    for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(context_, lane);
  }

  Capabilities capabilities() const override { return {}; }
  Sizes sizes() const override {
    return sliced_backend_sizes(context_.config, context_.me(), inner_->sizes());
  }

  DispatchResult dispatch(const DispatchCall& call, Stream stream) override {
    return lane(call.lane).dispatch(call, stream);
  }
  void combine(const CombineCall& call, Stream stream) override { lane(call.lane).combine(call, stream); }

  // Slices gather from each other, so no phase of a call would wait for no peer.
  void dispatch_send(const DispatchCall& call, Stream stream) override {
    refuse_unsupported(Operation::dispatch, call.lane, stream, "phases: call dispatch()");
  }
  DispatchResult dispatch_receive(int, Stream) override { return {}; }  // no call is ever sent
  void combine_send(const CombineCall& call, Stream stream) override {
    refuse_unsupported(Operation::combine, call.lane, stream, "phases: call combine()");
  }
  void combine_receive(int, Stream) override {}
  void route_values(const float*, const Plan&, float*, int lane, Stream stream) override {
    refuse_unsupported(Operation::route_values, lane, stream, "route_values");
  }
  DispatchCounts dispatch_counts(const Ids&, std::int32_t, int lane, Stream stream) override {
    refuse_unsupported(Operation::dispatch_counts, lane, stream,
                       "dispatch_counts: they have room for any routing");
  }

  const StepMetadata* metadata(const MetadataCall& call, Stream stream) override {
    return inner_->metadata(call, stream);
  }
  const void* received_rows(int) const override { return nullptr; }  // only read with dot_rows
  GatherOperations& gather_operations() override { return *this; }
  void refuse(Operation operation, int lane, const Error& error, Stream stream) noexcept override {
    inner_->refuse(operation, lane, error, stream);
  }
  CallDiagnostics take_diagnostics(int index) override { return lane(index).take_diagnostics(); }

  LoadCounts load_counts() const override {
    return load_of_slices(inner_->load_counts(), context_.config.placement);
  }
  WireCounts wire_counts() const override {
    WireCounts sum = inner_->wire_counts();
    for (const Lane& lane : lanes_) lane.sent.add_to(sum);
    return sum;
  }

 private:
  Lane& lane(int index) { return lanes_[static_cast<std::size_t>(index)]; }

  [[noreturn]] void refuse_unsupported(Operation operation, int lane, Stream stream, const char* what) {
    const UnsupportedError error(str("experts in slices (Placement::ep_tp) do not have ", what));
    inner_->refuse(operation, lane, error, stream);
    throw error;
  }

  std::int64_t all_gather_v(const AllGatherCall& call, Stream stream) override {
    return context_.gather->all_gather_v(call, stream);
  }
  void reduce_scatter_v(const ReduceScatterCall& call, Stream stream) override {
    context_.gather->reduce_scatter_v(call, stream);
  }

  const std::unique_ptr<Backend> inner_;
  const SlicedContext context_;
  std::deque<Lane> lanes_;  // a deque: results refer to their lane, so elements must not move
};

}  // namespace
}  // namespace sliced

std::unique_ptr<Backend> make_sliced_backend(const Rank& rank, const Config& config,
                                             std::unique_ptr<Backend> inner) {
  return std::make_unique<sliced::SlicedBackend>(rank, config, std::move(inner));
}

Sizes sliced_backend_sizes(const Config& config, int rank, const Sizes& inner) {
  const sliced::LocalArrays arrays = sliced::local_arrays(config, rank);
  Sizes sizes = inner;
  sizes.results += config.lanes * arrays.result_bytes;
  sizes.messages += config.lanes * (arrays.bytes - arrays.result_bytes);
  return sizes;
}

}  // namespace ferry
