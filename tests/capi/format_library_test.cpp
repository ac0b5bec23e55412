// Formats of shared libraries, in C++ and C.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/encoder.hpp"
#include "ferry/ferry.h"
#include "ferry/ferry.hpp"
#include "format/registry.hpp"
#include "harness/check.hpp"
#include "refusal.hpp"

namespace ferry::capi {
namespace {

std::string path_of(const std::string& kind) {
  return std::string(FERRY_TEST_FORMATS) + "/formats_" + kind + ".so";
}

std::string refusal(const std::string& path) {
  try {
    load_formats(path);
  } catch (const UsageError& error) {
    EXPECT_EQ(ferry_load_formats(path.c_str()), FERRY_USAGE);
    EXPECT_STREQ(ferry_last_error(), error.what());
    return error.what();
  }
  return "no error";
}

TEST(FormatLibrary, ItsEncodersEncodeTheTokens) {
  const std::vector<Format> formats = load_formats(path_of("of_two"));
  ASSERT_EQ(formats.size(), 2u);
  EXPECT_EQ(to_string(formats[0]), "library_lower");
  EXPECT_EQ(parse_format("library_upper"), formats[1]);
  EXPECT_EQ(load_formats(path_of("of_two")), formats);  // it is known
  EXPECT_EQ(ferry_load_formats(path_of("of_two").c_str()), FERRY_OK);
  for (std::size_t which = 0; which < 2; ++which) {
    Group::threads(2).run([&](const Rank& rank) {
      constexpr int kHidden = 32;
      Config config{.experts = 2, .top_k = 1, .hidden = kHidden, .max_tokens = 1};
      config.format = formats[which];
      Exchange exchange(rank, config);
      std::vector<std::uint16_t> token;
      for (int c = 0; c < kHidden; ++c)
        token.push_back(static_cast<std::uint16_t>(0x4000 + 257 * c + rank.index()));
      const std::int32_t other = 1 - rank.index();
      const DispatchResult received =
          exchange.dispatch(Tokens::rows(token.data(), 1, DType::bf16), &other, nullptr);
      ASSERT_EQ(received.host->total, 1);
      const auto* const row = static_cast<const std::uint8_t*>(received.parts[0].data);
      for (int c = 0; c < kHidden; ++c)
        EXPECT_EQ(row[c], (0x4000 + 257 * c + other) >> (8 * which) & 0xFF) << "column " << c;
    });
  }
}

TEST(FormatLibrary, WhatCannotBeLoadedIsNamed) {
  EXPECT_NE(refusal(path_of("of_none")).find("formats_of_none.so"), std::string::npos);
  EXPECT_NE(refusal(path_of("without")).find("has no function ferry_formats"), std::string::npos);
  EXPECT_NE(refusal(path_of("repeats")).find("the format 'bf16' exists already: choose another name"),
            std::string::npos);
  EXPECT_NE(refusal(path_of("refuses")).find("formats_refuses.so returned 6 (unsupported)"),
            std::string::npos);
  EXPECT_NE(refusal("").find("the path is empty"), std::string::npos);
  EXPECT_EQ(ferry_load_formats(nullptr), FERRY_USAGE);
}

std::string unknown(const std::string& name) {
  return test::refusal([&] { parse_format(name); });
}

TEST(FormatLibrary, RegistersAllOfItsFormatsOrNone) {
  Encoder encoder;
  encoder.part_bytes = [](int hidden) { return std::array<std::int64_t, kMaxParts>{hidden}; };
  encoder.on_host = [](const EncoderCall&) {};
  register_format("library_taken", encoder);
  for (const char* kind : {"second_taken", "ignores"}) {
    EXPECT_NE(refusal(path_of(kind)).find("the format 'library_taken' exists already"), std::string::npos);
    EXPECT_NE(unknown("library_before_taken"), "accepted");
  }
  const Format given_back = register_format("library_before_taken", encoder);  // its name is free
  EXPECT_EQ(parse_format("library_before_taken"), given_back);
}

TEST(FormatLibrary, ThatHasFailedCanBeLoadedAgain) {
  EXPECT_THROW(load_formats(path_of("fails_once")), UsageError);
  EXPECT_NE(unknown("library_at_second_try"), "accepted");
  const std::vector<Format> formats = load_formats(path_of("fails_once"));
  ASSERT_EQ(formats.size(), 1u);
  EXPECT_EQ(parse_format("library_at_second_try"), formats[0]);
}

TEST(FormatLibrary, WhatItsEncodersThrowIsToldToTheCaller) {
  const std::vector<Format> formats = load_formats(path_of("throws"));
  ASSERT_EQ(formats.size(), 1u);
  EXPECT_EQ(ferry_group_run(nullptr, nullptr, nullptr), FERRY_USAGE);  // an older error of this thread
  Group::threads(1).run([&](const Rank& rank) {
    Config config{.experts = 1, .top_k = 1, .hidden = 96, .max_tokens = 4, .format = formats[0]};
    EXPECT_NE(contract::usage_error([&] { Exchange(rank, config); }).find("hidden = 96 is no multiple of 64"),
              std::string::npos);
    config.hidden = 64;
    Exchange exchange(rank, config);
    const std::vector<std::uint16_t> tokens(4 * 64);
    const std::vector<std::int32_t> ids(4);
    const auto refused = [&](int rows) {
      return contract::usage_error(
          [&] { exchange.dispatch(Tokens::rows(tokens.data(), rows, DType::bf16), ids.data(), nullptr); });
    };
    EXPECT_NE(refused(1).find("one row is too few for this encoder"), std::string::npos);
    EXPECT_NE(refused(3).find("an exception that is not a std::exception"), std::string::npos);
    EXPECT_EQ(refused(2), "");
  });
}

TEST(FormatLibrary, RegistersWhileItIsLoadedOnly) {
  EXPECT_EQ(load_formats(path_of("keeps")).size(), 0u);
  void* const library = dlopen(path_of("keeps").c_str(), RTLD_NOW);
  ASSERT_NE(library, nullptr);
  const auto kept = *static_cast<ferry_register_format_function*>(dlsym(library, "kept_register_format"));
  ferry_encoder encoder{};
  encoder.size = sizeof encoder;
  ferry_format format{};
  EXPECT_EQ(kept("library_late", &encoder, &format), FERRY_USAGE);
  EXPECT_NE(std::string(ferry_last_error()).find("may only be called by ferry_formats()"), std::string::npos);
  dlclose(library);
}

// Sets what the ferry_formats() of a library of kind "calls" calls.
void call_during(const std::string& kind, void (*function)()) {
  void* const library = dlopen(path_of(kind).c_str(), RTLD_NOW);
  ASSERT_NE(library, nullptr) << dlerror();
  *static_cast<void (**)()>(dlsym(library, "during_ferry_formats")) = function;
}

std::string refused_inside, refused_in_a_thread;

TEST(FormatLibrary, ItsFunctionMayLoadLibraries) {
  call_during("calls_1", [] {
    refused_inside = refusal(path_of("calls_1"));
    EXPECT_EQ(load_formats(path_of("calls_2")).size(), 1u);
    EXPECT_EQ(unknown("library_calls_2"), "accepted");
    std::thread([] { EXPECT_EQ(load_formats(path_of("of_two")).size(), 2u); }).join();
    std::thread([] { refused_in_a_thread = unknown("library_calls_1"); }).join();
  });
  const std::vector<Format> formats = load_formats(path_of("calls_1"));
  EXPECT_NE(refused_inside.find("its ferry_formats() waits for this call"), std::string::npos)
      << refused_inside;
  EXPECT_NE(refused_in_a_thread, "");  // it was not known yet
  ASSERT_EQ(formats.size(), 1u);
  EXPECT_EQ(to_string(formats[0]), "library_calls_1");
  EXPECT_EQ(load_formats(path_of("calls_1")), formats);
}

std::barrier both_load(2);
std::atomic<int> refused_loads;

void load_other(const std::string& other) {
  both_load.arrive_and_wait();
  refused_loads += refusal(other) != "no error" ? 1 : 0;
}

TEST(FormatLibrary, FunctionsThatLoadEachOthersLibraryEnd) {
  call_during("calls_3", [] { load_other(path_of("calls_4")); });
  call_during("calls_4", [] { load_other(path_of("calls_3")); });
  std::vector<std::thread> threads;
  for (const char* kind : {"calls_3", "calls_4"}) {
    threads.emplace_back([kind] { EXPECT_EQ(load_formats(path_of(kind)).size(), 1u); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused_loads, 1);  // the one that would have waited for itself
}

TEST(FormatLibrary, ThreadsThatLoadItAtOnceGetTheSameFormats) {
  call_during("calls_2", [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
  Group::threads(4).run([](const Rank&) {
    const std::vector<Format> formats = load_formats(path_of("calls_2"));
    EXPECT_EQ(formats, std::vector{parse_format("library_calls_2")});
  });
}

// An encoder may be given back with objects of the caller, whose destructors may ask for formats.
struct AsksForAFormat {
  ~AsksForAFormat() { unknown("library_nobody"); }
};

TEST(FormatLibrary, DestructorsOfEncodersMayAskForFormats) {
  Registration registration;
  Encoder encoder;
  encoder.part_bytes = [held = std::make_shared<AsksForAFormat>()](int hidden) {
    return std::array<std::int64_t, kMaxParts>{hidden};
  };
  encoder.on_host = [](const EncoderCall&) {};
  registration.add("library_given_back", std::move(encoder));
}

}  // namespace
}  // namespace ferry::capi
