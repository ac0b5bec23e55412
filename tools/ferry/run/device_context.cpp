#include "tools/ferry/run/device_context.hpp"

#include <algorithm>

#include "tools/ferry/run/experts.hpp"

namespace ferry::app {

std::int64_t Site::arrived_rows() const {
  const Config& config = job_.config;
  const int rank = exchange_.rank().index();
  const bool padded = config.layout == Layout::expert_padded;
  return exchange_.capacity() * (padded ? config.placement.local_experts(rank) : 1);
}

CombineOptions Site::combine_options(const DispatchResult& received) const {
  CombineOptions options;
  const bool weighs =
      job_.config.layout != Layout::rank_major && job_.config.reduction != Reduction::unreduced;
  if (weighs) options.row_weights = received.weight;
  return options;
}

namespace {

class HostSite final : public Site {
 public:
  HostSite(const Rank& rank, const Job& job)
      : Site(rank, job),
        experts_(job, rank.index(), arrived_rows()),
        result_(static_cast<std::size_t>(job.result_bytes())) {}

  void take(const StepInputs& inputs) override {
    inputs_ = &inputs;
    std::fill(result_.begin(), result_.end(), std::byte{0xFF});
  }
  void dispatch() override {
    received_ = exchange_.dispatch(Tokens::rows(inputs_->tokens.data(), job_.tokens(), job_.type),
                                   inputs_->routes.ids.data(), inputs_->routes.weights.data());
  }
  void multiply() override { experts_.multiply(received_); }
  void swiglu() override { experts_.swiglu(received_); }
  void combine() override {
    exchange_.combine(experts_.outputs(), received_.plan, {.data = result_.data(), .type = job_.type},
                      combine_options(received_));
  }
  const DispatchResult& received() override { return received_; }
  std::span<const std::byte> result() override { return result_; }

 private:
  Experts experts_;
  const StepInputs* inputs_ = nullptr;
  DispatchResult received_;
  std::vector<std::byte> result_;  // what combine writes
};

}  // namespace

std::unique_ptr<Site> make_host_site(const Rank& rank, const Job& job) {
  return std::make_unique<HostSite>(rank, job);
}

}  // namespace ferry::app
