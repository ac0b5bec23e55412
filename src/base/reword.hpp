// Puts the text of an error into the words of the interface that was called, such as MAX's, whose calls are
// carried out by others with arguments of other names.
#pragma once

#include <span>
#include <string>

#include "ferry/error.hpp"

namespace ferry {

struct Phrase {
  const char *from, *to;
};

// Replaces each phrase of `text`, in the order given, unless it begins within a longer name.
std::string reworded(std::string text, std::span<const Phrase> phrases);

// Runs `call`. What it throws about its arguments is thrown with another text.
template <class Call>
decltype(auto) in_words(std::span<const Phrase> phrases, const Call& call) {
  try {
    return call();
  } catch (const BadIdError& error) {
    throw BadIdError(reworded(error.what(), phrases), error.bad);
  } catch (const BadSourceError& error) {
    throw BadSourceError(reworded(error.what(), phrases), error.bad);
  } catch (const UsageError& error) {
    throw UsageError(reworded(error.what(), phrases));
  } catch (const UnsupportedError& error) {
    throw UnsupportedError(reworded(error.what(), phrases));
  }
}

}  // namespace ferry
