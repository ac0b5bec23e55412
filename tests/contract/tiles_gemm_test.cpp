// A grouped GEMM on received rows whose scales are tiles, dequantised as a consumer reads them, against the
// bf16 GEMM on the values that the oracle decodes.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/block_formats.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

constexpr int kHidden = 192, kOutputs = 16;

// The scale byte of block `block` of row `row` of a group, by cuBLAS's published formula ("1D Block Scaling
// Factors Layout").
std::uint8_t scale_byte(const std::byte* group, std::int64_t row, std::int64_t block, std::int64_t blocks) {
  const std::int64_t inner_dim = (blocks + 3) / 4 * 4;
  const std::int64_t tile = (block / 4 * 4 + row / 128 * inner_dim) * 128;
  return std::to_integer<std::uint8_t>(group[tile + row % 128 % 32 * 16 + row % 128 / 32 * 4 + block % 4]);
}

// The values of row `row` of the group that begins at `first` and has the scales `tiles`.
std::vector<float> dequantised(const DispatchResult& received, const Format& format, std::int64_t first,
                               std::int64_t row, const std::byte* tiles, float global_scale) {
  const bool nvfp4 = format.kind == FormatKind::nvfp4, narrow = format.kind != FormatKind::mxfp8;
  const std::int64_t columns_of_block = nvfp4 ? 16 : 32, blocks = kHidden / columns_of_block;
  const auto* values =
      static_cast<const std::uint8_t*>(received.data) + (first + row) * received.parts[0].row_bytes;
  const float g = format.nvfp4_options.per_token
                      ? static_cast<const float*>(received.parts[2].data)[first + row]
                      : global_scale;
  std::vector<float> row_values;
  for (std::int64_t column = 0; column < kHidden; ++column) {
    const std::uint8_t scale = scale_byte(tiles, row, column / columns_of_block, blocks);
    const std::uint8_t code = narrow ? values[column / 2] >> (column % 2 * 4) & 15 : values[column];
    const float element =
        oracle::decode_element(narrow ? oracle::Element::e2m1 : oracle::Element::e4m3, code);
    row_values.push_back(nvfp4 ? element * oracle::decode_element(oracle::Element::e4m3, scale) * g
                               : std::ldexp(element, scale - 127));
  }
  return row_values;
}

// The values that the oracle decodes from its own encoding of the token.
std::vector<double> decoded_by_oracle(const StepInputs& step, const Source& source) {
  const oracle::GlobalInputs& inputs = step.inputs;
  const std::int64_t size = bytes_of(inputs.type);
  const std::byte* from =
      inputs.ranks[static_cast<std::size_t>(source.rank)].parts[0].data() + source.token * kHidden * size;
  std::vector<float> row;
  for (std::int64_t column = 0; column < kHidden; ++column)
    row.push_back(oracle::load(inputs.type, from + column * size));
  const Format& format = inputs.format;
  if (format.kind == FormatKind::nvfp4) {
    const float g = format.nvfp4_options.per_token ? oracle::nvfp4_row_scale(row) : inputs.global_scale;
    return oracle::decode_nvfp4(oracle::encode_nvfp4(row, g), kHidden);
  }
  const auto element = format.kind == FormatKind::mxfp8 ? oracle::Element::e4m3 : oracle::Element::e2m1;
  return oracle::decode_mx(oracle::encode_mx(row, element, format.mx.rule), element, kHidden);
}

void check_gemm(const DispatchResult& received, const StepInputs& step) {
  Random random = Random::of({5});
  double difference = 0, norm = 0;
  for (int group = 0; group < received.groups; ++group) {
    std::vector<float> weights;  // [H, kOutputs], bf16
    for (int i = 0; i < kHidden * kOutputs; ++i)
      weights.push_back(oracle::rounded(DType::bf16, static_cast<float>(random.uniform() - 0.5)));
    const auto* tiles = static_cast<const std::byte*>(received.parts[1].data) +
                        received.tile_offsets[group] * received.parts[1].row_bytes;
    const std::int64_t first = received.row_offsets[group];
    for (std::int64_t row = 0; row < received.counts[group]; ++row) {
      const std::vector<float> got =
          dequantised(received, step.inputs.format, first, row, tiles, step.inputs.global_scale);
      const std::vector<double> expected = decoded_by_oracle(step, received.source[first + row]);
      for (std::size_t n = 0; n < kOutputs; ++n) {
        float y = 0, z = 0;
        for (std::size_t k = 0; k < kHidden; ++k) {
          y += got[k] * weights[k * kOutputs + n];
          z += oracle::rounded(DType::bf16, static_cast<float>(expected[k])) * weights[k * kOutputs + n];
        }
        const double of_bf16 = oracle::rounded(DType::bf16, z);
        difference += (y - of_bf16) * (y - of_bf16);
        norm += of_bf16 * of_bf16;
      }
    }
  }
  require(norm > 0 && difference <= 1e-4 * norm, "the GEMMs differ by ", std::sqrt(difference / norm));
}

TEST_P(Contract, GroupedGemmOnDequantisedTiles) {
  for (const char* format :
       {"mxfp8-tiles", "mxfp8-ocp-tiles", "mxfp4-tiles", "nvfp4-tiles", "nvfp4-token-tiles"}) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      TestCase c = small_case(12);
      c.ranks = 2;
      c.config.format = parse_format(format);
      c.config.layout = layout;
      c.config.hidden = kHidden;
      c.config.experts = 3;
      c.config.top_k = 2;
      c.config.max_tokens = 150;  // more rows than a tile has
      c.config.alignment = 4;
      c.full = true;
      c.type = DType::bf16;
      c.weights_from = WeightsFrom::none;
      if (c.config.format.kind == FormatKind::nvfp4 && !c.config.format.nvfp4_options.per_token)
        c.global_scale = 0.0123f;
      GetParam().choose_backend(c.config);
      const StepInputs step = make_inputs(c);
      run(c.ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        DispatchRun dispatch(exchange, c, step);
        check_gemm(dispatch.call(), step);
      });
    }
  }
}

}  // namespace
}  // namespace ferry::contract
