# Attention (cpp/kvpool/attention): one source for each instruction set, of which the best is taken at run time, compiled
# with special flags and not optimised across files: those flags must not reach code that runs on every processor.
#
# Products and sums are contracted into one rounding only where the source says so: bits must not depend on the compiler.
# The kernels are optimised in every build but Debug, since without it they are a hundred times slower. With
# AddressSanitizer they are so less, and without checks of undefined behaviour, which would take minutes to compile.
set(kvpool_attention ${CMAKE_CURRENT_LIST_DIR}/../cpp/kvpool/attention)
set(kvpool_attention_flags -ffp-contract=off)
if(KVPOOL_SANITIZE STREQUAL "address")
  list(APPEND kvpool_attention_flags -fno-sanitize=undefined -O1)
elseif(NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
  list(APPEND kvpool_attention_flags -O2)
endif()
if(lto_supported)
  list(APPEND kvpool_attention_flags -fno-lto)
endif()

function(kvpool_attention_source name)
  set_source_files_properties(${kvpool_attention}/${name}.cpp PROPERTIES
                              COMPILE_OPTIONS "${kvpool_attention_flags};${ARGN}")
endfunction()

kvpool_attention_source(merge_rows)
kvpool_attention_source(kernel_portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(kvpool_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    list(APPEND kvpool_avx512 -Wno-maybe-uninitialized -Wno-uninitialized)  # its own header, GCC's bug 105593
  endif()
  kvpool_attention_source(kernel_avx2 -mavx2 -mfma -mf16c)
  kvpool_attention_source(kernel_avx512 ${kvpool_avx512})
  kvpool_attention_source(kernel_avx512bf16 ${kvpool_avx512} -mavx512bf16)
endif()
