# SPDX-License-Identifier: Apache-2.0
# One object library per kernel folder, each compiled for its own architectures only.
set(SPECFUSED_KERNEL_OBJECTS "")
set(SPECFUSED_BUILT_ARCHS "")

set(SPECFUSED_KNOWN_ARCHS 80 89 90a 100a 103 120)
foreach(arch ${SPECFUSED_ARCHS})
  if(NOT arch IN_LIST SPECFUSED_KNOWN_ARCHS)
    message(FATAL_ERROR "specfused: SPECFUSED_ARCHS must name some of ${SPECFUSED_KNOWN_ARCHS}, "
                        "got ${arch}")
  endif()
endforeach()

# specfused_add_kernels(<folder> ARCHS 90a ... [PTX 80] SOURCES a.cu ...)
function(specfused_add_kernels folder)
  cmake_parse_arguments(ARG "" "PTX" "ARCHS;SOURCES" ${ARGN})
  set(wanted "")
  set(built ${SPECFUSED_BUILT_ARCHS})
  foreach(arch ${ARG_ARCHS})
    if(NOT SPECFUSED_ARCHS OR arch IN_LIST SPECFUSED_ARCHS)
      list(APPEND wanted ${arch}-real)
      list(APPEND built ${folder}:sm_${arch})
    endif()
  endforeach()
  if(ARG_PTX AND NOT SPECFUSED_ARCHS)
    list(APPEND wanted ${ARG_PTX}-virtual)
    list(APPEND built ${folder}:compute_${ARG_PTX})
  endif()
  if(NOT wanted)
    message(FATAL_ERROR "specfused: SPECFUSED_ARCHS must name some of ${ARG_ARCHS}, "
                        "got ${SPECFUSED_ARCHS}")
  endif()
  add_library(specfused_${folder} OBJECT ${ARG_SOURCES})
  set_target_properties(specfused_${folder} PROPERTIES
    CUDA_ARCHITECTURES "${wanted}" CUDA_STANDARD 17 CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(specfused_${folder} PRIVATE
    -Xptxas=--warn-on-spills,--warn-on-local-memory-usage --threads=2)
  set(SPECFUSED_KERNEL_OBJECTS
    ${SPECFUSED_KERNEL_OBJECTS} $<TARGET_OBJECTS:specfused_${folder}> PARENT_SCOPE)
  set(SPECFUSED_BUILT_ARCHS ${built} PARENT_SCOPE)
endfunction()
