include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/ferryTargets.cmake)

# The static library needs the CUDA runtime at link time, and brings along the one that it was built with.
set(ferry_cudart ${CMAKE_CURRENT_LIST_DIR}/../../ferry/libcudart_static.a)
if(EXISTS ${ferry_cudart} AND NOT TARGET CUDA::cudart_static)
  add_library(CUDA::cudart_static STATIC IMPORTED)
  set_target_properties(CUDA::cudart_static PROPERTIES IMPORTED_LOCATION ${ferry_cudart}
                                                       INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")
endif()

# A project in C alone links with its C compiler, which does not add the libraries that a static C++ library needs.
get_property(ferry_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
get_target_property(ferry_type ferry::ferry TYPE)
if(ferry_type STREQUAL "STATIC_LIBRARY" AND NOT "CXX" IN_LIST ferry_languages)
  set_property(TARGET ferry::ferry APPEND PROPERTY INTERFACE_LINK_LIBRARIES stdc++ m)
endif()
