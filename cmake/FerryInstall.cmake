include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ferry)

install(TARGETS ferry EXPORT ferryTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ferry TYPE INCLUDE FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(EXPORT ferryTargets NAMESPACE ferry:: DESTINATION ${package_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/ferryConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/ferryConfig.cmake ${PROJECT_BINARY_DIR}/ferryConfigVersion.cmake
        DESTINATION ${package_dir})
