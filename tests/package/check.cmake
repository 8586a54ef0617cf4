# cmake -DSOURCE=<repo> -DBUILD=<its build folder> -DCOMPILER=<c++> -P check.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}\n${output}")
  endif()
endfunction()

set(work ${BUILD}/package)
file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix)
foreach(how find subdirectory)
  run(${CMAKE_COMMAND} -S ${SOURCE}/tests/package -B ${work}/${how} -DHOW=${how} -DSOURCE=${SOURCE}
      -DCMAKE_PREFIX_PATH=${work}/prefix -DCMAKE_CXX_COMPILER=${COMPILER})
  run(${CMAKE_COMMAND} --build ${work}/${how})
  run(${work}/${how}/consumer)
endforeach()
