# SPDX-License-Identifier: Apache-2.0
# torch by its stable ABI: headers and two libraries, no find_package(Torch), no ATen. What is
# compiled here against any torch >= 2.10, CPU or CUDA build, loads into every torch >= 2.10.
set(SPECFUSED_TORCH_DIR "" CACHE PATH "The torch package: .../site-packages/torch")
if(NOT EXISTS "${SPECFUSED_TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "specfused: no torch >= 2.10 headers in '${SPECFUSED_TORCH_DIR}': "
                      "pip install torch, then build again.")
endif()

function(specfused_link_torch_stable target)
  target_include_directories(${target} SYSTEM PRIVATE ${SPECFUSED_TORCH_DIR}/include)
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
  target_compile_options(${target} PRIVATE ${SPECFUSED_WARNINGS})
  # Error texts of torch's headers hold __FILE__: no path of the building machine in the binary.
  target_compile_options(${target} PRIVATE
    -fmacro-prefix-map=${CMAKE_SOURCE_DIR}/= -fmacro-prefix-map=${SPECFUSED_TORCH_DIR}/=)
  target_link_directories(${target} PRIVATE ${SPECFUSED_TORCH_DIR}/lib)
  # libtorch.so must stay in DT_NEEDED: it brings libtorch_cuda into the lookup scope where there
  # is one, and with it the weak stream symbol of csrc/torch/stream.h.
  target_link_options(${target} PRIVATE -Wl,--no-as-needed)
  target_link_libraries(${target} PRIVATE torch torch_cpu)
endfunction()
