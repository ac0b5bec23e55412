# ferry_fuzzer(NAME name SOURCES file... SEEDS file LIBRARY_SOURCES pattern)
#
# Builds a libFuzzer program and registers it with ctest under the label `fuzz`. Does nothing without fuzzing
# instrumentation (preset `fuzz`). SEEDS is the source of a program that writes the initial corpus into the folder given
# as its argument. The fuzzer adds inputs that reach new code to that folder, which is in the build tree.
# LIBRARY_SOURCES is a regular expression: of the libraries' sources, only those whose paths below src/ match are compiled.
set(FERRY_FUZZ_SECONDS 30 CACHE STRING "How long ctest lets each fuzzer run")

function(ferry_fuzzer)
  if(NOT FERRY_SANITIZE MATCHES fuzzer)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;SEEDS;LIBRARY_SOURCES" "SOURCES")

  get_target_property(library_sources ferry SOURCES)
  foreach(name IN LISTS FERRY_SATELLITES)
    get_target_property(sources ferry-${name} SOURCES)
    list(APPEND library_sources ${sources})
  endforeach()
  set(chosen)
  foreach(source IN LISTS library_sources)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/src)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/src OUTPUT_VARIABLE path)
    if(path MATCHES "^(${arg_LIBRARY_SOURCES})$")
      list(APPEND chosen ${source})
    endif()
  endforeach()
  add_library(${arg_NAME}_library STATIC ${chosen})
  target_compile_definitions(${arg_NAME}_library PRIVATE FERRY_VERSION="${PROJECT_VERSION}") # base/types.cpp
  target_include_directories(${arg_NAME}_library PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)

  add_executable(${arg_NAME} ${arg_SOURCES})
  target_link_options(${arg_NAME} PRIVATE -fsanitize=fuzzer)
  add_executable(${arg_NAME}_seeds ${arg_SEEDS})
  foreach(program IN ITEMS ${arg_NAME} ${arg_NAME}_seeds)
    target_include_directories(${program} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
    target_link_libraries(${program} PRIVATE ${arg_NAME}_library)
  endforeach()
  add_dependencies(fuzzers ${arg_NAME})

  set(corpus ${CMAKE_CURRENT_BINARY_DIR}/${arg_NAME}_corpus)
  add_custom_command(TARGET ${arg_NAME} POST_BUILD COMMAND ${arg_NAME}_seeds ${corpus})
  add_dependencies(${arg_NAME} ${arg_NAME}_seeds)
  add_test(NAME ${arg_NAME} COMMAND ${arg_NAME} -max_total_time=${FERRY_FUZZ_SECONDS} -timeout=10 -rss_limit_mb=2048
                                    ${corpus})
  set_tests_properties(${arg_NAME} PROPERTIES LABELS fuzz)
endfunction()
