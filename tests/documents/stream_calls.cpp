// What README.md's calls on a stream stand in.
#include <ferry/ferry.hpp>

void run_experts(void* rows, const std::int32_t* row_offsets, void* stream);

void layer(ferry::Exchange& exchange, const ferry::Tokens& tokens, const ferry::Ids& ids,
           const float* weights, void* stream, void* outputs, void* result) {
  // BLOCK
}
