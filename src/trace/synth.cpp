#include "trace/trace.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <numeric>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"
#include "trace/random.hpp"

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

// Draws synthetic traces.
//
// The recipe, for each layer by itself:
// - ln(popularity) of an expert is normal, with standard deviation 0.65 (decode) or 0.9 (prefill).
// - 1 % of the experts are hot: 4 to 8 times as popular as the mean.
// - The experts form 8 blocks of neighbours. The popularity of each block is multiplied by a lognormal
//   factor.
// - A token keeps each expert of the token before it with probability 0.15, and draws the others by
//   Gumbel-top-k on ln(popularity). With group-limited routing it first chooses 4 of 8 groups, those of kept
//   experts before others, then by the sum of the two highest scores in the group, and draws from these
//   groups alone.
//
// Gumbel-top-k is drawn as a race: expert e finishes after an exponential time of rate popularity(e), and the
// first to finish win. The score ln(popularity) + Gumbel noise equals -ln(time), so a softmax over scores has
// weights proportional to 1 / time.

namespace trace {
namespace {

constexpr int kBlocks = 8;
constexpr int kHotPercent = 1;
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Recipe {
  double sigma;  // of ln(popularity)
  double keep;   // probability that a token keeps an expert of the token before it
};

Recipe recipe_of(Workload workload) {
  switch (workload) {
    case Workload::decode:
      return {.sigma = 0.65, .keep = 0.15};
    case Workload::prefill:
      return {.sigma = 0.9, .keep = 0.15};
    case Workload::uniform:
      break;
  }
  return {.sigma = 0, .keep = 0};
}

// Makes kHotPercent of the experts hot.
void add_hot_experts(std::vector<double>& popularity, Random& random) {
  const std::size_t experts = popularity.size();
  const double mean =
      std::accumulate(popularity.begin(), popularity.end(), 0.0) / static_cast<double>(experts);
  std::vector<std::size_t> order(experts);
  std::iota(order.begin(), order.end(), 0);
  const std::size_t hot = (experts * kHotPercent + 50) / 100;
  for (std::size_t i = 0; i < hot; ++i) {
    std::swap(order[i], order[i + random.below(experts - i)]);
    popularity[order[i]] = (4 + 4 * random.uniform()) * mean;
  }
}

// Multiplies the popularity of each block of neighbouring experts by a lognormal factor.
void scale_blocks(std::vector<double>& popularity, double sigma, Random& random) {
  std::array<double, kBlocks> factors{};
  for (double& factor : factors) factor = portable_exp(sigma * random.normal());
  for (std::size_t e = 0; e < popularity.size(); ++e)
    popularity[e] *= factors[e * kBlocks / popularity.size()];
}

std::vector<double> draw_popularity(const SynthSpec& spec, Random& random) {
  std::vector<double> popularity(static_cast<std::size_t>(spec.experts), 1.0);
  if (spec.workload == Workload::uniform) return popularity;
  const double sigma = recipe_of(spec.workload).sigma;
  for (double& p : popularity) p = portable_exp(sigma * random.normal());
  add_hot_experts(popularity, random);
  scale_blocks(popularity, spec.block_sigma, random);
  return popularity;
}

// An expert and the time at which it finished the race.
struct Finish {
  double time;
  int expert;

  bool operator<(const Finish& other) const {
    return std::pair(time, expert) < std::pair(other.time, other.expert);
  }
};

// A group of experts, scored for one token.
struct GroupScore {
  std::size_t number = 0;
  double first = kNever, second = kNever;  // the two earliest times in the group
  bool kept = false;                       // it holds an expert that the token kept

  void add(double time) {
    second = std::min(second, std::max(first, time));
    first = std::min(first, time);
  }

  // Smaller is better: the sum of the two highest scores is -ln(first * second). A group with one expert has
  // one score.
  double product() const { return second == kNever ? first : first * second; }

  bool operator<(const GroupScore& other) const {
    return std::tuple(!kept, product(), number) < std::tuple(!other.kept, other.product(), other.number);
  }
};

// Routes the tokens of one layer, one after another.
class Router {
 public:
  Router(const SynthSpec& spec, int layer)
      : random_(spec.seed, static_cast<std::uint64_t>(layer)),
        keep_(recipe_of(spec.workload).keep),
        grouped_(spec.grouped),
        top_k_(static_cast<std::size_t>(spec.top_k)),
        popularity_(draw_popularity(spec, random_)) {}

  // The K experts of the next token, by finishing time.
  const std::vector<Finish>& next() {
    keep_experts();
    race();
    if (grouped_) limit_groups();
    const auto missing = static_cast<std::ptrdiff_t>(top_k_ - chosen_.size());
    std::partial_sort(racing_.begin(), racing_.begin() + missing, racing_.end());
    chosen_.insert(chosen_.end(), racing_.begin(), racing_.begin() + missing);
    std::sort(chosen_.begin(), chosen_.end());
    return chosen_;
  }

 private:
  // Drops each expert of the last token with probability 1 - keep.
  void keep_experts() {
    std::size_t kept = 0;
    for (const Finish finish : chosen_) {
      if (random_.uniform() < keep_) chosen_[kept++] = finish;
    }
    chosen_.resize(kept);
  }

  // Draws the times of all experts that the token has not kept.
  void race() {
    racing_.clear();
    for (int e = 0; e < static_cast<int>(popularity_.size()); ++e) {
      const double time = random_.exponential() / popularity_[static_cast<std::size_t>(e)];
      const bool kept =
          std::any_of(chosen_.begin(), chosen_.end(), [&](const Finish& a) { return a.expert == e; });
      if (!kept) racing_.push_back({time, e});
    }
  }

  std::size_t group_of(int expert) const {
    return static_cast<std::size_t>(expert) * kGroups / popularity_.size();
  }

  // Chooses the token's groups and takes the experts of all others out of the race.
  void limit_groups() {
    std::array<GroupScore, kGroups> groups{};
    for (std::size_t i = 0; i < groups.size(); ++i) groups[i].number = i;
    for (const Finish& finish : chosen_) groups[group_of(finish.expert)].kept = true;
    for (const Finish& finish : racing_) groups[group_of(finish.expert)].add(finish.time);
    std::sort(groups.begin(), groups.end());
    std::array<bool, kGroups> chosen{};
    for (std::size_t i = 0; i < kGroupsOfToken; ++i) chosen[groups[i].number] = true;
    std::erase_if(racing_, [&](const Finish& finish) { return !chosen[group_of(finish.expert)]; });
  }

  Random random_;
  const double keep_;
  const bool grouped_;
  const std::size_t top_k_;
  const std::vector<double> popularity_;
  std::vector<Finish> chosen_;  // experts of the last token
  std::vector<Finish> racing_;
};

void append(const std::vector<Finish>& chosen, Trace& trace) {
  double sum = 0;
  for (const Finish& finish : chosen) sum += 1 / finish.time;
  for (const Finish& finish : chosen) {
    trace.ids.push_back(finish.expert);
    trace.weights.push_back(static_cast<float>(1 / finish.time / sum));
  }
}

std::string source_text(const SynthSpec& spec) {
  std::string text = "synthesised: ";
  if (spec.workload == Workload::uniform) {
    text += "uniform routing";
  } else {
    text += "lognormal popularity, sigma " + std::string(spec.workload == Workload::decode ? "0.65" : "0.9") +
            ", 1 % hot experts, 15 % of a token's experts kept by the next";
  }
  if (spec.grouped) text += ", at most 4 of 8 groups a token";
  return text + "; seed " + std::to_string(spec.seed) + "; weights renormalised";
}

}  // namespace
}  // namespace trace

Trace synthesise(const SynthSpec& spec) {
  trace::check(spec);
  Trace out;
  out.name = trace::to_string(spec);
  out.source = trace::source_text(spec);
  out.layers = spec.layers;
  out.tokens = spec.tokens;
  out.top_k = spec.top_k;
  out.experts = spec.experts;
  out.sequence_lengths = {spec.tokens};
  const auto routes = static_cast<std::size_t>(spec.layers * spec.tokens * spec.top_k);
  out.ids.reserve(routes);
  out.weights.reserve(routes);
  for (int layer = 0; layer < spec.layers; ++layer) {
    trace::Router router(spec, layer);
    for (std::int64_t token = 0; token < spec.tokens; ++token) trace::append(router.next(), out);
  }
  return out;
}

}  // namespace ferry
