# The oracle of tests/oracle, an independent implementation of the contract: the tests and `ferry run` compare every backend
# with it.
set(oracle ${PROJECT_SOURCE_DIR}/tests/oracle)
add_library(
  ferry_oracle STATIC
  ${oracle}/combine.cpp
  ${oracle}/dispatch.cpp
  ${oracle}/encode.cpp
  ${oracle}/expected.cpp
  ${oracle}/gather.cpp
  ${oracle}/numbers.cpp
  ${oracle}/indexed_rows.cpp
  ${oracle}/row_positions.cpp)
target_include_directories(ferry_oracle PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_link_libraries(ferry_oracle PUBLIC ferry::ferry)

# Sanitizers would spend most of the time of the contract tests in the oracle's arithmetic, which touches no memory but its
# arguments and its own vectors.
if(FERRY_SANITIZE)
  set_source_files_properties(${oracle}/numbers.cpp PROPERTIES COMPILE_OPTIONS "-O2;-fno-sanitize=all")
  set_source_files_properties(${oracle}/encode.cpp PROPERTIES COMPILE_OPTIONS "-O2;-fno-sanitize=undefined")
endif()
