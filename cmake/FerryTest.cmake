# ferry_precompiled_headers(target): the target's C++ sources read headers that most tests include from one precompiled file.
# Its sources must be compiled with the options of this folder and link GoogleTest. Without FERRY_UNITY it does nothing, so
# that a build remains that finds missing #include lines.
if(FERRY_UNITY)
  file(CONFIGURE OUTPUT precompiled.cpp CONTENT "")
  add_library(test_headers OBJECT ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cpp)
  target_link_libraries(test_headers PRIVATE ferry::ferry GTest::gtest)
  target_precompile_headers(
    test_headers
    PRIVATE
    <algorithm>
    <functional>
    <map>
    <optional>
    <random>
    <sstream>
    <string>
    <thread>
    <vector>
    <ferry/ferry.hpp>
    <gtest/gtest.h>)
endif()
function(ferry_precompiled_headers target)
  if(FERRY_UNITY)
    target_precompile_headers(${target} REUSE_FROM test_headers)
  endif()
endfunction()

# ferry_test(NAME name SOURCES file... [LIBS library...] [LABELS label...] [TIMEOUT seconds] [OWN_MAIN] [ALONE])
#
# Builds a GoogleTest program and registers each of its tests with ctest. Sources may include from src/ and tests/.
# TIMEOUT applies to each test, 120 s by default. OWN_MAIN: the sources define main(). ALONE: no other test runs beside these,
# which would miss its deadlines.
# Labels with a meaning: `threads` runs with the thread sanitizer too, `cuda` in the build with the CUDA backend too,
# `slow` is not built with sanitizers, `long` only with `./scripts/test --long`.
function(ferry_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "OWN_MAIN;ALONE" "NAME;TIMEOUT" "SOURCES;LIBS;LABELS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_NAME OR NOT arg_SOURCES)
    message(FATAL_ERROR "ferry_test: NAME and SOURCES are required; unknown arguments: '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  if(FERRY_SANITIZE AND "slow" IN_LIST arg_LABELS)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(arg_OWN_MAIN)
    set(gtest GTest::gtest)
  else()
    set(gtest GTest::gtest_main)
  endif()

  add_executable(${arg_NAME} ${arg_SOURCES})
  target_include_directories(${arg_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${arg_NAME} PRIVATE ferry::ferry ${gtest} ${arg_LIBS})
  ferry_precompiled_headers(${arg_NAME})

  foreach(part threads cuda)
    if(${part} IN_LIST arg_LABELS)
      add_dependencies(tests_${part} ${arg_NAME})
    endif()
  endforeach()

  # Discovered at test time, so that the emulator set in FerryCompile is used for it.
  gtest_discover_tests(${arg_NAME} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 NO_PRETTY_VALUES
                       PROPERTIES TIMEOUT ${arg_TIMEOUT} RUN_SERIAL ${arg_ALONE})

  # gtest_discover_tests would split a list of labels, so a file that ctest reads afterwards sets them.
  set(labels ${CMAKE_CURRENT_BINARY_DIR}/${arg_NAME}_labels.cmake)
  file(WRITE ${labels} "set_tests_properties(\${${arg_NAME}_TESTS} PROPERTIES LABELS \"${arg_LABELS}\")\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels})
endfunction()

# ferry_mpi_test(NAME name RANKS n PROGRAM target [ARGUMENTS argument...] [TIMEOUT seconds] [LOSES_RANKS])
#
# Registers a program, already added, that mpirun starts as n processes. Only where the MPI module is built. TIMEOUT is 60 s
# by default. LOSES_RANKS: a rank ends early and the others shall live. Then Open MPI's mpirun sometimes stays when all ranks
# have ended, so it is killed after 20 s, which the test must survive: it passes by what the ranks have printed.
function(ferry_mpi_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "LOSES_RANKS" "NAME;RANKS;PROGRAM;TIMEOUT" "ARGUMENTS")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  set(patience)
  set(recovery)
  if(arg_LOSES_RANKS)
    set(patience timeout --kill-after 5 20)
    set(recovery ";OMPI_MCA_orte_enable_recovery=1")
  endif()
  find_package(MPI REQUIRED COMPONENTS C)
  add_dependencies(${arg_PROGRAM} ferry_mpi)
  add_test(NAME ${arg_NAME} COMMAND ${patience} ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${arg_RANKS}
                                    $<TARGET_FILE:${arg_PROGRAM}> ${arg_ARGUMENTS})
  # No leak detection: Open MPI leaks. The OMPI variables allow more ranks than processors, which take turns, and running as
  # root.
  set_tests_properties(
    ${arg_NAME}
    PROPERTIES
      TIMEOUT ${arg_TIMEOUT}
      LABELS processes
      ENVIRONMENT
      "OMPI_MCA_rmaps_base_oversubscribe=1;OMPI_MCA_mpi_yield_when_idle=1;OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;ASAN_OPTIONS=detect_leaks=0${recovery}"
  )
endfunction()
