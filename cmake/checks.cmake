# SPDX-License-Identifier: Apache-2.0
# Check programs of the CUDA kernels (tests/kernels), without torch, from the library's own objects.
if(NOT SPECFUSED_CUDA)
  message(FATAL_ERROR "specfused: SPECFUSED_CHECKS must come with SPECFUSED_CUDA, got OFF")
endif()
get_target_property(specfused_check_archs specfused_smxx CUDA_ARCHITECTURES)

# specfused_add_check(<name> a.cu ...)
function(specfused_add_check name)
  add_library(${name}_objects OBJECT ${ARGN})
  set_target_properties(${name}_objects PROPERTIES
    CUDA_ARCHITECTURES "${specfused_check_archs}" CUDA_STANDARD 17)
  target_compile_options(${name}_objects PRIVATE
    --threads=2 -Xcompiler=-Wall,-Wextra $<$<BOOL:${SPECFUSED_WERROR}>:-Xcompiler=-Werror>)
  add_executable(${name}
    $<TARGET_OBJECTS:${name}_objects> $<TARGET_OBJECTS:specfused_cpu> ${SPECFUSED_KERNEL_OBJECTS})
  set_target_properties(${name} PROPERTIES
    LINKER_LANGUAGE CXX RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
  specfused_link_cudart(${name})
endfunction()

specfused_add_check(attn_check
  tests/kernels/attn_case.cu tests/kernels/attn_check.cu tests/kernels/attn_compare.cu
  tests/kernels/attn_delays.cu tests/kernels/attn_probe.cu)
specfused_add_check(commit_check
  tests/kernels/commit_bench.cu tests/kernels/commit_case.cu tests/kernels/commit_check.cu)
