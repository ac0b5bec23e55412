// The encoding in which a token's row is transferred and received, such as bf16 or block-scaled fp8.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "ferry/types.hpp"

namespace ferry {

/// The encodings. `raw` is data that the caller has quantised: Ferry moves its bytes without looking at them.
/// `registered` is a format of the caller's own, whose encoder dispatch calls: see register_format().
enum class FormatKind : int {
  bf16 = 0,
  fp16 = 1,
  fp32 = 2,
  fp8_e4m3 = 3,
  raw = 4,
  mxfp8 = 5,
  mxfp4 = 6,
  nvfp4 = 7,
  registered = 8
};

/// Form of the fp8 scales. Each scale covers a block of 128 columns of one row; the last block may be
/// shorter. The formulas are in docs/formats.md.
struct Fp8Options {
  /// Scales are [blocks, leading dimension] instead of [rows, blocks]; expert_padded: [G, blocks, leading
  /// dimension].
  bool column_major = false;
  bool power_of_two = false;  ///< scale = 2^ceil(log2(s / 448)) instead of s / 448
  bool packed = false;        ///< scales are biased exponents, four to an int32; needs `power_of_two`

  bool operator==(const Fp8Options&) const = default;
};

/// How an MX format chooses the exponent of a block's scale from the block's largest magnitude m * 2^k,
/// 1 <= m < 2.
enum class MxRule : int {
  up = 0,   ///< the smallest exponent with which no value is clamped: mxfp8 from k - 8, mxfp4 from k - 2
  ocp = 1,  ///< as the OCP specification: mxfp8 k - 8, mxfp4 k - 2; values near the largest may be clamped
};

/// Form of the scales of an MX format. Each scale covers a block of 32 columns of one row and is a biased
/// exponent (E8M0: the scale is 2^(E - 127)), four to a little-endian 32-bit word; bytes past the last block
/// are 0.
struct MxOptions {
  MxRule rule = MxRule::up;
  bool column_major = false;  ///< as in Fp8Options, of words instead of fp32 scales
  bool tiles = false;  ///< bytes are in tiles of 128 rows x 4 blocks, see Format; not with column_major

  bool operator==(const MxOptions&) const = default;
};

/// Form of the scales of NVFP4. Each scale covers a block of 16 columns of one row and is an e4m3 number,
/// four to a little-endian 32-bit word; bytes past the last block are 0. A value is element * scale * g,
/// where g is an fp32 of the whole call (DispatchOptions::global_scale), or of each row.
struct Nvfp4Options {
  bool per_token = false;  ///< g = max(the row's largest finite magnitude / 2688, 2^-126), a part of its own
  bool column_major = false;  ///< as in Fp8Options, of words instead of fp32 scales
  bool tiles = false;  ///< bytes are in tiles of 128 rows x 4 blocks, see Format; not with column_major

  bool operator==(const Nvfp4Options&) const = default;
};

/// How a row is encoded. A value: cheap to copy, compared by content, chosen for each dispatch.
///
/// A row consists of up to kMaxParts parts, each an array of its own at the receiver. bf16, fp16 and fp32
/// have one part, fp8 and the MX formats have two (values, scales), nvfp4 has two, or three per
/// token (values, scales, g), raw has one for each size given.
///
/// Scales as tiles (option `tiles`): the scale bytes of each group are in tiles of 128 rows x 4 blocks, 512
/// bytes each, as block-scaled matrix units read them. Each group's tiles begin at a tile of their own
/// (DispatchResult::tile_offsets), and bytes without a row or block are 0. docs/formats.md, "Scales as
/// tiles", has the address of every byte. expert_major and expert_padded only.
struct Format {
  FormatKind kind = FormatKind::bf16;
  Fp8Options fp8{};                                  ///< fp8_e4m3 only
  MxOptions mx{};                                    ///< mxfp8 and mxfp4 only
  Nvfp4Options nvfp4_options{};                      ///< nvfp4 only
  std::array<std::int64_t, kMaxParts> part_bytes{};  ///< raw only: bytes a row of each part; 0: no such part
  int registered = -1;  ///< registered only: the number that register_format() gave it in this process

  static Format bf16() { return {}; }
  static Format fp16() { return {.kind = FormatKind::fp16}; }
  static Format fp32() { return {.kind = FormatKind::fp32}; }

  /// e4m3 values with one scale for each block of 128 columns, fp32 unless `packed`. Dispatch quantises the
  /// tokens, which may be bf16, fp16 or fp32.
  static Format fp8_e4m3(Fp8Options options = {}) { return {.kind = FormatKind::fp8_e4m3, .fp8 = options}; }

  /// MXFP8: e4m3 values, each block of 32 columns with a power of two as its scale. Dispatch quantises the
  /// tokens, which may be bf16, fp16 or fp32. `hidden` must be a multiple of 16.
  static Format mxfp8(MxOptions options = {}) { return {.kind = FormatKind::mxfp8, .mx = options}; }

  /// MXFP4: e2m1 values, two to a byte with the even column in the low four bits; otherwise like mxfp8.
  /// `hidden` must be a multiple of 32.
  static Format mxfp4(MxOptions options = {.rule = MxRule::ocp}) {
    return {.kind = FormatKind::mxfp4, .mx = options};
  }

  /// NVFP4: e2m1 values as in mxfp4, each block of 16 columns with an e4m3 scale. Dispatch quantises the
  /// tokens, which may be bf16, fp16 or fp32. `hidden` must be a multiple of 32.
  static Format nvfp4(Nvfp4Options options = {}) {
    return {.kind = FormatKind::nvfp4, .nvfp4_options = options};
  }

  /// One to kMaxParts parts that Ferry moves without looking at them, such as quantised values and their
  /// scales. `bytes`: bytes of each part of a row, multiples of 16.
  /// @throws UsageError  too many parts, or a size that is not a positive multiple of 16
  static Format raw(std::initializer_list<std::int64_t> bytes);

  /// True if dispatch computes the received values: tokens may then be bf16, fp16 or fp32. False if received
  /// rows hold the bytes that the caller passed.
  bool quantises() const;
  /// True for data that Ferry moves without looking at it.
  bool is_raw() const;
  /// The type of tokens and received rows of bf16, fp16 and fp32; nothing for other formats.
  std::optional<DType> value_type() const;

  bool operator==(const Format&) const = default;
};

/// The name of a format, as parse_format() reads it.
std::string to_string(const Format& format);

/// Reads the name of a format:
/// - `bf16`, `fp16`, `fp32`
/// - `fp8`, followed by any of `-columns`, `-pow2`, `-packed`, each at most once; `-packed` needs `-pow2`
/// - `mxfp8`, `mxfp4`, followed by any of `-up` or `-ocp` (default of mxfp8: up, of mxfp4: ocp), `-columns`
/// or
///   `-tiles`
/// - `nvfp4`, followed by any of `-token` (a scale for each token), `-columns` or `-tiles`
/// - `raw:` and one to four sizes in bytes, as in `raw:1024+64`
/// - the name of a registered format
///
/// @throws UsageError  any other text
Format parse_format(const std::string& name);

}  // namespace ferry
