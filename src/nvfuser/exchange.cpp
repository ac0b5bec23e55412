#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "base/errors.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "exchange/device_work.hpp"
#include "exchange/overlap.hpp"
#include "ferry/error.hpp"
#include "ferry/nvfuser.hpp"
#include "format/numbers.hpp"
#include "layout/plan_layout.hpp"
#include "plan/shapes.hpp"

namespace ferry::nvfuser {

namespace {

// nvFuser's words for the arguments of the calls that carry its own out.
constexpr Phrase kDispatchWords[] = {
    {", or choose the format ", ", or construct the exchange with format = "},
    {"memory.parts[0]", "recv_x"},
    {"memory of part 0: ", "recv_x: "},
};

// A combine returns its rows in a dispatch.
constexpr Phrase kCombineWords[] = {
    {"dispatch: ", "combine: "},  {"refused dispatch ", "refused combine "},
    {"tokens: ", "rows: "},       {"tokens is an array of", "rows is an array of"},
    {"ids: ", "recv_src_rank: "}, {"weights: ", "recv_src_idx: "},
};

using Numbers = std::vector<std::int64_t>;

constexpr std::int64_t kMostRows = 1 << 24;  // the largest max_tokens of a ferry::Exchange
constexpr std::size_t kTextBytes = 512;      // of a rank's refusal, as the ranks gather it

DType type_of(const Config& config) {
  const std::optional<DType> type = config.format.value_type();
  if (!type)
    throw UsageError(str("nvfuser: format ", to_string(config.format), ", must be bf16, fp16 or fp32"));
  return *type;
}

// Refuses settings that nvFuser's calls decide or do not have: they would be without effect.
void check_other_settings(const Config& config) {
  if (config.placement.tp() > 1)
    throw UnsupportedError("nvfuser: experts in slices are not supported: use ferry::Exchange");
  if (config.placement.has_replicas())
    throw UnsupportedError("nvfuser: a placement with replicas is not supported: use ferry::Exchange");
  const Config defaults;
  const DType type = config.combine_type == defaults.combine_type ? defaults.combine_type : type_of(config);
  const std::pair<const char*, bool> set[] = {
      {"local_slots", config.local_slots != defaults.local_slots},
      {"shared_experts", config.shared_experts != defaults.shared_experts},
      {"input", config.input != defaults.input},
      {"shared_split", config.shared_split != defaults.shared_split},
      {"transfer", config.transfer != defaults.transfer},
      {"layout", config.layout != defaults.layout},
      {"alignment", config.alignment != defaults.alignment},
      {"capacity", config.capacity != defaults.capacity},
      {"repeats", config.repeats != defaults.repeats},
      {"zero_padding", config.zero_padding != defaults.zero_padding},
      {"combine_type other than the format", config.combine_type != type},
      {"reduction", config.reduction != defaults.reduction},
      {"reduction_level", config.reduction_level != defaults.reduction_level},
      {"lanes", config.lanes != defaults.lanes},
      {"own_receive_buffers", config.own_receive_buffers != defaults.own_receive_buffers},
      {"check_calls (in C manual_check)", config.check_calls != defaults.check_calls},
      {"count_waits", config.count_waits != defaults.count_waits}};
  for (const auto& [name, is_set] : set) {
    if (is_set)
      throw UsageError(str("nvfuser: ", name, ": leave it at its default, which nvFuser's calls need"));
  }
}

Config dispatch_config(const Config& config) {
  return {.experts = config.experts,
          .top_k = config.top_k,
          .hidden = config.hidden,
          .max_tokens = config.max_tokens,
          .backend = config.backend,
          .engine = config.engine,
          .memory = config.memory,
          .hops = config.hops,
          .window = config.window,
          .placement = config.placement,
          .layout = config.top_k == 1 ? Layout::expert_major : Layout::rank_major,
          .format = config.format,
          .combine_type = type_of(config),
          .deadline = config.deadline};
}

// Rows return in a dispatch whose experts are the ranks.
Config return_config(const Config& config, int ranks) {
  if (std::int64_t{ranks} * config.max_tokens > kMostRows) {
    throw UsageError(str("nvfuser: max_tokens = ", config.max_tokens, " on ", counted(ranks, "rank"),
                         ", must be at most ", kMostRows / ranks));
  }
  return {.experts = ranks,
          .top_k = 1,
          .hidden = config.hidden,
          .max_tokens = ranks * config.max_tokens,
          .backend = config.backend,
          .engine = config.engine,
          .memory = config.memory,
          .hops = config.hops,
          .window = config.window,
          .capacity = static_cast<std::int64_t>(std::min(config.top_k, ranks)) * config.max_tokens,
          .format = config.format,
          .combine_type = type_of(config),
          .deadline = config.deadline};
}

// The configurations of both directions. Collective: if this rank refuses its own, the peers' construction
// ends too.
struct Configs {
  Config there, back;
};

Configs configs_or_refuse(const Rank& rank, const Config& config) {
  return or_refuse([&](const Error& error) { refuse_configuration(rank, error); },
                   [&]() -> Configs {
                     check_other_settings(config);
                     return {dispatch_config(config), return_config(config, rank.size())};
                   });
}

float value_at(const std::byte* row, std::int64_t column, DType type) {
  if (type == DType::fp32) {
    float value;
    std::memcpy(&value, row + column * 4, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + column * 2, 2);
  return type == DType::bf16 ? bf16_to_fp32(bits) : fp16_to_fp32(bits);
}

void store(float value, std::byte* row, std::int64_t column, DType type) {
  if (type == DType::fp32) {
    value = canonical(value);
    std::memcpy(row + column * 4, &value, 4);
    return;
  }
  const std::uint16_t bits = type == DType::bf16 ? fp32_to_bf16(value) : fp32_to_fp16(value);
  std::memcpy(row + column * 2, &bits, 2);
}

void check_length(const char* name, std::span<const std::int64_t> values, std::size_t length) {
  if (values.size() != length)
    throw UsageError(str(name, " has ", values.size(), " entries, must have ", length));
}

void check_values(const char* name, std::span<const std::int64_t> values, std::int64_t limit) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || values[i] >= limit) {
      throw UsageError(str(name, "[", i, "] = ", values[i], ", must be 0 to ", limit - 1,
                           "; pass what dispatch returned"));
    }
  }
}

}  // namespace

struct Exchange::State {
  State(const Rank& own, const Configs& configs)
      : rank(own),
        ranks(static_cast<std::size_t>(own.size())),
        type(configs.there.combine_type),
        there(own, configs.there),
        back(own, configs.back),
        device(make_device_work(there)) {
    if (device == nullptr) return;
    const std::int64_t most = back.config().max_tokens;
    targets = reinterpret_cast<std::int64_t*>(device->allocate(most * 8));
    indices = reinterpret_cast<float*>(device->allocate(most * 4));
    terms = reinterpret_cast<std::int32_t*>(
        device->allocate(std::int64_t{there.config().max_tokens} * most_terms() * 4));
  }

  // The most rows of a token that come back.
  int most_terms() const { return std::min(there.config().top_k, rank.size()); }
  // `bytes` bytes from one memory of the exchange or of the host to the other.
  void copy(void* to, const void* from, std::int64_t bytes) const {
    if (device != nullptr) {
      device->copy(to, from, bytes);
    } else if (bytes > 0) {
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
    }
  }
  template <class T>
  std::vector<T> on_host(const T* values, std::int64_t count) const {
    std::vector<T> copied(static_cast<std::size_t>(count));
    copy(copied.data(), values, count * static_cast<std::int64_t>(sizeof(T)));
    return copied;
  }

  DispatchResult result_of(const ferry::DispatchResult& rows) const;
  ferry::DispatchResult return_rows(const CombineInput& input, Stream stream);
  void check_input(const CombineInput& input, std::int64_t tokens, const void* result) const;
  std::vector<Numbers> agree(const std::string& fault, const Numbers& numbers) const;
  void check_counts(const std::vector<Numbers>& gathered) const;
  std::string fault_of(std::span<const std::int32_t> index, std::span<const std::int64_t> counts,
                       std::int64_t tokens) const;
  void add_rows(const std::byte* rows, std::span<const std::int32_t> index, std::int64_t tokens,
                std::byte* result) const;
  void add_rows_on_device(const void* rows, std::span<const std::int32_t> index, std::int64_t tokens,
                          void* result, Stream stream);

  Rank rank;
  std::size_t ranks;
  DType type;
  ferry::Exchange there, back;
  std::unique_ptr<DeviceWork> device;  // null: host memory
  // In device memory, of a combine.
  std::int64_t* targets = nullptr;  // [R * max_tokens] recv_src_rank
  float* indices = nullptr;         // [R * max_tokens] recv_src_idx, which travel as weights
  std::int32_t* terms = nullptr;    // [max_tokens, most_terms()] the returned rows of each token
};

Exchange::Exchange(const Rank& rank, const Config& config)
    : state_(std::make_unique<State>(rank, configs_or_refuse(rank, config))) {}
Exchange::~Exchange() = default;

DispatchResult Exchange::dispatch(const Tokens& tokens, const Ids& ids, const DispatchOptions& options) {
  ferry::Exchange& there = state_->there;
  const CallOptions call{.stream = options.stream};
  return in_words(kDispatchWords, [&] {
    const ferry::DispatchResult rows =
        there.dispatch(tokens, ids, nullptr, {.call = call, .memory = {.parts = {options.recv_x}}});
    there.synchronize(call);
    there.check();
    return state_->result_of(rows);
  });
}

std::int64_t Exchange::capacity() const {
  return state_->there.capacity();
}

DispatchResult Exchange::last_dispatch_result() const {
  return state_->result_of(state_->there.last_dispatch_result());
}

DispatchResult Exchange::State::result_of(const ferry::DispatchResult& rows) const {
  const Config& config = there.config();
  const std::size_t me = static_cast<std::size_t>(rank.index());
  DispatchResult received;
  if (rows.total == nullptr) return received;
  received.recv_x = rows.data;
  received.call = rows.call;
  const std::int64_t total = on_host(rows.total, 1).front();
  for (const Source& source : on_host(rows.source, total)) {
    received.recv_src_idx.push_back(source.token);
    received.recv_src_rank.push_back(source.rank);
  }
  if (config.top_k == 1) {
    const std::vector<std::int32_t> counts = on_host(rows.counts, rows.groups),
                                    experts = on_host(rows.group_expert, rows.groups);
    for (std::size_t group = 0; group < counts.size(); ++group)
      received.recv_topk_idx.insert(received.recv_topk_idx.end(), counts[group], experts[group]);
  } else {
    const std::vector<std::int32_t> ids = on_host(rows.local_ids, total * config.top_k);
    received.recv_topk_idx.assign(ids.begin(), ids.end());
  }
  const std::vector<std::int32_t> between =
      on_host(view_plan(rows.plan.storage(), plan_shape(config)).tokens_between,
              static_cast<std::int64_t>(ranks * ranks));
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    received.n_tokens_to_rank.push_back(between[me * ranks + peer]);
    received.n_tokens_from_rank.push_back(between[peer * ranks + me]);
  }
  return received;
}

void Exchange::refuse_dispatch(const Error& error) noexcept {
  state_->there.refuse(Operation::dispatch, error);
}

void Exchange::combine(const CombineInput& input, std::int64_t tokens, void* result, Stream stream) {
  State& state = *state_;
  std::string fault;
  Numbers numbers(1 + 2 * state.ranks);
  try {
    state.check_input(input, tokens, result);
    numbers[0] = tokens;
    std::ranges::copy(input.n_tokens_to_rank, numbers.begin() + 1);
    std::ranges::copy(input.n_tokens_from_rank,
                      numbers.begin() + 1 + static_cast<std::ptrdiff_t>(state.ranks));
  } catch (const UsageError& error) {  // a rank that threw alone would leave its peers waiting
    fault = error.what();
  }
  state.check_counts(state.agree(fault, numbers));

  const ferry::DispatchResult rows =
      in_words(kCombineWords, [&] { return state.return_rows(input, stream); });
  std::vector<std::int32_t> returned;
  for (const float index : state.on_host(rows.weight, state.on_host(rows.total, 1).front()))
    returned.push_back(std::bit_cast<std::int32_t>(index));
  state.agree(state.fault_of(returned, input.n_tokens_to_rank, tokens), {});
  if (state.device != nullptr) {
    state.add_rows_on_device(rows.data, returned, tokens, result, stream);
  } else {
    state.add_rows(static_cast<const std::byte*>(rows.data), returned, tokens,
                   static_cast<std::byte*>(result));
  }
}

// Sends every row to its source rank. The index of a row's token travels as its weight, which dispatch
// delivers bit for bit.
ferry::DispatchResult Exchange::State::return_rows(const CombineInput& input, Stream stream) {
  std::vector<float> index;
  for (const std::int64_t token : input.recv_src_idx)
    index.push_back(std::bit_cast<float>(static_cast<std::int32_t>(token)));
  const std::int64_t count = std::ssize(index);
  const std::int64_t* ids = input.recv_src_rank.data();
  const float* weights = index.data();
  if (device != nullptr) {
    copy(targets, ids, count * 8);
    copy(indices, weights, count * 4);
    ids = targets;
    weights = indices;
  }
  const CallOptions call{.stream = stream};
  const ferry::DispatchResult rows =
      back.dispatch(Tokens::rows(input.rows, count, type), ids, weights, {.call = call, .weighted = true});
  back.synchronize(call);
  return rows;
}

void Exchange::State::check_input(const CombineInput& input, std::int64_t tokens, const void* result) const {
  const std::int64_t most = there.config().max_tokens;
  if (tokens < 0 || tokens > most)
    throw UsageError(str("tokens = ", tokens, ", must be 0 to max_tokens = ", most));
  if (result == nullptr && tokens > 0)
    throw UsageError(str("result is null; it needs memory for ", counted(tokens, "token")));
  if (input.rows == nullptr && !input.recv_src_idx.empty())
    throw UsageError(str("rows is null; recv_src_idx has ", input.recv_src_idx.size(), " entries"));
  if (device != nullptr) device->require_usable("combine", "result", result);
  check_length("recv_src_rank", input.recv_src_rank, input.recv_src_idx.size());
  check_length("n_tokens_to_rank", input.n_tokens_to_rank, ranks);
  check_length("n_tokens_from_rank", input.n_tokens_from_rank, ranks);
  check_values("recv_src_rank", input.recv_src_rank, rank.size());
  check_values("recv_src_idx", input.recv_src_idx, most);
  check_values("n_tokens_to_rank", input.n_tokens_to_rank, most + 1);
  check_values("n_tokens_from_rank", input.n_tokens_from_rank, most + 1);
  CallArrays arrays;
  const std::int64_t row_bytes = there.config().hidden * bytes_of(type);
  arrays.read("rows", input.rows, std::ssize(input.recv_src_idx), row_bytes);
  const auto read = [&](const char* name, std::span<const std::int64_t> values) {
    arrays.read(name, values.data(), std::ssize(values), sizeof(std::int64_t));
  };
  read("recv_src_idx", input.recv_src_idx);
  read("recv_src_rank", input.recv_src_rank);
  read("n_tokens_to_rank", input.n_tokens_to_rank);
  read("n_tokens_from_rank", input.n_tokens_from_rank);
  arrays.write("result", result, tokens, row_bytes);
  arrays.require_apart("", -1);
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    const auto rows = std::ranges::count(input.recv_src_rank, static_cast<std::int64_t>(peer));
    if (rows != input.n_tokens_from_rank[peer]) {
      throw UsageError(str("recv_src_rank has ", counted(rows, "row"), " of rank ", peer,
                           ", n_tokens_from_rank[", peer, "] = ", input.n_tokens_from_rank[peer],
                           "; pass arrays of one dispatch"));
    }
  }
}

// Gathers the numbers of every rank, or throws a refusal that one rank has on every rank.
std::vector<Numbers> Exchange::State::agree(const std::string& fault, const Numbers& numbers) const {
  const std::size_t bytes = kTextBytes + numbers.size() * sizeof(std::int64_t);
  std::vector<char> mine(bytes), all(bytes * ranks);
  fault.copy(mine.data(), kTextBytes - 1);
  std::copy_n(reinterpret_cast<const char*>(numbers.data()), bytes - kTextBytes, mine.data() + kTextBytes);
  rank.all_gather(mine.data(), all.data(), bytes);
  std::vector<Numbers> gathered(ranks, Numbers(numbers.size()));
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    const char* const message = all.data() + peer * bytes;
    if (*message != 0) throw UsageError(str("combine: rank ", peer, ": ", message));
    std::copy_n(message + kTextBytes, bytes - kTextBytes, reinterpret_cast<char*>(gathered[peer].data()));
  }
  return gathered;
}

// `gathered` has of every rank: N, n_tokens_to_rank, n_tokens_from_rank. All ranks throw the same error.
void Exchange::State::check_counts(const std::vector<Numbers>& gathered) const {
  for (std::size_t source = 0; source < ranks; ++source) {
    std::int64_t sum = 0;
    for (std::size_t target = 0; target < ranks; ++target) {
      const std::int64_t sent = gathered[source][1 + target];
      const std::int64_t received = gathered[target][1 + ranks + source];
      if (sent != received) {
        throw UsageError(str("combine: n_tokens_to_rank[", target, "] of rank ", source, " is ", sent,
                             ", n_tokens_from_rank[", source, "] of rank ", target, " is ", received,
                             "; pass arrays of one dispatch on every rank"));
      }
      sum += sent;
    }
    const std::int64_t most = gathered[source][0] * std::min(there.config().top_k, rank.size());
    if (sum > most) {
      throw UsageError(str("combine: n_tokens_to_rank of rank ", source, " adds up to ", counted(sum, "row"),
                           ", its ", counted(gathered[source][0], "token"), " have at most ", most,
                           "; pass tokens, N of the dispatch"));
    }
  }
}

// What is wrong with the token indices of the returned rows, which stand in the order of the ranks that
// returned them; empty if nothing.
std::string Exchange::State::fault_of(std::span<const std::int32_t> index,
                                      std::span<const std::int64_t> counts, std::int64_t tokens) const {
  std::vector<bool> seen(static_cast<std::size_t>(tokens));
  auto row = index.begin();
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    // K = 1: a token has one row on all ranks together.
    if (there.config().top_k > 1) seen.assign(seen.size(), false);
    for (const auto end = row + counts[peer]; row != end; ++row) {
      if (*row >= tokens) {
        return str("rank ", peer, " returned a row of token ", *row, ", tokens = ", tokens,
                   "; check recv_src_idx there or pass tokens");
      }
      if (seen[*row]) {
        return str("rank ", peer, " returned a row of token ", *row,
                   ", which came before; check recv_src_idx there");
      }
      seen[*row] = true;
    }
  }
  return {};
}

void Exchange::State::add_rows(const std::byte* rows, std::span<const std::int32_t> index,
                               std::int64_t tokens, std::byte* result) const {
  const std::int64_t hidden = there.config().hidden, row_bytes = hidden * bytes_of(type);
  std::vector<float> sums(static_cast<std::size_t>(tokens * hidden));
  for (const std::int32_t token : index) {  // in rank order
    for (std::int64_t column = 0; column < hidden; ++column)
      sums[token * hidden + column] += value_at(rows, column, type);
    rows += row_bytes;
  }
  for (std::int64_t i = 0; i < tokens * hidden; ++i) store(sums[i], result, i, type);
}

void Exchange::State::add_rows_on_device(const void* rows, std::span<const std::int32_t> index,
                                         std::int64_t tokens, void* result, Stream stream) {
  const auto most = static_cast<std::size_t>(most_terms());
  std::vector<std::int32_t> listed(static_cast<std::size_t>(tokens) * most, -1);
  std::vector<std::size_t> found(static_cast<std::size_t>(tokens));
  for (std::size_t row = 0; row < index.size(); ++row) {  // in rank order
    const auto token = static_cast<std::size_t>(index[row]);
    listed[token * most + found[token]++] = static_cast<std::int32_t>(row);
  }
  copy(terms, listed.data(), std::ssize(listed) * 4);
  device->add_rows({.rows = rows,
                    .terms = terms,
                    .most = most_terms(),
                    .result = result,
                    .count = tokens,
                    .hidden = there.config().hidden,
                    .type = type},
                   stream);
  back.synchronize({.stream = stream});
}

}  // namespace ferry::nvfuser
