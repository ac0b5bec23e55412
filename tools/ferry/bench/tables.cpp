#include "tools/ferry/bench/tables.hpp"

#include "format/parts.hpp"
#include "tools/ferry/bench/check.hpp"

namespace ferry::app {

TokenTables::TokenTables(const BenchPoint& point)
    : point_(point),
      quantised_(point.config.format.kind == FormatKind::fp8_e4m3),
      message_bytes_(wire_bytes(parts_of(point.config.format, point.config.hidden))),
      tokens_(static_cast<std::size_t>(std::int64_t{point.ranks} * point.tokens * point.token_bytes())),
      messages_(quantised_
                    ? static_cast<std::size_t>(std::int64_t{point.ranks} * point.tokens * message_bytes_)
                    : 0) {}

void TokenTables::write(const BenchInputs& inputs, int set, int rank) {
  for (std::int64_t token = 0; token < point_.tokens; ++token) {
    const std::int64_t number = std::int64_t{rank} * point_.tokens + token;
    inputs.write_token(set, rank, token, 1.0f,
                       &tokens_[static_cast<std::size_t>(number * point_.token_bytes())]);
    if (!quantised_) continue;
    write_message(point_, inputs, set, rank, token,
                  &messages_[static_cast<std::size_t>(number * message_bytes_)]);
  }
}

const std::byte* TokenTables::tokens_of(int rank) const {
  return &tokens_[static_cast<std::size_t>(std::int64_t{rank} * point_.tokens * point_.token_bytes())];
}

}  // namespace ferry::app
