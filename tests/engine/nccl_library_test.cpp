// Loading NCCL: where it is searched, and the errors when it is missing.
#include "engine/nccl_library.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "refusal.hpp"

namespace ferry {
namespace {

std::string message_of(const std::string& path) {
  return test::refusal<UnsupportedError>([&] { load_nccl(path); });
}

TEST(NcclLibrary, AMissingFileIsNamed) {
  EXPECT_NE(message_of("/nowhere/libnccl.so.2").find("/nowhere/libnccl.so.2"), std::string::npos);
}

TEST(NcclLibrary, AnotherLibraryIsNamedWithItsMissingFunction) {
  const std::string message = message_of(FERRY_NO_NCCL);
  EXPECT_NE(message.find(FERRY_NO_NCCL), std::string::npos) << message;
  EXPECT_NE(message.find("ncclGetVersion"), std::string::npos) << message;
}

TEST(NcclLibrary, AnOldVersionIsNamed) {
  setenv("FAKE_NCCL_VERSION", "21705", 1);
  // Another path, under which no other test has loaded it.
  std::string path = "/proc/self/root";
  path += FERRY_FAKE_NCCL;
  const std::string message = message_of(path);
  unsetenv("FAKE_NCCL_VERSION");
  EXPECT_NE(message.find("is NCCL 2.17.5: 2.18 or later is needed"), std::string::npos) << message;
}

TEST(NcclLibrary, IsSearchedInPythonInstallations) {
  namespace fs = std::filesystem;
  const fs::path python = fs::path(testing::TempDir()) / "ferry-nccl-test";
  const fs::path site = python / "lib/python3.12/site-packages";
  const fs::path library = site / "nvidia/nccl/lib/libnccl.so.2";
  fs::create_directories(library.parent_path());
  std::ofstream(library) << "no library";
  const auto found = [&] {
    const std::vector<std::string> candidates = nccl_candidates();
    return std::count(candidates.begin(), candidates.end(), library.string());
  };
  EXPECT_EQ(found(), 0);
  setenv("PYTHONPATH", ("/nowhere:" + site.string()).c_str(), 1);
  EXPECT_EQ(found(), 1);
  unsetenv("PYTHONPATH");
  setenv("PATH", ("/nowhere:" + (python / "bin").string()).c_str(), 1);
  EXPECT_EQ(found(), 1);
  fs::remove_all(python);
}

}  // namespace
}  // namespace ferry
