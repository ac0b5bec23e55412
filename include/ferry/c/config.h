// The configuration of an exchange, and how much memory it takes.
#ifndef FERRY_C_CONFIG_H
#define FERRY_C_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FERRY_MAX_PARTS 4
#define FERRY_MAX_TOP_K 32

// Value types.
enum { FERRY_BF16 = 0, FERRY_FP16 = 1, FERRY_FP32 = 2 };

// Id types.
enum { FERRY_INT32 = 0, FERRY_INT64 = 1 };

enum { FERRY_BACKEND_DEFAULT = 0, FERRY_REFERENCE = 1, FERRY_CPU = 2, FERRY_CUDA = 3 };

// How received rows are arranged: see ferry::Layout.
enum { FERRY_EXPERT_MAJOR = 0, FERRY_EXPERT_PADDED = 1, FERRY_RANK_MAJOR = 2 };

// How combine adds the rows of a token: see ferry::Reduction.
enum { FERRY_REDUCTION_DEFAULT = 0, FERRY_PARTIAL = 1, FERRY_EXACT = 2, FERRY_UNREDUCED = 3 };

// How a token's values travel and arrive.
enum {
  FERRY_FORMAT_DEFAULT = 0,
  FERRY_FORMAT_BF16 = 1,
  FERRY_FORMAT_FP16 = 2,
  FERRY_FORMAT_FP32 = 3,
  FERRY_FORMAT_FP8_E4M3 = 4,  // quantised while dispatching, with fp32 scales of 1 x 128 blocks
  FERRY_FORMAT_RAW = 5        // parts that are moved as they are
};

// Flags of the scales of fp8_e4m3.
enum {
  FERRY_FP8_COLUMNS = 1,       // they arrive as [blocks, leading dimension] instead of [rows, blocks]
  FERRY_FP8_POWER_OF_TWO = 2,  // scale = 2^ceil(log2(s / 448))
  FERRY_FP8_PACKED = 4         // those as biased exponents, four to an int32
};

typedef struct ferry_format {
  int32_t kind;                         // FERRY_FORMAT_...
  uint32_t flags;                       // FERRY_FP8_...
  int64_t part_bytes[FERRY_MAX_PARTS];  // raw: bytes of each part of a row, multiples of 16; 0: no part
} ferry_format;

// The same on every rank: ferry_exchange_create compares it and names the first difference.
typedef struct ferry_config {
  size_t size;
  int32_t experts;     // E
  int32_t top_k;       // K, 1 to 32
  int32_t hidden;      // H, columns of a token
  int32_t max_tokens;  // T, most tokens a rank may have in a call

  int32_t backend;  // default: FERRY_CPU
  int32_t layout;   // default: FERRY_EXPERT_MAJOR
  // Placement: expert e is number expert_local[e] on rank expert_rank[e]. Both [experts], read during the
  // call. The local numbers of a rank are 0, 1, 2, ... Both NULL: blocks of neighbouring experts, see
  // ferry_placement_blocks.
  const int32_t* expert_rank;
  const int32_t* expert_local;
  uint64_t placement_version;

  int64_t capacity;      // rows a rank can receive (expert_padded: rows an expert); 0: any routing fits
  int32_t alignment;     // expert_major: experts start at multiples of it; 0: 1
  int32_t repeats;       // 1: the default capacity also holds tokens that list an expert more than once
  int32_t zero_padding;  // 1: padding rows become zero instead of being left alone
  int32_t combine_type;  // value type of the experts' rows that combine carries
  ferry_format format;   // the largest message, and the format of calls that name none; default: bf16
  int32_t reduction;     // the largest combine; default: FERRY_PARTIAL
  int32_t lanes;         // 0: 1
  double deadline;       // seconds a wait may last; 0: 30
  int32_t bring_memory;  // 1: the exchange owns no memory for arrivals, every dispatch brings it
  int32_t check_apart;   // 1: calls of host backends do not end with ferry_check, the caller calls it
} ferry_config;

typedef struct ferry_sizes {  // bytes of one rank's exchange, by what they are for
  size_t size;
  int64_t dispatch_staging;  // symmetric
  int64_t combine_staging;   // symmetric
  int64_t signals;           // symmetric: flags, counts, refusals
  int64_t results;           // owned outputs of all lanes
  int64_t plans;             // lanes' plans and working memory
  int64_t total;
} ferry_sizes;

// What an exchange of this configuration on one of `ranks` ranks would map, exactly; the rows it can receive
// (expert_padded: of one expert); the bytes of a plan, the same on every rank. They need no group and map
// nothing. FERRY_USAGE or FERRY_UNSUPPORTED for what ferry_exchange_create would refuse.
ferry_status ferry_sizes_of(const ferry_config* config, int ranks, int rank, ferry_sizes* sizes);
ferry_status ferry_capacity_of(const ferry_config* config, int ranks, int rank, int64_t* rows);
ferry_status ferry_plan_bytes(const ferry_config* config, int ranks, int64_t* bytes);

// The default placement, written to [experts] each: blocks of neighbouring experts, in which the first
// experts % ranks ranks hold one more than the others.
ferry_status ferry_placement_blocks(int experts, int ranks, int32_t* expert_rank, int32_t* expert_local);

#ifdef __cplusplus
}
#endif

#endif
