#include "ferry/version.hpp"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace {

TEST(Version, HasThreeNumbers) {
  const std::string version(ferry::version());
  unsigned major, minor, patch;
  char dots[2];
  std::istringstream text(version);
  text >> major >> dots[0] >> minor >> dots[1] >> patch;
  ASSERT_TRUE(text && text.peek() == EOF) << version;
  EXPECT_EQ(version, std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch));
}

}  // namespace
