#include "exchange/backend.hpp"
#include "ferry/error.hpp"
#include "tools/ferry/bench/device_bench.hpp"
#include "tools/ferry/limits/gpu_probes.hpp"
#include "tools/ferry/run/device_context.hpp"

namespace ferry::app {

namespace {

[[noreturn]] void refuse() {
  throw UnsupportedError(kNoCudaBackend);
}

}  // namespace

std::vector<std::string> gpu_names() {
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
std::vector<DeviceRow> play_device_case(const DeviceCase&, const std::string&) {
  refuse();
}
std::unique_ptr<Site> make_device_site(const Rank&, const Job&) {
  refuse();
}

}  // namespace ferry::app
