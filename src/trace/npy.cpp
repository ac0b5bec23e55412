#include "trace/npy.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "format/numbers.hpp"

namespace ferry::trace {

namespace {

constexpr std::size_t kMaxDimensions = 4;

// The text header of an NPY file: a Python dictionary literal with the keys descr, fortran_order and shape.
struct NpyHeader {
  NpyType type = NpyType::uint8;
  std::vector<std::uint64_t> shape;  // at most kMaxDimensions
};

// In the order of NpyType.
constexpr const char* kDescr[] = {"|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4"};

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
    for (int number = 0; number < static_cast<int>(std::size(kDescr)); ++number) {
      const auto candidate = static_cast<NpyType>(number);
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
    if (next() == '-') fail(position_, "expected a dimension of 0 or more, found a negative one");
    std::uint64_t value = 0;
    const char* const begin = text_.data() + position_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error == std::errc::result_out_of_range)
      fail(position_, str("expected a dimension of at most ", std::numeric_limits<std::uint64_t>::max(),
                          ", found a larger one"));
    if (error != std::errc{}) fail(position_, str("expected a dimension, found ", found_here()));
    position_ += static_cast<std::size_t>(end - begin);
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

static_assert(std::endian::native == std::endian::little, "elements are used in the byte order of the file");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kVersionOffset = kMagic.size();
constexpr std::size_t kLengthOffset = kVersionOffset + 2;
constexpr std::size_t kHeaderMultiple = 64;  // data starts at a multiple of it
constexpr std::size_t kMostHeaderBytes = 1 << 16;
constexpr std::size_t kWindowBytes = 1 << 20;
constexpr std::size_t kMostBytesBeforeData = kLengthOffset + 4 + kMostHeaderBytes;

[[noreturn]] void fail(const std::string& file, std::size_t offset, const std::string& message) {
  throw UsageError(str(file, ": offset ", offset, ": ", message));
}

[[noreturn]] void fail_system(const std::string& path, const char* what) {
  const int error = errno;
  throw SystemError(str(path, ": cannot ", what, ": ", std::strerror(error)), error);
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// `size`: of the file.
void require_bytes(const std::string& file, std::uint64_t size, std::size_t offset, std::size_t bytes,
                   const char* what) {
  const std::uint64_t left = size - offset;
  if (left < bytes) {
    fail(file, offset, str(what, ": expected ", counted(bytes, "byte"), ", found ", left));
  }
}

// Fills `to` with the bytes from `offset` on.
void read(const std::string& file, std::istream& in, std::uint64_t offset, std::span<std::byte> to) {
  errno = 0;
  in.clear();
  in.seekg(static_cast<std::streamoff>(offset));
  in.read(reinterpret_cast<char*>(to.data()), static_cast<std::streamsize>(to.size()));
  if (in.bad()) fail_system(file, "read");
  require_bytes(file, offset + static_cast<std::uint64_t>(in.gcount()), offset, to.size(),
                "a file that keeps its size");
}

// Number of elements. Refuses shapes that could not be addressed, so that later arithmetic cannot overflow.
std::uint64_t count_elements(const std::string& file, std::size_t offset, const NpyHeader& header) {
  const std::uint64_t most = std::numeric_limits<std::int64_t>::max() / bytes_of(header.type);
  std::uint64_t size = 1;
  for (const std::uint64_t dimension : header.shape) {
    if (dimension != 0 && size > most / dimension) {
      fail(file, offset,
           str("expected a shape of at most ", counted(most, "element"), ", found ",
               shape_text(header.shape)));
    }
    size *= dimension;
  }
  return size;
}

// What a file says of its array, before the data are read.
struct NpyBeginning {
  NpyHeader header;
  std::uint64_t elements;
  std::size_t data_offset;
};

// `begin`: the first bytes of a file of `size` bytes, kMostBytesBeforeData unless the file is shorter.
NpyBeginning parse_beginning(const std::string& file, std::span<const std::byte> begin, std::uint64_t size) {
  require_bytes(file, size, 0, kLengthOffset, "magic and version");
  if (std::memcmp(begin.data(), kMagic.data(), kMagic.size()) != 0) {
    fail(file, 0, "expected the magic of an NPY file (93 4e 55 4d 50 59), found something else");
  }
  const int major = std::to_integer<int>(begin[kVersionOffset]);
  const int minor = std::to_integer<int>(begin[kVersionOffset + 1]);
  if (major < 1 || major > 3 || minor != 0) {
    fail(file, kVersionOffset, str("expected version 1.0, 2.0 or 3.0, found ", major, ".", minor));
  }

  const std::size_t length_bytes = major == 1 ? 2 : 4;
  require_bytes(file, size, kLengthOffset, length_bytes, "header length");
  const std::byte* length_at = begin.data() + kLengthOffset;
  const std::size_t length = major == 1 ? load<std::uint16_t>(length_at) : load<std::uint32_t>(length_at);
  const std::size_t header_offset = kLengthOffset + length_bytes;
  require_bytes(file, size, header_offset, length, "header");
  if (length > kMostHeaderBytes) {
    fail(file, kLengthOffset,
         str("expected a header of at most ", kMostHeaderBytes, " bytes, found ", length));
  }

  const auto* text = reinterpret_cast<const char*>(begin.data() + header_offset);
  NpyHeader header = Parser(file, header_offset, {text, length}).parse();
  const std::uint64_t elements = count_elements(file, header_offset, header);
  const std::size_t data_offset = header_offset + length;
  const std::uint64_t expected = elements * bytes_of(header.type), found = size - data_offset;
  if (found != expected) {
    fail(file, data_offset,
         str("data of shape ", shape_text(header.shape), ", type ", descr(header.type), ": expected ",
             counted(expected, "byte"), ", found ", found));
  }
  return {std::move(header), elements, data_offset};
}

// "3, 8222, 6"
std::string joined(std::span<const std::uint64_t> shape) {
  std::string text;
  for (const std::uint64_t dimension : shape) text += str(text.empty() ? "" : ", ", dimension);
  return text;
}

std::string header_text(NpyType type, std::span<const std::uint64_t> shape) {
  const char* comma = shape.size() == 1 ? "," : "";  // Python writes a tuple of one as (n,)
  std::string text =
      str("{'descr': '", descr(type), "', 'fortran_order': False, 'shape': (", joined(shape), comma, "), }");
  const std::size_t unpadded = kLengthOffset + 2 + text.size() + 1;
  text.append((kHeaderMultiple - unpadded % kHeaderMultiple) % kHeaderMultiple, ' ');
  return text + '\n';
}

}  // namespace

template <class T>
void write_npy(const std::string& path, std::span<const std::uint64_t> shape, std::span<const T> data) {
  const NpyType type = std::is_same_v<T, std::int32_t>   ? NpyType::int32
                       : std::is_same_v<T, std::int64_t> ? NpyType::int64
                                                         : NpyType::float32;
  const std::string header = header_text(type, shape);
  errno = 0;
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!out) fail_system(path, "open for writing");
  const auto length = static_cast<std::uint16_t>(header.size());
  out << kMagic << '\x01' << '\x00';
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << header;
  out.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size_bytes()));
  out.close();
  if (!out) fail_system(path, "write");
}

template void write_npy(const std::string&, std::span<const std::uint64_t>, std::span<const std::int32_t>);
template void write_npy(const std::string&, std::span<const std::uint64_t>, std::span<const std::int64_t>);
template void write_npy(const std::string&, std::span<const std::uint64_t>, std::span<const float>);

std::size_t bytes_of(NpyType type) {
  return static_cast<std::size_t>(descr(type)[2] - '0');
}

bool is_integer(NpyType type) {
  return type != NpyType::float16 && type != NpyType::float32;
}

const char* descr(NpyType type) {
  return kDescr[static_cast<int>(type)];
}

std::string shape_text(std::span<const std::uint64_t> shape) {
  return str("[", joined(shape), "]");
}

NpyArray::NpyArray(std::string file, std::unique_ptr<std::istream> in, std::uint64_t size)
    : file_(std::move(file)), in_(std::move(in)) {
  window_.resize(std::min<std::uint64_t>(size, kMostBytesBeforeData));
  read(file_, *in_, 0, window_);
  NpyBeginning beginning = parse_beginning(file_, window_, size);
  size_ = beginning.elements;
  type_ = beginning.header.type;
  shape_ = std::move(beginning.header.shape);
  data_offset_ = beginning.data_offset;
}

NpyArray::NpyArray(std::string file, std::span<const std::byte> content)
    : NpyArray(std::move(file),
               std::make_unique<std::istringstream>(
                   std::string(reinterpret_cast<const char*>(content.data()), content.size())),
               content.size()) {}

void NpyArray::read_window(std::uint64_t first) const {
  const std::size_t bytes = bytes_of(type_);
  first_ = first;
  held_ = std::min<std::uint64_t>(size_ - first, kWindowBytes / bytes);
  window_.resize(held_ * bytes);
  read(file_, *in_, data_offset_ + first * bytes, window_);
}

std::int64_t NpyArray::integer(std::uint64_t i) const {
  const std::byte* at = element(i);
  switch (type_) {
    case NpyType::uint8:
      return load<std::uint8_t>(at);
    case NpyType::int8:
      return load<std::int8_t>(at);
    case NpyType::uint16:
      return load<std::uint16_t>(at);
    case NpyType::int16:
      return load<std::int16_t>(at);
    case NpyType::uint32:
      return load<std::uint32_t>(at);
    case NpyType::int32:
      return load<std::int32_t>(at);
    case NpyType::int64:
      return load<std::int64_t>(at);
    default:
      break;
  }
  const auto value = load<std::uint64_t>(at);
  constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
  if (value > static_cast<std::uint64_t>(kMax)) {
    fail(file_, data_offset_ + i * sizeof value,
         str("expected an integer of at most ", kMax, ", found ", value));
  }
  return static_cast<std::int64_t>(value);
}

float NpyArray::real(std::uint64_t i) const {
  if (type_ == NpyType::float16) return fp16_value(load<std::uint16_t>(element(i)));
  return load<float>(element(i));
}

NpyArray open_npy(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) throw UsageError(str(path, ": no such file"));
  if (error) throw SystemError(str(path, ": cannot open: ", error.message()), error.value());
  if (!std::filesystem::is_regular_file(status)) throw UsageError(str(path, ": expected a regular file"));

  errno = 0;
  auto in = std::make_unique<std::ifstream>(path, std::ios::binary);
  if (!*in) fail_system(path, "open");
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) throw SystemError(str(path, ": cannot determine the size: ", error.message()), error.value());
  return NpyArray(path, std::move(in), size);
}

}  // namespace ferry::trace
