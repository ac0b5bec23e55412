// Products of fp32 matrices for the experts: by OpenBLAS where the build has it, otherwise by plain loops.
#pragma once

#include <cstdint>
#include <string>

namespace ferry::app {

// out [rows, columns] = a [rows, inner] b [inner, columns], in the calling thread.
void multiply(const float* a, const float* b, std::int64_t rows, int inner, int columns, float* out);

// No threads of its own, from now on: the ranks are the threads.
void multiply_in_one_thread();

// Who multiplies: the library's name, or what stands in for it.
std::string multiply_name();

// The library's version and how it was built; empty without one.
std::string multiply_about();

}  // namespace ferry::app
