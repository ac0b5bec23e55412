// Stands in for a profiler: NVTX loads it (NVTX_INJECTION64_PATH) and calls it for every range. Writes them
// to the file that FERRY_TEST_RANGES names, "+ domain name" where one begins and "-" where it ends.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

namespace {

std::mutex mutex;
std::FILE* file = nullptr;
std::set<std::string> domains;

void write(const std::string& line) {
  const std::lock_guard lock(mutex);
  std::fprintf(file, "%s\n", line.c_str());
  std::fflush(file);
}

nvtxDomainHandle_t create_domain(const char* name) {
  const std::lock_guard lock(mutex);
  return reinterpret_cast<nvtxDomainHandle_t>(const_cast<char*>(domains.insert(name).first->c_str()));
}

int push_range(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  write("+ " + std::string(reinterpret_cast<const char*>(domain)) + " " + attributes->message.ascii);
  return 0;
}

int pop_range(nvtxDomainHandle_t) {
  write("-");
  return 0;
}

template <class Function>
void replace(NvtxFunctionTable table, int id, Function function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  file = std::fopen(std::getenv("FERRY_TEST_RANGES"), "w");
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (file == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0)
    return 0;
  replace(table, NVTX_CBID_CORE2_DomainCreateA, create_domain);
  replace(table, NVTX_CBID_CORE2_DomainRangePushEx, push_range);
  replace(table, NVTX_CBID_CORE2_DomainRangePop, pop_range);
  return 1;
}
