// Replaces the GPU parts of the program in builds without CUDA: every function throws UnsupportedError.
#include "exchange/backend.hpp"
#include "ferry/error.hpp"
#include "tools/ferry/bench/engine_bench.hpp"
#include "tools/ferry/bench/runners.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"
#include "tools/ferry/run/device_context.hpp"
#include "tools/ferry/run/program_context.hpp"

namespace ferry::app {

namespace {

[[noreturn]] void refuse() {
  throw UnsupportedError(kNoCudaBackend);
}

}  // namespace

std::vector<std::string> gpu_names() {
  refuse();
}
std::string found_nvshmem() {
  refuse();
}
int gpu_sms() {
  refuse();
}
double measure_push(int, int) {
  refuse();
}
double measure_gpu_flag() {
  refuse();
}
double measure_gpu_barrier(int) {
  refuse();
}
double measure_launch(int) {
  refuse();
}
std::vector<GpuBenchRow> run_gpu_case(const GpuCase&, const std::string&) {
  refuse();
}
EngineBenchRow run_engine_point(const BenchPoint&) {
  refuse();
}
std::unique_ptr<DeviceContext> make_gpu_context(const Rank&, const RunSpec&) {
  refuse();
}
std::unique_ptr<ProgramContext> make_gpu_program_context(const RunSpec&, Exchange&, int) {
  refuse();
}
void choose_gpu(const Rank&) {
  refuse();
}

}  // namespace ferry::app
