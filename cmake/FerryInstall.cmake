include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ferry)

set(libraries ferry)
if(TARGET ferry_shared)
  list(APPEND libraries ferry_shared)
endif()
install(TARGETS ${libraries} EXPORT ferryTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ferry TYPE INCLUDE FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(EXPORT ferryTargets NAMESPACE ferry:: DESTINATION ${package_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/ferryConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/ferryConfig.cmake ${PROJECT_BINARY_DIR}/ferryConfigVersion.cmake
        DESTINATION ${package_dir})

# pkg-config: `ferry` is the shared library, `ferry-static` the static one with all that it needs.
if(TARGET ferry_shared)
  file(RELATIVE_PATH prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  set(libraries_of_ferry "-L\${libdir} -lferry")
  set(libraries_of_ferry-static "-pthread -ldl -lstdc++ -lm")
  if(FERRY_CUDA)
    string(PREPEND libraries_of_ferry-static "${CUDA_cudart_static_LIBRARY} -lrt ")
  endif()
  string(PREPEND libraries_of_ferry-static "\${libdir}/libferry.a ")
  foreach(package IN ITEMS ferry ferry-static)
    set(package_libraries ${libraries_of_${package}})
    configure_file(${PROJECT_SOURCE_DIR}/cmake/ferry.pc.in ${PROJECT_BINARY_DIR}/${package}.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  endforeach()
endif()
