// The configuration of an exchange (sizes of the layer, layout of received rows, formats, backend), and
// functions that compute the memory it takes.
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
#define FERRY_MAX_SHARED_EXPERTS 16

/// Value types.
enum { FERRY_BF16 = 0, FERRY_FP16 = 1, FERRY_FP32 = 2 };

/// Types of expert ids.
enum { FERRY_INT32 = 0, FERRY_INT64 = 1 };

/// See ferry::BackendKind, also for how FERRY_BACKEND_AUTOMATIC chooses. FERRY_REFERENCE is reserved: a call
/// that asks for it returns FERRY_USAGE.
enum {
  FERRY_BACKEND_AUTOMATIC = 0,
  FERRY_REFERENCE = 1,
  FERRY_CPU = 2,
  FERRY_CUDA = 3,
  FERRY_COLLECTIVE = 4,
  FERRY_NVSHMEM = 5
};

/// The engine of FERRY_COLLECTIVE: NCCL, or the one that the group must have brought. See ferry::EngineKind.
enum { FERRY_ENGINE_AUTOMATIC = 0, FERRY_ENGINE_MPI = 1, FERRY_ENGINE_CUSTOM = 2, FERRY_ENGINE_NCCL = 3 };

/// Where an exchange takes and leaves its arrays: see ferry::MemoryKind.
enum { FERRY_MEMORY_AUTOMATIC = 0, FERRY_HOST_MEMORY = 1, FERRY_DEVICE_MEMORY = 2 };

/// How messages reach ranks of other nodes: see ferry::Hops.
enum { FERRY_HOPS_AUTOMATIC = 0, FERRY_ONE_HOP = 1, FERRY_TWO_HOPS = 2 };

/// Whose tokens the ranks pass to dispatch: see ferry::Input.
enum { FERRY_INPUT_OWN = 0, FERRY_INPUT_REPLICATED = 1 };

/// See ferry::Transfer.
enum { FERRY_TRANSFER_ROUTED = 0, FERRY_TRANSFER_GATHER = 1 };

/// How dispatch arranges the rows that a rank receives: see ferry::Layout.
enum { FERRY_EXPERT_MAJOR = 0, FERRY_EXPERT_PADDED = 1, FERRY_RANK_MAJOR = 2, FERRY_EXPERT_INDEXED = 3 };

/// How combine adds the rows of a token: see ferry::Reduction.
enum { FERRY_REDUCTION_DEFAULT = 0, FERRY_PARTIAL = 1, FERRY_EXACT = 2, FERRY_UNREDUCED = 3 };

/// In which steps FERRY_PARTIAL adds the sums of the ranks: see ferry::ReductionLevel.
enum { FERRY_LEVEL_AUTOMATIC = 0, FERRY_LEVEL_RANK = 1, FERRY_LEVEL_NODE = 2 };

/// The encoding in which a token's row is transferred and received.
enum {
  FERRY_FORMAT_DEFAULT = 0,
  FERRY_FORMAT_BF16 = 1,
  FERRY_FORMAT_FP16 = 2,
  FERRY_FORMAT_FP32 = 3,
  FERRY_FORMAT_FP8_E4M3 = 4,  ///< quantised by dispatch, with one fp32 scale for each block of 128 columns
  FERRY_FORMAT_RAW = 5,       ///< one to FERRY_MAX_PARTS parts that Ferry moves without looking at them
  FERRY_FORMAT_MXFP8 =
      6,  ///< quantised by dispatch to e4m3, with one 8-bit exponent for each block of 32 columns
  FERRY_FORMAT_MXFP4 = 7,  ///< the same to e2m1, two values to a byte, the even column in the low four bits
  FERRY_FORMAT_NVFP4 = 8,  ///< to e2m1, with an e4m3 scale for each block of 16 columns: ferry::Nvfp4Options
  FERRY_FORMAT_REGISTERED = 9  ///< of an encoder of the caller's: see ferry_register_format()
};

/// How the scales of a format that quantises are computed and stored: flags.
enum {
  FERRY_SCALE_COLUMNS = 1,     ///< scales in columns instead of rows: ferry::Fp8Options::column_major
  FERRY_FP8_POWER_OF_TWO = 2,  ///< fp8: scale = 2^ceil(log2(s / 448)) instead of s / 448
  FERRY_FP8_PACKED = 4,        ///< fp8: biased exponents, four to an int32; needs FERRY_FP8_POWER_OF_TWO
  FERRY_MX_UP = 8,             ///< MX: the rule ferry::MxRule::up, default of FERRY_FORMAT_MXFP8
  FERRY_MX_OCP = 16,           ///< MX: the rule ferry::MxRule::ocp, default of FERRY_FORMAT_MXFP4
  FERRY_NVFP4_PER_TOKEN = 32,  ///< NVFP4: a further fp32 scale for each token, as a third part
  FERRY_SCALE_TILES = 64       ///< MX, NVFP4: scales are in tiles of 128 rows x 4 blocks, see ferry::Format
};

typedef struct ferry_format {
  int32_t kind;    ///< FERRY_FORMAT_...
  uint32_t flags;  ///< of the scales; registered: the format's number in this process; otherwise 0
  int64_t part_bytes[FERRY_MAX_PARTS];  ///< raw only: bytes a row of each part, multiples of 16; 0: no part
  int64_t reserved[2];                  ///< 0, see ferry/ferry.h
} ferry_format;

/// Reads the name of a format, such as "bf16", "fp8-pow2" or "raw:1024+64": see ferry::parse_format().
ferry_status ferry_parse_format(const char* name, ferry_format* format);
/// Writes the name of a format to `name`, of `bytes` bytes, with a zero at its end. FERRY_USAGE: there is no
/// room.
ferry_status ferry_format_name(const ferry_format* format, char* name, size_t bytes);

/// The configuration of an exchange. It must be the same on every rank: ferry_exchange_create compares the
/// configurations and names the first field that differs.
typedef struct ferry_config {
  size_t size;
  int32_t experts;     ///< E
  int32_t top_k;       ///< K, 1 to FERRY_MAX_TOP_K
  int32_t hidden;      ///< H
  int32_t max_tokens;  ///< T: most tokens of a rank in a call

  int32_t backend;  ///< default: FERRY_BACKEND_AUTOMATIC; ferry_exchange_config() tells which was chosen
  int32_t layout;   ///< default: FERRY_EXPERT_MAJOR
  /// Placement: expert e is local expert expert_local[e] of rank expert_rank[e]. Both [E], read during the
  /// call. The local numbers of a rank are 0, 1, 2, ... without gaps. Both NULL: see
  /// ferry_placement_blocks(), or held_experts.
  const int32_t* expert_rank;
  const int32_t* expert_local;
  uint64_t placement_version;  ///< the caller's own number; plans report it

  /// Rows that a rank can receive (expert_padded: each expert), padding included, a multiple of `alignment`.
  /// 0: enough for any routing in which no token lists an expert more than once; with `repeats`, for any
  /// routing.
  int64_t capacity;
  int32_t alignment;     ///< see ferry::Config::alignment; 0: 1
  int32_t repeats;       ///< 1: the default capacity has room for tokens that list an expert more than once
  int32_t zero_padding;  ///< 1: padding rows are zeroed instead of left untouched
  int32_t combine_type;  ///< value type of the rows that combine transfers
  ferry_format format;   ///< default of each dispatch; no dispatch may have larger messages; default: bf16
  int32_t reduction;     ///< default of each combine; FERRY_PARTIAL allows no other, rank_major only this
  int32_t lanes;         ///< independent sequences of calls, 1 to 64; 0: 1
  double deadline;       ///< longest wait for a peer, in seconds; 0: 30
  /// 1: the exchange owns no memory for the rows it receives, and every dispatch passes
  /// ferry_receive_buffers.
  int32_t external_receive_buffers;
  /// 1: calls of host backends do not end with ferry_check(), which the caller calls instead.
  int32_t manual_check;
  int32_t engine;           ///< FERRY_ENGINE_...; default: FERRY_ENGINE_AUTOMATIC
  int32_t reduction_level;  ///< see ferry::Config::reduction_level; default: FERRY_LEVEL_AUTOMATIC
  int32_t hops;             ///< default: FERRY_HOPS_AUTOMATIC; ferry_exchange_config() tells which was chosen
  int32_t window;           ///< see ferry::Config::window; default 0
  int32_t memory;           ///< default: FERRY_MEMORY_AUTOMATIC
  int32_t shared_experts;   ///< S, 0 to FERRY_MAX_SHARED_EXPERTS: see ferry::Config::shared_experts
  int32_t input;            ///< default: FERRY_INPUT_OWN
  int32_t shared_split;     ///< see ferry::Config::shared_split; default 0
  int32_t transfer;         ///< default: FERRY_TRANSFER_ROUTED
  /// tp: each expert is in so many slices, on R = ep * tp ranks, as ferry::Placement::ep_tp() places them;
  /// both arrays of the placement are NULL, or hold what that function gives. 0: 1.
  int32_t expert_slices;
  int64_t local_slots;  ///< see ferry::Config::local_slots; default 0
  /// A placement with replicas, in place of expert_rank and expert_local: held_counts [R] says how many
  /// experts each rank holds, and held_experts [their sum] has those of rank 0 in local order, then those of
  /// rank 1, and so on. Both read during the call. Both NULL: no replicas.
  const int32_t* held_experts;
  const int32_t* held_counts;
  int64_t layers;       ///< see ferry::Config::layers; 0: 1
  int64_t count_waits;  ///< 1: ferry_exchange_counts() has the waits for every peer; host memory. Default 0
} ferry_config;

/// Bytes that an exchange takes on one rank, by purpose, and its sizes that callers need.
typedef struct ferry_sizes {
  size_t size;
  int64_t dispatch_staging;  ///< symmetric memory
  int64_t combine_staging;   ///< symmetric memory
  int64_t signals;           ///< symmetric memory: flags, counts and refusals
  int64_t results;           ///< received rows and their arrays, all lanes
  int64_t plans;             ///< plans and working memory, all lanes
  int64_t total;
  /// FERRY_COLLECTIVE, and in two hops FERRY_CPU, FERRY_CUDA and FERRY_NVSHMEM: packed messages, all lanes
  int64_t messages;
  int64_t capacity;    ///< rows that the rank can receive (expert_padded: rows of one expert)
  int64_t plan_bytes;  ///< bytes of a plan's storage, the same on every rank
} ferry_sizes;

/// The exact bytes that an exchange of this configuration maps on rank `rank` of `ranks`. Local; it needs no
/// group and allocates nothing. Returns FERRY_USAGE or FERRY_UNSUPPORTED where ferry_exchange_create() would.
/// `node_of_rank` [ranks]: ranks with equal numbers, which may be any, are on one host; sizes differ where
/// messages take two hops. NULL: all are on one. FERRY_BACKEND_AUTOMATIC: as if every rank could load what
/// this process can.
ferry_status ferry_sizes_of(const ferry_config* config, const int32_t* node_of_rank, int ranks, int rank,
                            ferry_sizes* sizes);

/// Writes the default placement to two arrays [E]: consecutive experts on each rank. The first E % R ranks
/// hold one expert more than the others.
ferry_status ferry_placement_blocks(int experts, int ranks, int32_t* expert_rank, int32_t* expert_local);

#ifdef __cplusplus
}
#endif

#endif
