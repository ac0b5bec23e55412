#include "ferry/balance.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace balancing {
namespace {

constexpr double kEven = 5e-3;       // a busiest bin this little above the mean needs no more replicas
constexpr double kTolerance = 5e-3;  // what an earlier placement may cost, for nodes and again for ranks
constexpr double kDeviations = 2;    // standard deviations of a rank's load that are counted as load
constexpr double kGain = 1e-9;       // improvements below are rounding

using Bins = std::vector<std::vector<int>>;  // by bin: the items in it

// A load, of which hashes decide a part: level() is what chance seldom exceeds.
struct Load {
  double mean = 0, variance = 0;

  Load operator+(const Load& other) const { return {mean + other.mean, variance + other.variance}; }
  Load operator-(const Load& other) const { return {mean - other.mean, variance - other.variance}; }
  double level() const { return variance > 0 ? mean + kDeviations * std::sqrt(variance) : mean; }
};

// What is packed: items into bins, ranks or nodes.
struct Task {
  std::vector<double> weight{};  // by item
  bool in_routes = false;        // weights are numbers of routes, each of which chooses its replica by hash
  int bins = 1;
  int slots = 1;              // most items in a bin
  bool may_replicate = true;  // an item may be in several bins, each with an equal share of its weight

  int items() const { return static_cast<int>(weight.size()); }
  double mean() const { return std::accumulate(weight.begin(), weight.end(), 0.0) / bins; }
};

// A step that takes load from the busiest bin.
struct Step {
  enum class Kind { move, swap, add, drop } kind = Kind::drop;
  int item = -1;   // of the busiest bin
  int to = -1;     // move, add: the other bin
  int other = -1;  // swap: the item of bin `to` that comes in return
  double gain = 0;
};

class Packing {
 public:
  explicit Packing(const Task& task)
      : task_(&task),
        held_(static_cast<std::size_t>(task.bins)),
        load_(static_cast<std::size_t>(task.bins)),
        replicas_(static_cast<std::size_t>(task.items()), 0),
        holds_(static_cast<std::size_t>(task.bins) * static_cast<std::size_t>(task.items()), 0) {}

  const Bins& bins() const { return held_; }
  double busiest() const { return level(busiest_bin()); }

  void add(int item, int bin) {
    set_holds(bin, item, true);
    held_[at(bin)].push_back(item);
    load_[at(bin)] = load_[at(bin)] + share(item, 0);
    change_replicas(item, 1);
  }

  // Takes the items of `bins`, as far as the task has room for them, and places the missing ones.
  void start_from(const Bins& bins) {
    for (int bin = 0; bin < task_->bins; ++bin) {
      for (const int item : bins[at(bin)])
        if (has_room(bin) && (task_->may_replicate || replicas_[at(item)] == 0)) add(item, bin);
    }
    for (const int item : by_share()) {
      if (replicas_[at(item)] > 0) continue;
      if (least_loaded(item) < 0) drop_a_replica();
      add(item, least_loaded(item));
    }
  }

  // Gives items as many replicas as `replicas` has, where there is room, whatever the loads.
  void replicate(const std::vector<int>& replicas) {
    for (int item = 0; item < task_->items(); ++item) {
      while (replicas_[at(item)] < replicas[at(item)]) {
        const int bin = least_loaded(item);
        if (bin < 0) break;
        add(item, bin);
      }
    }
  }

  // Greedy: the largest share first, each into the least loaded bin. `replicas` by item.
  void start_greedily(const std::vector<int>& replicas) {
    std::vector<std::pair<double, int>> shares;
    for (int item = 0; item < task_->items(); ++item) {
      for (int i = 0; i < replicas[at(item)]; ++i)
        shares.emplace_back(-task_->weight[at(item)] / replicas[at(item)], item);
    }
    std::sort(shares.begin(), shares.end());
    // Loads of the shares that are to come, so that the order is by final loads.
    std::vector<double> load(at(task_->bins), 0.0);
    for (const auto& [negative, item] : shares) {
      int best = -1;
      for (int bin = 0; bin < task_->bins; ++bin) {
        if (!has_room(bin) || holds(bin, item)) continue;
        if (best < 0 || load[at(bin)] < load[at(best)] ||
            (load[at(bin)] == load[at(best)] && held_[at(bin)].size() < held_[at(best)].size()))
          best = bin;
      }
      if (best < 0) continue;  // the bins with room hold it already: one replica fewer
      load[at(best)] -= negative;
      add(item, best);
    }
  }

  // Improves the busiest bin until its load is at most `enough` or no step helps.
  void improve(double enough) {
    while (true) {
      const int bin = busiest_bin();
      if (level(bin) <= enough) return;
      const std::optional<Step> step = best_step(bin);
      if (!step) return;
      apply(*step, bin);
    }
  }

 private:
  static std::size_t at(int index) { return static_cast<std::size_t>(index); }

  double level(int bin) const { return load_[at(bin)].level(); }
  int busiest_bin() const {
    int busiest = 0;
    for (int bin = 1; bin < task_->bins; ++bin)
      if (level(bin) > level(busiest)) busiest = bin;
    return busiest;
  }

  bool holds(int bin, int item) const { return holds_[at(bin) * at(task_->items()) + at(item)] != 0; }
  void set_holds(int bin, int item, bool value) {
    holds_[at(bin) * at(task_->items()) + at(item)] = value ? 1 : 0;
  }
  bool has_room(int bin) const { return held_[at(bin)].size() < at(task_->slots); }

  // An item's load in each of its bins, with `more` replicas than now.
  Load share(int item, int more) const {
    const int replicas = replicas_[at(item)] + more;
    if (replicas <= 0) return {};
    const double mean = task_->weight[at(item)] / replicas;
    return {mean, task_->in_routes ? mean * (replicas - 1) / replicas : 0};
  }

  // Counts a replica more or less of `item`, whose bins are already right, and corrects their loads.
  void change_replicas(int item, int more) {
    const Load change = share(item, more) - share(item, 0);
    replicas_[at(item)] += more;
    for (int bin = 0; bin < task_->bins; ++bin)
      if (holds(bin, item)) load_[at(bin)] = load_[at(bin)] + change;
  }

  void remove(int item, int bin) {
    set_holds(bin, item, false);
    std::erase(held_[at(bin)], item);
    load_[at(bin)] = load_[at(bin)] - share(item, 0);
    change_replicas(item, -1);
  }

  std::vector<int> by_share() const {
    std::vector<int> items(at(task_->items()));
    std::iota(items.begin(), items.end(), 0);
    std::sort(items.begin(), items.end(), [&](int a, int b) {
      return std::pair(-task_->weight[at(a)], a) < std::pair(-task_->weight[at(b)], b);
    });
    return items;
  }

  // The least loaded bin with room that does not hold the item, or -1.
  int least_loaded(int item) const {
    int best = -1;
    for (int bin = 0; bin < task_->bins; ++bin) {
      if (!has_room(bin) || holds(bin, item)) continue;
      if (best < 0 || level(bin) < level(best)) best = bin;
    }
    return best;
  }

  // Makes room, where every bin is full: the replica goes whose share costs the others least.
  void drop_a_replica() {
    int least = -1;
    for (int item = 0; item < task_->items(); ++item) {
      if (replicas_[at(item)] < 2) continue;
      if (least < 0 || (share(item, -1) - share(item, 0)).mean < (share(least, -1) - share(least, 0)).mean)
        least = item;
    }
    int from = -1;
    for (int bin = 0; bin < task_->bins; ++bin)
      if (holds(bin, least) && (from < 0 || level(bin) > level(from))) from = bin;
    remove(least, from);
  }

  // Takes a step into account if every bin that it touches ends below the busiest. A gain is counted per item
  // that changes bins, because each one costs a copy of weights.
  static void offer(std::optional<Step>& best, Step step, double busiest, double after, int moved) {
    if (after >= busiest * (1 - kGain)) return;
    step.gain = (busiest - after) / moved;
    if (!best || step.gain > best->gain) best = step;
  }

  std::optional<Step> best_step(int bin) const {
    std::optional<Step> best;
    const Load from = load_[at(bin)];
    const double busiest = from.level();
    for (const int item : held_[at(bin)]) {
      const Load own = share(item, 0);
      if (replicas_[at(item)] > 1) offer_drop(best, bin, item);
      for (int to = 0; to < task_->bins; ++to) {
        if (to == bin || holds(to, item)) continue;
        const Load load = load_[at(to)];
        if (has_room(to)) {
          offer(best, {Step::Kind::move, item, to}, busiest,
                std::max((from - own).level(), (load + own).level()), 1);
          if (task_->may_replicate) offer_add(best, bin, item, to);
        }
        for (const int other : held_[at(to)]) {
          const Load change = own - share(other, 0);
          if (change.mean <= 0 || load.mean + change.mean >= busiest || holds(bin, other)) continue;
          offer(best, {Step::Kind::swap, item, to, other}, busiest,
                std::max((from - change).level(), (load + change).level()), 2);
        }
      }
    }
    return best;
  }

  void offer_add(std::optional<Step>& best, int bin, int item, int to) const {
    const Load less = share(item, 1), change = less - share(item, 0);
    double after = (load_[at(to)] + less).level();
    for (int other = 0; other < task_->bins; ++other)
      if (holds(other, item)) after = std::max(after, (load_[at(other)] + change).level());
    offer(best, {Step::Kind::add, item, to}, level(bin), after, 1);
  }

  // A dropped replica costs no copy of weights.
  void offer_drop(std::optional<Step>& best, int bin, int item) const {
    const Load own = share(item, 0), change = share(item, -1) - own;
    double after = (load_[at(bin)] - own).level();
    for (int other = 0; other < task_->bins; ++other)
      if (other != bin && holds(other, item)) after = std::max(after, (load_[at(other)] + change).level());
    offer(best, {Step::Kind::drop, item}, level(bin), after, 1);
  }

  void apply(const Step& step, int bin) {
    if (step.kind != Step::Kind::add) remove(step.item, bin);
    if (step.kind == Step::Kind::swap) {
      remove(step.other, step.to);
      add(step.other, bin);
    }
    if (step.kind != Step::Kind::drop) add(step.item, step.to);
  }

  const Task* task_;
  Bins held_;
  std::vector<Load> load_;     // by bin
  std::vector<int> replicas_;  // by item
  std::vector<char> holds_;    // [bins, items]
};

// Replicas of each item: one more for the largest share, while it is above `above` and there are slots.
std::vector<int> replicas_above(const Task& task, double above) {
  std::vector<int> replicas(task.weight.size(), 1);
  if (!task.may_replicate) return replicas;
  std::int64_t left = std::int64_t{task.bins} * task.slots - task.items();
  std::vector<std::pair<double, int>> heap;
  for (int item = 0; item < task.items(); ++item)
    heap.emplace_back(task.weight[static_cast<std::size_t>(item)], -item);
  std::make_heap(heap.begin(), heap.end());
  for (; left > 0 && !heap.empty() && heap.front().first > above; --left) {
    std::pop_heap(heap.begin(), heap.end());
    const auto item = static_cast<std::size_t>(-heap.back().second);
    if (++replicas[item] < task.bins) {
      heap.back().first = task.weight[item] / replicas[item];
      std::push_heap(heap.begin(), heap.end());
    } else {
      heap.pop_back();
    }
  }
  return replicas;
}

// The most even packing found from nothing.
Packing pack_freshly(const Task& task) {
  const double mean = task.mean();
  Packing best(task);
  best.start_greedily(replicas_above(task, 0));
  const double even = std::min(best.busiest(), mean * (1 + kEven));
  // Few replicas first: what an expert on one rank receives does not depend on hashes.
  for (const double above : {1.0, 0.5, 0.0}) {
    Packing packing(task);
    packing.start_greedily(replicas_above(task, mean * above));
    packing.improve(mean);
    if (packing.busiest() < best.busiest()) best = packing;
    if (packing.busiest() <= even) break;
  }
  return best;
}

// The bins of `packed` in the order in which they have most in common with `earlier`.
Bins in_earlier_order(const Bins& packed, const Bins& earlier) {
  struct Pair {
    int common;
    std::size_t from, to;
  };
  std::vector<Pair> pairs;
  for (std::size_t from = 0; from < packed.size(); ++from) {
    const std::set<int> items(packed[from].begin(), packed[from].end());
    for (std::size_t to = 0; to < earlier.size(); ++to) {
      const auto common = std::count_if(earlier[to].begin(), earlier[to].end(),
                                        [&](int item) { return items.contains(item); });
      pairs.push_back({static_cast<int>(common), from, to});
    }
  }
  std::sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) {
    return std::tuple(-a.common, a.from, a.to) < std::tuple(-b.common, b.from, b.to);
  });
  Bins ordered(packed.size());
  std::vector<char> used(packed.size(), 0), filled(packed.size(), 0);
  for (const Pair& pair : pairs) {
    if (used[pair.from] != 0 || filled[pair.to] != 0) continue;
    used[pair.from] = filled[pair.to] = 1;
    ordered[pair.to] = packed[pair.from];
  }
  return ordered;
}

// `earlier` empty: from nothing. Else by few moves from it, if they lead far enough.
Bins pack(const Task& task, const Bins& earlier) {
  const Packing fresh = pack_freshly(task);
  if (earlier.empty()) return fresh.bins();
  const double enough = fresh.busiest() * (1 + kTolerance);
  // An item too heavy for one bin needs another before steps that each help alone can make it even.
  for (const double above : {std::numeric_limits<double>::infinity(), 1.0, 0.75, 0.5}) {
    Packing moved(task);
    moved.start_from(earlier);
    moved.replicate(replicas_above(task, task.mean() * above));
    moved.improve(enough);
    if (moved.busiest() <= enough) return moved.bins();
  }
  return in_earlier_order(fresh.bins(), earlier);
}

// The experts of a rank in local order: those that stay keep their numbers.
std::vector<int> local_order(std::vector<int> held, const std::vector<int>& earlier) {
  std::sort(held.begin(), held.end());
  std::vector<int> order, arrived;
  for (const int expert : held)
    if (std::find(earlier.begin(), earlier.end(), expert) == earlier.end()) arrived.push_back(expert);
  for (const int expert : earlier) {
    const bool stays = std::binary_search(held.begin(), held.end(), expert);
    order.push_back(stays ? expert : -1);
  }
  auto next = arrived.begin();
  for (int& expert : order)
    if (expert < 0 && next != arrived.end()) expert = *next++;
  order.insert(order.end(), next, arrived.end());
  // The last experts fill the gaps that are left.
  for (std::size_t i = 0; i < order.size(); ++i) {
    while (!order.empty() && order.back() < 0) order.pop_back();
    if (i < order.size() && order[i] < 0) {
      order[i] = order.back();
      order.pop_back();
    }
  }
  return order;
}

// Balances one layer.
class LayerBalance {
 public:
  LayerBalance(std::span<const double> loads, const BalanceOptions& options, const Placement* earlier)
      : loads_(loads),
        options_(options),
        earlier_(earlier),
        experts_(static_cast<int>(loads.size())),
        ranks_of_node_(options.ranks / options.nodes),
        group_size_(options.groups > 0 ? experts_ / options.groups : 1) {
    // Without any load all experts count alike.
    in_routes_ =
        std::all_of(loads.begin(), loads.end(), [](double load) { return load == std::floor(load); });
    if (std::all_of(loads.begin(), loads.end(), [](double load) { return load == 0; }))
      equal_.assign(loads.size(), 1.0), loads_ = equal_;
  }

  Placement placement() const {
    std::vector<std::vector<int>> ranks;
    for (const std::vector<int>& groups : groups_of_nodes()) pack_node(groups, ranks);
    return Placement::replicas(std::move(ranks), experts_);
  }

 private:
  double load(int expert) const { return loads_[static_cast<std::size_t>(expert)]; }

  // By node: its groups.
  Bins groups_of_nodes() const {
    Task task{.bins = options_.nodes,
              .slots = ranks_of_node_ * options_.slots / group_size_,
              .may_replicate = false};
    for (int group = 0; group < experts_ / group_size_; ++group) {
      double sum = 0;
      for (int i = 0; i < group_size_; ++i) sum += load(group * group_size_ + i);
      task.weight.push_back(sum);
    }
    Bins earlier;
    if (earlier_ != nullptr) {
      earlier.resize(static_cast<std::size_t>(options_.nodes));
      for (int group = 0; group < task.items(); ++group) {
        const int rank = earlier_->location(group * group_size_).rank;
        earlier[static_cast<std::size_t>(rank / ranks_of_node_)].push_back(group);
      }
    }
    return pack(task, earlier);
  }

  // Appends the ranks of the next node, which has the experts of `groups`.
  void pack_node(const std::vector<int>& groups, std::vector<std::vector<int>>& ranks) const {
    Task task{.in_routes = in_routes_, .bins = ranks_of_node_, .slots = options_.slots};
    std::vector<int> expert_of, item_of(static_cast<std::size_t>(experts_), -1);
    for (const int group : groups) {
      for (int i = 0; i < group_size_; ++i) {
        const int expert = group * group_size_ + i;
        item_of[static_cast<std::size_t>(expert)] = static_cast<int>(expert_of.size());
        expert_of.push_back(expert);
        task.weight.push_back(load(expert));
      }
    }
    const int first = static_cast<int>(ranks.size());
    Bins earlier;
    for (int rank = first; earlier_ != nullptr && rank < first + ranks_of_node_; ++rank) {
      earlier.emplace_back();
      for (const int expert : earlier_->experts_of(rank)) {
        const int item = item_of[static_cast<std::size_t>(expert)];
        if (item >= 0) earlier.back().push_back(item);
      }
    }
    for (const std::vector<int>& items : pack(task, earlier)) {
      std::vector<int> held;
      for (const int item : items) held.push_back(expert_of[static_cast<std::size_t>(item)]);
      const int rank = static_cast<int>(ranks.size());
      ranks.push_back(local_order(std::move(held),
                                  earlier_ != nullptr ? earlier_->experts_of(rank) : std::vector<int>()));
    }
  }

  std::span<const double> loads_;
  std::vector<double> equal_;
  const BalanceOptions& options_;
  const Placement* earlier_;  // null: none
  int experts_, ranks_of_node_, group_size_;
  bool in_routes_ = false;  // the loads are whole numbers
};

void check_number(const char* name, std::int64_t value, const char* must_be, bool right) {
  if (!right) throw UsageError(str("balance: ", name, " = ", value, ", must be ", must_be));
}

void check_sizes(std::size_t loads, int layers, int experts, const BalanceOptions& options) {
  const int ranks = options.ranks, nodes = options.nodes, groups = options.groups;
  check_number("layers", layers, "0 or more", layers >= 0);
  check_number("experts", experts, "1 or more", experts >= 1);
  check_number("ranks", ranks, "1 or more", ranks >= 1);
  check_number("slots", options.slots, "1 or more", options.slots >= 1);
  check_number("nodes", nodes, str("1 or more, and divide ranks = ", ranks).c_str(),
               nodes >= 1 && ranks % nodes == 0);
  check_number("groups", groups, str("0, or 1 or more and divide experts = ", experts).c_str(),
               groups >= 0 && (groups == 0 || experts % groups == 0));
  if (loads != static_cast<std::size_t>(layers) * static_cast<std::size_t>(experts)) {
    throw UsageError(str("balance: loads has ", counted(loads, "value"), ", must be [layers, experts] = [",
                         layers, ", ", experts, "]"));
  }
  const std::int64_t slots = std::int64_t{ranks} * options.slots;
  if (slots < experts) {
    throw UsageError(str("balance: ", counted(experts, "expert"), " do not fit the ", slots, " slots of ",
                         counted(ranks, "rank"), ": pass slots = ", (experts + ranks - 1) / ranks,
                         " or more"));
  }
  const int size = groups > 0 ? experts / groups : 1;
  const std::int64_t of_node = slots / nodes / size;
  if (of_node * nodes * size < experts) {
    throw UsageError(str("balance: ", groups, " groups of ", counted(size, "expert"), " do not fit ",
                         counted(nodes, "node"), " of ", counted(slots / nodes, "slot"), ", which hold ",
                         of_node, " groups each: pass more slots, or groups = 0"));
  }
}

void check_loads(std::span<const double> loads, int experts) {
  for (std::size_t i = 0; i < loads.size(); ++i) {
    if (loads[i] >= 0 && std::isfinite(loads[i])) continue;
    const std::size_t layer = i / static_cast<std::size_t>(experts);
    throw UsageError(str("balance: loads[", layer, ", ", i % static_cast<std::size_t>(experts),
                         "] = ", loads[i], ", must be finite and 0 or more"));
  }
}

void check_earlier(int layers, int experts, const BalanceOptions& options) {
  const std::span<const Placement> earlier = options.earlier;
  if (earlier.empty()) return;
  if (earlier.size() != static_cast<std::size_t>(layers)) {
    throw UsageError(str("balance: earlier has ", counted(earlier.size(), "placement"),
                         ", must have one for each of ", counted(layers, "layer"), ", or none"));
  }
  for (std::size_t layer = 0; layer < earlier.size(); ++layer) {
    const Placement& placement = earlier[layer];
    if (placement.experts() != experts || placement.ranks() != options.ranks || placement.tp() > 1) {
      throw UsageError(str("balance: earlier[", layer, "] is of ", counted(placement.experts(), "expert"),
                           " on ", counted(placement.ranks(), "rank"), ", tp ", placement.tp(),
                           ", must be of ", experts, " on ", options.ranks, ", tp 1"));
    }
    for (int rank = 0; rank < options.ranks; ++rank) {
      if (placement.local_experts(rank) <= options.slots) continue;
      throw UsageError(str("balance: earlier[", layer, "] has ",
                           counted(placement.local_experts(rank), "expert"), " on rank ", rank,
                           ", must have at most slots = ", options.slots));
    }
  }
}

}  // namespace
}  // namespace balancing

std::vector<Placement> balance(std::span<const double> loads, int layers, int experts,
                               const BalanceOptions& options) {
  balancing::check_sizes(loads.size(), layers, experts, options);
  balancing::check_loads(loads, experts);
  balancing::check_earlier(layers, experts, options);
  std::vector<Placement> placements;
  for (int layer = 0; layer < layers; ++layer) {
    const auto l = static_cast<std::size_t>(layer), e = static_cast<std::size_t>(experts);
    const Placement* earlier = options.earlier.empty() ? nullptr : &options.earlier[l];
    placements.push_back(balancing::LayerBalance(loads.subspan(l * e, e), options, earlier).placement());
  }
  return placements;
}

int moved_experts(const Placement& from, const Placement& to) {
  if (from.experts() != to.experts() || from.ranks() != to.ranks()) {
    throw UsageError(str("moved_experts: placements of ", counted(from.experts(), "expert"), " on ",
                         counted(from.ranks(), "rank"), " and of ", to.experts(), " on ", to.ranks(),
                         ": they must be of the same"));
  }
  int moved = 0;
  for (int rank = 0; rank < to.ranks(); ++rank) {
    const std::vector<int>& before = from.experts_of(rank);
    for (const int expert : to.experts_of(rank))
      moved += std::find(before.begin(), before.end(), expert) == before.end();
  }
  return moved;
}

}  // namespace ferry
