// What `ferry bench --backend cuda` prints and writes.
#pragma once

#include "apps/ferry/bench_report.hpp"

namespace ferry::app {

std::string device_bench_table(const std::vector<BenchRow>& rows);
nlohmann::ordered_json device_bench_json(const std::vector<BenchRow>& rows);

}  // namespace ferry::app
