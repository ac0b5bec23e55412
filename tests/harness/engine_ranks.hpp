// Ranks of groups that bring an engine, for the backend `collective`.
#pragma once

#include <functional>

#include "ferry/group.hpp"

namespace ferry::contract {

// Deadline of a group of threads, in seconds: hundreds of them take turns on a few processors.
double meeting_deadline(int ranks);

// Runs `body` as every rank of a group, each in a thread with a group of its own, connected by a
// ThreadEngine. Throws the error that occurred first.
// `device_memory`: the engine takes it too.
void run_engine_threads(int ranks, const std::function<void(Rank)>& body, bool device_memory = false);

// The same on simulated hosts, one for each node.
void run_engine_nodes(const Topology& topology, const std::function<void(Rank)>& body,
                      bool device_memory = false);

// The same on two simulated hosts. Of three ranks and more they differ in size, and their ranks take turns.
void run_engine_hosts(int ranks, const std::function<void(Rank)>& body);

// In a process that mpirun has started: runs `body` as this process's rank. Does nothing if mpirun has not
// started `ranks` processes, or if they have other nodes. `nodes` [ranks]: the node of each; empty: any.
// Every process must call it, in the same order.
void run_mpi_process(int ranks, const std::vector<int>& nodes, const std::function<void(Rank)>& body);

// The same in a group that this process joins at the first call and stays in, so that engines may stay
// connected between bodies. The caller destroys its exchanges before leave_mpi_group().
void run_mpi_member(int ranks, const std::vector<int>& nodes, const std::function<void(Rank)>& body);
void leave_mpi_group();

// Whether run_mpi_process() has run a body since the last call.
bool take_mpi_process_ran();

}  // namespace ferry::contract
