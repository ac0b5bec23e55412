#include "tools/ferry/common/files.hpp"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <random>
#include <system_error>
#include <utility>

#include "base/environment.hpp"
#include "ferry/version.hpp"

namespace ferry::app {

namespace {

namespace fs = std::filesystem;

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

std::string cannot_write(const std::string& path, int error) {
  return fmt::format("cannot write '{}': {}", path, std::strerror(error));
}

[[noreturn]] void fail_to_write(const std::string& path, int error) {
  throw SystemError(cannot_write(path, error), error);
}

void put(const std::string& path, const std::string& text, std::FILE* file) {
  const bool all = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (!all || std::fflush(file) != 0) fail_to_write(path, errno);
}

// A temporary file in the folder of `target`. It replaces the target in replace_target(); until then the
// destructor removes it.
class TemporaryFile {
 public:
  TemporaryFile(const std::string& path, const std::string& target)
      : path_(path),
        target_(target),
        temporary_(fmt::format("{}.{:08x}.part", target, std::random_device()())) {
    constexpr mode_t kReadWriteAll = 0666;  // reduced by the umask
    // Exclusive and at random: in a folder for all, somebody could have put a link of that name there.
    const int descriptor = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kReadWriteAll);
    if (descriptor < 0) fail_to_write(path_, errno);
    file_.reset(fdopen(descriptor, "w"));
    struct stat old{};
    if (stat(target_.c_str(), &old) == 0) fchmod(descriptor, old.st_mode);
  }
  ~TemporaryFile() {
    if (!temporary_.empty()) unlink(temporary_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const std::string& text) { put(path_, text, file_.get()); }
  void replace_target() {
    if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail_to_write(path_, errno);
    temporary_.clear();
  }

 private:
  const std::string& path_;
  const std::string& target_;
  std::string temporary_;
  File file_;
};

// The regular file, existing or new, that a path leads to once links are followed. Empty for anything else.
std::string regular_target(const std::string& path) {
  std::error_code failed;
  const fs::file_status status = fs::status(path, failed);
  if (status.type() == fs::file_type::directory) throw UsageError(cannot_write(path, EISDIR));
  if (status.type() != fs::file_type::regular && status.type() != fs::file_type::not_found) return "";
  const fs::path target = fs::weakly_canonical(path, failed);
  return failed ? path : target.string();
}

}  // namespace

Output::Output(std::string path) : path_(std::move(path)) {
  if (!wanted() || to_stdout()) return;
  target_ = regular_target(path_);
  replaces_ = !target_.empty() && fs::exists(target_);
  if (target_.empty() || replaces_) {
    if (access(path_.c_str(), W_OK) != 0) throw UsageError(cannot_write(path_, errno));
  }
  if (target_.empty()) return;
  try {
    const TemporaryFile attempt(path_, target_);
  } catch (const SystemError& error) {
    throw UsageError(error.what());
  }
}

void Output::write(const std::string& text) const {
  if (!wanted()) return;
  if (to_stdout()) return put("standard output", text, stdout);
  if (target_.empty()) {
    const File file(std::fopen(path_.c_str(), "w"));
    if (!file) fail_to_write(path_, errno);
    return put(path_, text, file.get());
  }
  TemporaryFile temporary(path_, target_);
  temporary.write(text);
  temporary.replace_target();
}

std::string written_files(std::initializer_list<const Output*> outputs) {
  std::string text;
  for (const Output* output : outputs) {
    if (!output->wanted() || output->to_stdout()) continue;
    text += fmt::format("{:<10}{}{}\n", text.empty() ? "Wrote" : "", output->path(),
                        output->replaces() ? ", replacing an older file" : "");
  }
  return text;
}

nlohmann::ordered_json report_json(const char* schema, int schema_version) {
  return {{"schema", schema}, {"schema_version", schema_version}, {"ferry_version", std::string(version())}};
}

void write_report(const Output& json, const nlohmann::ordered_json& report, const std::string& table) {
  if (!json.to_stdout()) fmt::print("{}", table);
  json.write(report.dump(2) + "\n");
  if (!json.to_stdout()) fmt::print("{}", written_files({&json}));
}

// ---- Progress

namespace {

constexpr std::int64_t kRefreshMs = 200;  // a shorter task shows nothing
constexpr std::int64_t kFirstLogLineMs = 2'000, kLogLinesApartMs = 60'000;

std::int64_t now_ms() {
  using std::chrono::milliseconds;
  return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

struct Progress::SharedState {
  std::atomic<std::int64_t> parts_done;
  std::atomic<std::int64_t> started_ms;  // when the first part was done, with which the estimate begins
  std::atomic<double> first_work, work_done;
  std::atomic<std::int64_t> last_print_ms;
  std::atomic<std::int64_t> wait_ms;  // from the last line to the next
  std::atomic<bool> printed;
  std::atomic<bool> muted;
};

Progress::Progress(std::string task, std::int64_t total, std::int64_t parts, double work)
    : task_(std::move(task)),
      total_(total),
      parts_(parts),
      work_(work > 0 ? work : static_cast<double>(total * parts)),
      terminal_(isatty(STDERR_FILENO) == 1),
      memory_(Mapping::anonymous_shared(sizeof(SharedState))) {
  state().last_print_ms = now_ms();
  state().wait_ms = terminal_ ? kRefreshMs : kFirstLogLineMs;
}

void Progress::hide() const {
  if (state().printed.exchange(false)) fmt::print(stderr, "\r\033[K");
}

Progress::SharedState& Progress::state() const {
  return *reinterpret_cast<SharedState*>(memory_.data());
}

void Progress::show() const {
  if (!terminal_ || state().muted) return;
  state().printed = true;
  fmt::print(stderr, "\r\033[K{}", line());
  std::fflush(stderr);
}

std::string Progress::line() const {
  if (total_ == 0) return task_;
  std::string text = fmt::format("{}: {} of {}", task_, state().parts_done / parts_, total_);
  const double done = state().work_done, counted = done - state().first_work;
  if (counted <= 0) return text;
  const double left = (work_ - done) / counted * static_cast<double>(now_ms() - state().started_ms) * 1e-3;
  return text + fmt::format(", about {:%T} left", std::chrono::seconds(std::llround(left)));
}

void Progress::refresh() const {
  const std::int64_t now = now_ms();
  std::int64_t last = state().last_print_ms;
  if (now - last < state().wait_ms || !state().last_print_ms.compare_exchange_strong(last, now)) return;
  if (terminal_) return show();
  state().wait_ms = std::min(2 * state().wait_ms, kLogLinesApartMs);
  if (!state().muted) fmt::print(stderr, "ferry: {}\n", line());
}

void Progress::mute() const {
  state().muted = true;
}

void Progress::advance(double work) const {
  state().work_done += work;
  if (state().parts_done++ == 0) {
    state().started_ms = now_ms();
    state().first_work = work;
  }
  refresh();
}

namespace {

constexpr std::int64_t kMostBytes = 256 << 20;  // of a text

[[noreturn]] void fail(const std::string& name, int error) {
  throw UsageError(fmt::format("{}: {}", name, std::strerror(error)));
}

class InputFile {
 public:
  // Without O_NONBLOCK, opening a pipe waits for its writer.
  InputFile(const std::string& path, const std::string& name)
      : descriptor_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    if (descriptor_ < 0) fail(name, errno);
  }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile() { close(descriptor_); }

  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

std::string read_file(const std::string& path, const std::string& name) {
  const InputFile file(path, name);
  struct stat status{};
  if (fstat(file.get(), &status) != 0) fail(name, errno);
  if (S_ISDIR(status.st_mode)) fail(name, EISDIR);
  if (!S_ISREG(status.st_mode)) throw UsageError(fmt::format("{}: expected a regular file", name));
  if (status.st_size > kMostBytes)
    throw UsageError(fmt::format("{}: {} bytes, expected at most {}", name, status.st_size, kMostBytes));
  std::string text;
  try {
    text.resize(static_cast<std::size_t>(status.st_size));
  } catch (const std::exception&) {  // std::bad_alloc, std::length_error
    throw SystemError(fmt::format("{}: no memory for its {} bytes", name, status.st_size), ENOMEM);
  }
  std::size_t end = 0;
  while (end < text.size()) {
    const ssize_t bytes = read(file.get(), text.data() + end, text.size() - end);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) fail(name, errno);
    if (bytes == 0) break;  // the file has shrunk meanwhile
    end += static_cast<std::size_t>(bytes);
  }
  text.resize(end);
  return text;
}

void require_schema(const report::JsonField& report, const std::string& schema) {
  const std::string found = report.value("schema", std::string());
  if (found == schema) return;
  throw UsageError(fmt::format("{}, not {}", found.empty() ? "no schema" : "schema " + found, schema));
}

bool colours(std::FILE* stream) {
  return isatty(fileno(stream)) == 1 && environment_variable("NO_COLOR").empty();
}

fs::path documents_folder() {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  for (const fs::path& folder :
       {program / "documents", program.parent_path() / FERRY_DATAROOTDIR / "doc" / "ferry"}) {
    if (fs::is_directory(folder / "docs", ignored)) return folder;
  }
  return {};
}

std::string document(std::string_view name) {
  return (documents_folder() / name).string();
}

}  // namespace ferry::app
