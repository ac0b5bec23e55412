#include "ferry/config.hpp"

#include "capi/boundary.hpp"
#include "capi/convert.hpp"

namespace ferry::capi {
namespace {

Config read_config(const ferry_config* config, int ranks) {
  return to_config(read_sized(config, "ferry_config"), ranks);
}

}  // namespace

extern "C" {

ferry_status ferry_sizes_of(const ferry_config* config, int ranks, int rank, ferry_sizes* sizes) {
  return guarded(
      [&] { write_sized(sizes, to_c(size_of(read_config(config, ranks), ranks, rank)), "ferry_sizes"); });
}

ferry_status ferry_sizes_on_nodes(const ferry_config* config, const int32_t* node_of_rank, int ranks,
                                  int rank, ferry_sizes* sizes) {
  return guarded([&] {
    const Topology topology = to_topology(node_of_rank, ranks);
    write_sized(sizes, to_c(size_of(read_config(config, ranks), topology, rank)), "ferry_sizes");
  });
}

ferry_status ferry_capacity_of(const ferry_config* config, int ranks, int rank, int64_t* rows) {
  return guarded([&] { required(rows, "rows") = capacity_of(read_config(config, ranks), ranks, rank); });
}

ferry_status ferry_plan_bytes(const ferry_config* config, int ranks, int64_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = plan_bytes(read_config(config, ranks), ranks); });
}

ferry_status ferry_parse_format(const char* name, ferry_format* format) {
  return guarded([&] { required(format, "format") = to_c(parse_format(&required(name, "name"))); });
}

ferry_status ferry_format_name(const ferry_format* format, char* name, size_t bytes) {
  return guarded([&] {
    const std::string text = to_string(to_format(required(format, "format")).value_or(Config().format));
    if (name == nullptr || bytes <= text.size())
      throw UsageError(str("name: ", counted(text.size() + 1, "byte"), " are needed for '", text, "', got ",
                           name == nullptr ? 0 : bytes));
    text.copy(name, text.size());
    name[text.size()] = '\0';
  });
}

ferry_status ferry_placement_blocks(int experts, int ranks, int32_t* expert_rank, int32_t* expert_local) {
  return guarded([&] {
    required(expert_rank, "expert_rank");
    required(expert_local, "expert_local");
    const Placement placement = Placement::blocks(experts, ranks);
    for (int e = 0; e < experts; ++e) {
      expert_rank[e] = placement.location(e).rank;
      expert_local[e] = placement.location(e).local;
    }
  });
}

}  // extern "C"

}  // namespace ferry::capi
