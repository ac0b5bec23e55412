#include "trace/npy_header.hpp"

#include <array>
#include <cstdio>
#include <limits>
#include <optional>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::trace {
namespace {

constexpr std::array kTypes = {NpyType::uint8,   NpyType::int8,   NpyType::uint16, NpyType::int16,
                               NpyType::uint32,  NpyType::int32,  NpyType::uint64, NpyType::int64,
                               NpyType::float16, NpyType::float32};

std::string printable(char c) {
  if (c >= ' ' && c <= '~') return std::string("'") + c + "'";
  char text[16];
  std::snprintf(text, sizeof text, "byte 0x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
  return text;
}

// A recursive-descent parser for the few Python literals that a header may hold.
class Parser {
 public:
  Parser(const std::string& file, std::size_t offset, std::string_view text)
      : file_(file), offset_(offset), text_(text) {}

  NpyHeader parse() {
    take('{');
    while (next() != '}') {
      entry();
      if (next() != '}') take(',');
    }
    take('}');
    padding();
    require_key("descr", type_.has_value());
    require_key("fortran_order", has_order_);
    require_key("shape", shape_.has_value());
    return {*type_, *shape_};
  }

 private:
  void entry() {
    const std::size_t at = (skip_spaces(), position_);
    const std::string_view key = quoted();
    take(':');
    if (key == "descr") {
      refuse_second(at, key, type_.has_value());
      type_ = type();
    } else if (key == "fortran_order") {
      refuse_second(at, key, has_order_);
      order();
      has_order_ = true;
    } else if (key == "shape") {
      refuse_second(at, key, shape_.has_value());
      shape_ = dimensions();
    } else {
      fail(at, str("expected a key descr, fortran_order or shape, found '", key, "'"));
    }
  }

  NpyType type() {
    skip_spaces();
    const std::size_t at = position_;
    if (next() == '[') fail(at, "structured arrays are not supported; expected a plain type such as '<i4'");
    const std::string_view found = quoted();
    for (const NpyType candidate : kTypes) {
      if (found == descr(candidate)) return candidate;
      const bool one_byte = bytes_of(candidate) == 1;  // has no byte order; some writers use '<' all the same
      if (one_byte && found.starts_with('<') && found.substr(1) == descr(candidate) + 1) return candidate;
    }
    const char* why = found.starts_with('>') ? "big-endian arrays are not supported"
                      : found.find('O') != std::string_view::npos
                          ? "arrays of Python objects are not supported"
                          : "this type is not supported";
    fail(at, str(why, "; expected one of |u1 |i1 <u2 <i2 <u4 <i4 <u8 <i8 <f2 <f4, found '", found, "'"));
  }

  void order() {
    skip_spaces();
    const std::size_t at = position_;
    const std::string_view rest = text_.substr(position_);
    if (rest.starts_with("True"))
      fail(at, "Fortran order is not supported; expected fortran_order False (C order)");
    if (!rest.starts_with("False")) fail(at, str("expected fortran_order False, found ", found_here()));
    position_ += 5;
  }

  std::vector<std::uint64_t> dimensions() {
    std::vector<std::uint64_t> shape;
    take('(');
    while (next() != ')') {
      if (shape.size() == kMaxDimensions) {
        fail(position_, str("expected at most ", kMaxDimensions, " dimensions, found more"));
      }
      shape.push_back(number());
      if (next() == ')' && shape.size() == 1)
        fail(position_, "expected ',' after the only dimension, found ')'");
      if (next() != ')') take(',');
    }
    take(')');
    return shape;
  }

  std::uint64_t number() {
    skip_spaces();
    const std::size_t at = position_;
    if (next() == '-') fail(at, "expected a dimension of 0 or more, found a negative one");
    constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t value = 0;
    for (; is_digit(peek()); ++position_) {
      const auto digit = static_cast<std::uint64_t>(peek() - '0');
      if (value > (kMax - digit) / 10)
        fail(at, str("expected a dimension of at most ", kMax, ", found a larger one"));
      value = value * 10 + digit;
    }
    if (position_ == at) fail(at, str("expected a dimension, found ", found_here()));
    return value;
  }

  std::string_view quoted() {
    const char quote = next();
    if (quote != '\'' && quote != '"') fail(position_, str("expected a quoted string, found ", found_here()));
    const std::size_t begin = ++position_;
    while (peek() != quote) {
      if (!(peek() >= ' ' && peek() <= '~') || peek() == '\\') {
        fail(position_, str("expected a plain character or the closing quote, found ", found_here()));
      }
      ++position_;
    }
    return text_.substr(begin, position_++ - begin);
  }

  void padding() {
    skip_spaces();
    if (position_ != text_.size())
      fail(position_, str("expected only spaces after the header, found ", found_here()));
  }

  void take(char expected) {
    if (next() != expected) fail(position_, str("expected ", printable(expected), ", found ", found_here()));
    ++position_;
  }

  char next() {
    skip_spaces();
    return peek();
  }

  // At the end of the text: 0, which no rule accepts.
  char peek() const { return position_ < text_.size() ? text_[position_] : '\0'; }

  void skip_spaces() {
    while (peek() == ' ' || peek() == '\n') ++position_;
  }

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  std::string found_here() const {
    return position_ < text_.size() ? printable(text_[position_]) : std::string("the end of the header");
  }

  void refuse_second(std::size_t at, std::string_view key, bool present) const {
    if (present) fail(at, str("expected the key '", key, "' once, found it twice"));
  }

  void require_key(const char* key, bool present) const {
    if (!present) fail(0, str("expected the key '", key, "' in the header, found none"));
  }

  [[noreturn]] void fail(std::size_t at, const std::string& message) const {
    throw UsageError(str(file_, ": offset ", offset_ + at, ": ", message));
  }

  const std::string& file_;
  const std::size_t offset_;
  const std::string_view text_;
  std::size_t position_ = 0;
  std::optional<NpyType> type_;
  std::optional<std::vector<std::uint64_t>> shape_;
  bool has_order_ = false;
};

}  // namespace

NpyHeader parse_npy_header(const std::string& file, std::size_t offset, std::string_view text) {
  return Parser(file, offset, text).parse();
}

}  // namespace ferry::trace
