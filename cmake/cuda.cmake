# Finds nvcc by itself. CUDA is enabled as a language only when there are kernels to compile (cuda/*.cu); without them
# the compiler's version is recorded for `kvpool info`, and nothing else depends on it.
#   AUTO  use it where it is found    ON  fail where it is not    OFF  do not look
# Sets KVPOOL_CUDA_COMPILER_VERSION (empty: none found) and KVPOOL_CUDA_ENABLED.
set(KVPOOL_CUDA_COMPILER_VERSION "")
set(KVPOOL_CUDA_ENABLED OFF)
if(NOT KVPOOL_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVPOOL_CUDA is '${KVPOOL_CUDA}'; it can be AUTO, ON or OFF")
endif()
if(KVPOOL_SANITIZE OR KVPOOL_CUDA STREQUAL "OFF")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(KVPOOL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVPOOL_CUDA=ON, but no CUDA compiler was found: set CUDACXX to nvcc, or put nvcc on the PATH")
  endif()
  return()
endif()

file(GLOB_RECURSE KVPOOL_CUDA_SOURCES CONFIGURE_DEPENDS cuda/*.cu)
if(KVPOOL_CUDA_SOURCES)
  enable_language(CUDA)
  set(KVPOOL_CUDA_ENABLED ON)
  set(KVPOOL_CUDA_COMPILER_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
else()
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_output ERROR_QUIET)
  if(nvcc_output MATCHES "release [0-9.]+, V([0-9.]+)")
    set(KVPOOL_CUDA_COMPILER_VERSION "${CMAKE_MATCH_1}")
  endif()
endif()
message(STATUS "CUDA compiler: ${CMAKE_CUDA_COMPILER} ${KVPOOL_CUDA_COMPILER_VERSION}")
