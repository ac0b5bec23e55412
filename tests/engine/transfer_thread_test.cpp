#include "engine/transfer_thread.hpp"

#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <thread>

namespace ferry {
namespace {

TEST(TransferThread, RunsInTheCallingThreadWhenIdle) {
  TransferThread transfers;
  std::thread::id where;
  EXPECT_TRUE(transfers.try_run([&] { where = std::this_thread::get_id(); }));
  EXPECT_EQ(where, std::this_thread::get_id());
  EXPECT_THROW(transfers.try_run([] { throw std::runtime_error("failed"); }), std::runtime_error);
  EXPECT_TRUE(transfers.try_run([] {}));
}

TEST(TransferThread, RunsNothingBesideATransfer) {
  TransferThread transfers;
  std::promise<void> begun, may_end;
  auto submitted = transfers.submit([&] {
    begun.set_value();
    may_end.get_future().wait();
  });
  begun.get_future().wait();
  EXPECT_FALSE(transfers.try_run([] {}));
  may_end.set_value();
  EXPECT_EQ(submitted.get(), nullptr);
}

TEST(TransferThread, WhatIsSubmittedMeanwhileRunsAfterwards) {
  TransferThread transfers;
  bool ended = false, ended_before = false;
  std::future<std::exception_ptr> submitted;
  EXPECT_TRUE(transfers.try_run([&] {
    submitted = transfers.submit([&] { ended_before = ended; });
    EXPECT_FALSE(transfers.try_run([] {}));
    ended = true;
  }));
  submitted.get();
  EXPECT_TRUE(ended_before);
}

}  // namespace
}  // namespace ferry
