// The whole C++ interface in one include.
//
//   group.hpp            the ranks: threads, processes, MPI, or a bootstrap of the caller's
//   topology.hpp         which ranks share memory
//   engine.hpp           the caller's own transport between ranks
//   config.hpp           the configuration of an exchange, and the memory it takes
//   exchange.hpp         dispatch, combine and their gradients: start here
//   calls.hpp            arguments, options and results of the operations
//   dispatch_layout.hpp  which tokens go to which rank, from a rank's own ids
//   plan.hpp             the routes of a dispatch as a value that can be kept and reused
//   format.hpp           the encoding in which rows are transferred, such as bf16 or fp8
//   encoder.hpp          formats of the caller's own
//   placement.hpp        which rank holds which expert
//   balance.hpp          placements with replicas, for the same load on every rank
//   error.hpp            the exceptions and the numbers they carry
//   program.hpp          a layer as a value: steps over named values
//   evaluator.hpp        runs programs
//   max.hpp              dispatch and combine in the call shapes of MAX
//   nvfuser.hpp          dispatch and combine in the call shapes of nvFuser
//   trace.hpp            recorded and synthetic routing
//   types.hpp            enumerations, and the symbols N, K, T, E, R, L, H, G in which shapes are written
//   version.hpp          the version of the library
//
// Not included:
//
//   format_library.hpp   lets a shared library register its encoders with the program that loads it
//
// and cuda/*.cuh, for .cu files.
#pragma once

#if __cplusplus < 202002L
#error "Ferry's C++ headers need C++20: compile with -std=c++20"
#endif

#include "ferry/balance.hpp"
#include "ferry/calls.hpp"
#include "ferry/config.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/encoder.hpp"
#include "ferry/engine.hpp"
#include "ferry/error.hpp"
#include "ferry/evaluator.hpp"
#include "ferry/exchange.hpp"
#include "ferry/format.hpp"
#include "ferry/group.hpp"
#include "ferry/max.hpp"
#include "ferry/nvfuser.hpp"
#include "ferry/placement.hpp"
#include "ferry/plan.hpp"
#include "ferry/program.hpp"
#include "ferry/topology.hpp"
#include "ferry/trace.hpp"
#include "ferry/types.hpp"
#include "ferry/version.hpp"
