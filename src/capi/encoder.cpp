#include "capi/encoder.hpp"

#include <algorithm>

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

using Encode = ferry_status (*)(const ferry_encoder_call* call, void* user);

std::function<void(const EncoderCall&)> to_function(Encode encode, void* user, const char* name) {
  if (encode == nullptr) return {};
  return [=](const EncoderCall& call) {
    const ferry_encoder_call c = encoder_call_of(call);
    raise(encode(&c, user), name);
  };
}

Encoder to_encoder(const ferry_encoder& c) {
  Encoder encoder;
  if (c.part_bytes != nullptr) {
    encoder.part_bytes = [c](int hidden) {
      std::array<std::int64_t, kMaxParts> bytes{};
      raise(c.part_bytes(hidden, bytes.data(), c.user), "ferry_encoder.part_bytes");
      return bytes;
    };
  }
  encoder.on_host = to_function(c.on_host, c.user, "ferry_encoder.on_host");
  encoder.on_device = to_function(c.on_device, c.user, "ferry_encoder.on_device");
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
