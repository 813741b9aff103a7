# Compiles the kernels of attention for GPUs (cuda/attention) where KVPOOL_TRITON_PYTHON names a Python that has Triton, of
# the version in cuda/attention/variants.py. Needs no nvcc and no GPU: Triton brings an assembler. Without it kvpool has no
# such kernels, and nothing else is missing; at run time Triton is not needed either way.
# Set KVPOOL_TRITON_TARGETS, as "90" or "80,90", to compile for fewer GPUs: ten seconds for each.
if(NOT KVPOOL_TRITON_PYTHON)
  return()
endif()

set(KVPOOL_TRITON_TARGETS "80,90,100" CACHE STRING "Targets of the kernels of attention")
set(kvpool_attention_kernels ${CMAKE_CURRENT_LIST_DIR}/../cuda/attention)
set(kvpool_cubins ${CMAKE_BINARY_DIR}/cubins)
execute_process(
  COMMAND ${KVPOOL_TRITON_PYTHON} -c "import sys, variants, triton; sys.exit(triton.__version__ != variants.TRITON)"
  WORKING_DIRECTORY ${kvpool_attention_kernels} RESULT_VARIABLE no_triton OUTPUT_QUIET ERROR_VARIABLE why)
if(no_triton)
  message(FATAL_ERROR "KVPOOL_TRITON_PYTHON is ${KVPOOL_TRITON_PYTHON}, which has not the Triton of "
                      "cuda/attention/variants.py: ${why}")
endif()

add_custom_command(
  OUTPUT ${kvpool_cubins}/cubins.cpp
  COMMAND ${KVPOOL_TRITON_PYTHON} ${kvpool_attention_kernels}/compile.py --out ${kvpool_cubins} --targets
          "${KVPOOL_TRITON_TARGETS}"
  DEPENDS ${kvpool_attention_kernels}/compile.py ${kvpool_attention_kernels}/kernels.py
          ${kvpool_attention_kernels}/variants.py
  COMMENT "Kernels of attention for sm_${KVPOOL_TRITON_TARGETS}" VERBATIM)
target_sources(kvpool_core PRIVATE ${kvpool_cubins}/cubins.cpp)
# The assembler reads the cubins: from the folder where it finds them, and not when whole programs are optimised.
set_source_files_properties(
  ${kvpool_cubins}/cubins.cpp PROPERTIES COMPILE_OPTIONS "-Wa,-I${kvpool_cubins};-fno-lto" SKIP_UNITY_BUILD_INCLUSION ON)
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/../cpp/kvpool/attend_gpu/cubin.cpp
                            PROPERTIES COMPILE_DEFINITIONS KVPOOL_ATTENTION_CUBINS)
