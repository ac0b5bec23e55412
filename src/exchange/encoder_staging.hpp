// The encoded rows of an exchange whose format the caller has registered: memory for them, and the call of
// the encoder before a dispatch. The backends see a raw format.
#pragma once

#include <memory>
#include <vector>

#include "exchange/backend.hpp"
#include "exchange/device_work.hpp"
#include "ferry/encoder.hpp"

namespace ferry {

class EncoderStaging {
 public:
  // `config`: complete, of a registered format. `work`: null for host memory.
  EncoderStaging(const Config& config, std::unique_ptr<DeviceWork> work);

  // Encodes the tokens of a checked call, and returns the call with them as raw parts. Throws UsageError if
  // the encoder throws another error than one of Ferry's, or (test builds, host memory) writes past a row.
  DispatchCall encode(const DispatchCall& call) const;

  // Test builds, device memory: throws UsageError if an encoder has written past a row since the last call.
  void raise_broken_guards(int lane) const;

  // Bytes of the memory of all lanes.
  static std::int64_t bytes(const Config& config);

 private:
  EncoderCall encoder_call(const DispatchCall& call) const;
  [[noreturn]] void throw_written_past(int lane, int part, std::int64_t row) const;

  const Format format_, raw_;
  const std::int64_t hidden_, max_tokens_;
  std::unique_ptr<DeviceWork> work_;
  std::vector<std::vector<std::byte>> host_;              // of each lane
  std::vector<std::array<std::byte*, kMaxParts>> parts_;  // of each lane
};

}  // namespace ferry
