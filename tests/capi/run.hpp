// Runs test bodies on the ranks of a C group.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "capi/boundary.hpp"
#include "ferry/ferry.h"

namespace ferry::capi_test {

using Body = std::function<void(ferry_rank*)>;
using GroupHandle = std::unique_ptr<ferry_group, void (*)(ferry_group*)>;
using ExchangeHandle = std::unique_ptr<ferry_exchange, void (*)(ferry_exchange*)>;

inline ferry_status call_body(ferry_rank* rank, void* user) {
  try {
    (*static_cast<const Body*>(user))(rank);
    return FERRY_OK;
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
    return FERRY_OTHER;
  }
}

inline GroupHandle threads(int ranks) {
  ferry_group* group = nullptr;
  EXPECT_EQ(ferry_group_threads(nullptr, ranks, &group), FERRY_OK) << ferry_last_error();
  return {group, ferry_group_destroy};
}

inline ferry_status run(ferry_group* group, Body body) {
  return ferry_group_run(group, call_body, &body);
}

inline void run_threads(int ranks, const Body& body) {
  EXPECT_EQ(run(threads(ranks).get(), body), FERRY_OK) << ferry_last_error();
}

// A struct with its size set and zeros otherwise.
template <class T>
T sized() {
  T value{};
  value.size = sizeof value;
  return value;
}

inline ferry_config small_config() {
  auto config = sized<ferry_config>();
  config.experts = 10;
  config.top_k = 3;
  config.hidden = 256;
  config.max_tokens = 7;
  return config;
}

inline ferry_status plan_bytes_of(const ferry_config* config, int ranks, std::int64_t* bytes) {
  auto sizes = sized<ferry_sizes>();
  const ferry_status status = ferry_sizes_of(config, nullptr, ranks, 0, &sizes);
  if (status == FERRY_OK) *bytes = sizes.plan_bytes;
  return status;
}

inline ExchangeHandle make_exchange(const ferry_rank* rank, const ferry_config& config) {
  ferry_exchange* exchange = nullptr;
  if (ferry_exchange_create(rank, &config, &exchange) != FERRY_OK)
    throw std::runtime_error(ferry_last_error());
  return {exchange, ferry_exchange_destroy};
}

inline ferry_error_record last_record() {
  auto record = sized<ferry_error_record>();
  EXPECT_EQ(ferry_last_record(&record), FERRY_OK);
  return record;
}

// Whether the thread's last error message contains `part`.
inline testing::AssertionResult last_error_contains(const std::string& part) {
  const std::string text = ferry_last_error();
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' does not contain '" << part << "'";
}

// Whether a call has ended with FERRY_USAGE and such a message.
inline testing::AssertionResult is_refused(ferry_status status, const std::string& part) {
  if (status == FERRY_USAGE) return last_error_contains(part);
  return testing::AssertionFailure() << ferry_status_name(status) << ", expected '" << part << "'";
}

}  // namespace ferry::capi_test
