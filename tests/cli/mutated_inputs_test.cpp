// Every file that the program reads, damaged at random: a reader takes it, or refuses it with an error that
// names the file, within 4 times the file and 64 MiB of memory.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <new>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "report/synthetic_run.hpp"
#include "seed.hpp"
#include "tools/ferry/model/constants.hpp"
#include "tools/ferry/model/records.hpp"
#include "tools/ferry/run/program_run.hpp"
#include "tools/ferry/run/report.hpp"
#include "tools/report/forms.hpp"
#include "trace/files.hpp"

namespace {

// Bytes that operator new has handed out, and the most at a time.
std::atomic<std::int64_t> allocated_bytes = 0, peak_bytes = 0;

constexpr std::size_t kSizeRoom = alignof(std::max_align_t);

}  // namespace

void* operator new(std::size_t bytes) {
  auto* const block = static_cast<std::byte*>(std::malloc(bytes + kSizeRoom));
  if (block == nullptr) throw std::bad_alloc();
  *reinterpret_cast<std::size_t*>(block) = bytes;
  const std::int64_t now = allocated_bytes += static_cast<std::int64_t>(bytes);
  std::int64_t peak = peak_bytes;
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
  return block + kSizeRoom;
}

void operator delete(void* memory) noexcept {
  if (memory == nullptr) return;
  auto* const block = static_cast<std::byte*>(memory) - kSizeRoom;
  allocated_bytes -= static_cast<std::int64_t>(*reinterpret_cast<std::size_t*>(block));
  std::free(block);
}

void operator delete(void* memory, std::size_t) noexcept {
  operator delete(memory);
}

namespace ferry::app {
namespace {

using Random = std::mt19937_64;
using trace_test::TempFolder;

constexpr int kMutations = FERRY_MUTATIONS;

int below(Random& random, int limit) {
  return static_cast<int>(random() % static_cast<std::uint64_t>(limit));
}

std::string contents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// Bytes that readers may not expect.
const std::vector<std::string> kHostile = {"2147483647",
                                           "-2147483648",
                                           "2147483648",
                                           "30000",
                                           "1073741823",
                                           "-1",
                                           "0",
                                           "1e300",
                                           "1e999",
                                           "9223372036854775807",
                                           "18446744073709551616",
                                           "null",
                                           "[]",
                                           "{}",
                                           "\"x\"",
                                           "true",
                                           "[[[[[[[[",
                                           "{\"a\":",
                                           ",",
                                           "\n",
                                           "\0",
                                           "\xff",
                                           "0.5",
                                           "a",
                                           "part",
                                           "call",
                                           "(",
                                           ")",
                                           " after="};

std::string mutated(std::string text, Random& random) {
  const auto place = [&] {
    return static_cast<std::size_t>(below(random, static_cast<int>(text.size()) + 1));
  };
  for (int changes = 1 + below(random, 3); changes > 0; --changes) {
    const std::string& hostile =
        kHostile[static_cast<std::size_t>(below(random, static_cast<int>(kHostile.size())))];
    const std::size_t at = place(), length = static_cast<std::size_t>(below(random, 64));
    switch (below(random, 8)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(std::min(at, text.size()), length);
        break;
      case 2:
        text.insert(at, hostile);
        break;
      case 3:
        text.insert(place(), text.substr(std::min(at, text.size()), length));
        break;
      case 4:
        if (below(random, 4) == 0) text.resize(at);
        break;
      case 5:  // four bytes, as of an id
        for (std::size_t i = at; i < std::min(at + 4, text.size()); ++i)
          text[i] = static_cast<char>(random() % 2 * 0xff);
        break;
      default: {  // a number
        const std::size_t begin = std::min(text.find_first_of("0123456789", at), text.size());
        const std::size_t end = std::min(text.find_first_not_of("0123456789.", begin), text.size());
        text.replace(begin, end - begin, hostile);
      }
    }
  }
  return text;
}

// `read` reads the file and uses what it has read.
void expect_bounded(const std::string& original, const std::string& name,
                    const std::function<void(const std::string& path)>& read) {
  const TempFolder folder;
  Random random(test::seed());
  int refused = 0;
  for (int mutation = 0; mutation <= kMutations; ++mutation) {
    const std::string text = mutation == 0 ? original : mutated(original, random);
    const std::string path = folder.write(name, text);
    std::string error;
    const std::int64_t before = allocated_bytes;
    peak_bytes = before;
    const auto refuse = [&](const Error& thrown) { error = thrown.what(); };
    try {
      read(path);
    } catch (const UsageError& thrown) {
      refuse(thrown);
    } catch (const SystemError& thrown) {
      refuse(thrown);
    }  // any other exception fails the test
    EXPECT_LE(peak_bytes - before, 4 * static_cast<std::int64_t>(text.size()) + (64 << 20))
        << text.substr(0, 2000);
    if (mutation == 0) {
      ASSERT_EQ(error, "");
    }
    if (error.empty()) continue;
    ++refused;
    EXPECT_NE(error.find(path), std::string::npos) << error;
    for (const char* word : {"json.exception", "bad_alloc", "std::", "vector"})
      EXPECT_EQ(error.find(word), std::string::npos) << error;
    if (testing::Test::HasFailure()) {
      std::ofstream(std::filesystem::temp_directory_path() / ("ferry-failed-" + name), std::ios::binary)
          << text;
      return;
    }
  }
  EXPECT_GT(refused, kMutations / 20);
}

void use_trace(const std::string& path) {
  const Trace trace = open_trace(path);
  for (int layer = 0; layer < std::min(trace.layers, 4); ++layer)
    if (std::ranges::any_of(trace.layer_ids(layer), [](std::int32_t id) { return id >= 0; }))
      load_statistics(expert_counts(trace, layer));
  partition(trace, {.layer = 0, .rank = 1, .ranks = 3, .tokens_per_rank = 5, .step = 7});
}

TEST(MutatedInputs, Traces) {
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 2 * 40 * 4; ++i) ids.push_back(i * 7 % 64);
  const std::string text = trace_test::npy(trace_test::header("<i4", "(2, 40, 4)"), trace_test::raw(ids));
  expect_bounded(text, "a.ids.npy", use_trace);
}

TEST(MutatedInputs, Reports) {
  const report::RunReport run = report::synthetic_run(test::seed(), {4, 16, 6});
  expect_bounded(report::to_json(run).dump(1), "run.json",
                 [](const std::string& path) { report::to_json(*read_earlier_run(path), 1); });
}

TEST(MutatedInputs, Programs) {
  std::string text = "program layers\ninput x: tokens\ninput ids: ids\ninput w: weights\n";
  std::string x = "x";
  for (const char* const layer : {"0", "1", "2", "3"}) {
    const std::string n = layer;
    text += "rows" + n + " = dispatch(" + x + ", ids, w) lane=" + n + " sm_limit=20\n";
    text += "half" + n + " = part(" + x + ") index=1 of=2 stream=3\n";
    text += "out" + n + ": outputs = call experts(rows" + n + ")\n";
    text += "y" + n + " = combine(out" + n + ", rows" + n + ", rows" + n + ") lane=" + n + " after=half" + n +
            "\n";
    x = "y" + n;
  }
  text += "output " + x + "\n";
  expect_bounded(text, "layers.txt", [](const std::string& path) {
    const Program program = read_program(path);
    to_svg(program);
  });
}

TEST(MutatedInputs, Constants) {
  expect_bounded(json_of(built_in_model()).dump(1), "constants.json", read_model);
}

TEST(MutatedInputs, Limits) {
  expect_bounded(contents(FERRY_RESULTS "/2026-11-22-4xh200-limits.json"), "limits.json", read_limits);
}

TEST(MutatedInputs, Measurements) {
  expect_bounded(contents(FERRY_RESULTS "/model/2026-11-23-2xh200.json"), "bench.json", read_bench);
}

// What the sizes in small files once made readers allocate, and texts that cost more than their size.
struct SmallFile {
  const char* name;
  std::string text;
  std::function<void(const std::string& path)> read;
  std::vector<std::string> words;  // in the error
};

std::string repeated(const std::string& text, std::size_t bytes) {
  std::string all;
  while (all.size() < bytes) all += text;
  return all;
}

std::vector<SmallFile> small_files() {
  const nlohmann::ordered_json right = report::to_json(report::synthetic_run(1, {2, 8, 3}));
  const auto report_with = [&](const char* pointer, const nlohmann::ordered_json& value) {
    nlohmann::ordered_json json = right;
    json[nlohmann::ordered_json::json_pointer(pointer)] = value;
    return json.dump();
  };
  nlohmann::ordered_json one_node = right;
  one_node["configuration"]["ranks"] = 2147483647;
  one_node["configuration"].erase("node_of_rank");
  const auto read_report = [](const std::string& path) { report::to_json(*read_earlier_run(path), 1); };
  const std::string head = "program long\ninput x: tokens\n";
  std::string most_steps = head + "v0: tokens = call f(x)\n";
  for (int i = 1; i < 1 << 17; ++i)
    most_steps += "v" + std::to_string(i) + ": tokens = call f(v" + std::to_string(i - 1) + ")\n";
  return {
      {"ranks.json", one_node.dump(), read_report, {"times has 6 entries"}},
      {"nodes.json", report_with("/configuration/nodes", 30000), read_report, {"nodes is 30000", "ranks"}},
      {"steps.json",
       report_with("/workload/steps", 2147483648),
       read_report,
       {"workload.steps is 2147483648, expected a whole number from -2147483648 to 2147483647"}},
      {"none.json", report_with("/load/rows_per_rank", nullptr), read_report, {"load.rows_per_rank is null"}},
      {"huge.json", report_with("/machine/cores", 1e300), read_report, {"machine.cores is 1e+300"}},
      {"time.json", report_with("/timeline/spans_us/0/0/2/1", 1e307), read_report, {"combine begins at"}},
      {"sum.json",
       report_with("/load/rows_per_rank", {INT64_MAX, INT64_MAX}),
       read_report,
       {"rows_per_rank[1]"}},
      {"deep.json", repeated("[", 1 << 20), read_report, {"nested more than 64 deep"}},
      {"member.json", "{\"schema\": " + repeated("[", 1 << 20), read_report, {"nested more than 64 deep"}},
      {"many.json", "[" + repeated("0,", 4 << 20) + "0]", read_report, {"more than", "values"}},
      {"keys.json", "{" + repeated("\"\":0,", 1 << 20) + "\"\":0}", read_report, {"more than 4096 members"}},
      {"empty.json", "", read_model, {"not JSON"}},
      {"largest.ids.npy",
       trace_test::npy(trace_test::header("<i4", "(1, 2)"),
                       trace_test::raw<std::int32_t>({0, (1 << 30) - 1})),
       use_trace,
       {"expected ids below 1048576", "found 1073741823"}},
      {"header.ids.npy",
       std::string("\x93NUMPY\x02\x00\x00\x00\x10\x00", 12) + repeated(" ", 1 << 20),
       use_trace,
       {"expected a header of at most 65536 bytes, found 1048576"}},
      {"steps.txt",
       head + repeated("x = part(x)\n", 12 << 17) + "x = part(x)\n",
       read_program,
       {"131072 steps"}},
      {"most.txt", most_steps, read_program, {"accepted"}},
      {"names.txt",
       head + "y: tokens = call f(" + repeated("x,", 4 << 20) + "x)\n",
       read_program,
       {"393216 times"}},
  };
}

TEST(MutatedInputs, SmallFilesTakeLittleMemory) {
  const TempFolder folder;
  for (const SmallFile& file : small_files()) {
    SCOPED_TRACE(file.name);
    const std::string path = folder.write(file.name, file.text);
    const std::int64_t before = allocated_bytes;
    peak_bytes = before;
    std::string error = "accepted";
    try {
      file.read(path);
    } catch (const UsageError& thrown) {
      error = thrown.what();
    }
    EXPECT_LE(peak_bytes - before, 4 * static_cast<std::int64_t>(file.text.size()) + (64 << 20));
    if (error != "accepted") {
      EXPECT_NE(error.find(path), std::string::npos) << error.substr(0, 1000);
    }
    for (const std::string& word : file.words)
      EXPECT_NE(error.find(word), std::string::npos) << error.substr(0, 1000);
  }
}

// Ids and weights have four bytes each in memory, and lengths eight.
TEST(MutatedInputs, LargeTracesTakeFourTimesTheirSize) {
  constexpr std::int64_t kIds = 16 << 20;
  const TempFolder folder;
  const auto write_zeros = [&](const std::string& name, const char* type, const char* shape, int bytes) {
    const std::string path = folder.write(name, trace_test::npy(trace_test::header(type, shape), ""));
    const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path)) + kIds * bytes;
    EXPECT_EQ(truncate(path.c_str(), size), 0);
    return size;
  };
  const auto peak_of = [&](const char* words) {
    const std::int64_t before = allocated_bytes;
    peak_bytes = before;
    if (*words == 0)
      use_trace(folder / "a.ids.npy");
    else
      EXPECT_THROWS(use_trace(folder / "a.ids.npy"), UsageError, words);
    return peak_bytes - before;
  };
  for (const auto& [type, bytes] : {std::pair{"|u1", 1}, {"|i1", 1}, {"<u2", 2}, {"<i4", 4}, {"<i8", 8}}) {
    SCOPED_TRACE(type);
    const std::int64_t ids = write_zeros("a.ids.npy", type, "(2, 2097152, 4)", bytes);
    std::filesystem::remove(folder / "a.weights.npy");
    std::filesystem::remove(folder / "a.seqlens.npy");
    EXPECT_LE(peak_of(""), 4 * ids + (64 << 20));
    const std::int64_t weights = write_zeros("a.weights.npy", "<f2", "(2, 2097152, 4)", 2);
    EXPECT_LE(peak_of(""), 4 * (ids + weights) + (64 << 20));
    const std::int64_t lengths = write_zeros("a.seqlens.npy", "|u1", "(16777216,)", 1);
    EXPECT_LE(peak_of("expected at most 8388608 lengths of one byte each, found 16777216"),
              4 * (ids + weights + lengths) + (64 << 20));
  }
}

// 6 GB without content: nothing of them is read before the first bytes are those of an array.
TEST(MutatedInputs, SparseFilesAreRefusedByTheirBeginning) {
  const TempFolder folder;
  for (const auto& [name, read] :
       std::vector<std::pair<const char*, std::function<void(const std::string&)>>>{
           {"sparse.ids.npy", use_trace}, {"sparse.json", read_model}, {"sparse.txt", read_program}}) {
    const std::string path = folder.write(name, "x");
    ASSERT_EQ(truncate(path.c_str(), std::int64_t{6} << 30), 0);
    const std::int64_t before = allocated_bytes;
    peak_bytes = before;
    EXPECT_THROW(read(path), UsageError) << name;
    EXPECT_LE(peak_bytes - before, 64 << 20) << name;
  }
}

TEST(MutatedInputs, FilesWithoutAnEndAreRefused) {
  const TempFolder folder;
  const std::string pipe = folder / "pipe.ids.npy";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, std::string("/dev/zero")}) {
    for (const std::function<void(const std::string&)>& read :
         {std::function<void(const std::string&)>(read_model),
          {read_program},
          {read_limits},
          {read_bench},
          {read_earlier_run}})
      EXPECT_THROW(read(path), UsageError) << path;
  }
  EXPECT_THROW(open_trace(pipe), UsageError);
}

}  // namespace
}  // namespace ferry::app
