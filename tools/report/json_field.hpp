// Reads JSON documents that others may have written: bounds what they take in memory, and names the field in
// every error.
#pragma once

#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace ferry::report {

// Parses a text. Refuses what is no JSON, values nested more than 64 deep, and more values than a file of its
// size is read with: parsed values take several times the bytes of their text.
// @throws UsageError
nlohmann::ordered_json parse_json(const std::string& text);

// A value in a document, with its place.
class JsonField {
 public:
  using Json = nlohmann::ordered_json;

  explicit JsonField(const Json& document) : json_(&document) {}

  // A member of an object.
  bool has(const char* name) const { return json_->is_object() && json_->contains(name); }
  JsonField at(const char* name) const;
  // The member, or `other` if the object has none.
  template <class T>
  T value(const char* name, const T& other) const {
    return has(name) ? at(name).as<T>() : other;
  }

  // An element of an array.
  std::size_t size() const;
  JsonField operator[](std::size_t index) const;

  bool is_null() const { return json_->is_null(); }
  // The value, which must be of the type and within its range.
  template <class T>
  T as() const {
    if constexpr (IsVector<T>::value) {
      T values;
      values.reserve(size());
      for (std::size_t i = 0; i < size(); ++i) values.push_back((*this)[i].as<typename T::value_type>());
      return values;
    } else if constexpr (IsOptional<T>::value) {
      return is_null() ? T() : T(as<typename T::value_type>());
    } else if constexpr (std::is_same_v<T, bool>) {
      return boolean();
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(integer(std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
    } else if constexpr (std::is_floating_point_v<T>) {
      return number();
    } else {
      return text();
    }
  }

  // @throws UsageError  always: the place, what it holds, and what is expected
  [[noreturn]] void refuse(const std::string& expected) const;

 private:
  template <class T>
  struct IsVector : std::false_type {};
  template <class T>
  struct IsVector<std::vector<T>> : std::true_type {};
  template <class T>
  struct IsOptional : std::false_type {};
  template <class T>
  struct IsOptional<std::optional<T>> : std::true_type {};

  JsonField(const Json& value, std::string place) : json_(&value), place_(std::move(place)) {}
  bool boolean() const;
  std::int64_t integer(std::int64_t least, std::int64_t most) const;
  double number() const;
  std::string text() const;

  const Json* json_;
  std::string place_;  // such as load.rows_per_rank[3]; empty: the document
};

}  // namespace ferry::report
