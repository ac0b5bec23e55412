#include "ferry/version.hpp"

#include <gtest/gtest.h>

#include <regex>
#include <string>

namespace {

TEST(Version, HasThreeNumbers) {
  const std::string version(ferry::version());
  EXPECT_TRUE(std::regex_match(version, std::regex(R"(\d+\.\d+\.\d+)"))) << version;
}

}  // namespace
