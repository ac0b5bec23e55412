# How everything here is compiled. Directory scope: a project that adds Ferry as a subdirectory keeps its own flags.

set(CMAKE_C_STANDARD 11)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

add_compile_options(-Wall -Wextra -Wpedantic -Wshadow)

# Results are defined to the bit: a multiply and an add become one fma only where the source says std::fma.
add_compile_options(-ffp-contract=off)

if(FERRY_SANITIZE)
  add_compile_options(-fsanitize=${FERRY_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${FERRY_SANITIZE})
endif()

if(FERRY_SANITIZE MATCHES thread)
  # The thread sanitizer's shadow memory collides with addresses that wide randomisation hands out.
  find_program(FERRY_SETARCH setarch REQUIRED)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${FERRY_SETARCH} -R)
endif()
