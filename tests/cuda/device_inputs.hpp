// A rank's inputs of a dispatch, in device memory: one input set, or the memory that calls read, into which
// sets are loaded. Tokens have the two bytes a value of bf16 and fp16; ids are int64.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device_resources.hpp"
#include "cuda/device_test.hpp"
#include "ferry/config.hpp"
#include "ferry/exchange.hpp"

namespace ferry::contract {

class DeviceInputs {
 public:
  // Memory that calls read.
  explicit DeviceInputs(const Config& config) : DeviceInputs(oracle::RankInputs{}, config) {}
  // The memory of an input set: N tokens, then poison up to max_tokens.
  DeviceInputs(const oracle::RankInputs& in, const Config& config)
      : tokens_of_set_(in.tokens),
        count_(bytes_of_values(std::vector<std::int32_t>{static_cast<std::int32_t>(in.tokens)})),
        tokens_(padded(in.tokens > 0 ? in.parts[0] : std::vector<std::byte>{},
                       std::int64_t{config.max_tokens} * 2 * config.hidden)),
        ids_(padded(bytes_of_values(in.ids), std::int64_t{config.max_tokens} * config.top_k * 8)),
        weights_(padded(bytes_of_values(in.weights), std::int64_t{config.max_tokens} * config.top_k * 4)),
        most_(config.max_tokens) {}

  // Enqueues copies that make `set` the input of later calls.
  void load(const DeviceInputs& set, cudaStream_t stream) const {
    count_.copy_from(set.count_, stream);
    tokens_.copy_from(set.tokens_, stream);
    ids_.copy_from(set.ids_, stream);
    weights_.copy_from(set.weights_, stream);
  }

  // N of `set`, which is loaded here, as the host knows it.
  Tokens tokens_of(const DeviceInputs& set) const { return Tokens::rows(tokens_.data(), set.tokens_of_set_); }
  // N from device memory.
  Tokens counted_tokens() const {
    Tokens tokens = Tokens::rows(tokens_.data(), most_);
    tokens.device_count = count_.as<std::int32_t>();
    return tokens;
  }
  Ids ids() const { return Ids(ids_.as<std::int64_t>()); }
  const float* weights() const { return weights_.as<float>(); }

 private:
  std::int64_t tokens_of_set_;
  DeviceBytes count_, tokens_, ids_, weights_;
  std::int64_t most_;
};

}  // namespace ferry::contract
