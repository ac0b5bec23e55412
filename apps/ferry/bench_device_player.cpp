#include "apps/ferry/bench_device_player.hpp"

#include <chrono>
#include <deque>
#include <numeric>

#include "apps/ferry/bench_check.hpp"

namespace ferry::app {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kEager = 100;  // calls whose host time is taken
constexpr int kWarming = 3;  // replays before those that count

std::int64_t result_rows(const BenchPoint& point) {
  return std::int64_t{point.tokens} *
         (point.config.reduction == Reduction::unreduced ? point.config.top_k : 1);
}

bool weighs_rows(const BenchPoint& point) {
  return point.config.layout != Layout::rank_major && point.config.reduction != Reduction::unreduced;
}

}  // namespace

DevicePlayer::DevicePlayer(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs,
                           DeviceNotes& notes)
    : rank_(rank),
      point_(point),
      inputs_(inputs),
      notes_(notes),
      exchange_(rank, point.config),
      result_(result_rows(point) * point.token_bytes()) {
  const std::int64_t routes = std::int64_t{point.tokens} * point.config.top_k;
  std::vector<std::byte> tokens(static_cast<std::size_t>(point.tokens * point.token_bytes()));
  for (int number = 0; number < kSets; ++number) {
    for (std::int64_t token = 0; token < point.tokens; ++token) {
      inputs.write_token(number, rank.index(), token, 1.0f, tokens.data() + token * point.token_bytes());
    }
    Set& set = sets_[static_cast<std::size_t>(number)];
    set.tokens = DeviceArray(static_cast<std::int64_t>(tokens.size()));
    set.tokens.fill_from(tokens.data(), set.tokens.bytes());
    set.ids = DeviceArray(routes * 4);
    set.ids.fill_from(inputs.ids(number, rank.index()), routes * 4);
    set.weights = DeviceArray(routes * 4);
    set.weights.fill_from(inputs.weights(number, rank.index()), routes * 4);
    set.plan = DeviceArray(plan_bytes(exchange_.config(), point.ranks));
  }
}

void DevicePlayer::play() {
  for (int set = 0; set < kSets; ++set) check(set);
  const WireCounts wire = exchange_.wire();
  notes_.dispatch_wire_bytes = wire.dispatch_bytes;
  notes_.combine_wire_bytes = wire.combine_bytes;
  const auto dispatches = [this](int set) { dispatch(set); };
  const auto combines = [this](int set) { combine(set); };
  notes_.dispatch = time(dispatches);
  notes_.combine = time(combines);
  notes_.dispatch_host = time_host(dispatches);
  notes_.combine_host = time_host(combines);
  exchange_.check();
}

Arrivals DevicePlayer::dispatch(int number) {
  const Set& set = sets_[static_cast<std::size_t>(number)];
  DispatchOptions options;
  options.sm_limit = point_.sm_limit;
  options.memory.plan = set.plan.as<void>();
  return exchange_.dispatch(Tokens::rows(set.tokens.as(), point_.tokens, point_.type),
                            set.ids.as<std::int32_t>(), set.weights.as<float>(), options, stream_);
}

void DevicePlayer::combine(int number) {
  const Set& set = sets_[static_cast<std::size_t>(number)];
  CombineOptions options;
  options.sm_limit = point_.sm_limit;
  if (weighs_rows(point_)) options.weights = set.row_weights.as<float>();
  exchange_.combine({set.outputs.as(), point_.type},
                    Plan::over(set.plan.as<void>(), static_cast<std::size_t>(set.plan.bytes())),
                    {.data = result_.as(), .type = point_.type}, options, stream_);
}

// Experts that leave rows as they are: what arrived goes back.
void DevicePlayer::check(int number) {
  const Arrivals arrivals = dispatch(number);
  exchange_.synchronize(0, stream_);
  exchange_.check();
  const Arrivals local = arrivals_on_host_.copy(arrivals, point_.config);
  notes_.rows_checked += check_arrivals(point_, inputs_, number, rank_.index(), local);
  notes_.rows += std::accumulate(local.counts, local.counts + local.groups, std::int64_t{0});
  Set& set = sets_[static_cast<std::size_t>(number)];
  if (weighs_rows(point_)) {
    set.row_weights = DeviceArray(*local.total * 4);
    if (*local.total > 0) set.row_weights.fill_from(local.weight, *local.total * 4);
  }
  fill_outputs(local, number);
  result_.fill(0xFF, stream_);
  combine(number);
  exchange_.synchronize(0, stream_);
  std::vector<std::byte> result(static_cast<std::size_t>(result_.bytes()));
  copy_to_host(result.data(), result_.as(), result_.bytes());
  notes_.rows_checked += check_result(point_, inputs_, number, rank_.index(), result.data());
}

void DevicePlayer::fill_outputs(const Arrivals& local, int number) {
  const std::int64_t row_bytes = point_.token_bytes();
  std::vector<std::byte> rows(static_cast<std::size_t>(*local.total * row_bytes));
  for (int group = 0; group < local.groups; ++group) {
    for (std::int32_t i = 0; i < local.counts[group]; ++i) {
      const std::int64_t row = local.row_offsets[group] + i;
      const Source& source = local.source[row];
      inputs_.write_token(number, source.rank, source.token, 1.0f, rows.data() + row * row_bytes);
    }
  }
  Set& set = sets_[static_cast<std::size_t>(number)];
  set.outputs = DeviceArray(static_cast<std::int64_t>(rows.size()) + 16);  // an address, also without rows
  set.outputs.fill_from(rows.data(), static_cast<std::int64_t>(rows.size()));
}

// Seconds of a call in every replay on this rank's stream. Replays follow each other without the host.
std::vector<double> DevicePlayer::time(const std::function<void(int set)>& call) {
  const DeviceGraph graph(stream_, [&] {
    for (int launch = 0; launch < point_.launches; ++launch) call(launch % kSets);
  });
  const int replays = point_.repetitions + kWarming;
  std::deque<DeviceEvent> marks(static_cast<std::size_t>(replays) + 1);
  rank_.barrier();
  marks[0].record(stream_);
  for (int replay = 0; replay < replays; ++replay) {
    graph.launch(stream_);
    marks[static_cast<std::size_t>(replay) + 1].record(stream_);
  }
  exchange_.synchronize(0, stream_);
  std::vector<double> seconds;
  for (std::size_t replay = kWarming; replay + 1 < marks.size(); ++replay)
    seconds.push_back(marks[replay + 1].seconds_since(marks[replay]) / point_.launches);
  return seconds;
}

// Seconds that the calling thread spends in a call; the queue of the stream stays short.
double DevicePlayer::time_host(const std::function<void(int set)>& call) {
  std::chrono::duration<double> spent{};
  for (int number = 0; number < kEager; ++number) {
    const Clock::time_point start = Clock::now();
    call(number % kSets);
    spent += Clock::now() - start;
    exchange_.synchronize(0, stream_);
  }
  return spent.count() / kEager;
}

}  // namespace ferry::app
