#include "tools/ferry/run/gpu_expert_inputs.hpp"

#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels/kernels.hpp"
#include "tools/ferry/run/device_context.hpp"

namespace ferry::app {

GpuExpertWeights::GpuExpertWeights(const RunSpec& spec, const std::vector<int>& experts) {
  const std::int64_t matrix = std::int64_t{spec.config.hidden} * spec.options.inner;
  const std::int64_t bytes = 3 * matrix * bytes_of(spec.type);  // of an expert
  const auto locals = static_cast<std::int64_t>(experts.size());
  matrices = GpuBuffer(locals * bytes);
  factors = GpuBuffer(locals * 4);
  std::vector<std::byte> converted(static_cast<std::size_t>(locals * bytes));
  std::vector<float> of_experts;
  for (const int expert : experts) {
    std::byte* to = converted.data() + static_cast<std::int64_t>(of_experts.size()) * bytes;
    for (const float* from :
         {spec.weights.gate(expert), spec.weights.up(expert), spec.weights.down(expert)}) {
      cpu::kernels().convert_row(to, spec.type, from, DType::fp32, matrix, cpu::Store::cached);
      to += matrix * bytes_of(spec.type);
    }
    of_experts.push_back(factor_of(expert));
  }
  matrices.fill_from(converted.data(), matrices.bytes());
  factors.fill_from(of_experts.data(), factors.bytes());
}

GpuRows gpu_rows_of(const RunSpec& spec, const DispatchResult& received) {
  const Format& format = spec.config.format;
  GpuRows rows{};
  rows.values = received.data;
  rows.type = spec.type;
  rows.hidden = spec.config.hidden;
  rows.encoding = encoding_of(format);
  if (!rows.encoding.quantises()) return rows;
  rows.scales = received.parts[1].data;
  rows.scale_part = parts_of(format, spec.config.hidden).part[1];
  rows.scale_leading = received.parts[1].leading_dimension;
  rows.call_scale = spec.global_scale();
  rows.groups = ScaleGroups::of(received);
  if (rows.encoding.row_scale) rows.row_scales = static_cast<const float*>(received.parts[2].data);
  return rows;
}

}  // namespace ferry::app
