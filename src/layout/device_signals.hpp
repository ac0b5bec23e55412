// Where the signals of one lane lie in a GPU rank's symmetric memory.
//
//   letters         [2 generations][R sources]   what one rank tells another once a call
//   sent flags      [2 phases][2][R sources]     call number: nothing more of a phase comes from a source
//   dispatch flags  [2][R sources][T]            call number: message i of a source is here
//   combine flags   [2][combine rows]            call number: this row of combine's staging is here
#pragma once

#include <cstdint>

#include "core/error_record.hpp"
#include "layout/exchange_layout.hpp"
#include "layout/host_device.hpp"

namespace ferry {

inline constexpr int kDeviceOptions = 12;
inline constexpr int kPhases = 2;  // of a call that sends: combine's weights from home, then everything else
inline constexpr int kDeviceArguments = 3;  // optional arguments whose presence is compared

// Stored last with release: `call`. Whoever has read it with acquire may read the rest.
struct DeviceLetter {
  std::uint64_t call;
  std::uint64_t terms;  // hash of operation, refusal and options: what all ranks have alike
  std::int32_t count;   // metadata: this rank's; otherwise its tokens
  std::int32_t argument[kDeviceArguments];  // 0 absent, 1 given, 2 either
  Operation operation;
  std::int32_t refused;
  std::int64_t option[kDeviceOptions];
  ErrorRecord refusal;
  // int32 counts [E], then tokens [R]: at DeviceSignals::counts_offset.
};

struct DeviceSignals {
  std::int32_t ranks, experts, max_tokens;
  std::int64_t combine_rows;

  FERRY_HD constexpr std::int64_t counts_offset() const {
    return (static_cast<std::int64_t>(sizeof(DeviceLetter)) + 15) / 16 * 16;
  }
  FERRY_HD constexpr std::int64_t letter_bytes() const {
    return (counts_offset() + 4 * (std::int64_t{experts} + ranks) + 127) / 128 * 128;
  }
  FERRY_HD constexpr std::int64_t letter(int generation, int source) const {
    return (std::int64_t{generation} * ranks + source) * letter_bytes();
  }
  FERRY_HD constexpr std::int64_t sent_flag(int phase, int generation, int source) const {
    return letter(2, 0) + 8 * ((2 * std::int64_t{phase} + generation) * ranks + source);
  }
  FERRY_HD constexpr std::int64_t dispatch_flag(int generation, int source, std::int64_t i) const {
    return sent_flag(2, 0, 0) + 8 * ((std::int64_t{generation} * ranks + source) * max_tokens + i);
  }
  FERRY_HD constexpr std::int64_t combine_flag(int generation, std::int64_t row) const {
    return dispatch_flag(2, 0, 0) + 8 * (generation * combine_rows + row);
  }
  FERRY_HD constexpr std::int64_t bytes() const { return combine_flag(2, 0); }
};

}  // namespace ferry
