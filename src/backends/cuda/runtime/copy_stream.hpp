// The stream of this process for short copies.
#pragma once

#include <cuda_runtime_api.h>

namespace ferry::cuda {

// Of the current device; made at the first call, and kept. It is non-blocking, for any thread, and never
// captured.
//
// One stream for all copies, because CUDA has few hardware queues. A stream that has not been used, or not
// while as many other streams as there are queues, may share a queue with any stream, and then waits for a
// kernel that waits for another rank.
cudaStream_t copy_stream();

}  // namespace ferry::cuda
