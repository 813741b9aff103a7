# KVPOOL_SANITIZE -> KVPOOL_SANITIZE_FLAGS, for the compiler and the linker alike. The first fault ends the program.
# KVPOOL_SANITIZE_TEST_FLAGS follow them for the files of the tests, which compile in half the time without optimisation.
# Three checks of undefined behaviour take a third of the compiler's time and are left out: a null pointer faults when it
# is used, and AddressSanitizer finds accesses outside an object or after its life.
set(KVPOOL_SANITIZE_FLAGS "")
set(KVPOOL_SANITIZE_TEST_FLAGS "")
if(KVPOOL_SANITIZE STREQUAL "address")
  set(KVPOOL_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize=null,vptr,object-size)
elseif(KVPOOL_SANITIZE STREQUAL "thread")
  set(KVPOOL_SANITIZE_FLAGS -fsanitize=thread)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND KVPOOL_SANITIZE_FLAGS -Wno-tsan)  # "atomic_thread_fence is not supported": a limit of GCC's, not a fault
  endif()
elseif(KVPOOL_SANITIZE)
  message(FATAL_ERROR "KVPOOL_SANITIZE is '${KVPOOL_SANITIZE}'; it can be address, thread or empty")
endif()
if(KVPOOL_SANITIZE)
  set(KVPOOL_SANITIZE_TEST_FLAGS -O0)
  if(KVPOOL_SANITIZE STREQUAL "address")
    list(APPEND KVPOOL_SANITIZE_TEST_FLAGS -fno-sanitize=alignment)
  endif()
  # -g1: names and lines, which is what a report shows; whole debugging information takes a third of the build's time.
  list(APPEND KVPOOL_SANITIZE_FLAGS -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1)
endif()
