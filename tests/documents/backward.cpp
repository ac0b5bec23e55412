// What the backward pass of docs/guides/training.md stands in.
#include <ferry/ferry.hpp>

void experts(const void* rows, void* outputs);
void experts_backward(const void* d_outputs, void* d_rows);

void layer(ferry::Exchange& exchange, const ferry::Tokens& x, const ferry::Ids& ids, const float* weights,
           void* outputs, void* y, const ferry::Tokens& dy, float* d_weights, void* d_rows, void* dx) {
  // BLOCK
}
