# The vendored BLAKE3 (third_party/blake3): one object file an instruction set, of which it takes the best at run time.
# Its objects become part of kvpool_core. No warnings of ours, and no optimisation across files: the flags of one file
# must not reach code that runs on every processor.
set(blake3_folder ${CMAKE_CURRENT_LIST_DIR}/../third_party/blake3)
set(blake3_sources blake3.c blake3_dispatch.c blake3_portable.c)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  list(APPEND blake3_sources blake3_sse2.c blake3_sse41.c blake3_avx2.c blake3_avx512.c)
  set_source_files_properties(${blake3_folder}/blake3_sse2.c PROPERTIES COMPILE_OPTIONS "-msse2")
  set_source_files_properties(${blake3_folder}/blake3_sse41.c PROPERTIES COMPILE_OPTIONS "-msse4.1")
  set_source_files_properties(${blake3_folder}/blake3_avx2.c PROPERTIES COMPILE_OPTIONS "-mavx2")
  set_source_files_properties(${blake3_folder}/blake3_avx512.c PROPERTIES COMPILE_OPTIONS "-mavx512f;-mavx512vl")
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  list(APPEND blake3_sources blake3_neon.c)
endif()
list(TRANSFORM blake3_sources PREPEND ${blake3_folder}/)

add_library(kvpool_blake3 OBJECT ${blake3_sources})
set_target_properties(kvpool_blake3 PROPERTIES INTERPROCEDURAL_OPTIMIZATION OFF)
target_compile_options(kvpool_blake3 PRIVATE ${KVPOOL_SANITIZE_FLAGS})
