# Adds each named folder that has a CMakeLists.txt, so that a part can be left out of a source tree.
function(ferry_add_subdirectories)
  foreach(folder IN LISTS ARGN)
    if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/CMakeLists.txt)
      add_subdirectory(${folder})
    endif()
  endforeach()
endfunction()
