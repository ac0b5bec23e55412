#include <deque>
#include <map>
#include <span>

#include "ferry/error.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/run/gpu_expert_inputs.hpp"
#include "tools/ferry/run/program_context.hpp"

namespace ferry::app {

namespace {

// Allocates everything when it is constructed, as GpuExperts does.
class GpuProgramContext final : public ProgramContext {
 public:
  GpuProgramContext(const RunSpec& spec, Exchange& exchange, int calls)
      : spec_(spec),
        exchange_(exchange),
        weights_(spec, spec.config.placement.experts_of(exchange.rank().index())),
        tokens_(spec.tokens() * spec.row_bytes()),
        ids_(spec.tokens() * spec.config.top_k * 4),
        weights_of_routes_(ids_.bytes()) {
    const std::int64_t inner_row = spec.options.inner * bytes_of(spec.type);
    for (int call = 0; call < calls; ++call)
      activated_.emplace_back(received_row_capacity(exchange) * inner_row);
  }

  Stream stream() const override { return stream_; }

  InputAddresses set_inputs(const std::vector<std::byte>& tokens, const Routes& routes) override {
    tokens_.fill_from(tokens.data(), tokens_.bytes());
    ids_.fill_from(routes.ids.data(), ids_.bytes());
    weights_of_routes_.fill_from(routes.weights.data(), weights_of_routes_.bytes());
    return {tokens_.as(), ids_.as<std::int32_t>(), weights_of_routes_.as<float>()};
  }

  void run_experts(bool swiglu, const DispatchResult& received, ProgramValue& outputs,
                   Stream stream) override {
    const GpuRows rows = gpu_rows_of(spec_, received);
    const GpuGroups groups{received.counts, received.row_offsets, received.groups};
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    if (!swiglu) return scale_groups(rows, groups, weights_.factors.as<float>(), outputs.data, handle);
    swiglu_groups(rows, groups, {weights_.matrices.as(), spec_.options.inner, activated_of(outputs)},
                  outputs.data, handle);
  }

  void synchronize() override {
    for (int lane = 0; lane < exchange_.config().lanes; ++lane) {
      exchange_.synchronize({.lane = lane, .stream = stream_});
      exchange_.check(lane);
    }
  }
  std::vector<std::byte> copy_rows(const ProgramValue& tokens) const override {
    std::vector<std::byte> rows(static_cast<std::size_t>(tokens.rows * spec_.row_bytes()));
    copy_to_host(rows.data(), tokens.data, tokens.rows * spec_.row_bytes());
    return rows;
  }

  void start_clock() override {
    stream_.synchronize();
    start_event_.record(stream_);
    start_event_.wait();
    ProgramContext::start_clock();
  }
  void mark(Stream stream) override {
    if (used_marks_ == marks_.size()) marks_.emplace_back();
    marks_[used_marks_++].record(static_cast<cudaStream_t>(stream.handle));
  }
  std::vector<double> take_marks() override {
    std::vector<double> moments;
    for (std::size_t i = 0; i < used_marks_; ++i) {
      marks_[i].wait();
      moments.push_back(marks_[i].seconds_since(start_event_) * 1e6);
    }
    used_marks_ = 0;
    return moments;
  }

 private:
  // Memory for the function's call that makes `outputs`.
  void* activated_of(const ProgramValue& outputs) {
    const std::size_t next = calls_.size();
    return activated_.at(calls_.try_emplace(&outputs, next).first->second).as();
  }

  const RunSpec& spec_;
  Exchange& exchange_;
  cuda::CudaStream stream_;
  GpuExpertWeights weights_;
  GpuBuffer tokens_, ids_, weights_of_routes_;
  std::vector<GpuBuffer> activated_;  // by call: [rows, inner] of RunSpec::type
  std::map<const ProgramValue*, std::size_t> calls_;
  GpuEvent start_event_;
  std::deque<GpuEvent> marks_;  // deque: events cannot be moved
  std::size_t used_marks_ = 0;
};

}  // namespace

std::unique_ptr<ProgramContext> make_gpu_program_context(const RunSpec& spec, Exchange& exchange, int calls) {
  return std::make_unique<GpuProgramContext>(spec, exchange, calls);
}

}  // namespace ferry::app
