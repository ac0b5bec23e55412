// Opens shared libraries of formats.
#include <dlfcn.h>

#include <deque>
#include <exception>
#include <map>
#include <mutex>

#include "base/text.hpp"
#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "ferry/encoder.hpp"
#include "ferry/error.hpp"
#include "ferry/ferry.h"

namespace ferry {
namespace {

// What the library that is being loaded has registered. ferry_formats() takes no argument of ours.
struct Loading {
  std::vector<Format> formats;
  std::exception_ptr failure;
};
Loading* loading = nullptr;  // guarded by Libraries::mutex

// Never destroyed: threads may dispatch while the process ends.
struct Libraries {
  std::mutex mutex;
  std::map<void*, std::vector<Format>> formats;  // of each library
};

Libraries& libraries() {
  static auto* const instance = new Libraries;
  return *instance;
}

ferry_status register_loaded(const char* name, const ferry_encoder* encoder, ferry_format* format) {
  const ferry_status status = ferry_register_format(name, encoder, format);
  if (status == FERRY_OK) {
    loading->formats.push_back(capi::to_format(*format).value());
  } else {
    try {
      capi::raise(status, "ferry_register_format");
    } catch (...) {
      loading->failure = std::current_exception();
    }
  }
  return status;
}

}  // namespace

std::vector<Format> load_formats(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw UsageError(str("load_formats: ", dlerror()));
  Libraries& all = libraries();
  const std::lock_guard lock(all.mutex);
  if (const auto known = all.formats.find(library); known != all.formats.end()) return known->second;
  void* const function = dlsym(library, "ferry_formats");
  if (function == nullptr)
    throw UsageError(
        str("load_formats: ", path, " has no function ferry_formats: see ferry/format_library.hpp"));
  Loading now;
  loading = &now;
  const ferry_status status = reinterpret_cast<decltype(&ferry_formats)>(function)(&register_loaded);
  loading = nullptr;
  if (status != FERRY_OK && now.failure) std::rethrow_exception(now.failure);
  if (status != FERRY_OK)
    throw UsageError(str("load_formats: ferry_formats() of ", path, " returned ", status, " (",
                         ferry_status_name(status), ")"));
  return all.formats[library] = now.formats;
}

extern "C" ferry_status ferry_load_formats(const char* path) {
  return capi::guarded([&] { load_formats(&capi::required(path, "path")); });
}

}  // namespace ferry
