#include "tools/ferry/common/gpu.hpp"
#include "tools/ferry/common/result_on_host.hpp"
#include "tools/ferry/run/device_context.hpp"
#include "tools/ferry/run/gpu_experts.hpp"

namespace ferry::app {

namespace {

class DeviceSite final : public Site {
 public:
  DeviceSite(const Rank& rank, const Job& job)
      : Site(rank, job),
        experts_(job, rank.index(), arrived_rows(), stream_),
        tokens_(job.tokens() * job.row_bytes()),
        ids_(job.tokens() * job.config.top_k * 4),
        weights_(ids_.bytes()),
        result_(job.result_bytes()),
        result_copy_(static_cast<std::size_t>(job.result_bytes())) {}

  void take(const StepInputs& inputs) override {
    tokens_.fill_from(inputs.tokens.data(), tokens_.bytes());
    ids_.fill_from(inputs.routes.ids.data(), ids_.bytes());
    weights_.fill_from(inputs.routes.weights.data(), weights_.bytes());
    result_.fill(0xFF, stream_);
    stream_.wait();
  }
  void dispatch() override {
    received_ = exchange_.dispatch(Tokens::rows(tokens_.as(), job_.tokens(), job_.type),
                                   ids_.as<std::int32_t>(), weights_.as<float>(), stream_);
    exchange_.synchronize(0, stream_);
  }
  void multiply() override {
    experts_.multiply(received_);
    stream_.wait();
  }
  void swiglu() override {
    experts_.swiglu(received_);
    stream_.wait();
  }
  void combine() override {
    exchange_.combine(experts_.outputs(), received_.plan, {.data = result_.as(), .type = job_.type},
                      combine_options(received_), stream_);
    exchange_.synchronize(0, stream_);
  }
  const DispatchResult& received() override {
    exchange_.check();
    received_copy_ = result_on_host_.copy(received_, job_.config);
    return received_copy_;
  }
  std::span<const std::byte> result() override {
    exchange_.check();
    copy_to_host(result_copy_.data(), result_.as(), result_.bytes());
    return result_copy_;
  }

 private:
  DeviceStream stream_;
  DeviceExperts experts_;
  DeviceArray tokens_, ids_, weights_;  // of the step
  DeviceArray result_;                  // what combine writes
  DispatchResult received_, received_copy_;
  ResultOnHost result_on_host_;
  std::vector<std::byte> result_copy_;
};

}  // namespace

std::unique_ptr<Site> make_device_site(const Rank& rank, const Job& job) {
  int devices = 0;
  cuda::check(cudaGetDeviceCount(&devices), "count the GPUs");
  cuda::check(cudaSetDevice(rank.index() % devices), "use a GPU");
  return std::make_unique<DeviceSite>(rank, job);
}

}  // namespace ferry::app
