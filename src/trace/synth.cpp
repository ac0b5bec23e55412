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
#include "trace/synth.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "trace/portable_math.hpp"
#include "trace/random.hpp"

namespace ferry {
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
