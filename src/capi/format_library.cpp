// Formats of C: encoders, and shared libraries that register them.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/shared_library.hpp"
#include "base/text.hpp"
#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "ferry/encoder.hpp"
#include "ferry/error.hpp"
#include "ferry/ferry.h"
#include "format/registry.hpp"

namespace ferry::capi {

namespace {

ferry_encoder_call encoder_call_of(const EncoderCall& call) {
  ferry_encoder_call c{};
  c.size = sizeof c;
  c.tokens = call.tokens;
  c.stride = call.stride;
  c.type = static_cast<std::int32_t>(call.type);
  c.hidden = call.hidden;
  c.rows = call.rows;
  c.device_rows = call.device_rows;
  std::copy(call.part_bytes.begin(), call.part_bytes.end(), c.part_bytes);
  std::copy(call.parts.begin(), call.parts.end(), c.parts);
  std::copy(call.part_strides.begin(), call.part_strides.end(), c.part_strides);
  c.stream = call.stream.handle;
  return c;
}

// Throws the status that `function` of the encoder has returned, unless it is FERRY_OK. call_encoder() turns
// the exception into a UsageError.
void check_encoded(const ferry_encoder& c, ferry_status status, const char* function) {
  if (status == FERRY_OK) return;
  const char* const text = c.error != nullptr ? c.error(c.user) : nullptr;
  throw std::runtime_error(text != nullptr ? text : describe(status, function));
}

using Encode = ferry_status (*)(const ferry_encoder_call* call, void* user);

std::function<void(const EncoderCall&)> to_function(const ferry_encoder& c, Encode encode, const char* name) {
  if (encode == nullptr) return {};
  return [=](const EncoderCall& call) {
    const ferry_encoder_call rows = encoder_call_of(call);
    check_encoded(c, encode(&rows, c.user), name);
  };
}

Encoder to_encoder(const ferry_encoder& c) {
  Encoder encoder;
  if (c.part_bytes != nullptr) {
    encoder.part_bytes = [c](int hidden) {
      std::array<std::int64_t, kMaxParts> bytes{};
      check_encoded(c, c.part_bytes(hidden, bytes.data(), c.user), "ferry_encoder.part_bytes");
      return bytes;
    };
  }
  encoder.on_host = to_function(c, c.on_host, "ferry_encoder.on_host");
  encoder.on_device = to_function(c, c.on_device, "ferry_encoder.on_device");
  return encoder;
}

// Adds the encoder to `registration` and sets `format`. Throws UsageError.
void add_format(Registration& registration, const char* name, const ferry_encoder* encoder,
                ferry_format* format) {
  ferry_format& made = required(format, "format");
  made = to_c(registration.add(&required(name, "name"), to_encoder(read_sized(encoder, "ferry_encoder"))));
}

}  // namespace

extern "C" {

ferry_status ferry_register_format(const char* name, const ferry_encoder* encoder, ferry_format* format) {
  return guarded([&] {
    Registration registration;
    add_format(registration, name, encoder, format);
    registration.make_known();
  });
}

}  // extern "C"

}  // namespace ferry::capi

namespace ferry {
namespace {

// How long a thread waits for another one that loads the same library.
constexpr std::chrono::seconds kPatience(60);

// What the library that is being loaded has registered.
struct Loading {
  Registration registration;
  std::vector<Format> formats;
  std::exception_ptr failure;  // the first
};

// What the ferry_formats() that this thread runs registers: the function takes no argument of ours.
thread_local Loading* loading = nullptr;

// Never destroyed: threads may dispatch while the process ends. The mutex is not held while a ferry_formats()
// runs, which may load a library itself, or wait for a thread that does.
struct Libraries {
  struct Library {
    std::thread::id loader;                      // the thread that calls or called its ferry_formats()
    std::optional<std::vector<Format>> formats;  // once they are known
  };

  std::mutex mutex;
  std::condition_variable changed;  // notified when a library has been loaded, or has failed
  std::map<void*, Library> loaded;
  std::map<std::thread::id, void*> awaited;  // by threads that wait for the loader of a library
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
std::vector<Format> register_formats(const SharedLibrary& opened, const std::string& path) {
  decltype(&ferry_formats) function = nullptr;
  if (!opened.find(function, "ferry_formats"))
    throw UsageError(
        str("load_formats: ", path, " has no function ferry_formats: see ferry/format_library.hpp"));
  Loading now;
  Loading* const outer = std::exchange(loading, &now);
  ferry_status status = FERRY_OK;
  try {
    status = function(&register_loaded);
  } catch (...) {
    loading = outer;
    throw UsageError(str("load_formats: ferry_formats() of ", path,
                         " has thrown an exception: let it return a status instead"));
  }
  loading = outer;
  if (now.failure) std::rethrow_exception(now.failure);
  if (status != FERRY_OK)
    throw UsageError(str("load_formats: ferry_formats() of ", path, " returned ", status, " (",
                         ferry_status_name(status), ")"));
  now.registration.make_known();
  return now.formats;
}

// Whether the loader of the library is this thread or waits for it, by way of other loaders.
bool waits_for_this_thread(const Libraries& all, void* library) {
  auto at = all.loaded.find(library);
  while (at != all.loaded.end() && !at->second.formats) {
    if (at->second.loader == std::this_thread::get_id()) return true;
    const auto awaited = all.awaited.find(at->second.loader);
    if (awaited == all.awaited.end()) return false;
    at = all.loaded.find(awaited->second);
  }
  return false;
}

// Returns the formats of a library that is loaded. Otherwise makes this thread its loader.
std::optional<std::vector<Format>> known_or_claimed(void* library, const std::string& path) {
  Libraries& all = libraries();
  std::unique_lock lock(all.mutex);
  const auto is_loading = [&] {
    const auto known = all.loaded.find(library);
    return known != all.loaded.end() && !known->second.formats;
  };
  if (is_loading()) {
    if (waits_for_this_thread(all, library))
      throw UsageError(
          str("load_formats: ", path, " is being loaded, and its ferry_formats() waits for this call"));
    all.awaited[std::this_thread::get_id()] = library;
    const bool ended = all.changed.wait_for(lock, kPatience, [&] { return !is_loading(); });
    all.awaited.erase(std::this_thread::get_id());
    if (!ended)
      throw UsageError(str("load_formats: ferry_formats() of ", path, ", which another thread has called, ",
                           "has not returned for ", kPatience.count(), " s"));
  }
  return all.loaded.try_emplace(library, std::this_thread::get_id()).first->second.formats;
}

}  // namespace

std::vector<Format> load_formats(const std::string& path) {
  // The loader would open the program itself.
  if (path.empty())
    throw UsageError("load_formats: the path is empty: pass the path of a shared library of formats");
  if (path.find('\0') != std::string::npos)
    throw UsageError(
        str("load_formats: the path ", path.c_str(), " contains a NUL character: pass one without"));
  const SharedLibrary opened = open_library(path);
  if (!opened) throw UsageError(str("load_formats: ", opened.fault));
  void* const library = opened.handle;
  if (const auto known = known_or_claimed(library, path)) return *known;
  std::optional<std::vector<Format>> formats;
  std::exception_ptr failure;
  try {
    formats = register_formats(opened, path);
  } catch (...) {
    failure = std::current_exception();
  }
  Libraries& all = libraries();
  {
    const std::lock_guard lock(all.mutex);
    if (failure) {
      all.loaded.erase(library);
    } else {
      all.loaded.at(library).formats = formats;
    }
  }
  all.changed.notify_all();
  if (failure) std::rethrow_exception(failure);
  return *formats;
}

extern "C" ferry_status ferry_load_formats(const char* path) {
  return capi::guarded([&] { load_formats(&capi::required(path, "path")); });
}

}  // namespace ferry
