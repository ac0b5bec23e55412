# The kernels are compiled once for each instruction set and chosen at run time. Their loops are written for the
# vectoriser of -O3, which a debug build needs too. It may compute both sides of a choice (-fno-trapping-math): that
# touches floating-point exception flags, no value. TARGET_DIRECTORY: the target stands in the folder above, and options
# set only here would not reach it.
set(kernel_options -fno-trapping-math)
if(NOT FERRY_SANITIZE) # whose checks keep loops from being vectorised
  list(APPEND kernel_options -O3)
endif()
target_sources(ferry PRIVATE kernels.cpp kernels/baseline.cpp)
set_source_files_properties(kernels/baseline.cpp TARGET_DIRECTORY ferry PROPERTIES COMPILE_OPTIONS "${kernel_options}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  target_sources(ferry PRIVATE kernels/avx2.cpp kernels/avx512.cpp)
  set(avx2 -mavx2 -mfma)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  set_source_files_properties(kernels/avx2.cpp TARGET_DIRECTORY ferry PROPERTIES COMPILE_OPTIONS "${kernel_options};${avx2}")
  set_source_files_properties(kernels/avx512.cpp TARGET_DIRECTORY ferry PROPERTIES COMPILE_OPTIONS "${kernel_options};${avx512}")
endif()
