# SPDX-License-Identifier: Apache-2.0
# nvcc of a CUDA toolkit, or of pip's compiler packages (no lib64, no unversioned libraries).
# The toolkit's root is asked of nvcc itself, which may be a wrapper script or a link.
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --dryrun -x cu /dev/null
  OUTPUT_VARIABLE specfused_dryrun ERROR_VARIABLE specfused_dryrun)
if(NOT specfused_dryrun MATCHES "TOP=([^\n]+)")
  message(FATAL_ERROR "specfused: ${CMAKE_CUDA_COMPILER} does not answer as nvcc does")
endif()
get_filename_component(specfused_cuda_root "${CMAKE_MATCH_1}" ABSOLUTE)
find_library(SPECFUSED_CUDART NAMES cudart_static
  PATHS ${specfused_cuda_root}/lib64 ${specfused_cuda_root}/lib
        ${specfused_cuda_root}/targets/x86_64-linux/lib ${specfused_cuda_root}/targets/sbsa-linux/lib
  NO_DEFAULT_PATH REQUIRED)
get_filename_component(specfused_cudart_dir "${SPECFUSED_CUDART}" DIRECTORY)
# CMake's compiler check links a program: let it find the runtime of pip's packages.
set(ENV{LIBRARY_PATH} "${specfused_cudart_dir}:$ENV{LIBRARY_PATH}")
set(CMAKE_CUDA_FLAGS_INIT "-L${specfused_cudart_dir}")
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # each folder names its own
endif()
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
enable_language(CUDA)

function(specfused_link_cudart target)
  target_link_libraries(${target} PRIVATE ${SPECFUSED_CUDART} pthread dl rt)
endfunction()

set(SPECFUSED_SMXX_SOURCES
  csrc/smxx/attn/dispatch.cu
  csrc/smxx/attn/float32.cu
  csrc/smxx/attn/instantiations/decode_bf16_d128.cu
  csrc/smxx/attn/instantiations/decode_bf16_d256.cu
  csrc/smxx/attn/instantiations/decode_bf16_d64.cu
  csrc/smxx/attn/instantiations/decode_fp16_d128.cu
  csrc/smxx/attn/instantiations/decode_fp16_d256.cu
  csrc/smxx/attn/instantiations/decode_fp16_d64.cu
  csrc/smxx/attn/instantiations/verify_bf16_d128.cu
  csrc/smxx/attn/instantiations/verify_bf16_d256.cu
  csrc/smxx/attn/instantiations/verify_bf16_d64.cu
  csrc/smxx/attn/instantiations/verify_fp16_d128.cu
  csrc/smxx/attn/instantiations/verify_fp16_d256.cu
  csrc/smxx/attn/instantiations/verify_fp16_d64.cu
  csrc/smxx/bench.cu
  csrc/smxx/commit/commit.cu
  csrc/smxx/commit/sample.cu
  csrc/smxx/device.cu
  csrc/smxx/draft/topk.cu
  csrc/smxx/plan.cu
  csrc/smxx/tree_words.cu)

set(SPECFUSED_SM90_SOURCES
  csrc/sm90/attn/instantiations/verify_bf16_d128.cu
  csrc/sm90/attn/instantiations/verify_bf16_d256.cu
  csrc/sm90/attn/instantiations/verify_bf16_d64.cu
  csrc/sm90/attn/instantiations/verify_fp16_d128.cu
  csrc/sm90/attn/instantiations/verify_fp16_d256.cu
  csrc/sm90/attn/instantiations/verify_fp16_d64.cu)
