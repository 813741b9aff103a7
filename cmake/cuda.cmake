# Finds nvcc by itself, and compiles the kernels (cuda/*.cu) where there is one.
#   AUTO  use it where it is found    ON  fail where it is not    OFF  do not look
# Sets KVPOOL_CUDA_COMPILER_VERSION (empty: none found), KVPOOL_CUDA_ENABLED, KVPOOL_CUDA_TARGETS (what the kernels are
# compiled for, as `kvpool info` says it), and makes the object library kvpool_kernels.
#
# The CUDA runtime is linked statically and opens libcuda at the first launch, so that one build imports and works on
# machines without a driver. Set CMAKE_CUDA_ARCHITECTURES for other targets: "90-real" alone builds in a third of the time.
set(KVPOOL_CUDA_COMPILER_VERSION "")
set(KVPOOL_CUDA_ENABLED OFF)
set(KVPOOL_CUDA_TARGETS "")
if(NOT KVPOOL_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVPOOL_CUDA is '${KVPOOL_CUDA}'; it can be AUTO, ON or OFF")
endif()
# Sanitizer builds test the references and the kernels' arithmetic on the CPU.
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

# Asked before CMake tries the compiler: an older one does not know the newest of the targets, and that try would fail.
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_output ERROR_QUIET)
string(REGEX MATCH "release ([0-9.]+)" nvcc_release "${nvcc_output}")
if(nvcc_release AND CMAKE_MATCH_1 VERSION_LESS 12.8)
  if(KVPOOL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVPOOL_CUDA=ON, but nvcc ${CMAKE_MATCH_1} is older than 12.8")
  endif()
  message(WARNING "The CUDA kernels are left out: nvcc ${CMAKE_MATCH_1} is older than 12.8")
  return()
endif()

# Machine code for the servers of three generations; from the last one the driver compiles for what is newer.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 100-virtual)
endif()
enable_language(CUDA)
find_package(CUDAToolkit QUIET)
if(NOT TARGET CUDA::cudart_static)
  set(why "the static runtime of nvcc ${CMAKE_CUDA_COMPILER_VERSION} is missing")
  if(KVPOOL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVPOOL_CUDA=ON, but ${why}")
  endif()
  message(WARNING "The CUDA kernels are left out: ${why}")
  return()
endif()
set(KVPOOL_CUDA_ENABLED ON)
set(KVPOOL_CUDA_COMPILER_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
foreach(target ${CMAKE_CUDA_ARCHITECTURES})  # "90" alone is both: machine code, and what the driver compiles
  string(REGEX MATCH "^([0-9]+[a-z]*)(-real|-virtual)?$" target "${target}")
  if(NOT CMAKE_MATCH_2 STREQUAL "-virtual")
    list(APPEND KVPOOL_CUDA_TARGETS sm_${CMAKE_MATCH_1})
  endif()
  if(NOT CMAKE_MATCH_2 STREQUAL "-real")
    list(APPEND KVPOOL_CUDA_TARGETS compute_${CMAKE_MATCH_1})
  endif()
endforeach()
list(JOIN KVPOOL_CUDA_TARGETS " " KVPOOL_CUDA_TARGETS)

file(GLOB KVPOOL_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/../cuda/*.cu)
add_library(kvpool_kernels OBJECT ${KVPOOL_CUDA_SOURCES})
# No optimisation across files: nvcc compiles the host's half by itself, and its objects link with those that have it.
set_target_properties(
  kvpool_kernels PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_VISIBILITY_PRESET hidden
                            INTERPROCEDURAL_OPTIMIZATION OFF)
target_include_directories(kvpool_kernels PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../cuda ${CMAKE_CURRENT_LIST_DIR}/../cpp)
target_compile_options(kvpool_kernels PRIVATE -Xcompiler=-Wall,-Wextra)
if(KVPOOL_WERROR)
  target_compile_options(kvpool_kernels PRIVATE -Xcompiler=-Werror --Werror=all-warnings)
endif()
message(STATUS "CUDA kernels: nvcc ${KVPOOL_CUDA_COMPILER_VERSION} for ${KVPOOL_CUDA_TARGETS}")
