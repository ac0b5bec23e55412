#include "ferry/group.hpp"

#include "capi/boundary.hpp"
#include "capi/convert.hpp"

namespace ferry::capi {
namespace {

// Returns a handle, which the caller owns, to the group that `construct` returns.
template <class Construct>
ferry_status make_group(ferry_group** group, const Construct& construct) {
  return guarded([&] {
    required(group, "group");
    *group = new ferry_group{construct()};
  });
}

Bootstrap to_bootstrap(const ferry_bootstrap* given) {
  const ferry_bootstrap c = read_sized(given, "ferry_bootstrap");
  Bootstrap bootstrap{.rank = c.rank, .ranks = c.ranks, .all_gather = {}, .barrier = {}};
  if (c.all_gather != nullptr) {
    bootstrap.all_gather = [c](const void* mine, void* all, std::size_t bytes) {
      raise(c.all_gather(mine, all, bytes, c.user), "ferry_bootstrap.all_gather");
    };
  }
  if (c.barrier != nullptr) {
    bootstrap.barrier = [c] { raise(c.barrier(c.user), "ferry_bootstrap.barrier"); };
  }
  if (c.host_id != nullptr) bootstrap.host_id = c.host_id;
  return bootstrap;
}

EngineFunctions to_engine(const ferry_engine_functions* given) {
  if (given == nullptr) return {};
  const ferry_engine_functions c = read_sized(given, "ferry_engine_functions");
  if (c.all_to_all_v == nullptr) throw UsageError("ferry_engine_functions.all_to_all_v is NULL");
  EngineFunctions engine;
  engine.all_to_all_v = [c](int lane, const void* send, const std::int64_t* send_bytes,
                            const std::int64_t* send_offsets, void* receive,
                            const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) {
    raise(
        c.all_to_all_v(lane, send, send_bytes, send_offsets, receive, receive_bytes, receive_offsets, c.user),
        "ferry_engine_functions.all_to_all_v");
  };
  if (c.abort != nullptr) engine.abort = [c] { c.abort(c.user); };
  engine.ordered_lanes = c.unordered_lanes == 0;
  engine.device_memory = c.device_memory != 0;
  return engine;
}

// The number that `query` returns for the handle; -1 for NULL.
template <class Handle, class Query>
int query_number(const Handle* handle, const Query& query) {
  int number = -1;
  guarded([&] { number = query(required(handle, "handle")); });
  return number;
}

}  // namespace

extern "C" {

ferry_status ferry_group_threads(const int32_t* node_of_rank, int ranks, ferry_group** group) {
  return make_group(group, [&] {
    return node_of_rank == nullptr ? Group::threads(ranks) : Group::threads(to_topology(node_of_rank, ranks));
  });
}

ferry_status ferry_group_processes(const int32_t* node_of_rank, int ranks, ferry_group** group) {
  return make_group(group, [&] {
    return node_of_rank == nullptr ? Group::processes(ranks)
                                   : Group::processes(to_topology(node_of_rank, ranks));
  });
}

ferry_status ferry_group_mpi(ferry_group** group) {
  return make_group(group, [] { return Group::mpi(); });
}

ferry_status ferry_group_launched(ferry_group** group) {
  return make_group(group, [] { return Group::launched(); });
}

ferry_status ferry_group_custom(const ferry_bootstrap* bootstrap, const ferry_engine_functions* engine,
                                ferry_group** group) {
  return make_group(group, [&] { return Group::custom(to_bootstrap(bootstrap), to_engine(engine)); });
}

void ferry_group_destroy(ferry_group* group) {
  delete group;
}

int ferry_group_size(const ferry_group* group) {
  return query_number(group, [](const ferry_group& handle) { return handle.group.size(); });
}

ferry_status ferry_group_set_deadline(ferry_group* group, double seconds) {
  return guarded([&] { required(group, "group").group.set_deadline(seconds); });
}

ferry_status ferry_group_run(ferry_group* group, ferry_body body, void* user) {
  return guarded([&] {
    required(group, "group");
    if (body == nullptr) throw UsageError("body is NULL");
    group->group.run([&](Rank rank) {
      ferry_rank handle{std::move(rank)};
      raise(body(&handle, user), "the rank's body");
    });
  });
}

ferry_status ferry_group_join(ferry_group* group, ferry_rank** rank) {
  return guarded([&] {
    required(group, "group");
    required(rank, "rank");
    *rank = new ferry_rank{group->group.join()};
  });
}

void ferry_rank_leave(ferry_rank* rank) {
  delete rank;
}

int ferry_rank_index(const ferry_rank* rank) {
  return query_number(rank, [](const ferry_rank& handle) { return handle.rank.index(); });
}

int ferry_rank_size(const ferry_rank* rank) {
  return query_number(rank, [](const ferry_rank& handle) { return handle.rank.size(); });
}

ferry_status ferry_rank_topology(const ferry_rank* given, ferry_topology* topology, int32_t* node_of) {
  return guarded([&] {
    const Rank& rank = required(given, "rank").rank;
    ferry_topology c{};
    c.same_process = rank.same_process();
    c.nodes = rank.topology().nodes();
    write_sized(topology, c, "ferry_topology");
    for (int peer = 0; node_of != nullptr && peer < rank.size(); ++peer)
      node_of[peer] = rank.topology().node_of(peer);
  });
}

ferry_status ferry_rank_all_gather(const ferry_rank* rank, const void* mine, void* all, size_t bytes) {
  return guarded([&] {
    required(rank, "rank");
    if (bytes > 0 && (mine == nullptr || all == nullptr))
      throw UsageError("all_gather: mine and all must not be NULL");
    rank->rank.all_gather(mine, all, bytes);
  });
}

ferry_status ferry_rank_barrier(const ferry_rank* rank) {
  return guarded([&] { required(rank, "rank").rank.barrier(); });
}

}  // extern "C"

}  // namespace ferry::capi
