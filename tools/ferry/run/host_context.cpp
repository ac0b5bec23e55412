// The contexts of `ferry run` on the CPU: an exchange with its experts, and programs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "base/mapping.hpp"
#include "ferry/exchange.hpp"
#include "format/parts.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/scale_row.hpp"
#include "tools/ferry/run/device_context.hpp"
#include "tools/ferry/run/program_context.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/swiglu.hpp"

namespace ferry::app {

CombineOptions DeviceContext::combine_options(const DispatchResult& received) const {
  CombineOptions options;
  if (combine_applies_weights(spec_.config.layout, spec_.config.reduction))
    options.row_weights = received.weight;
  return options;
}

namespace {

// The experts of one rank, as DeviceContext describes them, with memory for their outputs.
class HostExperts {
 public:
  // `capacity`: the most rows that can be received. Pages are allocated as rows touch them.
  HostExperts(const RunSpec& spec, int rank, std::int64_t capacity)
      : spec_(spec),
        rank_major_(spec.config.layout == Layout::rank_major),
        hidden_(spec.config.hidden),
        outputs_(capacity * spec.row_bytes()),
        experts_(experts_on(spec, rank)),
        rows_of_expert_(experts_.size()),
        swiglu_(spec.weights) {
    if (rank_major_) sums_ = LocalMemory(capacity * hidden_ * 4);
  }

  void scale(const DispatchResult& received) {
    group_rows(received);
    std::vector<float> x(static_cast<std::size_t>(hidden_)), product(x.size()), sum(x.size());
    auto scale_by = [&](int expert) {
      std::transform(x.begin(), x.end(), product.begin(),
                     [f = factor_of(expert)](float value) { return value * f; });
    };
    if (!rank_major_) {
      for (std::size_t local = 0; local < rows_of_expert_.size(); ++local) {
        for (const Routed& routed : rows_of_expert_[local]) {
          load_row(received, routed.row, x.data());
          scale_by(experts_[local]);
          store_row(routed.row, product.data());
        }
      }
      return;
    }
    const int top_k = spec_.config.top_k;
    for (std::int64_t row = 0; row < *received.total; ++row) {
      load_row(received, row, x.data());
      std::fill(sum.begin(), sum.end(), 0.0F);
      for (std::int64_t i = row * top_k; i < (row + 1) * top_k; ++i) {
        if (received.local_ids[i] < 0) continue;
        scale_by(experts_[static_cast<std::size_t>(received.local_ids[i])]);
        accumulate(received.weight[i], product.data(), sum.data());
      }
      store_row(row, sum.data());
    }
  }

  void swiglu(const DispatchResult& received) {
    group_rows(received);
    if (rank_major_) std::memset(sums_.data(), 0, static_cast<std::size_t>(*received.total * hidden_ * 4));
    for (std::size_t local = 0; local < rows_of_expert_.size(); ++local) {
      apply_swiglu(received, experts_[local], rows_of_expert_[local]);
    }
    if (!rank_major_) return;
    const auto* sums = reinterpret_cast<const float*>(sums_.data());
    for (std::int64_t row = 0; row < *received.total; ++row) store_row(row, sums + row * hidden_);
  }

  Outputs outputs() const { return {.data = outputs_.data(), .type = spec_.type}; }

 private:
  // A received row that an expert processes, with the weight that rank_major applies here.
  struct Routed {
    std::int64_t row;
    float weight;
  };

  void load_row(const DispatchResult& received, std::int64_t row, float* values) const {
    if (received.index != nullptr) row = received.index[row];
    if (spec_.config.format.quantises()) return load_quantised_row(received, row, values);
    const auto* from = static_cast<const std::byte*>(received.data) + row * spec_.row_bytes();
    cpu::kernels().convert_row(values, DType::fp32, from, spec_.type, hidden_, cpu::Store::cached);
  }

  void load_quantised_row(const DispatchResult& received, std::int64_t row, float* values) const {
    const Encoding encoding = encoding_of(spec_.config.format);
    const PartList parts = parts_of(spec_.config.format, hidden_);
    const auto* codes = static_cast<const std::byte*>(received.data) + row * parts.part[0].row_bytes;
    const ReceivedPart& scales = received.parts[1];
    const std::int64_t place = scale_row(received, parts.part[1], row, scales.leading_dimension);
    const float row_scale =
        encoding.row_scale ? static_cast<const float*>(received.parts[2].data)[row] : spec_.global_scale();
    for (std::int64_t block = 0; block < encoding.blocks(hidden_); ++block) {
      const float scale =
          received_scale(encoding, parts.part[1], scales.data, scales.leading_dimension, place, block) *
          row_scale;
      const std::int64_t begin = block * encoding.block, end = std::min(begin + encoding.block, hidden_);
      for (std::int64_t c = begin; c < end; ++c) values[c] = quantised_element(encoding, codes, c) * scale;
    }
  }

  void store_row(std::int64_t row, const float* values) {
    cpu::kernels().convert_row(outputs_.data() + row * spec_.row_bytes(), spec_.type, values, DType::fp32,
                               hidden_, cpu::Store::cached);
  }

  // sum = fma(weight, values rounded to RunSpec::type, sum). Overwrites `values`.
  void accumulate(float weight, float* values, float* sum) const {
    if (spec_.type != DType::fp32) {
      std::vector<std::byte> rounded(static_cast<std::size_t>(spec_.row_bytes()));
      const cpu::Kernels& kernels = cpu::kernels();
      kernels.convert_row(rounded.data(), spec_.type, values, DType::fp32, hidden_, cpu::Store::cached);
      kernels.convert_row(values, DType::fp32, rounded.data(), spec_.type, hidden_, cpu::Store::cached);
    }
    for (std::int64_t c = 0; c < hidden_; ++c) sum[c] = std::fma(weight, values[c], sum[c]);
  }

  // Lists the rows of each expert.
  void group_rows(const DispatchResult& received) {
    for (std::vector<Routed>& rows : rows_of_expert_) rows.clear();
    if (!rank_major_) {
      for (std::size_t group = 0; group < rows_of_expert_.size(); ++group) {
        const std::int64_t begin = received.row_offsets[group];
        for (std::int64_t row = begin; row < begin + received.counts[group]; ++row)
          rows_of_expert_[group].push_back({row, 1.0F});
      }
      return;
    }
    const int top_k = spec_.config.top_k;
    for (std::int64_t i = 0; i < *received.total * top_k; ++i) {
      const std::int32_t local = received.local_ids[i];
      if (local >= 0)
        rows_of_expert_[static_cast<std::size_t>(local)].push_back({i / top_k, received.weight[i]});
    }
  }

  void apply_swiglu(const DispatchResult& received, int expert, const std::vector<Routed>& rows) {
    in_.resize(std::max(in_.size(), rows.size() * static_cast<std::size_t>(hidden_)));
    out_.resize(in_.size());
    for (std::size_t i = 0; i < rows.size(); ++i)
      load_row(received, rows[i].row, &in_[i * static_cast<std::size_t>(hidden_)]);
    swiglu_.run(expert, in_.data(), static_cast<std::int64_t>(rows.size()), out_.data());
    auto* sums = reinterpret_cast<float*>(sums_.data());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      float* values = &out_[i * static_cast<std::size_t>(hidden_)];
      if (rank_major_) {
        accumulate(rows[i].weight, values, sums + rows[i].row * hidden_);
      } else {
        store_row(rows[i].row, values);
      }
    }
  }

  const RunSpec& spec_;
  bool rank_major_;
  std::int64_t hidden_;
  LocalMemory outputs_;                              // [capacity, hidden] of RunSpec::type
  LocalMemory sums_;                                 // rank_major: [capacity, hidden] fp32
  std::vector<int> experts_;                         // the shared ones, then this rank's
  std::vector<std::vector<Routed>> rows_of_expert_;  // of each of experts_
  std::vector<float> in_, out_;
  Swiglu swiglu_;
};

class HostContext final : public DeviceContext {
 public:
  HostContext(const Rank& rank, const RunSpec& spec)
      : DeviceContext(rank, spec),
        experts_(spec, rank.index(), received_row_capacity(exchange_)),
        global_scale_(spec.global_scale()),
        result_(static_cast<std::size_t>(spec.result_bytes())) {}

  void set_inputs(const ContextInputs& inputs) override {
    inputs_ = &inputs;
    std::fill(result_.begin(), result_.end(), std::byte{0xFF});
  }

  void dispatch() override {
    received_ = exchange_.dispatch(Tokens::rows(inputs_->tokens.data(), spec_.tokens(), spec_.type),
                                   inputs_->routes.ids.data(), inputs_->routes.weights.data(),
                                   {.global_scale = spec_.options.global_scale ? &global_scale_ : nullptr});
  }

  void run_scaling_experts() override { experts_.scale(received_); }
  void run_swiglu_experts() override { experts_.swiglu(received_); }
  void combine() override {
    exchange_.combine(experts_.outputs(), received_.plan, {.data = result_.data(), .type = spec_.type},
                      combine_options(received_));
  }

  const DispatchResult& received() override { return received_; }
  std::span<const std::byte> result() override { return result_; }

 private:
  HostExperts experts_;
  const ContextInputs* inputs_ = nullptr;
  DispatchResult received_;
  float global_scale_;
  std::vector<std::byte> result_;
};

class HostProgramContext final : public ProgramContext {
 public:
  HostProgramContext(const RunSpec& spec, const Exchange& exchange) : spec_(spec), exchange_(exchange) {}

  InputAddresses set_inputs(const std::vector<std::byte>& tokens, const Routes& routes) override {
    return {tokens.data(), routes.ids.data(), routes.weights.data()};
  }

  // Each call of a program has experts of its own: their outputs live until combine has sent them.
  void run_experts(bool swiglu, const DispatchResult& received, ProgramValue& outputs, Stream) override {
    HostExperts& experts =
        experts_.try_emplace(&outputs, spec_, exchange_.rank().index(), received_row_capacity(exchange_))
            .first->second;
    swiglu ? experts.swiglu(received) : experts.scale(received);
    outputs.data = const_cast<void*>(experts.outputs().data);
  }

  void synchronize() override {}
  std::vector<std::byte> copy_rows(const ProgramValue& tokens) const override {
    const auto* const rows = static_cast<const std::byte*>(tokens.data);
    return {rows, rows + tokens.rows * spec_.row_bytes()};
  }

  void mark(Stream) override { marks_.push_back(now_us()); }
  std::vector<double> take_marks() override { return std::exchange(marks_, {}); }

 private:
  const RunSpec& spec_;
  const Exchange& exchange_;
  std::map<const ProgramValue*, HostExperts> experts_;
  std::vector<double> marks_;
};

}  // namespace

std::unique_ptr<DeviceContext> make_host_context(const Rank& rank, const RunSpec& spec) {
  return std::make_unique<HostContext>(rank, spec);
}

std::unique_ptr<ProgramContext> make_host_program_context(const RunSpec& spec, const Exchange& exchange) {
  return std::make_unique<HostProgramContext>(spec, exchange);
}

}  // namespace ferry::app
