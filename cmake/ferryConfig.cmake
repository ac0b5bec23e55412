include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/ferryTargets.cmake)

# A static library with the CUDA backend needs the CUDA runtime at link time. The shared library has it, and is used on
# machines without a toolkit.
get_target_property(ferry_libraries ferry::ferry INTERFACE_LINK_LIBRARIES)
if(ferry_libraries MATCHES CUDA::)
  # See FerryCompile.cmake: the module of CMake 3.25 fails for projects that require 3.25.
  set(ferry_minimum ${CMAKE_MINIMUM_REQUIRED_VERSION})
  set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    message(STATUS "ferry: no CUDA toolkit is found, which ferry::ferry needs to be linked; ferry::shared does not")
  endif()
  set(CMAKE_MINIMUM_REQUIRED_VERSION ${ferry_minimum})
endif()

# A project in C alone links with its C compiler, which does not add the libraries that a static C++ library needs.
get_property(ferry_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
get_target_property(ferry_type ferry::ferry TYPE)
if(ferry_type STREQUAL "STATIC_LIBRARY" AND NOT "CXX" IN_LIST ferry_languages)
  set_property(TARGET ferry::ferry APPEND PROPERTY INTERFACE_LINK_LIBRARIES stdc++ m)
endif()
