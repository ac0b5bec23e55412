// Compares the configurations of all ranks field by field, so that an error can name the field.
#include <algorithm>
#include <cstring>
#include <exception>
#include <string_view>

#include "base/text.hpp"
#include "exchange/config_fields.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace {

constexpr std::string_view kRefused = "refused\t";

std::string describe_placement(const Placement& placement) {
  std::string text = str("version ", placement.version(), "/tp", placement.tp(), ":");
  for (const ExpertLocation& location : placement.locations()) {
    text += str(" ", location.rank, ".", location.local);
  }
  return text;
}

// One line for each field: "name\tvalue\n".
std::string describe(const Config& config) {
  std::string text;
  const auto add = [&](const char* name, const auto& value) {
    if constexpr (requires { to_string(value); }) {
      text += str(name, "\t", to_string(value), "\n");
    } else {
      text += str(name, "\t", value, "\n");
    }
  };
  visit_common_fields(add, config);  // the others may differ between ranks, but for the placement
  add("placement", describe_placement(config.placement));
  return text;
}

// Collective. The texts of all ranks, in rank order.
std::vector<std::string> gather_texts(const Rank& rank, const std::string& mine) {
  const auto ranks = static_cast<std::size_t>(rank.size());
  const std::uint64_t length = mine.size();
  std::vector<std::uint64_t> lengths(ranks);
  rank.all_gather(&length, lengths.data(), sizeof length);
  std::size_t longest = 1;
  for (const std::uint64_t each : lengths) longest = std::max(longest, static_cast<std::size_t>(each));
  std::vector<char> padded(longest, 0), all(longest * ranks);
  std::memcpy(padded.data(), mine.data(), mine.size());
  rank.all_gather(padded.data(), all.data(), longest);
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < ranks; ++r) texts.emplace_back(all.data() + r * longest, lengths[r]);
  return texts;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> pieces;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1) {
    pieces.push_back(text.substr(begin, end - begin));
  }
  if (begin < text.size()) pieces.push_back(text.substr(begin));
  return pieces;
}

constexpr std::string_view kRemedy = ": pass the same on every rank";

[[noreturn]] void throw_difference(const std::string& a, const std::string& b, int rank_b) {
  const auto fields_a = split(a, '\n'), fields_b = split(b, '\n');
  for (std::size_t i = 0; i < fields_a.size() && i < fields_b.size(); ++i) {
    if (fields_a[i] == fields_b[i]) continue;
    const auto field_a = split(fields_a[i], '\t'), field_b = split(fields_b[i], '\t');
    const auto words_a = split(field_a.back(), ' '), words_b = split(field_b.back(), ' ');
    if (field_a.front() != "placement" || words_a.size() != words_b.size()) {
      throw UsageError(str("configurations differ: ", field_a.front(), " is ", field_a.back(),
                           " on rank 0 and ", field_b.back(), " on rank ", rank_b, kRemedy));
    }
    // A placement is too long to print: name the first expert that differs. The first two words are the
    // version.
    for (std::size_t w = 0; w < words_a.size(); ++w) {
      if (words_a[w] == words_b[w]) continue;
      const std::string field =
          w < 2 ? std::string("version") : str("location of expert ", w - 2, " (rank.local)");
      throw UsageError(str("configurations differ: placement: ", field, " is ", words_a[w], " on rank 0 and ",
                           words_b[w], " on rank ", rank_b, kRemedy));
    }
  }
  throw UsageError(str("configurations of rank 0 and rank ", rank_b, " have ", fields_a.size(), " and ",
                       fields_b.size(), " fields: run the same version of Ferry on every rank"));
}

}  // namespace

Config agree_on_config(const Rank& rank, const Config& given) {
  Config config;
  std::exception_ptr refusal;
  std::string mine;
  try {
    config = complete_config(given, rank.size());
    config.hops = chosen_hops(config, rank.topology());
    config.reduction_level = chosen_level(config, rank.topology());
    mine = describe(config);
  } catch (const Error& error) {
    refusal = std::current_exception();
    mine = str(kRefused, error.what());
  }
  const std::vector<std::string> all = gather_texts(rank, mine);
  if (refusal) std::rethrow_exception(refusal);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].starts_with(kRefused)) {
      throw UsageError(str("rank ", r, " refused its configuration: ", all[r].substr(kRefused.size())));
    }
  }
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] != all[0]) throw_difference(all[0], all[r], static_cast<int>(r));
  }
  return config;
}

void refuse_configuration(const Rank& rank, const Error& error) {
  gather_texts(rank, str(kRefused, error.what()));
}

}  // namespace ferry
