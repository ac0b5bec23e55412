#include "exchange/configuration.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/enumerators.hpp"
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/config_fields.hpp"
#include "exchange/replicas.hpp"
#include "exchange/sliced.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "format/registry.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace {

void check_range(const char* name, std::int64_t value, std::int64_t lowest, std::int64_t highest) {
  if (value < lowest || value > highest) {
    throw UsageError(str("configuration: ", name, " = ", value, ", must be ", lowest, " to ", highest));
  }
}

void check_enumerators(const Config& config) {
  check_backend(config.backend);
  const auto check = [](const char* name, const auto& value) {
    using Field = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_enum_v<Field>) {
      const auto all = enumerators<Field>();
      const auto number = [](Field each) { return static_cast<std::int64_t>(each); };
      check_range(name, number(value), number(all.front()), number(all.back()));
    }
  };
  visit_common_fields(check, config);
}

void check_shared_experts(const Config& config) {
  check_range("shared_experts", config.shared_experts, 0, kMaxSharedExperts);
  if (config.shared_experts == 0) return;
  if (config.layout == Layout::rank_major) {
    throw UsageError(str("configuration: shared_experts = ", config.shared_experts,
                         ", must be 0 with rank_major, whose rows are tokens: use an expert layout"));
  }
}

void check_input(const Config& config) {
  if (config.input == Input::own) {
    if (config.shared_split == 0) return;
    throw UsageError(
        str("configuration: shared_split = ", config.shared_split,
            ", must be 0 unless input is replicated: ranks with tokens of their own share none"));
  }
  if (config.reduction != Reduction::partial || config.reduction_level == ReductionLevel::node) {
    throw UsageError(str("configuration: replicated input with reduction ", to_string(config.reduction),
                         " and reduction_level ", to_string(config.reduction_level),
                         ", must be partial at level rank: each rank has only its own rows"));
  }
}

void check_transfer(const Config& config) {
  if (config.transfer == Transfer::routed) return;
  if (config.backend == BackendKind::nvshmem) {
    throw UnsupportedError(
        "configuration: transfer = gather: the backend nvshmem has only routed: pass routed, whose results "
        "are the same, or use another backend");
  }
  if (config.input != Input::own) {
    throw UsageError(str("configuration: transfer = gather with input ", to_string(config.input),
                         ", must be own: replicated tokens do not travel"));
  }
  if (config.layout == Layout::rank_major) {
    throw UsageError(
        "configuration: transfer = gather with layout rank_major, whose rows are the tokens that were sent: "
        "use an expert layout");
  }
  if (config.hops == Hops::two)
    throw UsageError("configuration: transfer = gather with hops two, must be one: no rank forwards tokens");
  if (config.reduction != Reduction::partial || config.reduction_level == ReductionLevel::node) {
    throw UsageError(str("configuration: transfer = gather with reduction ", to_string(config.reduction),
                         " and reduction_level ", to_string(config.reduction_level),
                         ", must be partial at level rank: each rank returns one sum for a token"));
  }
}

void check_shared_split(const Config& config) {
  const int ranks = config.placement.ranks();
  if (config.shared_split < 0 || config.shared_split > ranks)
    throw UsageError(
        str("configuration: shared_split = ", config.shared_split, ", must be 0 to ", ranks,
            ": it is how many of the ranks divide the shared experts' rows, 0 if each takes all"));
  if (config.shared_split > 0 && config.shared_experts == 0)
    throw UsageError(str("configuration: shared_split = ", config.shared_split,
                         ", must be 0 without shared_experts: there are no rows to divide"));
}

void check_local_slots(const Config& config) {
  const int most = config.placement.most_local_experts();
  if (config.local_slots == 0 || config.local_slots >= most) return;
  throw UsageError(str("configuration: local_slots = ", config.local_slots, ", must be ", most,
                       " or more, the most experts that the placement gives a rank, or 0"));
}

void check_reduction(const Config& config) {
  if (config.layout != Layout::rank_major || config.reduction == Reduction::partial) return;
  throw UsageError(
      str("configuration: reduction ", to_string(config.reduction),
          ", must be partial with rank_major, whose rows are sums over a token's local experts: use "
          "an expert layout, or partial"));
}

void check_alignment(const Config& config) {
  if (config.layout == Layout::rank_major && config.alignment != 1) {
    throw UsageError(str("configuration: alignment = ", config.alignment,
                         ", must be 1: rank_major rows have no alignment"));
  }
  if (config.capacity % config.alignment != 0) {
    throw UsageError(str("configuration: capacity = ", config.capacity,
                         " is not a multiple of alignment = ", config.alignment));
  }
}

void check_capacity(const Config& config) {
  for (int rank = 0; rank < config.placement.ranks(); ++rank) {
    const std::int64_t rows = std::max(row_capacity(config, rank), row_room(config, rank).rows);
    if (rows > std::numeric_limits<std::int32_t>::max()) {
      throw UsageError(str("configuration: rank ", rank, " would have ", counted(rows, "row"), ", at most ",
                           std::numeric_limits<std::int32_t>::max(),
                           " can be numbered: set a smaller capacity"));
    }
  }
}

// An exchange with a registered format calls its encoder.
void check_encoder(const Config& config) {
  if (!encoding_of(config.format).by_caller) return;
  const Encoder& encoder = encoder_of(config.format);
  const MemoryKind memory = chosen_memory(config);
  if (memory == MemoryKind::host ? encoder.on_host : encoder.on_device) return;
  throw UnsupportedError(str("configuration: the encoder of the format ", to_string(config.format),
                             " has no ", memory == MemoryKind::host ? "on_host" : "on_device",
                             ", so it cannot encode rows in ", to_string(memory),
                             " memory: give it one, or use ", memory == MemoryKind::host ? "device" : "host",
                             " memory"));
}

// An input type that the format accepts. The type of each call's tokens is checked in the call.
DType accepted_input(const Format& format) {
  return format.value_type().value_or(DType::bf16);
}

void check_indexed(const Config& config) {
  if (config.layout != Layout::expert_indexed) return;
  if (chosen_memory(config) == MemoryKind::device) {
    throw UnsupportedError(
        "configuration: layout expert_indexed on device memory: it has no kernels: use expert_major, or host "
        "memory");
  }
  const char* const with = config.zero_padding                   ? "zero_padding"
                           : config.input != Input::own          ? "replicated input"
                           : config.transfer == Transfer::gather ? "transfer = gather"
                                                                 : nullptr;
  if (with == nullptr) return;
  throw UsageError(str("configuration: layout expert_indexed with ", with,
                       ": its rows are the tokens that were sent, and none is padding: use expert_major"));
}

// Computes the sizes in floating point, because in integers they may overflow.
void check_memory(const Config& config) {
  constexpr auto kMost = static_cast<double>(1ll << 56);
  auto real = [](std::int64_t value) { return static_cast<double>(value); };
  const ExchangeShape shape = exchange_shape(config, 0);
  const double messages = real(shape.ranks) * shape.max_tokens * real(shape.message_bytes);
  const double sums = real(shape.combine_rows) * real(shape.combine_row_bytes);
  double rows = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) rows = std::max(rows, real(row_room(config, rank).rows));
  const double staging = 2 * config.lanes * (messages + sums);
  const double received = config.lanes * rows * real(shape.message_bytes);
  const double largest = std::max(real(shape.message_bytes), real(shape.combine_row_bytes));
  const bool has_windows = config.backend != BackendKind::collective && config.hops == Hops::two;
  const double windows = has_windows ? real(config.lanes) * shape.ranks * config.window * largest : 0;
  if (windows > kMost) {
    throw UsageError(str("configuration: needs ", counted(windows, "byte"), " of windows for ",
                         counted(config.window, "message"), ", more than can be addressed (", kMost,
                         "): reduce window or lanes"));
  }
  if (staging > kMost || received > kMost) {
    throw UsageError(str("configuration: needs ", counted(staging, "byte"), " of staging and ", received,
                         " for received rows, more than can be addressed (", kMost,
                         "): reduce max_tokens, capacity or lanes"));
  }
}

}  // namespace

void check_alone(const Config& config) {
  check_range("experts", config.experts, 1, kMostExperts);
  check_range("top_k", config.top_k, 1, kMaxTopK);
  check_range("hidden", config.hidden, 1, 1 << 24);
  check_range("max_tokens", config.max_tokens, 1, 1 << 24);
  check_range("alignment", config.alignment, 1, 1 << 20);
  check_range("capacity", config.capacity, 0, std::numeric_limits<std::int32_t>::max());
  check_range("local_slots", config.local_slots, 0, kMostExperts);
  check_range("layers", config.layers, 1, kMostLayers);
  check_range("lanes", config.lanes, 1, kMaxLanes);
  if (!(config.deadline > 0) || !std::isfinite(config.deadline)) {
    throw UsageError(str("configuration: deadline = ", config.deadline, " s, must be positive and finite"));
  }
  check_enumerators(config);
  const MemoryKind only = has_kernels(config.backend) ? MemoryKind::device : MemoryKind::host;
  const bool has_both = config.backend == BackendKind::collective || config.backend == BackendKind::automatic;
  if (!has_both && config.memory != MemoryKind::automatic && config.memory != only) {
    throw UnsupportedError(str("configuration: the backend ", to_string(config.backend), " works on ",
                               to_string(only), " memory, and memory is ", to_string(config.memory),
                               ": pass automatic, or use the backend collective"));
  }
  if (config.engine == EngineKind::nccl && chosen_memory(config) == MemoryKind::host) {
    throw UnsupportedError(
        str("configuration: the engine nccl moves device memory with the backend collective; the backend is ",
            to_string(config.backend), ", and memory is ", to_string(config.memory),
            has_both ? ": pass memory automatic or device, or another engine"
                     : ": pass the backend collective, or another engine"));
  }
  if (config.count_waits && chosen_memory(config) == MemoryKind::device) {
    throw UnsupportedError(str("configuration: count_waits is for host memory, and the backend ",
                               to_string(config.backend), " works on device memory: leave it off"));
  }
  check_range("window", config.window, 0, 1 << 24);
  const std::int64_t row_bytes = config.hidden * bytes_of(config.combine_type);
  if (row_bytes % 16 != 0) {
    throw UsageError(str("configuration: a row of ", config.hidden, " ", to_string(config.combine_type),
                         " values is ", counted(row_bytes, "byte"),
                         ", must be a multiple of 16: make hidden a multiple of ",
                         16 / bytes_of(config.combine_type)));
  }
  check_format(config.format, config.hidden, accepted_input(config.format));
  check_tiles(config, config.format);
  check_encoder(config);
  check_reduction(config);
  check_alignment(config);
  check_shared_experts(config);
  check_input(config);
  check_transfer(config);
  check_indexed(config);
}

Config complete_config(const Config& given, int ranks) {
  check_alone(given);
  Config config = given;
  if (config.placement.empty()) config.placement = Placement::blocks(config.experts, ranks);
  if (config.placement.ranks() != ranks || config.placement.experts() != config.experts) {
    throw UsageError(
        str("configuration: the placement is for ", counted(config.placement.experts(), "expert"), " on ",
            counted(config.placement.ranks(), "rank"), ", the exchange has ", config.experts, " on ", ranks));
  }
  config.memory = chosen_memory(config);
  check_range("placement: replicas", config.placement.total_replicas(), 1, kMostExperts);
  if (config.placement.tp() > 1) {
    check_sliced(config);
    config.repeats = true;  // the rows of a rank never overflow
  }
  check_shared_split(config);
  check_local_slots(config);
  check_capacity(config);
  check_memory(config);
  return config;
}

Config inner_config(const Config& config) {
  if (config.placement.tp() > 1) return routed_config(config);
  return config.placement.has_replicas() ? replica_config(config) : config;
}

void check_tiles(const Config& config, const Format& format) {
  if (!encoding_of(format).scale_tiles) return;
  if (!has_route_rows(config.layout)) {
    throw UsageError(str("format ", to_string(format), ": ", to_string(config.layout),
                         " has no tiles, because its rows are not sorted by expert: use expert_major or "
                         "expert_padded, or scales in rows"));
  }
}

MemoryKind chosen_memory(const Config& config) {
  if (config.memory != MemoryKind::automatic) return config.memory;
  const bool has_engine =
      config.backend == BackendKind::collective || config.backend == BackendKind::automatic;
  const bool nccl = has_engine && config.engine == EngineKind::nccl;
  return has_kernels(config.backend) || nccl ? MemoryKind::device : MemoryKind::host;
}

bool resolve_by_hosts(Config& config, const Topology& topology, bool one_host) {
  if (config.backend == BackendKind::automatic) {
    const bool device = chosen_memory(config) == MemoryKind::device;
    if (config.engine != EngineKind::automatic || (!one_host && !device)) {
      config.backend = BackendKind::collective;
    } else if (one_host) {
      config.backend = device ? BackendKind::cuda : BackendKind::cpu;
    } else {
      return false;
    }
  }
  config.hops = chosen_hops(config, topology);
  config.reduction_level = chosen_level(config, topology);
  return true;
}

DeviceBackendFaults device_backend_faults(const Config& config) {
  DeviceBackendFaults faults;
  const auto fault_of = [](auto step) -> std::string {
    try {
      step();
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  faults.nccl = fault_of(require_nccl);
  if (config.transfer == Transfer::gather) {
    faults.nvshmem = "it has no transfer gather";
  } else if (config.placement.tp() > 1) {
    faults.nvshmem = "it has no experts in slices on several hosts";
  } else {
    faults.nvshmem = fault_of(require_nvshmem);
  }
  return faults;
}

void choose_device_backend(Config& config, std::span<const DeviceBackendFaults> by_rank) {
  // "rank R: why" of the first rank with a fault
  const auto fault_in = [&](std::string DeviceBackendFaults::* candidate) -> std::string {
    for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
      const std::string& fault = by_rank[rank].*candidate;
      if (!fault.empty()) return by_rank.size() == 1 ? fault : str("rank ", rank, ": ", fault);
    }
    return {};
  };
  const std::string no_nvshmem = fault_in(&DeviceBackendFaults::nvshmem);
  config.backend = BackendKind::nvshmem;
  if (no_nvshmem.empty()) return;
  config.backend = BackendKind::collective;
  config.engine = EngineKind::nccl;
  const std::string no_nccl = fault_in(&DeviceBackendFaults::nccl);
  if (no_nccl.empty()) return;
  throw UnsupportedError(
      str("configuration: backend automatic, on device memory of several hosts, finds neither nvshmem nor "
          "collective over NCCL.\nnvshmem: ",
          no_nvshmem, "\ncollective over NCCL: ", no_nccl));
}

Hops chosen_hops(const Config& config, const Topology& topology) {
  if (config.hops != Hops::automatic) return config.hops;
  if (config.transfer == Transfer::gather) return Hops::one;
  if (config.backend == BackendKind::nvshmem) {
    const bool few = std::int64_t{config.max_tokens} * config.hidden <= kOneHopValues;
    return topology.nodes() > 1 && !few ? Hops::two : Hops::one;
  }
  const bool several = topology.nodes() > 1 && topology.ranks() > topology.nodes();
  const bool relays = config.backend == BackendKind::collective && chosen_memory(config) == MemoryKind::host;
  return several && relays ? Hops::two : Hops::one;
}

bool has_relays(const Config& config, const Topology& topology) {
  return topology.nodes() > 1 && chosen_hops(config, topology) == Hops::two;
}

ReductionLevel chosen_level(const Config& config, const Topology& topology) {
  if (config.reduction_level != ReductionLevel::automatic) return config.reduction_level;
  const bool by_node =
      topology.nodes() > 1 && config.input == Input::own && config.transfer == Transfer::routed;
  return by_node ? ReductionLevel::node : ReductionLevel::rank;
}

void check_rank(int rank, int ranks) {
  if (rank < 0 || rank >= ranks) throw UsageError(str("rank = ", rank, ", must be 0 to ", ranks - 1));
}

std::int64_t capacity_of(const Config& config, int ranks, int rank) {
  const Config full = complete_config(config, ranks);
  check_rank(rank, ranks);
  return group_capacity(full, rank);
}

std::int64_t plan_bytes(const Config& config, int ranks) {
  const Config full = complete_config(config, ranks);
  return view_plan(nullptr, plan_shape(inner_config(full))).bytes;
}

// Compares the configurations of all ranks field by field, so that an error can name the field.

namespace {

constexpr std::string_view kRefused = "refused\t";

std::string describe_placement(const Placement& placement) {
  std::string text = str("version ", placement.version(), "/tp", placement.tp(), ":");
  for (int expert = 0; expert < placement.experts(); ++expert) {
    const char* before = " ";
    for (const ExpertLocation& location : placement.replicas_of(expert))
      text += str(std::exchange(before, "+"), location.rank, ".", location.local);
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

constexpr std::uint64_t kMostTextBytes = 32ull * kMostExperts + (1 << 20);  // a placement, and all else

// Collective. The texts of all ranks, in rank order.
std::vector<std::string> gather_texts(const Rank& rank, const std::string& mine) {
  const auto ranks = static_cast<std::size_t>(rank.size());
  const std::uint64_t length = mine.size();
  std::vector<std::uint64_t> lengths(ranks);
  rank.all_gather(&length, lengths.data(), sizeof length);
  for (std::size_t r = 0; r < ranks; ++r) {
    const bool is_mine = static_cast<int>(r) == rank.index();
    if (lengths[r] > kMostTextBytes || (is_mine && lengths[r] != length))
      throw SystemError(str("the length of rank ", r, "'s configuration, ", counted(lengths[r], "byte"),
                            " of text, is damaged: at most ", kMostTextBytes, " are possible"),
                        EIO);
  }
  const std::size_t longest = std::max<std::size_t>(1, *std::max_element(lengths.begin(), lengths.end()));
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

// Collective: every rank says which backends it could use.
void choose_device_backend(const Rank& rank, Config& config) {
  const DeviceBackendFaults mine = device_backend_faults(config);
  const std::vector<std::string> nvshmem = gather_texts(rank, mine.nvshmem),
                                 nccl = gather_texts(rank, mine.nccl);
  std::vector<DeviceBackendFaults> by_rank;
  for (std::size_t r = 0; r < nvshmem.size(); ++r) by_rank.push_back({nvshmem[r], nccl[r]});
  choose_device_backend(config, by_rank);
  resolve_by_hosts(config, rank.topology(), rank.state().one_host());
}

}  // namespace

Config agree_on_config(const Rank& rank, const Config& given) {
  Config config;
  bool resolved = false;
  std::exception_ptr refusal;
  std::string mine;
  try {
    config = complete_config(given, rank.size());
    resolved = resolve_by_hosts(config, rank.topology(), rank.state().one_host());
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
  if (!resolved) choose_device_backend(rank, config);
  return config;
}

void refuse_configuration(const Rank& rank, const Error& error) {
  gather_texts(rank, str(kRefused, error.what()));
}

}  // namespace ferry
