#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"
#include "trace/synth.hpp"

namespace ferry {
namespace trace {
namespace {

constexpr std::string_view kPrefix = "synth:";
constexpr std::string_view kGrouped = "-grouped";
constexpr std::array<std::string_view, 3> kWorkloads = {"decode", "prefill", "uniform"};

constexpr int kMaxExperts = 65536;
constexpr int kMaxLayers = 1024;
constexpr std::int64_t kMaxTokens = 0x7fffffff;
constexpr double kMaxBlockSigma = 2;  // far beyond any recording; weights stay above the smallest float

[[noreturn]] void fail(std::string_view text, const std::string& message) {
  throw UsageError(str("trace '", text, "': ", message));
}

void check_range(const SynthSpec& spec, const char* key, std::int64_t value, std::int64_t most) {
  if (value >= 1 && value <= most) return;
  fail(to_string(spec), str(key, ": expected 1 to ", most, ", found ", value));
}

void check_groups(const SynthSpec& spec) {
  if (spec.experts % kGroups != 0) {
    fail(to_string(spec),
         str("grouped: expected experts to be a multiple of ", kGroups, ", found ", spec.experts));
  }
  const int reachable = spec.experts / kGroups * kGroupsOfToken;
  if (spec.top_k > reachable) {
    fail(to_string(spec), str("grouped: expected top_k of at most the ", counted(reachable, "expert"), " in ",
                              kGroupsOfToken, " of ", kGroups, " groups, found ", spec.top_k));
  }
}

template <class T>
T parse_number(std::string_view text, std::string_view key, std::string_view value) {
  T result{};
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, result);
  if (error == std::errc::result_out_of_range) fail(text, str(key, ": '", value, "' is out of range"));
  if (error != std::errc{} || stop != end) {
    fail(text, str(key, ": expected a number, found '", value, "'"));
  }
  return result;
}

void set(SynthSpec& spec, std::string_view text, std::string_view key, std::string_view value) {
  if (key == "experts") {
    spec.experts = parse_number<int>(text, key, value);
  } else if (key == "top_k") {
    spec.top_k = parse_number<int>(text, key, value);
  } else if (key == "tokens") {
    spec.tokens = parse_number<std::int64_t>(text, key, value);
  } else if (key == "layers") {
    spec.layers = parse_number<int>(text, key, value);
  } else if (key == "seed") {
    spec.seed = parse_number<std::uint64_t>(text, key, value);
  } else if (key == "block_sigma" && spec.workload != Workload::uniform) {
    spec.block_sigma = parse_number<double>(text, key, value);
  } else if (key == "block_sigma") {
    fail(text, "block_sigma is not used by synth:uniform: leave it out");
  } else {
    fail(text, str("expected a key experts, top_k, tokens, layers, seed or block_sigma, found '", key, "'"));
  }
}

void set_workload(SynthSpec& spec, std::string_view text, std::string_view name) {
  spec.grouped = name.ends_with(kGrouped);
  if (spec.grouped) name.remove_suffix(kGrouped.size());
  const auto found = std::find(kWorkloads.begin(), kWorkloads.end(), name);
  if (found == kWorkloads.end()) {
    fail(text, "expected synth:decode, synth:prefill or synth:uniform, each optionally with -grouped");
  }
  spec.workload = static_cast<Workload>(found - kWorkloads.begin());
}

}  // namespace

void check(const SynthSpec& spec) {
  check_range(spec, "experts", spec.experts, kMaxExperts);
  check_range(spec, "top_k", spec.top_k, std::min(kMaxTopK, spec.experts));
  check_range(spec, "tokens", spec.tokens, kMaxTokens);
  check_range(spec, "layers", spec.layers, kMaxLayers);
  const std::int64_t routes = spec.tokens * spec.layers * spec.top_k;
  if (routes > kMaxRoutes) {
    fail(to_string(spec),
         str("expected layers * tokens * top_k of at most ", kMaxRoutes, ", found ", routes));
  }
  if (!(spec.block_sigma >= 0 && spec.block_sigma <= kMaxBlockSigma)) {
    fail(to_string(spec), str("block_sigma: expected 0 to ", kMaxBlockSigma, ", found ", spec.block_sigma));
  }
  if (spec.grouped) check_groups(spec);
}

std::string to_string(const SynthSpec& spec) {
  std::string text(kPrefix);
  text += kWorkloads.at(static_cast<std::size_t>(spec.workload));
  if (spec.grouped) text += kGrouped;
  text += ":experts=" + std::to_string(spec.experts) + ",top_k=" + std::to_string(spec.top_k) +
          ",tokens=" + std::to_string(spec.tokens) + ",layers=" + std::to_string(spec.layers) +
          ",seed=" + std::to_string(spec.seed);
  if (spec.workload == Workload::uniform) return text;
  std::array<char, 32> sigma{};  // the shortest text that is read back as the same number
  const auto end = std::to_chars(sigma.data(), sigma.data() + sigma.size(), spec.block_sigma).ptr;
  return text + ",block_sigma=" + std::string(sigma.data(), end);
}

}  // namespace trace

SynthSpec parse_synth_spec(const std::string& text, const SynthSpec& defaults) {
  if (!text.starts_with(trace::kPrefix))
    trace::fail(text, "expected a specification that starts with 'synth:'");
  constexpr std::size_t kEnd = std::string_view::npos;
  const std::string_view rest = std::string_view(text).substr(trace::kPrefix.size());
  SynthSpec spec = defaults;
  std::size_t separator = rest.find(':');
  trace::set_workload(spec, text, rest.substr(0, separator));
  while (separator != kEnd) {
    const std::size_t next = rest.find(',', separator + 1);
    const std::string_view pair = rest.substr(separator + 1, next == kEnd ? kEnd : next - separator - 1);
    const std::size_t equals = std::min(pair.find('='), pair.size());
    trace::set(spec, text, pair.substr(0, equals), pair.substr(std::min(equals + 1, pair.size())));
    separator = next;
  }
  trace::check(spec);
  return spec;
}

}  // namespace ferry
