// A library of formats whose encoders throw. It needs Ferry's headers only.
#include <stdexcept>
#include <string>

#include "ferry/format_library.hpp"

namespace {

std::array<std::int64_t, ferry::kMaxParts> part_bytes(int hidden) {
  if (hidden % 64 != 0)
    throw ferry::UsageError("hidden = " + std::to_string(hidden) + " is no multiple of 64");
  return {hidden};
}

void refuse_one_and_three_rows(const ferry::EncoderCall& call) {
  if (call.rows == 1) throw std::runtime_error("one row is too few for this encoder");
  if (call.rows == 3) throw 3;
}

}  // namespace

extern "C" ferry_status ferry_formats(ferry_register_format_function register_format) {
  ferry::Encoder encoder;
  encoder.part_bytes = part_bytes;
  encoder.on_host = refuse_one_and_three_rows;
  return ferry::register_from_library(register_format, "library_throws", encoder);
}
