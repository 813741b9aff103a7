# KVPOOL_UNITY=ON compiles several files of a target at once, which takes about half as long: for builds from nothing.
# Which files go together is what cmake/unity.py says. A file with compiler flags of its own is compiled alone.
option(KVPOOL_UNITY "Compile several files at once" OFF)
if(KVPOOL_UNITY)
  find_program(KVPOOL_SCRIPTS_PYTHON python3 REQUIRED)
endif()

# Groups of up to `bytes` of source; the files named behind ALONE stay alone.
function(kvpool_unity target bytes)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "INCLUDE;ALONE")
  if(NOT KVPOOL_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  list(REMOVE_ITEM sources ${arg_ALONE})
  execute_process(
    COMMAND ${KVPOOL_SCRIPTS_PYTHON} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/unity.py ${bytes} ${arg_INCLUDE} -- ${sources}
    OUTPUT_VARIABLE lines COMMAND_ERROR_IS_FATAL ANY OUTPUT_STRIP_TRAILING_WHITESPACE)
  string(REGEX REPLACE ";" "|" lines "${lines}")
  string(REGEX REPLACE "\n" ";" lines "${lines}")
  foreach(line ${lines})
    string(REGEX MATCH "^([0-9]+)\\|(.*)$" line "${line}")
    set_source_files_properties("${CMAKE_MATCH_2}" PROPERTIES UNITY_GROUP "group${CMAKE_MATCH_1}")
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # In one file, the compiler takes a source file for a header that shows a type from an unnamed namespace.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()
