#include "base/reword.hpp"

#include <string_view>

namespace ferry {
namespace {

bool is_of_name(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

}  // namespace

std::string reworded(std::string text, std::span<const Phrase> phrases) {
  for (const auto& [from, to] : phrases) {
    const std::string_view phrase = from, other = to;
    for (std::size_t at = text.find(phrase); at != std::string::npos; at = text.find(phrase, at)) {
      const bool within_name = at > 0 && is_of_name(text[at - 1]) && is_of_name(phrase.front());
      if (!within_name) text.replace(at, phrase.size(), other);
      at += within_name ? 1 : other.size();
    }
  }
  return text;
}

}  // namespace ferry
