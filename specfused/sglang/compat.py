# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between SGLang versions, and the gate that refuses unknown ones."""

import importlib.metadata
import importlib.util
import inspect
import os

import torch

TESTED = ((0, 5, 17), (0, 5, 23))
ALLOW_UNTESTED = "SPECFUSED_ALLOW_UNTESTED"


class UnsupportedVersion(RuntimeError):
    """The installed SGLang is not one that specfused was tested with."""


def sglang_version() -> str:
    """Version string of the installed SGLang."""
    return importlib.metadata.version("sglang")


def check_version(version: str | None = None) -> None:
    """Refuses SGLang versions that no test covers, unless SPECFUSED_ALLOW_UNTESTED=1."""
    version = version or sglang_version()
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers in TESTED or os.environ.get(ALLOW_UNTESTED) == "1":
        return
    tested = " and ".join(".".join(map(str, v)) for v in TESTED)
    raise UnsupportedVersion(
        f"specfused: SGLang must be {tested} (tested), got {version}; set {ALLOW_UNTESTED}=1 to "
        "try it anyway, or serve with --attention-backend triton"
    )


def spec_settings():
    """The speculative settings of this process (topk, steps, num_draft_tokens, algorithm)."""
    from sglang.srt.runtime_context import get_spec

    return get_spec()


def num_draft_tokens() -> int:
    """W of this server; 0 without speculation."""
    return spec_settings().speculative_num_draft_tokens or 0


def prefill_backend_name(runner) -> str:
    """The attention backend that the command line gives to prefill."""
    try:  # 0.5.23: values are resolved into the runtime context
        from sglang.srt.runtime_context import attention_backends
    except ImportError:
        return runner.server_args.get_attention_backends()[0]
    return attention_backends()[0]


def verify_mask(buffer: torch.Tensor, max_bs: int):
    """A QLEN_ONLY mask that the draft stage fills in place: W x W cells a request, no prefix."""
    from sglang.srt.layers.attention import verify_mask as module

    return module.VerifyMask(buffer=buffer, mode=module.TreeMaskMode.QLEN_ONLY, max_bs=max_bs)


def reads_end_after_replay():
    """0.5.23's name for a backend whose kernels read req_to_token until the replay ends."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.POST_REPLAY


def draft_factory_entry(name: str, create):
    """A backend_map entry of DraftBackendFactory: `create()` in the form this version expects.

    0.5.17's entries return the backend; 0.5.23's return (stamp, backend) and stamp it themselves.
    """
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    parameters = inspect.signature(DraftBackendFactory._create_backend).parameters
    return (lambda: (name, create())) if "stamps_children" in parameters else create


def fa3_present() -> bool:
    """Whether this machine and this sgl_kernel have FA3 (Hopper only)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        return importlib.util.find_spec("sgl_kernel.flash_ops") is not None
    except ImportError:
        return False


def flashinfer_present() -> bool:
    """Whether SGLang would use FlashInfer here."""
    from sglang.srt.utils import is_flashinfer_available

    return torch.cuda.is_available() and is_flashinfer_available()
