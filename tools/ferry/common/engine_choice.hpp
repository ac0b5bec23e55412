// The options --engine and --memory of the backend `collective`, as `ferry run` and `ferry bench` have them.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace ferry::app {

struct EngineChoice {
  std::string engine = "automatic", memory = "automatic";

  // The option that asks for GPUs; empty: none does.
  std::string gpu_option() const {
    if (engine == "nccl") return "--engine nccl";
    return memory == "device" ? "--memory device" : "";
  }
};

void add_engine_options(CLI::App& command, EngineChoice& choice);

// @throws UsageError  options that contradict one another, or another backend than `collective`
void check_engine(const std::string& backend, const EngineChoice& choice);

// @throws UnsupportedError  an option of `collective` asks for GPUs, and this build or machine has none
void check_gpus(const std::string& backend, const EngineChoice& choice);

}  // namespace ferry::app
