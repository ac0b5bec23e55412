// Stands in for src/backends/cuda/device/ptx.cuh where a host thread is a block.
#pragma once

#include "protocol/on_host/cuda_on_host.hpp"
#include "protocol/on_host/ptx_functions.hpp"
