// The stream of this process for short copies.
#pragma once

#include <cuda_runtime_api.h>

namespace ferry::cuda {

// A stream of the current device, made at the first call and never destroyed. A process must not reset the
// device afterwards. It is non-blocking, for any thread, and never captured.
//
// One stream for all copies, because CUDA has few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), and every
// new stream takes one in turn. The first work of a stream whose queue another one has taken since, or of a
// stream that was never used, may end up behind a kernel that waits for another rank of this process
// (measured: docs/log/2026-11-26-gpu.md).
cudaStream_t copy_stream();

}  // namespace ferry::cuda
