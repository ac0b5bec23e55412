# Compiler options of all targets. They have directory scope: a project that adds Ferry as a subdirectory keeps its own.

set(CMAKE_C_STANDARD 11)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# Results are defined to the bit: the compiler must not contract a multiply and an add to an fma.
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-ffp-contract=off>")

if(FERRY_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20) # CMake 3.25 has no C++20 option for CUDA
  set(CMAKE_CUDA_EXTENSIONS OFF)
  string(APPEND CMAKE_CUDA_FLAGS " --fmad=false --Werror=all-warnings -Xcompiler=-Wall,-Wextra,-ffp-contract=off")
endif()

if(FERRY_SANITIZE)
  add_compile_options(-fsanitize=${FERRY_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  # The sanitizers' own dlopen() calls the system's: of a program's run paths only the old kind holds for such callers too.
  add_link_options(-fsanitize=${FERRY_SANITIZE} LINKER:--disable-new-dtags)
  # GCC documents false positives of this warning in instrumented code.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()

if(FERRY_SANITIZE MATCHES thread)
  # The thread sanitizer's shadow memory collides with addresses of full randomisation: run tests without it.
  find_program(FERRY_SETARCH setarch REQUIRED)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${FERRY_SETARCH} -R)
endif()

# Calls find_package(CUDAToolkit); needed in every folder that uses its targets. The module of CMake 3.25 sets a property of
# a target that current toolkits no longer have, but only if the project requires 3.25 or newer.
macro(ferry_find_cuda_toolkit)
  set(ferry_minimum ${CMAKE_MINIMUM_REQUIRED_VERSION})
  set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
  find_package(CUDAToolkit REQUIRED)
  set(CMAKE_MINIMUM_REQUIRED_VERSION ${ferry_minimum})
endmacro()
