// Opens shared libraries of formats.
#include <dlfcn.h>

#include <deque>
#include <exception>
#include <map>
#include <mutex>

#include "base/text.hpp"
#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "capi/encoder.hpp"
#include "ferry/encoder.hpp"
#include "ferry/error.hpp"
#include "ferry/ferry.h"

namespace ferry {
namespace {

// What the library that is being loaded has registered.
struct Loading {
  Registration registration;
  std::vector<Format> formats;
  std::exception_ptr failure;  // the first
};

// Of the thread that runs a ferry_formats(), which takes no argument of ours.
thread_local Loading* loading = nullptr;

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
  return capi::guarded([&] {
    if (loading == nullptr)
      throw UsageError("load_formats: register_format may only be called by ferry_formats(), in its thread");
    try {
      capi::add_format(loading->registration, name, encoder, format);
      loading->formats.push_back(capi::to_format(*format).value());
    } catch (...) {
      if (!loading->failure) loading->failure = std::current_exception();
      throw;
    }
  });
}

// Calls the function of the library. Throws what keeps its formats from being registered.
void run(decltype(&ferry_formats) function, const std::string& path, Loading& now) {
  loading = &now;
  ferry_status status = FERRY_OK;
  try {
    status = function(&register_loaded);
  } catch (...) {
    loading = nullptr;
    throw UsageError(str("load_formats: ferry_formats() of ", path,
                         " has thrown an exception: let it return a status instead"));
  }
  loading = nullptr;
  if (now.failure) std::rethrow_exception(now.failure);
  if (status != FERRY_OK)
    throw UsageError(str("load_formats: ferry_formats() of ", path, " returned ", status, " (",
                         ferry_status_name(status), ")"));
}

}  // namespace

std::vector<Format> load_formats(const std::string& path) {
  // The loader would open the program itself.
  if (path.empty())
    throw UsageError("load_formats: the path is empty: pass the path of a shared library of formats");
  if (path.find('\0') != std::string::npos)
    throw UsageError(
        str("load_formats: the path ", path.c_str(), " contains a NUL character: pass one without"));
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
  run(reinterpret_cast<decltype(&ferry_formats)>(function), path, now);
  now.registration.make_known();
  return all.formats[library] = now.formats;
}

extern "C" ferry_status ferry_load_formats(const char* path) {
  return capi::guarded([&] { load_formats(&capi::required(path, "path")); });
}

}  // namespace ferry
