# Finds NVSHMEM 3, of a toolkit or of the Python package nvidia-nvshmem-cu13. Defines NVSHMEM_FOUND and the target
# NVSHMEM::nvshmem: the library of the host, and that of device code, which needs CUDA_SEPARABLE_COMPILATION.
#
# Looks in NVSHMEM_ROOT (variable or environment variable), beside the CUDA toolkit, in .venv, and where python3 has the package.
file(GLOB nvshmem_folders ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/nvshmem)
if(CUDAToolkit_BIN_DIR)
  list(PREPEND nvshmem_folders ${CUDAToolkit_BIN_DIR}/../../nvshmem ${CUDAToolkit_BIN_DIR}/..)
endif()
execute_process(
  COMMAND python3 -c "import importlib.util as u; print(*u.find_spec('nvidia.nvshmem').submodule_search_locations, sep=';')"
  OUTPUT_VARIABLE nvshmem_of_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
list(APPEND nvshmem_folders ${nvshmem_of_python})

find_path(NVSHMEM_INCLUDE_DIR nvshmem.h HINTS ${nvshmem_folders} PATH_SUFFIXES include)
find_library(NVSHMEM_HOST_LIBRARY NAMES libnvshmem_host.so.3 nvshmem_host HINTS ${nvshmem_folders} PATH_SUFFIXES lib)
find_library(NVSHMEM_DEVICE_LIBRARY NAMES libnvshmem_device.a HINTS ${nvshmem_folders} PATH_SUFFIXES lib)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NVSHMEM REQUIRED_VARS NVSHMEM_HOST_LIBRARY NVSHMEM_DEVICE_LIBRARY NVSHMEM_INCLUDE_DIR)
mark_as_advanced(NVSHMEM_HOST_LIBRARY NVSHMEM_DEVICE_LIBRARY NVSHMEM_INCLUDE_DIR)

if(NVSHMEM_FOUND AND NOT TARGET NVSHMEM::nvshmem)
  add_library(NVSHMEM::nvshmem INTERFACE IMPORTED)
  set_target_properties(
    NVSHMEM::nvshmem
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${NVSHMEM_INCLUDE_DIR}
               INTERFACE_LINK_LIBRARIES "${NVSHMEM_DEVICE_LIBRARY};${NVSHMEM_HOST_LIBRARY}")
endif()
