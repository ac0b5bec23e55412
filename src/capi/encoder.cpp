#include "capi/encoder.hpp"

#include <algorithm>
#include <stdexcept>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "ferry/encoder.hpp"

namespace ferry::capi {
namespace {

ferry_encoder_call encoder_call_of(const EncoderCall& call) {
  ferry_encoder_call c{};
  c.tokens = call.tokens;
  c.stride = call.stride;
  c.type = static_cast<std::int32_t>(call.type);
  c.hidden = call.hidden;
  c.rows = call.rows;
  c.device_rows = call.device_rows;
  std::copy(call.part_bytes.begin(), call.part_bytes.end(), c.part_bytes);
  std::copy(call.parts.begin(), call.parts.end(), c.parts);
  std::copy(call.part_strides.begin(), call.part_strides.end(), c.part_strides);
  c.stream = call.stream.handle;
  return c;
}

// Throws the status that `function` of the encoder has returned, unless it is FERRY_OK. call_encoder() turns
// the exception into a UsageError.
void check_encoded(const ferry_encoder& c, ferry_status status, const char* function) {
  if (status == FERRY_OK) return;
  const char* const text = c.error != nullptr ? c.error(c.user) : nullptr;
  throw std::runtime_error(text != nullptr ? text : describe(status, function));
}

using Encode = ferry_status (*)(const ferry_encoder_call* call, void* user);

std::function<void(const EncoderCall&)> to_function(const ferry_encoder& c, Encode encode, const char* name) {
  if (encode == nullptr) return {};
  return [=](const EncoderCall& call) {
    const ferry_encoder_call rows = encoder_call_of(call);
    check_encoded(c, encode(&rows, c.user), name);
  };
}

Encoder to_encoder(const ferry_encoder& c) {
  Encoder encoder;
  if (c.part_bytes != nullptr) {
    encoder.part_bytes = [c](int hidden) {
      std::array<std::int64_t, kMaxParts> bytes{};
      check_encoded(c, c.part_bytes(hidden, bytes.data(), c.user), "ferry_encoder.part_bytes");
      return bytes;
    };
  }
  encoder.on_host = to_function(c, c.on_host, "ferry_encoder.on_host");
  encoder.on_device = to_function(c, c.on_device, "ferry_encoder.on_device");
  return encoder;
}

}  // namespace

void add_format(Registration& registration, const char* name, const ferry_encoder* encoder,
                ferry_format* format) {
  ferry_format& made = required(format, "format");
  made = to_c(registration.add(&required(name, "name"), to_encoder(read_sized(encoder, "ferry_encoder"))));
}

extern "C" {

ferry_status ferry_register_format(const char* name, const ferry_encoder* encoder, ferry_format* format) {
  return guarded([&] {
    Registration registration;
    add_format(registration, name, encoder, format);
    registration.make_known();
  });
}

}  // extern "C"

}  // namespace ferry::capi
