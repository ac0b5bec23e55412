#include "tools/ferry/run/experts.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/kernels.hpp"
#include "format/e4m3.hpp"
#include "format/parts.hpp"

namespace ferry::app {

namespace {

constexpr std::int64_t kScaledColumns = 128;  // with one scale

// Scale of block `block` of an arrived fp8 row.
float scale_of(const DispatchResult& received, const PartLayout& part, bool packed, std::int64_t row,
               std::int64_t block) {
  const ReceivedPart& scales = received.parts[1];
  const auto* base = static_cast<const std::byte*>(scales.data);
  const std::int64_t word = packed ? block / 4 : block;
  const std::int64_t element = part.columns ? element_offset(part, row, word, scales.leading_dimension)
                                            : element_offset(part, row, 0, 0) + 4 * word;
  std::uint32_t bits = 0;
  std::memcpy(&bits, base + element, sizeof bits);
  return float_of(packed ? (bits >> (8 * (block % 4)) & 0xFFU) << 23 : bits);
}

}  // namespace

Experts::Experts(const Job& job, int rank, std::int64_t capacity)
    : job_(job),
      rank_(rank),
      rank_major_(job.config.layout == Layout::rank_major),
      hidden_(job.config.hidden),
      outputs_(capacity * job.row_bytes()),
      by_expert_(static_cast<std::size_t>(job.config.placement.local_experts(rank))),
      function_(job.weights) {
  if (rank_major_) sums_ = LocalMemory(capacity * hidden_ * 4);
}

void Experts::multiply(const DispatchResult& received) {
  group_rows(received);
  const std::vector<int>& experts = job_.config.placement.experts_of(rank_);
  std::vector<float> x(static_cast<std::size_t>(hidden_)), product(x.size()), sum(x.size());
  auto times = [&](int expert) {
    std::transform(x.begin(), x.end(), product.begin(),
                   [f = factor_of(expert)](float value) { return value * f; });
  };
  if (!rank_major_) {
    for (std::size_t local = 0; local < by_expert_.size(); ++local) {
      for (const Routed& routed : by_expert_[local]) {
        read(received, routed.row, x.data());
        times(experts[local]);
        write(routed.row, product.data());
      }
    }
    return;
  }
  const int top_k = job_.config.top_k;
  for (std::int64_t row = 0; row < *received.total; ++row) {
    read(received, row, x.data());
    std::fill(sum.begin(), sum.end(), 0.0F);
    for (std::int64_t i = row * top_k; i < (row + 1) * top_k; ++i) {
      if (received.local_ids[i] < 0) continue;
      times(experts[static_cast<std::size_t>(received.local_ids[i])]);
      add(received.weight[i], product.data(), sum.data());
    }
    write(row, sum.data());
  }
}

void Experts::swiglu(const DispatchResult& received) {
  group_rows(received);
  if (rank_major_) std::memset(sums_.data(), 0, static_cast<std::size_t>(*received.total * hidden_ * 4));
  const std::vector<int>& experts = job_.config.placement.experts_of(rank_);
  for (std::size_t local = 0; local < by_expert_.size(); ++local) {
    apply_swiglu(received, experts[local], by_expert_[local]);
  }
  if (!rank_major_) return;
  const auto* sums = reinterpret_cast<const float*>(sums_.data());
  for (std::int64_t row = 0; row < *received.total; ++row) write(row, sums + row * hidden_);
}

void Experts::apply_swiglu(const DispatchResult& received, int expert, const std::vector<Routed>& rows) {
  in_.resize(std::max(in_.size(), rows.size() * static_cast<std::size_t>(hidden_)));
  out_.resize(in_.size());
  for (std::size_t i = 0; i < rows.size(); ++i)
    read(received, rows[i].row, &in_[i * static_cast<std::size_t>(hidden_)]);
  function_.run(expert, in_.data(), static_cast<std::int64_t>(rows.size()), out_.data());
  auto* sums = reinterpret_cast<float*>(sums_.data());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    float* values = &out_[i * static_cast<std::size_t>(hidden_)];
    if (rank_major_) {
      add(rows[i].weight, values, sums + rows[i].row * hidden_);
    } else {
      write(rows[i].row, values);
    }
  }
}

// Which rows each local expert works on, with the weights that rank_major applies here.
void Experts::group_rows(const DispatchResult& received) {
  for (std::vector<Routed>& rows : by_expert_) rows.clear();
  if (!rank_major_) {
    for (std::size_t group = 0; group < by_expert_.size(); ++group) {
      const std::int64_t begin = received.row_offsets[group];
      for (std::int64_t row = begin; row < begin + received.counts[group]; ++row)
        by_expert_[group].push_back({row, 1.0F});
    }
    return;
  }
  const int top_k = job_.config.top_k;
  for (std::int64_t i = 0; i < *received.total * top_k; ++i) {
    const std::int32_t local = received.local_ids[i];
    if (local >= 0) by_expert_[static_cast<std::size_t>(local)].push_back({i / top_k, received.weight[i]});
  }
}

void Experts::read(const DispatchResult& received, std::int64_t row, float* values) const {
  if (job_.config.format.kind == FormatKind::fp8_e4m3) return read_fp8(received, row, values);
  const auto* from = static_cast<const std::byte*>(received.data) + row * job_.row_bytes();
  cpu::kernels().convert_row(values, DType::fp32, from, job_.type, hidden_, cpu::Store::cached);
}

void Experts::read_fp8(const DispatchResult& received, std::int64_t row, float* values) const {
  const PartLayout part = parts_of(job_.config.format, hidden_).part[1];
  const auto* codes = static_cast<const std::uint8_t*>(received.data) + row * hidden_;
  for (std::int64_t begin = 0; begin < hidden_; begin += kScaledColumns) {
    const float scale = scale_of(received, part, job_.config.format.fp8.packed, row, begin / kScaledColumns);
    const std::int64_t end = std::min(begin + kScaledColumns, hidden_);
    for (std::int64_t c = begin; c < end; ++c) values[c] = e4m3_to_fp32(codes[c]) * scale;
  }
}

void Experts::write(std::int64_t row, const float* values) {
  cpu::kernels().convert_row(outputs_.data() + row * job_.row_bytes(), job_.type, values, DType::fp32,
                             hidden_, cpu::Store::cached);
}

// sum = fma(weight, values rounded to Job::type, sum); `values` is used up.
void Experts::add(float weight, float* values, float* sum) const {
  if (job_.type != DType::fp32) {
    std::vector<std::byte> rounded(static_cast<std::size_t>(job_.row_bytes()));
    const cpu::Kernels& kernels = cpu::kernels();
    kernels.convert_row(rounded.data(), job_.type, values, DType::fp32, hidden_, cpu::Store::cached);
    kernels.convert_row(values, DType::fp32, rounded.data(), job_.type, hidden_, cpu::Store::cached);
  }
  for (std::int64_t c = 0; c < hidden_; ++c) sum[c] = std::fma(weight, values[c], sum[c]);
}

}  // namespace ferry::app
