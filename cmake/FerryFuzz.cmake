# ferry_fuzzer(NAME name SOURCES file... CORPUS folder)
#
# Builds a libFuzzer program and registers it with ctest under the label `fuzz`; nothing without fuzzing instrumentation
# (preset `fuzz`). New inputs go to the build tree; one that is worth keeping is copied into CORPUS by hand.
set(FERRY_FUZZ_SECONDS 30 CACHE STRING "How long ctest lets each fuzzer run")

function(ferry_fuzzer)
  if(NOT FERRY_SANITIZE MATCHES fuzzer)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;CORPUS" "SOURCES")

  add_executable(${arg_NAME} ${arg_SOURCES})
  target_include_directories(${arg_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${arg_NAME} PRIVATE ferry::ferry)
  target_link_options(${arg_NAME} PRIVATE -fsanitize=fuzzer)
  add_dependencies(fuzzers ${arg_NAME})

  set(found ${CMAKE_CURRENT_BINARY_DIR}/${arg_NAME}_corpus)
  file(MAKE_DIRECTORY ${found})
  add_test(NAME ${arg_NAME} COMMAND ${arg_NAME} -max_total_time=${FERRY_FUZZ_SECONDS} -timeout=10 -rss_limit_mb=2048
                                    ${found} ${CMAKE_CURRENT_SOURCE_DIR}/${arg_CORPUS})
  set_tests_properties(${arg_NAME} PROPERTIES LABELS fuzz)
endfunction()
