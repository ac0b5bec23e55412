#include "tools/report/json_field.hpp"

#include <fmt/core.h>

#include <array>

#include "ferry/error.hpp"

namespace ferry::report {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostDepth = 64;
constexpr int kMostMembers = 4096;  // of an object, which compares a new name with all others
// Memory of a parsed value with its share of the containers around it, and of what is made of it.
constexpr std::size_t kBytesOfValue = 64;
constexpr std::size_t kSmallMemory = 48 << 20;

// Walks through a text without keeping anything of it.
class JsonMeasure final : public nlohmann::json_sax<Json> {
 public:
  explicit JsonMeasure(std::size_t text_bytes) : most_((3 * text_bytes + kSmallMemory) / kBytesOfValue) {}

  bool null() override { return add(); }
  bool boolean(bool) override { return add(); }
  bool number_integer(number_integer_t) override { return add(); }
  bool number_unsigned(number_unsigned_t) override { return add(); }
  bool number_float(number_float_t, const string_t&) override { return add(); }
  bool string(string_t&) override { return add(); }
  bool binary(binary_t&) override { return add(); }
  bool key(string_t&) override {
    if (++members_[depth_ - 1] <= kMostMembers) return true;
    fault_ = fmt::format("an object of more than {} members", kMostMembers);
    return false;
  }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fault_ = fmt::format("not JSON, at byte {}", position);
    return false;
  }

  const std::string& fault() const { return fault_; }

 private:
  bool add() {
    if (++values_ <= most_) return true;
    fault_ = fmt::format("more than {} values, too many for its size", most_);
    return false;
  }
  bool open() {
    if (depth_ < kMostDepth) {
      members_[depth_++] = 0;
      return add();
    }
    fault_ = fmt::format("values nested more than {} deep", kMostDepth);
    return false;
  }
  bool close() {
    --depth_;
    return true;
  }

  const std::size_t most_;
  std::size_t values_ = 0;
  std::array<int, kMostDepth> members_{};  // of the open object at each depth
  std::size_t depth_ = 0;
  std::string fault_;
};

std::string found_in(const Json& json) {
  constexpr std::size_t kMostText = 60;
  if (json.is_object()) return "an object";
  if (json.is_array()) return fmt::format("an array of {}", json.size());
  std::string text = json.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kMostText) text = text.substr(0, kMostText) + "...";
  return text;
}

}  // namespace

Json parse_json(const std::string& text) {
  JsonMeasure measure(text.size());
  if (!Json::sax_parse(text, &measure)) throw UsageError(measure.fault());
  return Json::parse(text, nullptr, false);
}

void JsonField::refuse(const std::string& expected) const {
  throw UsageError(fmt::format("{} is {}, expected {}", place_.empty() ? "the document" : place_,
                               found_in(*json_), expected));
}

JsonField JsonField::at(const char* name) const {
  if (!json_->is_object()) refuse("an object");
  std::string place = place_.empty() ? name : place_ + "." + name;
  const auto found = json_->find(name);
  if (found == json_->end()) throw UsageError(place + " is missing");
  return {*found, std::move(place)};
}

std::size_t JsonField::size() const {
  if (!json_->is_array()) refuse("an array");
  return json_->size();
}

JsonField JsonField::operator[](std::size_t index) const {
  std::string place = fmt::format("{}[{}]", place_, index);
  if (index >= size()) throw UsageError(place + " is missing");
  return {(*json_)[index], std::move(place)};
}

bool JsonField::boolean() const {
  if (!json_->is_boolean()) refuse("true or false");
  return json_->get<bool>();
}

std::int64_t JsonField::integer(std::int64_t least, std::int64_t most) const {
  const bool fits = json_->is_number_unsigned()
                        ? json_->get<std::uint64_t>() <= static_cast<std::uint64_t>(most)
                        : json_->is_number_integer();
  if (!fits || json_->get<std::int64_t>() < least || json_->get<std::int64_t>() > most)
    refuse(fmt::format("a whole number from {} to {}", least, most));
  return json_->get<std::int64_t>();
}

double JsonField::number() const {
  if (!json_->is_number()) refuse("a number");
  return json_->get<double>();
}

std::string JsonField::text() const {
  if (!json_->is_string()) refuse("a text");
  return json_->get<std::string>();
}

}  // namespace ferry::report
