include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ferry)

set(libraries ferry)
foreach(name IN LISTS FERRY_SATELLITES)
  list(APPEND libraries ferry-${name})
endforeach()
if(TARGET ferry_shared)
  list(APPEND libraries ferry_shared)
  foreach(name IN LISTS FERRY_SATELLITES)
    list(APPEND libraries ferry-${name}-shared)
  endforeach()
endif()
install(TARGETS ${libraries} EXPORT ferryTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ferry TYPE INCLUDE FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp"
                                                                                  PATTERN "*.cuh")
install(EXPORT ferryTargets NAMESPACE ferry:: DESTINATION ${package_dir})

# Programs that link the static library need the CUDA runtime, and no toolkit: its licence lets it be passed on.
if(FERRY_CUDA)
  install(FILES ${CUDA_cudart_static_LIBRARY} DESTINATION ${CMAKE_INSTALL_LIBDIR}/ferry)
endif()

write_basic_package_version_file(${PROJECT_BINARY_DIR}/ferryConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/ferryConfig.cmake ${PROJECT_BINARY_DIR}/ferryConfigVersion.cmake
        DESTINATION ${package_dir})

# The documents with the examples that they quote, and the links between them as in the repository.
file(GLOB pages CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/*.md)
macro(ferry_install_documents folder)
  install(FILES ${pages} ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${folder} ${ARGN})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs ${PROJECT_SOURCE_DIR}/examples DESTINATION ${folder} ${ARGN}
          PATTERN CMakeLists.txt EXCLUDE PATTERN compare.cmake EXCLUDE PATTERN __pycache__ EXCLUDE
          PATTERN docs/index.md EXCLUDE PATTERN docs/site EXCLUDE)
endmacro()
ferry_install_documents(${CMAKE_INSTALL_DATAROOTDIR}/doc/ferry)
ferry_install_documents(ferry/documents COMPONENT python EXCLUDE_FROM_ALL)

# pkg-config: `ferry` is the shared library, `ferry-static` the static one with all that it needs. In a program that links
# everything statically (cc -static, pkg-config --static), `ferry` is the static one too. So are `ferry-max` and `ferry-max-static`,
# and those of the other libraries above Ferry.
if(TARGET ferry_shared)
  file(RELATIVE_PATH prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  set(needed "-pthread -ldl -lstdc++ -lm")
  if(FERRY_CUDA)
    string(PREPEND needed "-L\${libdir}/ferry -l:libcudart_static.a -lrt ")
  endif()
  function(ferry_install_package package libraries)
    configure_file(${PROJECT_SOURCE_DIR}/cmake/ferry.pc.in ${PROJECT_BINARY_DIR}/${package}.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  endfunction()
  # Static libraries not as paths: pkg-config would not quote their spaces.
  ferry_install_package(ferry "-L\${libdir} -lferry\nLibs.private: ${needed}")
  ferry_install_package(ferry-static "-L\${libdir} -l:libferry.a ${needed}")
  foreach(name IN LISTS FERRY_SATELLITES)
    ferry_install_package(ferry-${name} "-L\${libdir} -lferry_${name}\nRequires: ferry")
    ferry_install_package(ferry-${name}-static "-L\${libdir} -l:libferry_${name}.a\nRequires: ferry-static")
  endforeach()
endif()
