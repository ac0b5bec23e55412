// MAX's dispatch in C in every format: the received parts, decoded as docs/formats.md says, are the tokens
// that src_info names.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "capi/run.hpp"
#include "ferry/c/max.h"
#include "seed.hpp"

namespace ferry::capi_test {
namespace {

constexpr int kHidden = 288, kTokens = 5, kTopK = 2, kExperts = 6;

float e4m3(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                    : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return bits >> 7 != 0 ? -value : value;
}
float e2m1(std::uint8_t bits) {
  constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return (bits & 8) != 0 ? -kValues[bits & 7] : kValues[bits & 7];
}
float e8m0(std::uint8_t bits) {
  return std::ldexp(1.0f, bits - 127);
}
float fp16(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                    : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return bits >> 15 != 0 ? -value : value;
}
float bf16(std::uint16_t bits) {
  const std::uint32_t word = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

template <class T>
T load(const void* memory, std::int64_t byte) {
  T value;
  std::memcpy(&value, static_cast<const std::uint8_t*>(memory) + byte, sizeof value);
  return value;
}

bool has(const std::string& name, const char* word) {
  return name.find(word) != std::string::npos;
}

// What a test knows of a received row: its group, and its position there.
struct Place {
  std::int64_t row, group, position;
};

class Decoder {
 public:
  Decoder(std::string name, const ferry_max_dispatch_result& received)
      : name_(std::move(name)), received_(received) {}

  float value(const Place& at, int column) const {
    const ferry_received_part& values = received_.parts[0];
    const std::int64_t first = at.row * values.row_bytes;
    if (name_ == "bf16") return bf16(load<std::uint16_t>(values.data, first + 2 * column));
    if (name_ == "fp16") return fp16(load<std::uint16_t>(values.data, first + 2 * column));
    if (name_ == "fp32") return load<float>(values.data, first + 4 * column);
    if (has(name_, "fp8")) {
      const float element = e4m3(load<std::uint8_t>(values.data, first + column));
      return element *
             (has(name_, "mxfp8") ? e8m0(scale_byte(at, column / 32)) : fp8_scale(at, column / 128));
    }
    const auto pair = load<std::uint8_t>(values.data, first + column / 2);
    const float element = e2m1(column % 2 == 0 ? pair & 15 : pair >> 4);
    if (has(name_, "mxfp4")) return element * e8m0(scale_byte(at, column / 32));
    const float g = has(name_, "token") ? load<float>(received_.parts[2].data, 4 * at.row) : 0.25f;
    return element * e4m3(scale_byte(at, column / 16)) * g;
  }

 private:
  float fp8_scale(const Place& at, int block) const {
    const ferry_received_part& scales = received_.parts[1];
    if (has(name_, "packed"))
      return e8m0(
          load<std::uint8_t>(scales.data, 4 * (block / 4 * scales.leading_dimension + at.row) + block % 4));
    const bool columns = has(name_, "columns");
    return load<float>(scales.data, columns ? 4 * (block * scales.leading_dimension + at.row)
                                            : at.row * scales.row_bytes + 4 * block);
  }
  // A byte of the scales, of which four are a word.
  std::uint8_t scale_byte(const Place& at, int block) const {
    const ferry_received_part& scales = received_.parts[1];
    if (has(name_, "columns"))
      return load<std::uint8_t>(scales.data, 4 * (block / 4 * scales.leading_dimension + at.row) + block % 4);
    if (!has(name_, "tiles")) return load<std::uint8_t>(scales.data, at.row * scales.row_bytes + block);
    const std::int64_t blocks = kHidden / (has(name_, "nvfp4") ? 16 : 32), r = at.position,
                       tile = r / 128 * ((blocks + 3) / 4) + block / 4;
    return load<std::uint8_t>(scales.data, received_.tile_offsets[at.group] * scales.row_bytes + 512 * tile +
                                               r % 32 * 16 + r % 128 / 32 * 4 + block % 4);
  }

  const std::string name_;
  const ferry_max_dispatch_result& received_;
};

// Tokens of two ranks. A token in two has 8 times the size of its neighbour, and no block that of the next.
struct MaxTokens {
  MaxTokens() {
    std::mt19937 random(static_cast<unsigned>(test::seed()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t column = i % kHidden;
      const int size = 1 << (column / 16 % 2 + 2 * (column / 128) + 3 * (i / kHidden % 2));
      values[i] = static_cast<float>(static_cast<int>(random() % 255) - 127) / 64 * static_cast<float>(size);
    }
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % (kExperts + 1)) - 1;
  }
  const float* of(std::int64_t rank, std::int64_t token) const {
    return values.data() + (rank * kTokens + token) * kHidden;
  }

  std::vector<float> values = std::vector<float>(2 * kTokens * kHidden);
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(2 * kTokens * kTopK);
};

void check_rows(const std::string& name, const ferry_max_dispatch_result& received, const MaxTokens& tokens,
                std::int64_t rank) {
  const Decoder decoder(name, received);
  // Of a block's largest value: half a step of the elements, which are spaced by 1/16, or 1/4 of it and more.
  const float relative = has(name, "fp4") ? 0.26f : has(name, "fp8") ? 0.07f : 0.0f;
  const int block = has(name, "nvfp4") ? 16 : has(name, "mx") ? 32 : 128;
  std::int64_t row = 0;
  for (std::int64_t group = 0; group < received.groups; ++group) {
    std::int64_t position = 0;
    for (std::int64_t source = 0; source < 2; ++source) {
      for (std::int64_t token = 0; token < kTokens; ++token) {
        for (std::int64_t slot = 0; slot < kTopK; ++slot) {
          const std::int64_t expert =
              tokens.ids[static_cast<std::size_t>((source * kTokens + token) * kTopK + slot)];
          if (expert != rank * (kExperts / 2) + group) continue;
          ASSERT_EQ(received.src_info[2 * row], token);
          ASSERT_EQ(received.src_info[2 * row + 1], slot);
          const float* const sent = tokens.of(source, token);
          for (int column = 0; column < kHidden; ++column) {
            const int begin = column / block * block, end = std::min(begin + block, kHidden);
            float largest = 0;
            for (int c = begin; c < end; ++c) largest = std::max(largest, std::fabs(sent[c]));
            ASSERT_NEAR(decoder.value({row, group, position}, column), sent[column], relative * largest)
                << name << ", row " << row << ", column " << column;
          }
          ++row;
          ++position;
        }
      }
    }
  }
  EXPECT_EQ(received.row_offsets[received.expert_usage_stats[1]], row);
  EXPECT_EQ(received.tile_offsets != nullptr, has(name, "tiles")) << name;
}

TEST(MaxInC, RowsOfEveryFormatDecodeToTheTokens) {
  const MaxTokens tokens;
  for (const char* name :
       {"bf16", "fp16", "fp32", "fp8", "fp8-columns", "fp8-pow2", "fp8-columns-pow2-packed", "mxfp8",
        "mxfp8-columns", "mxfp8-tiles", "mxfp4", "mxfp4-columns", "mxfp4-tiles", "nvfp4", "nvfp4-columns",
        "nvfp4-tiles", "nvfp4-token", "nvfp4-token-columns", "nvfp4-token-tiles"}) {
    run_threads(2, [&](ferry_rank* rank) {
      const std::int64_t me = ferry_rank_index(rank);
      auto config = sized<ferry_config>();
      config.experts = kExperts;
      config.top_k = kTopK;
      config.hidden = kHidden;
      config.max_tokens = kTokens;
      ASSERT_EQ(ferry_parse_format(name, &config.format), FERRY_OK) << ferry_last_error();
      ferry_max_exchange* exchange = nullptr;
      ASSERT_EQ(ferry_max_exchange_create(rank, &config, &exchange), FERRY_OK)
          << name << ": " << ferry_last_error();
      auto received = sized<ferry_max_dispatch_result>();
      auto args = sized<ferry_max_dispatch_args>();
      // Every value has 8 significant bits: it is the same in bf16, fp16 and fp32.
      std::vector<std::uint16_t> narrow;
      for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
        std::uint32_t word;
        std::memcpy(&word, tokens.of(me, 0) + i, 4);
        narrow.push_back(static_cast<std::uint16_t>(word >> 16));
      }
      const std::string format = name;
      std::vector<std::uint16_t> half;
      for (std::int64_t i = 0; i < kTokens * kHidden && format == "fp16"; ++i) {
        std::uint16_t bits = 0;
        while (fp16(bits) != tokens.of(me, 0)[i]) ++bits;
        half.push_back(bits);
      }
      args.input_tokens.parts[0] = format == "fp32"   ? static_cast<const void*>(tokens.of(me, 0))
                                   : format == "fp16" ? half.data()
                                                      : narrow.data();
      args.input_tokens.type = format == "fp32" ? FERRY_FP32 : format == "fp16" ? FERRY_FP16 : FERRY_BF16;
      args.input_tokens.count = kTokens;
      args.topk_ids = tokens.ids.data() + me * kTokens * kTopK;
      const float g = 0.25f;
      if (format.starts_with("nvfp4") && !has(format, "token")) args.global_scale = &g;
      args.result = &received;
      EXPECT_EQ(ferry_max_ep_fused_dispatch(exchange, &args), FERRY_OK) << name << ": " << ferry_last_error();
      check_rows(format, received, tokens, me);
      ferry_max_exchange_destroy(exchange);
    });
  }
}

}  // namespace
}  // namespace ferry::capi_test
