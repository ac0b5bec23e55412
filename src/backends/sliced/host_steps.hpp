// The steps of experts in slices on the host.
#pragma once

#include "backends/sliced/steps.hpp"
#include "exchange/lane_counts.hpp"

namespace ferry::sliced {

class HostSteps final : public SliceSteps {
 public:
  explicit HostSteps(const Rank& rank) : rank_(rank) {}

  void post_dispatch(const PostDispatch& call, Stream stream) override;
  // Throw on every rank alike.
  void take_slice(const TakeSlice& call, Stream stream) override;
  void take_combine(const TakeCombine& call, Stream stream) override;
  // Throws SystemError for a damaged plan of a dispatch.
  void find_segments(const FindSegments& call, Stream stream) override;
  void copy_tokens(const CopyTokens& call, const StepSize& size, Stream stream) override;
  void pack_rows(const PackRows& call, const StepSize& size, Stream stream) override;
  void unpack_rows(const UnpackRows& call, const StepSize& size, Stream stream) override;
  void pack_outputs(const PackOutputs& call, const StepSize& size, Stream stream) override;
  void copy_results(const CopyResults& call, const StepSize& size, Stream stream) override;

  // Adds what the gathers have sent.
  void add_sent(WireCounts& sum) const { sent_.add_to(sum); }

 private:
  // Counts rows of `bytes` bytes to every other rank of the sub-group, rows(tp rank) each.
  template <class Rows>
  void count_sent(const SliceShape& shape, bool dispatch, std::int64_t bytes, Rows rows);

  const Rank& rank_;
  LaneCounts sent_{1};  // of rows sent within the sub-group
};

}  // namespace ferry::sliced
