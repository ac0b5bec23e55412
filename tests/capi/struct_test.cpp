// Structs of programs built with an earlier or later header, and null pointers.
#include <cstring>
#include <vector>

#include "capi/run.hpp"

namespace ferry::capi_test {
namespace {

// A struct with more or fewer bytes than in this header, between guard bytes.
template <class T>
class Resized {
 public:
  Resized(const T& value, std::size_t size) : memory_(size + 2 * kGuard, std::byte{0x7F}), size_(size) {
    std::memset(address(), 0, size);
    std::memcpy(address(), &value, std::min(size, sizeof value));
    std::memcpy(address(), &size, sizeof size);
  }

  T* get() { return reinterpret_cast<T*>(address()); }
  std::byte* address() { return memory_.data() + kGuard; }
  std::byte& last() { return address()[size_ - 1]; }
  bool guards_hold() const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (memory_[i] != std::byte{0x7F} || memory_[kGuard + size_ + i] != std::byte{0x7F}) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::vector<std::byte> memory_;
  std::size_t size_;
};

TEST(Structs, OfAnEarlierHeaderHaveDefaultsForMissingFields) {
  ferry_config config = small_config();
  config.deadline = -5;  // would be refused
  config.manual_check = 1;
  std::int64_t bytes = 0, expected = 0;
  const ferry_config plain = small_config();
  ASSERT_EQ(plan_bytes_of(&plain, 2, &expected), FERRY_OK);
  Resized<ferry_config> shorter(config, offsetof(ferry_config, deadline));
  EXPECT_EQ(plan_bytes_of(shorter.get(), 2, &bytes), FERRY_OK) << ferry_last_error();
  EXPECT_EQ(bytes, expected);
  Resized<ferry_config> whole(config, sizeof config);
  EXPECT_EQ(plan_bytes_of(whole.get(), 2, &bytes), FERRY_USAGE);
}

TEST(Structs, OfALaterHeaderMaySetKnownFieldsOnly) {
  std::int64_t bytes = 0;
  Resized<ferry_config> longer(small_config(), sizeof(ferry_config) + 24);
  EXPECT_EQ(plan_bytes_of(longer.get(), 2, &bytes), FERRY_OK) << ferry_last_error();
  longer.last() = std::byte{1};
  EXPECT_EQ(plan_bytes_of(longer.get(), 2, &bytes), FERRY_UNSUPPORTED);
  EXPECT_TRUE(last_error_contains("ferry_config: byte " + std::to_string(sizeof(ferry_config) + 23)));
}

TEST(Structs, WithAnInvalidSizeAreRefused) {
  std::int64_t bytes = 0;
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{1} << 40}) {
    ferry_config config = small_config();
    config.size = size;
    EXPECT_TRUE(
        is_refused(plan_bytes_of(&config, 2, &bytes), "ferry_config: size = " + std::to_string(size)));
    EXPECT_TRUE(last_error_contains(std::to_string(sizeof config)));
  }
}

TEST(Structs, AreFilledUpToTheirSize) {
  const ferry_config config = small_config();
  auto full = sized<ferry_sizes>();
  ASSERT_EQ(ferry_sizes_of(&config, nullptr, 2, 0, &full), FERRY_OK);

  ferry_sizes poison{};
  std::memset(&poison, 0x7F, sizeof poison);
  Resized<ferry_sizes> shorter(poison, offsetof(ferry_sizes, signals));
  ASSERT_EQ(ferry_sizes_of(&config, nullptr, 2, 0, shorter.get()), FERRY_OK);
  EXPECT_TRUE(shorter.guards_hold());
  EXPECT_EQ(std::memcmp(shorter.address() + sizeof(size_t), &full.dispatch_staging, 2 * sizeof(int64_t)), 0);

  Resized<ferry_sizes> longer(poison, sizeof(ferry_sizes) + 8);
  longer.last() = std::byte{0x7F};
  ASSERT_EQ(ferry_sizes_of(&config, nullptr, 2, 0, longer.get()), FERRY_OK);
  EXPECT_TRUE(longer.guards_hold());
  EXPECT_EQ(longer.last(), std::byte{0}) << "bytes that this library does not know must be zero";
  EXPECT_EQ(longer.get()->size, sizeof(ferry_sizes) + 8) << "the caller's size must be kept";
  EXPECT_EQ(longer.get()->total, full.total);
}

TEST(Structs, OfArgumentsMayBeShort) {
  run_threads(1, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    auto args = sized<ferry_dispatch_args>();
    args.input_scale_count = -1;  // beyond the end of the short struct
    Resized<ferry_dispatch_args> shorter(args, offsetof(ferry_dispatch_args, input_scale_count));
    EXPECT_EQ(ferry_dispatch(exchange.get(), shorter.get()), FERRY_OK) << ferry_last_error();
    EXPECT_TRUE(is_refused(ferry_dispatch(exchange.get(), &args), "input_scale_count = -1"));
  });
}

// Structs without `size`: in each call one of their reserved fields is set, on one rank.
TEST(Structs, WithoutSizeHaveReservedFieldsThatMustBeZero) {
  run_threads(2, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const bool odd = ferry_rank_index(rank) == 1;
    int which = 0;
    const auto refused = [&](const char* name, auto args, auto& part, auto function) {
      const std::string field = std::string(name) + ".reserved[" + std::to_string(++which % 2) + "]";
      if (odd) part(args).reserved[which % 2] = 77;
      EXPECT_EQ(function(exchange.get(), &args), FERRY_USAGE) << field;
      EXPECT_TRUE(last_error_contains(field + " = 77, must be 0: this library, version " + ferry_version() +
                                      ", is older than the program's headers"));
      EXPECT_TRUE(odd || last_error_contains("rank 1 refused"));
    };
    const auto call = [](auto& args) -> auto& { return args.call; };
    const auto plan = [](auto& args) -> auto& { return args.plan; };
    const auto format = [](auto& args) -> auto& { return args.format; };
    const auto memory = [](auto& args) -> auto& { return args.memory; };
    auto rows = sized<ferry_dispatch_result>();
    std::memset(&rows, 0x7F, sizeof rows);
    rows.size = sizeof rows;
    auto dispatch = sized<ferry_dispatch_args>();
    dispatch.result = &rows;
    ASSERT_EQ(ferry_dispatch(exchange.get(), &dispatch), FERRY_OK) << ferry_last_error();
    EXPECT_EQ(rows.plan.reserved[0] | rows.plan.reserved[1] | rows.parts[0].reserved[0], 0);
    dispatch.result = nullptr;
    std::vector<std::int64_t> storage(rows.plan.bytes / sizeof(std::int64_t));
    ferry_plan kept{};  // of a dispatch that was not refused
    ASSERT_EQ(ferry_plan_copy(&rows.plan, storage.data(), rows.plan.bytes, &kept), FERRY_OK);
    refused("ferry_call_options", dispatch, call, ferry_dispatch);
    refused("ferry_plan", dispatch, plan, ferry_dispatch);
    refused("ferry_format", dispatch, format, ferry_dispatch);
    refused("ferry_receive_buffers", dispatch, memory, ferry_dispatch);
    const auto tokens = [](auto& args) -> auto& { return args.tokens; };
    refused("ferry_tokens", dispatch, tokens, ferry_dispatch);
    auto combine = sized<ferry_combine_args>();
    auto backward = sized<ferry_combine_backward_args>();
    auto values = sized<ferry_route_values_args>();
    auto returned = sized<ferry_return_values_args>();
    combine.plan = backward.plan = values.plan = returned.plan = kept;
    const auto outputs = [](auto& args) -> auto& { return args.outputs; };
    const auto result = [](auto& args) -> auto& { return args.result; };
    refused("ferry_call_options", combine, call, ferry_combine);
    refused("ferry_rows", combine, outputs, ferry_combine);
    refused("ferry_rows", combine, result, ferry_combine);
    refused("ferry_plan", combine, plan, ferry_combine);
    refused("ferry_format", backward, format, ferry_combine_backward);
    refused("ferry_call_options", values, call, ferry_route_values);
    refused("ferry_plan", values, plan, ferry_route_values);
    refused("ferry_plan", returned, plan, ferry_return_values);
    const ferry_step_metadata* metadata = nullptr;
    auto step = sized<ferry_metadata_args>();
    step.metadata = &metadata;
    refused("ferry_call_options", step, call, ferry_metadata);
    auto gather = sized<ferry_all_gather_v_args>();
    gather.row_bytes = 16;
    refused("ferry_call_options", gather, call, ferry_all_gather_v);
    refused("ferry_call_options", sized<ferry_reduce_scatter_v_args>(), call, ferry_reduce_scatter_v);
    auto counted = sized<ferry_dispatch_counts_result>();
    auto counts = sized<ferry_dispatch_counts_args>();
    counts.result = &counted;
    refused("ferry_call_options", counts, call, ferry_dispatch_counts);

    ferry_call_options receive{};
    receive.reserved[1] = 5;
    EXPECT_EQ(ferry_dispatch_receive(exchange.get(), &receive, nullptr), FERRY_USAGE);
    EXPECT_TRUE(last_error_contains("ferry_call_options.reserved[1] = 5"));
    EXPECT_EQ(ferry_synchronize(exchange.get(), &receive), FERRY_USAGE);
    ASSERT_EQ(ferry_dispatch(exchange.get(), &dispatch), FERRY_OK) << ferry_last_error();
  });
  ferry_config config = small_config();
  config.format.reserved[1] = 1;
  std::int64_t bytes = 0;
  EXPECT_EQ(plan_bytes_of(&config, 2, &bytes), FERRY_USAGE);
  EXPECT_TRUE(last_error_contains("ferry_format.reserved[1] = 1"));
}

TEST(Pointers, ThatAreNullAreRefused) {
  const auto refused = [](ferry_status status, const char* name) {
    EXPECT_TRUE(is_refused(status, std::string(name) + " is NULL"));
  };
  const ferry_config config = small_config();
  auto sizes = sized<ferry_sizes>();
  std::int32_t table[10];
  refused(ferry_last_record(nullptr), "ferry_error_record");
  refused(ferry_group_threads(nullptr, 1, nullptr), "group");
  refused(ferry_group_processes(nullptr, 1, nullptr), "group");
  refused(ferry_group_mpi(nullptr), "group");
  refused(ferry_group_launched(nullptr), "group");
  refused(ferry_group_join(nullptr, nullptr), "group");
  ferry_group* group = nullptr;
  refused(ferry_group_custom(nullptr, nullptr, &group), "ferry_bootstrap");
  refused(ferry_group_run(nullptr, nullptr, nullptr), "group");
  refused(ferry_group_run(threads(1).get(), nullptr, nullptr), "body");
  refused(ferry_rank_barrier(nullptr), "rank");
  refused(ferry_rank_all_gather(nullptr, table, table, 4), "rank");
  refused(ferry_sizes_of(nullptr, nullptr, 1, 0, &sizes), "ferry_config");
  refused(ferry_sizes_of(&config, nullptr, 1, 0, nullptr), "ferry_sizes");
  refused(ferry_placement_blocks(10, 1, nullptr, table), "expert_rank");
  refused(ferry_placement_blocks(10, 1, table, nullptr), "expert_local");
  refused(ferry_exchange_create(nullptr, &config, nullptr), "rank");
  refused(ferry_exchange_sizes(nullptr, &sizes), "exchange");
  refused(ferry_exchange_config(nullptr, nullptr), "exchange");
  refused(ferry_dispatch(nullptr, nullptr), "exchange");
  refused(ferry_dispatch_send(nullptr, nullptr), "exchange");
  refused(ferry_dispatch_receive(nullptr, nullptr, nullptr), "exchange");
  refused(ferry_combine(nullptr, nullptr), "exchange");
  refused(ferry_combine_send(nullptr, nullptr), "exchange");
  refused(ferry_combine_receive(nullptr, nullptr), "exchange");
  refused(ferry_combine_backward(nullptr, nullptr), "exchange");
  refused(ferry_route_values(nullptr, nullptr), "exchange");
  refused(ferry_return_values(nullptr, nullptr), "exchange");
  refused(ferry_metadata(nullptr, nullptr), "exchange");
  refused(ferry_check(nullptr, 0), "exchange");
  refused(ferry_synchronize(nullptr, nullptr), "exchange");
  refused(ferry_refuse(nullptr, FERRY_DISPATCH, "", nullptr), "exchange");
  refused(ferry_all_gather_v(nullptr, nullptr), "exchange");
  refused(ferry_reduce_scatter_v(nullptr, nullptr), "exchange");
  refused(ferry_dispatch_counts(nullptr, nullptr), "exchange");
  refused(ferry_parse_format("bf16", nullptr), "format");
  refused(ferry_format_name(nullptr, nullptr, 0), "format");
  refused(ferry_trace_open(nullptr, nullptr, 0, nullptr), "name");
  refused(ferry_trace_save(nullptr, ""), "trace");
  refused(ferry_trace_query(nullptr, nullptr), "trace");
  refused(ferry_trace_partition(nullptr, nullptr), "trace");
  refused(ferry_last_dispatch_result(nullptr, 0, nullptr), "exchange");
  refused(ferry_exchange_counts(nullptr, nullptr), "exchange");
  EXPECT_EQ(ferry_group_size(nullptr), -1);
  EXPECT_EQ(ferry_rank_index(nullptr), -1);
  EXPECT_EQ(ferry_rank_size(nullptr), -1);
  refused(ferry_rank_topology(nullptr, nullptr, nullptr), "rank");
  ferry_group_destroy(nullptr);
  ferry_exchange_destroy(nullptr);
  ferry_trace_destroy(nullptr);
}

TEST(Pointers, ToArgumentsThatAreNullAreRefused) {
  run_threads(1, [](ferry_rank* rank) {
    const ExchangeHandle exchange = make_exchange(rank, small_config());
    const auto refused = [](ferry_status status, const char* name) {
      EXPECT_TRUE(is_refused(status, std::string(name) + " is NULL"));
    };
    refused(ferry_dispatch(exchange.get(), nullptr), "ferry_dispatch_args");
    refused(ferry_dispatch_send(exchange.get(), nullptr), "ferry_dispatch_args");
    refused(ferry_combine(exchange.get(), nullptr), "ferry_combine_args");
    refused(ferry_combine_backward(exchange.get(), nullptr), "ferry_combine_backward_args");
    refused(ferry_route_values(exchange.get(), nullptr), "ferry_route_values_args");
    refused(ferry_return_values(exchange.get(), nullptr), "ferry_return_values_args");
    refused(ferry_metadata(exchange.get(), nullptr), "ferry_metadata_args");
    refused(ferry_all_gather_v(exchange.get(), nullptr), "ferry_all_gather_v_args");
    refused(ferry_reduce_scatter_v(exchange.get(), nullptr), "ferry_reduce_scatter_v_args");
    refused(ferry_dispatch_counts(exchange.get(), nullptr), "ferry_dispatch_counts_args");
    refused(ferry_refuse(exchange.get(), FERRY_DISPATCH, nullptr, nullptr), "reason");
    refused(ferry_last_dispatch_result(exchange.get(), 0, nullptr), "ferry_dispatch_result");
    refused(ferry_exchange_counts(exchange.get(), nullptr), "ferry_counts");
    refused(ferry_rank_topology(rank, nullptr, nullptr), "ferry_topology");
    refused(ferry_exchange_config(exchange.get(), nullptr), "ferry_config");
  });
}

}  // namespace
}  // namespace ferry::capi_test
