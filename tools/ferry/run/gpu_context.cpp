#include <fmt/core.h>

#include <cuda_runtime_api.h>
#include <library_types.h>
#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "base/shared_library.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/gpu.hpp"
#include "tools/ferry/run/device_context.hpp"
#include "tools/ferry/run/gpu_expert_inputs.hpp"
#include "tools/ferry/run/program_context.hpp"

namespace ferry::app {

namespace {

// ---- matrix products by cuBLAS, which is loaded at run time

// Dense row-major matrices: out [rows, columns] = a [rows, inner] b [inner, columns].
struct MatrixProduct {
  const void* a;
  const void* b;
  void* out;
  std::int64_t rows;
  int inner, columns;
  DType type;      // of a and b
  DType out_type;  // `type` or fp32
};

// cuBLAS's enumerators, unchanged since CUDA 11. Declaring them here avoids its header, so that the program
// builds with the CUDA compiler alone.
constexpr int kNoTranspose = 0;        // CUBLAS_OP_N
constexpr int kComputeFp32 = 68;       // CUBLAS_COMPUTE_32F
constexpr int kDefaultAlgorithm = -1;  // CUBLAS_GEMM_DEFAULT

struct Functions {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, cudaStream_t stream);
  int (*gemm)(void* handle, int operation_a, int operation_b, int m, int n, int k, const void* alpha,
              const void* a, cudaDataType a_type, int a_leading, const void* b, cudaDataType b_type,
              int b_leading, const void* beta, void* c, cudaDataType c_type, int c_leading, int compute,
              int algorithm);
};

// The toolkit's version of cuBLAS, searched by the loader first and then in the toolkit's folder.
SharedLibrary open_cublas() {
  const std::string name = fmt::format("libcublas.so.{}", CUDART_VERSION / 1000);
  if (SharedLibrary library = open_first({name, FERRY_CUDA_LIBRARIES "/" + name})) return library;
  throw UnsupportedError(
      fmt::format("the experts of a run on GPUs need cuBLAS, but {} was found neither by the loader nor in "
                  "{}: install it "
                  "with the CUDA toolkit, or add its folder to LD_LIBRARY_PATH",
                  name, FERRY_CUDA_LIBRARIES));
}

template <class Function>
void find(Function& function, const SharedLibrary& library, const char* name) {
  if (!library.find(function, name)) throw UnsupportedError(fmt::format("cuBLAS has no {}", name));
}

const Functions& functions() {
  static const Functions loaded = [] {
    const SharedLibrary library = open_cublas();
    Functions found{};
    find(found.create, library, "cublasCreate_v2");
    find(found.destroy, library, "cublasDestroy_v2");
    find(found.set_stream, library, "cublasSetStream_v2");
    find(found.gemm, library, "cublasGemmEx");
    return found;
  }();
  return loaded;
}

void require_success(int status, const char* function) {
  if (status != 0)
    throw SystemError(fmt::format("{} of cuBLAS failed with status {}", function, status), EIO);
}

cudaDataType data_type(DType type) {
  if (type == DType::fp32) return CUDA_R_32F;
  return type == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}

class Cublas {
 public:
  // Uses the current GPU; products run on `stream`.
  // @throws UnsupportedError  cuBLAS was not found
  explicit Cublas(cudaStream_t stream) {
    require_success(functions().create(&handle_), "cublasCreate");
    const int status = functions().set_stream(handle_, stream);
    if (status != 0) functions().destroy(handle_);
    require_success(status, "cublasSetStream");
  }

  ~Cublas() { functions().destroy(handle_); }

  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  // Enqueues a product. Sums are fp32, in an order that cuBLAS chooses.
  // cuBLAS is column-major, so it sees the transposed matrices: out^T = b^T a^T.
  void multiply(const MatrixProduct& product) const {
    const float one = 1.0F, zero = 0.0F;
    const cudaDataType type = data_type(product.type);
    require_success(
        functions().gemm(handle_, kNoTranspose, kNoTranspose, product.columns, static_cast<int>(product.rows),
                         product.inner, &one, product.b, type, product.columns, product.a, type,
                         product.inner, &zero, product.out, data_type(product.out_type), product.columns,
                         kComputeFp32, kDefaultAlgorithm),
        "cublasGemmEx");
  }

 private:
  void* handle_ = nullptr;
};

// The experts of one rank on a GPU. SwiGLU's matrix products take operands of RunSpec::type and accumulate in
// fp32. They read received rows in place, with two exceptions: fp8 rows are decoded first, and rank_major
// rows are first gathered by expert.
class GpuExperts {
 public:
  // `rows`: the most rows that can be received. Allocates everything on the current GPU now, because an
  // allocation later could wait for kernels of other ranks, which wait for this one.
  GpuExperts(const RunSpec& spec, int rank, std::int64_t rows, const cuda::CudaStream& stream)
      : spec_(spec),
        experts_(experts_on(spec, rank)),
        rank_major_(spec.config.layout == Layout::rank_major),
        stream_(stream),
        cublas_(stream.get()),
        weights_(spec, experts_),
        outputs_(rows * spec.row_bytes()) {
    const std::int64_t slots = rank_major_ ? rows * spec.config.top_k : 0;
    const std::int64_t routes = rank_major_ ? slots : rows;
    const bool in_place = !rank_major_ && !spec.config.format.quantises();
    inputs_ = GpuBuffer(in_place ? 0 : routes * spec.row_bytes());
    gate_ = GpuBuffer(routes * spec.options.inner * 4);
    up_ = GpuBuffer(gate_.bytes());
    activated_ = GpuBuffer(routes * spec.options.inner * bytes_of(spec.type));
    expert_rows_ = GpuBuffer(slots * spec.row_bytes());
    row_of_route_ = GpuBuffer(slots * 4);
    route_of_slot_ = GpuBuffer(slots * 4);
  }

  // Enqueue on the stream and return. The dispatch has completed.
  void scale(const DispatchResult& received) {
    const GpuRows rows = gpu_rows_of(spec_, received);
    if (rank_major_) {
      return scale_and_sum_slots(rows, slots_of(received), weights_.factors.as<float>(), received.host->total,
                                 outputs_.as(), stream_.get());
    }
    scale_groups(rows, {received.counts, received.row_offsets, received.groups}, weights_.factors.as<float>(),
                 outputs_.as(), stream_.get());
  }

  void swiglu(const DispatchResult& received) {
    const GpuRows rows = gpu_rows_of(spec_, received);
    const std::vector<RowRange> ranges = rank_major_ ? gather_by_expert(received) : row_ranges(received);
    if (!rank_major_ && rows.encoding.quantises())
      gather_values(rows, nullptr, received.host->total, inputs_.as(), stream_.get());
    const bool in_place = inputs_.bytes() == 0;
    const auto* x = in_place ? static_cast<const std::byte*>(received.data) : inputs_.as();
    const GpuBuffer& out = rank_major_ ? expert_rows_ : outputs_;
    for (std::size_t local = 0; local < ranges.size(); ++local) {
      const auto [first, count] = ranges[local];
      if (count > 0)
        apply_swiglu(static_cast<int>(local), x + first * spec_.row_bytes(), count, row(out, first));
    }
    if (!rank_major_) return;
    sum_slots(rows, slots_of(received), expert_rows_.as(), route_of_slot_.as<std::int32_t>(),
              received.host->total, outputs_.as(), stream_.get());
  }

  Outputs outputs() const { return {.data = outputs_.as(), .type = spec_.type}; }

 private:
  // The contiguous rows of one expert.
  struct RowRange {
    std::int64_t first, count;
  };

  GpuSlots slots_of(const DispatchResult& received) const {
    return {.local_ids = received.local_ids, .weights = received.weight, .top_k = spec_.config.top_k};
  }

  std::vector<RowRange> row_ranges(const DispatchResult& received) const {
    std::vector<std::int32_t> counts(experts_.size()), offsets(experts_.size());
    const auto bytes = static_cast<std::int64_t>(experts_.size()) * 4;
    copy_to_host(counts.data(), received.counts, bytes);
    copy_to_host(offsets.data(), received.row_offsets, bytes);
    std::vector<RowRange> ranges;
    for (std::size_t local = 0; local < counts.size(); ++local)
      ranges.push_back({offsets[local], counts[local]});
    return ranges;
  }

  // Copies the rows of each local expert side by side into inputs_, and records each slot's position there in
  // route_of_slot_.
  std::vector<RowRange> gather_by_expert(const DispatchResult& received) {
    const std::int64_t top_k = spec_.config.top_k, slots = received.host->total * top_k;
    std::vector<std::int32_t> locals(static_cast<std::size_t>(slots)), row_of_route,
        route_of_slot(locals.size(), -1);
    copy_to_host(locals.data(), received.local_ids, slots * 4);
    std::vector<RowRange> ranges;
    for (std::int32_t local = 0; local < static_cast<std::int32_t>(experts_.size()); ++local) {
      const auto first = static_cast<std::int64_t>(row_of_route.size());
      for (std::int64_t slot = 0; slot < slots; ++slot) {
        if (locals[static_cast<std::size_t>(slot)] != local) continue;
        route_of_slot[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(row_of_route.size());
        row_of_route.push_back(static_cast<std::int32_t>(slot / top_k));
      }
      ranges.push_back({first, static_cast<std::int64_t>(row_of_route.size()) - first});
    }
    const auto routes = static_cast<std::int64_t>(row_of_route.size());
    row_of_route_.fill_from(row_of_route.data(), routes * 4);
    route_of_slot_.fill_from(route_of_slot.data(), slots * 4);
    gather_values(gpu_rows_of(spec_, received), row_of_route_.as<std::int32_t>(), routes, inputs_.as(),
                  stream_.get());
    return ranges;
  }

  // out = down(silu(x gate) * (x up))
  void apply_swiglu(int local, const void* x, std::int64_t rows, void* out) const {
    const int hidden = spec_.config.hidden, inner = spec_.options.inner;
    const std::int64_t matrix = std::int64_t{hidden} * inner * bytes_of(spec_.type);
    const std::byte* gate = weights_.matrices.as() + 3 * local * matrix;
    const MatrixProduct gate_product{.a = x,
                                     .b = gate,
                                     .out = gate_.as(),
                                     .rows = rows,
                                     .inner = hidden,
                                     .columns = inner,
                                     .type = spec_.type,
                                     .out_type = DType::fp32};
    MatrixProduct up_product = gate_product;
    up_product.b = gate + matrix;
    up_product.out = up_.as();
    cublas_.multiply(gate_product);
    cublas_.multiply(up_product);
    silu_times(gate_.as<float>(), up_.as<float>(), rows * inner, spec_.type, activated_.as(), stream_.get());
    cublas_.multiply({.a = activated_.as(),
                      .b = gate + 2 * matrix,
                      .out = out,
                      .rows = rows,
                      .inner = inner,
                      .columns = hidden,
                      .type = spec_.type,
                      .out_type = spec_.type});
  }

  std::byte* row(const GpuBuffer& rows, std::int64_t index) const {
    return rows.as() + index * spec_.row_bytes();
  }

  const RunSpec& spec_;
  const std::vector<int> experts_;  // of each group, and rank_major: global ids in local order
  bool rank_major_;
  const cuda::CudaStream& stream_;
  Cublas cublas_;
  GpuExpertWeights weights_;
  GpuBuffer outputs_;                // [rows, hidden] of RunSpec::type
  GpuBuffer inputs_;                 // [routes, hidden] of RunSpec::type; empty if rows are read in place
  GpuBuffer gate_, up_, activated_;  // [routes, inner]; `activated_` of RunSpec::type
  // rank_major only:
  GpuBuffer expert_rows_;    // [routes, hidden] of RunSpec::type, the experts' outputs
  GpuBuffer row_of_route_;   // [routes]
  GpuBuffer route_of_slot_;  // [rows, top_k], -1 for a slot without a local expert
};

class GpuContext final : public DeviceContext {
 public:
  GpuContext(const Rank& rank, const RunSpec& spec)
      : DeviceContext(rank, spec),
        stream_(rank),
        experts_(spec, rank.index(), received_row_capacity(exchange_), stream_),
        tokens_(spec.tokens() * spec.row_bytes()),
        ids_(spec.tokens() * spec.config.top_k * 4),
        weights_(ids_.bytes()),
        result_(spec.result_bytes()),
        result_copy_(static_cast<std::size_t>(spec.result_bytes())) {
    if (spec.options.global_scale) global_scale_ = GpuBuffer::of(spec.global_scale());
  }

  void set_inputs(const ContextInputs& inputs) override {
    tokens_.fill_from(inputs.tokens.data(), tokens_.bytes());
    ids_.fill_from(inputs.routes.ids.data(), ids_.bytes());
    weights_.fill_from(inputs.routes.weights.data(), weights_.bytes());
    result_.fill(0xFF, stream_);
    stream_.synchronize();
  }

  void dispatch() override {
    received_ = exchange_.dispatch(Tokens::rows(tokens_.as(), spec_.tokens(), spec_.type),
                                   ids_.as<std::int32_t>(), weights_.as<float>(),
                                   {.call = {.stream = stream_}, .global_scale = global_scale_.as<float>()});
    exchange_.synchronize({.stream = stream_});
  }

  void run_scaling_experts() override {
    experts_.scale(received_);
    stream_.synchronize();
  }

  void run_swiglu_experts() override {
    experts_.swiglu(received_);
    stream_.synchronize();
  }

  void combine() override {
    CombineOptions options = combine_options(received_);
    options.call.stream = stream_;
    exchange_.combine(experts_.outputs(), received_.plan, {.data = result_.as(), .type = spec_.type},
                      options);
    exchange_.synchronize({.stream = stream_});
  }

  const DispatchResult& received() override {
    exchange_.check();
    received_copy_ = result_on_host_.copy(received_, spec_.config);
    return received_copy_;
  }

  std::span<const std::byte> result() override {
    exchange_.check();
    copy_to_host(result_copy_.data(), result_.as(), result_.bytes());
    return result_copy_;
  }

 private:
  RankStream stream_;
  GpuExperts experts_;
  GpuBuffer tokens_, ids_, weights_;
  GpuBuffer global_scale_;  // empty: g is 1
  GpuBuffer result_;
  DispatchResult received_, received_copy_;
  ResultOnHost result_on_host_;
  std::vector<std::byte> result_copy_;
};

}  // namespace

void choose_gpu(const Rank& rank) {
  // Simulated hosts share this machine's GPUs.
  const Topology& topology = rank.topology();
  use_gpu_of_rank(topology.simulated() ? rank.index() : topology.local_rank_of(rank.index()));
}

std::unique_ptr<DeviceContext> make_gpu_context(const Rank& rank, const RunSpec& spec) {
  choose_gpu(rank);
  return std::make_unique<GpuContext>(rank, spec);
}

}  // namespace ferry::app
