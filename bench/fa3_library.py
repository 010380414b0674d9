# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 from a shared library of its own, named by SPECFUSED_FA3_LIBRARY.

What it must export (C; pointers are device pointers unless said otherwise; README.md has the rest):

    const char* fa3_source(void);  // the sources and the compiler, for the JSON file; host memory
    int64_t fa3_workspace_bytes(const int32_t* dims);
    int fa3_metadata(const int32_t* dims, cache_seqlens, cu_seqlens_q, workspace, stream);
    int fa3_forward(const int32_t* dims, out, q, k, v, page_table, cache_seqlens, cu_seqlens_q,
                    workspace, float softmax_scale, int metadata_ready, stream);

`dims` is host memory, see `DIMS`. Both ints are a cudaError_t, and a negative size is a refusal.
"""

import ctypes
import os

import torch

VARIABLE = "SPECFUSED_FA3_LIBRARY"
DIMS = (
    *("bs", "total_q", "max_seqlen_q", "num_heads", "num_heads_k"),
    *("page_size", "num_pages", "max_pages", "num_splits"),  # num_splits 0: automatic
)
PAGE_OF_TMA = 128  # pages of a multiple of it may reach another kernel of FA3
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def present() -> bool:
    return bool(os.environ.get(VARIABLE))


def load() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[VARIABLE])
    library.fa3_source.restype = ctypes.c_char_p
    library.fa3_workspace_bytes.argtypes = [_POINTER]
    library.fa3_workspace_bytes.restype = ctypes.c_int64
    library.fa3_metadata.argtypes = [_POINTER] * 5
    library.fa3_forward.argtypes = [_POINTER] * 9 + [ctypes.c_float, _INT, _POINTER]
    return library


def reason() -> str | None:
    """Why the library cannot be used, None if it can."""
    try:
        load()
    except (OSError, AttributeError) as e:
        return f"{VARIABLE} must name a library that exports the fa3 functions, got {e}"
    return None


def source() -> str | None:
    """What the library says it was made of; None where there is none."""
    return load().fa3_source().decode() if present() and reason() is None else None


class Forward:
    """One shape: causal, bf16, head_dim 128, paged; one workspace for all its launches.

    Args:
        cache_seqlens, cu_seqlens_q: int32 [bs] and [bs + 1]; kept, and read at each launch.
        metadata_once: the tile schedule is made here and kept, as SGLang does it for decode;
            otherwise each launch makes it, as SGLang's verify does.
        dims: the entries of `DIMS` by name.
    """

    def __init__(self, cache_seqlens, cu_seqlens_q, metadata_once: bool, **dims: int):
        self.library = load()
        self.lengths = (cache_seqlens, cu_seqlens_q)
        self.dims = (ctypes.c_int32 * len(DIMS))(*(dims[name] for name in DIMS))
        size = self.library.fa3_workspace_bytes(self.dims)
        if size < 0:
            raise ValueError(f"fa3: dims must be supported by the library, got {dims} ({size})")
        device = cache_seqlens.device
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self.metadata_once = metadata_once
        if metadata_once:
            where = (*self._pointers(self.lengths), self.workspace.data_ptr(), self._stream())
            self._check(self.library.fa3_metadata(self.dims, *where))

    @staticmethod
    def _pointers(tensors) -> list[int]:
        return [t.data_ptr() for t in tensors]

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.workspace.device).cuda_stream

    @staticmethod
    def _check(code: int):
        if code != 0:
            raise RuntimeError(f"fa3: CUDA error {code}")

    def launch(self, out, q, k, v, page_table, scale: float):
        pointers = self._pointers((out, q, k, v, page_table, *self.lengths, self.workspace))
        tail = (scale, int(self.metadata_once), self._stream())
        self._check(self.library.fa3_forward(self.dims, *pointers, *tail))
