// A shared library of one format: int8 values with one fp32 scale for each row. It is built without Ferry's
// library; ferry.load_formats() of Python, ferry::load_formats() or ferry_load_formats() opens it.
#include "ferry/cuda/encoder.cuh"
#include "ferry/format_library.hpp"

namespace {

struct EncodeInt8 {
  __host__ __device__ void operator()(const ferry::cuda::RowToEncode& row) const {
    float mine = 0;
    for (int c = row.thread; c < row.hidden; c += row.threads) mine = fmaxf(mine, fabsf(row.value(c)));
    const float scale = row.largest(mine) / 127;
    auto* const values = reinterpret_cast<std::int8_t*>(row.parts[0]);
    for (int c = row.thread; c < row.hidden; c += row.threads)
      values[c] = scale == 0 ? std::int8_t{0} : static_cast<std::int8_t>(rintf(row.value(c) / scale));
    if (row.thread == 0) *reinterpret_cast<float*>(row.parts[1]) = scale;
  }
};

// Values, and 16 bytes that begin with the scale: parts are multiples of 16 bytes.
std::array<std::int64_t, ferry::kMaxParts> part_bytes(int hidden) {
  return {hidden, 16};
}

}  // namespace

extern "C" ferry_status ferry_formats(ferry_register_format_function register_format) {
  return ferry::register_from_library(register_format, "int8_rows",
                                      ferry::cuda::make_encoder(part_bytes, EncodeInt8{}));
}
