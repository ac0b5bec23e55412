#include "tools/report/table.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "report/synthetic_run.hpp"
#include "seed.hpp"
#include "tools/report/units.hpp"

namespace ferry::report {
namespace {

std::string line_with(const std::string& table, const std::string& beginning) {
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(beginning)) return line;
  }
  return "no line begins with " + beginning;
}

TEST(Units, ThreeDigitsInTheLargestUnitReached) {
  EXPECT_EQ(in_time(0), "0.00 us");
  EXPECT_EQ(in_time(1.234), "1.23 us");
  EXPECT_EQ(in_time(12.34), "12.3 us");
  EXPECT_EQ(in_time(999.4), "999 us");
  EXPECT_EQ(in_time(999.6), "1.00 ms");
  EXPECT_EQ(in_time(9.996e3), "10.0 ms");
  EXPECT_EQ(in_time(99.96e3), "100 ms");
  EXPECT_EQ(in_time(2.5e6), "2.50 s");
  EXPECT_EQ(in_bytes(999), "999 B");
  EXPECT_EQ(in_bytes(1000), "1.00 kB");
  EXPECT_EQ(in_bytes(1.5e12), "1.50 TB");
  EXPECT_EQ(in_bytes_per_second(18.34e9), "18.3 GB/s");
  EXPECT_EQ(in_percent(0.7134), "71.3 %");
  EXPECT_EQ(in_times(1.418), "1.42 x");
  EXPECT_EQ(with_thousands(0), "0");
  EXPECT_EQ(with_thousands(-1234567), "-1,234,567");
  EXPECT_EQ(with_thousands(-123), "-123");
  EXPECT_EQ(with_thousands(1000), "1,000");
  EXPECT_EQ(counted(0, "rank"), "0 ranks");
  EXPECT_EQ(counted(1, "rank"), "1 rank");
  EXPECT_EQ(counted(2000, "rank"), "2,000 ranks");
  EXPECT_EQ(in_mean(0.3125), "0.31");
  EXPECT_EQ(in_mean(1250), "1,250");
}

TEST(Table, ShowsTheFiguresOfTheRun) {
  RunReport run = synthetic_run(test::seed(), {8, 256, 50});
  run.load.rows_per_rank = {1000, 1000, 1000, 2000, 1000, 1000, 1000, 0};
  run.times.assign(run.times.size(),
                   StepTimes{.stages = {Span{0, 1500}, Span{1500, 3500}, Span{3500, 4000}}});
  const std::string table = to_table(run);
  EXPECT_EQ(line_with(table, "dispatch"),
            "dispatch      1.50 ms    1.50 ms          -    1.50 ms    1.50 ms");
  EXPECT_EQ(line_with(table, "step"), "step          4.00 ms    4.00 ms          -    4.00 ms    4.00 ms");
  EXPECT_EQ(
      line_with(table, "          mean of a rank"),
      "          mean of a rank: dispatch 1.50 ms + experts 2.00 ms + combine 500 us + waiting 0.00 us = "
      "step 4.00 ms");
  EXPECT_EQ(line_with(table, "rank 3").substr(0, 32), "rank 3          2,000     2.00 x");
  EXPECT_EQ(line_with(table, "Busiest"), "Busiest   rank 3: 2.00 x the mean of 1,000 rows");
  EXPECT_EQ(line_with(table, "Checks").substr(0, 40), "Checks    passed  dispatch, bit for bit:");
}

TEST(Table, AFailedCheckShowsWhereItFailed) {
  RunReport run = synthetic_run(test::seed());
  run.checks = {{.name = "combine", .compared = 9, .wrong = 2, .detail = "first at rank 1, token 3"}};
  const std::string table = to_table(run);
  EXPECT_EQ(line_with(table, "Checks"), "Checks    FAILED  combine: 9 compared, 2 wrong");
  EXPECT_NE(table.find("first at rank 1, token 3"), std::string::npos);
}

TEST(Table, IsPlainText) {
  const std::string table = to_table(synthetic_run(test::seed()));
  EXPECT_TRUE(
      std::all_of(table.begin(), table.end(), [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); }));
  EXPECT_EQ(table.find(" \n"), std::string::npos);
}

}  // namespace
}  // namespace ferry::report
