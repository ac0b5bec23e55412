#include "capi/boundary.hpp"

#include <cerrno>
#include <exception>
#include <iterator>
#include <new>
#include <system_error>

#include "base/errors.hpp"
#include "ferry/version.hpp"

namespace ferry::capi {
namespace {

using Kind = ErrorRecord::Kind;

thread_local ErrorRecord last_error;

// A row for each kind of error, in their order.
constexpr struct {
  ferry_status status;
  std::int32_t record;
} kKinds[] = {{FERRY_OK, FERRY_RECORD_NONE},           {FERRY_USAGE, FERRY_RECORD_NONE},
              {FERRY_USAGE, FERRY_RECORD_BAD_ID},      {FERRY_USAGE, FERRY_RECORD_BAD_SOURCE},
              {FERRY_OVERFLOW, FERRY_RECORD_OVERFLOW}, {FERRY_TIMEOUT, FERRY_RECORD_WAIT},
              {FERRY_PEER_LOST, FERRY_RECORD_WAIT},    {FERRY_SYSTEM, FERRY_RECORD_SYSTEM},
              {FERRY_UNSUPPORTED, FERRY_RECORD_NONE},  {FERRY_OTHER, FERRY_RECORD_NONE}};
static_assert(std::size(kKinds) == static_cast<std::size_t>(Kind::other) + 1);

ferry_status status_of(Kind kind) {
  return kKinds[static_cast<int>(kind)].status;
}

// Exceptions of the standard library for refused requests (memory, files) become system errors.
ErrorRecord system_error_record(const std::exception_ptr& error, int error_number) {
  ErrorRecord record = ErrorRecord::of(error);
  record.kind = Kind::system;
  record.error_number = error_number;
  return record;
}

ErrorRecord current_error() noexcept {
  const std::exception_ptr error = std::current_exception();
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return system_error_record(error, ENOMEM);
  } catch (const std::system_error& refused) {
    return system_error_record(error, refused.code().value());
  } catch (...) {
    return ErrorRecord::of(error);
  }
}

ferry_error_record c_record_of(const ErrorRecord& record) {
  ferry_error_record c{};
  c.status = status_of(record.kind);
  c.kind = kKinds[static_cast<int>(record.kind)].record;
  c.wait = {.operation = static_cast<int32_t>(record.wait.operation),
            .call = record.wait.call,
            .rank = record.wait.rank,
            .peer = record.wait.peer,
            .expected = record.wait.expected,
            .observed = record.wait.observed};
  const BadId& id = record.bad_id;
  c.bad_id = {.rank = id.rank, .token = id.token, .slot = id.slot, .id = id.id, .count = id.count};
  const BadSource& source = record.bad_source;
  c.bad_source = {.rank = source.rank, .index = source.index, .count = source.count};
  const Overflow& overflow = record.overflow;
  c.overflow = {.rank = overflow.rank,
                .capacity = overflow.capacity,
                .needed = overflow.needed,
                .dropped = overflow.dropped};
  c.error_number = record.error_number;
  c.wait_via = record.wait.via;
  c.wait_role = static_cast<int64_t>(record.wait.role);
  c.wait_node = record.wait.node;
  return c;
}

}  // namespace

ferry_status store_current_error() noexcept {
  last_error = current_error();
  return status_of(last_error.kind);
}

std::string describe(ferry_status status, const char* function) {
  return str(function, " returned ", status, " (", ferry_status_name(status), ")");
}

void raise(ferry_status status, const char* function) {
  if (status == FERRY_OK) return;
  if (status_of(last_error.kind) == status) last_error.raise();
  ErrorRecord other;
  for (int kind = 1; other.kind == Kind::none && kind < static_cast<int>(Kind::other); ++kind)
    if (status_of(static_cast<Kind>(kind)) == status) other.kind = static_cast<Kind>(kind);
  other.raise_with(describe(status, function));
}

extern "C" {

const char* ferry_last_error(void) {
  return last_error.text;
}

ferry_status ferry_last_record(ferry_error_record* record) {
  const ferry_error_record last = c_record_of(last_error);  // copied before a failure below can replace it
  return guarded([&] { write_sized(record, last, "ferry_error_record"); });
}

const char* ferry_status_name(ferry_status status) {
  if (status < FERRY_OK || status > FERRY_UNSUPPORTED) return "other";
  return to_string(static_cast<ErrorCode>(status));
}

const char* ferry_version(void) {
  return version().data();
}

}  // extern "C"

}  // namespace ferry::capi
