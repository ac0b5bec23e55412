# Run by `cmake --install`: ends it if the prefix is the folder `sources`; `build` is in the message.
file(REAL_PATH "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}" to)
file(REAL_PATH "${sources}" from)
if(to STREQUAL from)
  message(FATAL_ERROR "the prefix ${CMAKE_INSTALL_PREFIX} is the folder of Ferry's sources: choose another one, such as "
                      "cmake --install ${build} --prefix \"$HOME/.local/ferry\"")
endif()
