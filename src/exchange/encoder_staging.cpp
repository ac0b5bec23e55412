#include "exchange/encoder_staging.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "format/registry.hpp"
#include "layout/plan_layout.hpp"

namespace ferry {
namespace {

// In test builds each row is followed by guard bytes, which show whether the encoder has written past it.
#if FERRY_TEST_HOOKS
constexpr std::int64_t kGuardBytes = 16;
#else
constexpr std::int64_t kGuardBytes = 0;
#endif
constexpr int kGuard = 0xA5;
constexpr std::int64_t kPartAlignment = 256;

std::int64_t stride_of(std::int64_t part_bytes) {
  return part_bytes + kGuardBytes;
}

std::int64_t lane_bytes(const Format& raw, std::int64_t max_tokens) {
  std::int64_t bytes = 0;
  for (const std::int64_t part : raw.part_bytes)
    bytes += part == 0 ? 0 : align_up(max_tokens * stride_of(part), kPartAlignment);
  return bytes;
}

bool is_guard(const std::byte* bytes) {
  return std::all_of(bytes, bytes + kGuardBytes, [](std::byte each) { return each == std::byte{kGuard}; });
}

}  // namespace

std::int64_t EncoderStaging::bytes(const Config& config) {
  if (!encoding_of(config.format).by_caller) return 0;
  return config.lanes * lane_bytes(as_raw(config.format, config.hidden), config.max_tokens);
}

EncoderStaging::EncoderStaging(const Config& config, std::unique_ptr<DeviceWork> work)
    : format_(config.format),
      raw_(as_raw(config.format, config.hidden)),
      hidden_(config.hidden),
      max_tokens_(config.max_tokens),
      work_(std::move(work)) {
  const std::int64_t bytes = lane_bytes(raw_, max_tokens_);
  if (work_ != nullptr && kGuardBytes > 0) work_->prepare_guards(config.lanes);
  for (int lane = 0; lane < config.lanes; ++lane) {
    std::byte* at = nullptr;
    if (work_ != nullptr) {
      at = work_->allocate(bytes);
    } else {
      at = host_.emplace_back(static_cast<std::size_t>(bytes)).data();
    }
    std::array<std::byte*, kMaxParts>& parts = parts_.emplace_back();
    for (std::size_t p = 0; p < parts.size(); ++p) {
      if (raw_.part_bytes[p] == 0) continue;
      parts[p] = at;
      at += align_up(max_tokens_ * stride_of(raw_.part_bytes[p]), kPartAlignment);
    }
  }
}

EncoderCall EncoderStaging::encoder_call(const DispatchCall& call) const {
  const std::int64_t dense = hidden_ * bytes_of(call.tokens.type);
  EncoderCall encode{.tokens = call.tokens.parts[0],
                     .stride = call.tokens.strides[0] != 0 ? call.tokens.strides[0] : dense,
                     .type = call.tokens.type,
                     .hidden = static_cast<int>(hidden_),
                     .rows = call.tokens.count,
                     .device_rows = call.tokens.device_count,
                     .part_bytes = raw_.part_bytes,
                     .parts = {},
                     .part_strides = {},
                     .stream = call.options.stream};
  const std::array<std::byte*, kMaxParts>& parts = parts_[static_cast<std::size_t>(call.options.lane)];
  for (std::size_t p = 0; p < parts.size(); ++p) {
    encode.parts[p] = parts[p];
    encode.part_strides[p] = parts[p] == nullptr ? 0 : stride_of(raw_.part_bytes[p]);
  }
  return encode;
}

void EncoderStaging::throw_written_past(int lane, int part, std::int64_t row) const {
  throw UsageError(str("dispatch: the encoder of the format ", name_of_registered(format_),
                       " has written past the end of part ", part, " of row ", row, ", lane ", lane,
                       ": a row has ", counted(raw_.part_bytes[static_cast<std::size_t>(part)], "byte"),
                       " there: return more from part_bytes, or write fewer"));
}

DispatchCall EncoderStaging::encode(const DispatchCall& call) const {
  const EncoderCall rows = encoder_call(call);
  const Encoder& encoder = encoder_of(format_);
  DispatchCall encoded = call;
  encoded.format = raw_;
  for (std::size_t p = 0; p < rows.parts.size(); ++p) {
    encoded.tokens.parts[p] = rows.parts[p];
    encoded.tokens.strides[p] = rows.part_strides[p];
  }
  if (rows.rows == 0) return encoded;
  const auto guards_of = [&](std::size_t p) {
    return GuardedRows{.first = static_cast<std::byte*>(rows.parts[p]),
                       .row_bytes = rows.part_bytes[p],
                       .stride = rows.part_strides[p],
                       .guard_bytes = rows.parts[p] == nullptr ? 0 : kGuardBytes,
                       .rows = rows.rows};
  };
  const auto for_each_guard = [&](std::size_t p, const auto& use) {
    const GuardedRows guards = guards_of(p);
    for (std::int64_t row = 0; guards.guard_bytes > 0 && row < guards.rows; ++row)
      use(guards.first + row * guards.stride + guards.row_bytes, row);
  };
  for (std::size_t p = 0; p < rows.parts.size(); ++p) {
    if (work_ != nullptr) {
      work_->fill_guards(guards_of(p), kGuard, rows.stream);
    } else {
      for_each_guard(
          p, [](std::byte* guard, std::int64_t) { std::fill_n(guard, kGuardBytes, std::byte{kGuard}); });
    }
  }
  const std::string failed =
      str("dispatch: the encoder of the format ", name_of_registered(format_), " has failed");
  call_encoder(failed, [&] { (work_ != nullptr ? encoder.on_device : encoder.on_host)(rows); });
  for (std::size_t p = 0; p < rows.parts.size(); ++p) {
    if (work_ != nullptr) {
      work_->check_guards(guards_of(p), kGuard, call.options.lane, static_cast<int>(p), rows.stream);
    } else {
      for_each_guard(p, [&](const std::byte* guard, std::int64_t row) {
        if (!is_guard(guard)) throw_written_past(call.options.lane, static_cast<int>(p), row);
      });
    }
  }
  return encoded;
}

void EncoderStaging::raise_broken_guards(int lane) const {
  if (work_ == nullptr || kGuardBytes == 0) return;
  if (const std::optional<BrokenGuard> broken = work_->take_broken_guard(lane))
    throw_written_past(lane, broken->part, broken->row);
}

}  // namespace ferry
