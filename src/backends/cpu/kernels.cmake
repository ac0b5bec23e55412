# The kernels are compiled once for each instruction set; one set is chosen at run time.
# -O3, in debug builds too: the loops rely on its vectoriser.
# -fno-trapping-math: lets the vectoriser compute both sides of a condition, which may raise floating-point exception
#   flags but changes no value.
# TARGET_DIRECTORY: the target is defined in a folder above, and source properties set here would not reach it otherwise.
set(kernel_options -fno-trapping-math)
if(NOT FERRY_SANITIZE) # sanitizer checks prevent vectorisation anyway
  list(APPEND kernel_options -O3)
endif()
target_sources(ferry PRIVATE kernels/kernels.cpp kernels/baseline.cpp)
set_source_files_properties(kernels/baseline.cpp TARGET_DIRECTORY ferry PROPERTIES COMPILE_OPTIONS "${kernel_options}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(avx2 -mavx2 -mfma)
  target_sources(ferry PRIVATE kernels/avx2.cpp)
  set_source_files_properties(kernels/avx2.cpp TARGET_DIRECTORY ferry PROPERTIES COMPILE_OPTIONS "${kernel_options};${avx2}")
endif()
# With sanitizers two sets of one source are enough: these take a minute to compile.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" AND NOT FERRY_SANITIZE)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  target_sources(ferry PRIVATE kernels/avx512.cpp)
  set_source_files_properties(kernels/kernels.cpp TARGET_DIRECTORY ferry PROPERTIES COMPILE_DEFINITIONS FERRY_AVX512=1)
  set_source_files_properties(kernels/avx512.cpp TARGET_DIRECTORY ferry PROPERTIES COMPILE_OPTIONS "${kernel_options};${avx512}")
endif()
