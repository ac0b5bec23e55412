# Fails if an object compiled for an instruction set that some processors lack holds a weak symbol. The linker keeps one
# of several weak symbols of a name, so other processors could end up calling it. NM: the tool. OBJECTS: the library's
# objects.
foreach(object IN LISTS OBJECTS)
  if(NOT object MATCHES "/kernels/avx[0-9]+\\.cpp")
    continue()
  endif()
  execute_process(COMMAND ${NM} --demangle ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [VWuvw] [^\n]*" shared "${symbols}")
  if(shared)
    message(FATAL_ERROR "${object} has weak symbols, which the linker may use for other processors: ${shared}")
  endif()
  list(APPEND checked ${object})
endforeach()
list(LENGTH checked count)
if(count EQUAL 0)
  message(FATAL_ERROR "none of the library's objects is built for AVX: nothing was checked")
endif()
