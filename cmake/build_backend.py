# SPDX-License-Identifier: Apache-2.0
"""In-tree PEP 517 backend: setuptools, plus finding torch and nvcc without downloading either.

`pip install .` builds in an isolated environment that cannot see torch. Listing torch as a build
requirement would download gigabytes of a CUDA build; instead the torch of the environment that pip
installs into is found by asking its interpreter. nvcc is taken from CUDA_HOME, PATH or
/usr/local/cuda; where there is none, pip's CUDA compiler packages become build requirements.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the rest of the PEP 517 interface

# nvidia-cuda-nvcc leaves its partners unpinned; a 13.0 compiler with 13.5 headers does not build.
CUDA_PACKAGES = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]

_TORCH_HEADER = "include/torch/csrc/stable/library.h"
_FIND_TORCH = (
    "import importlib.util as u; s = u.find_spec('torch');"
    "print(s.submodule_search_locations[0] if s else '')"
)


class BuildError(SystemExit):
    """Ends the build with one sentence that says how to go on."""


def wants_cuda() -> bool:
    """SPECFUSED_CUDA=0 builds the CPU implementations only."""
    return os.environ.get("SPECFUSED_CUDA", "1").lower() not in ("0", "off", "no", "false")


def find_nvcc() -> str | None:
    """nvcc of CUDA_HOME, of PATH, of /usr/local/cuda, or of pip's packages, in this order."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(home) / "bin/nvcc"] if home else []
    on_path = shutil.which("nvcc")
    places += [Path(on_path)] if on_path else []
    places += [Path("/usr/local/cuda/bin/nvcc")]
    places += [Path(p) / "nvidia/cu13/bin/nvcc" for p in sys.path if p]
    return next((str(p) for p in places if p.is_file()), None)


def find_torch() -> str:
    """Folder of the torch package that the build compiles against; its headers must be there."""
    named = os.environ.get("SPECFUSED_TORCH_DIR")
    if named and not Path(named, _TORCH_HEADER).is_file():
        raise BuildError(f"specfused: SPECFUSED_TORCH_DIR must name a torch >= 2.10, got {named}.")
    places = [named or ""]
    spec = importlib.util.find_spec("torch")
    places += list(spec.submodule_search_locations) if spec else []
    venv = os.environ.get("VIRTUAL_ENV")
    pythons = [sys.executable] + ([f"{venv}/bin/python"] if venv else [])
    for python in pythons:  # -I: the interpreter's own packages, not the build environment's
        done = subprocess.run([python, "-I", "-c", _FIND_TORCH], capture_output=True, text=True)
        places.append(done.stdout.strip())
    for place in places:
        if place and Path(place, _TORCH_HEADER).is_file():
            return place
    raise BuildError(
        f"specfused: no torch >= 2.10 for {sys.executable}: install one first (pip install torch), "
        "or name its folder in SPECFUSED_TORCH_DIR."
    )


def check_tools() -> str | None:
    """The compilers this build needs; returns nvcc, or None for a CPU-only build."""
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        raise BuildError(
            "specfused: no C++ compiler: install g++ (for example: apt-get install g++), "
            "or name one in CXX."
        )
    if not wants_cuda():
        return None
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            "specfused: no nvcc: set CUDA_HOME, or pip install " + " ".join(CUDA_PACKAGES) + ", "
            "or set SPECFUSED_CUDA=0 for a CPU-only build."
        )
    return nvcc


def _requirements() -> list[str]:
    return CUDA_PACKAGES if wants_cuda() and find_nvcc() is None else []


def get_requires_for_build_wheel(config_settings=None):
    """setuptools' own requirements, and a CUDA compiler where none is installed."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _requirements()


def get_requires_for_build_editable(config_settings=None):
    """The same for an editable install."""
    return build_meta.get_requires_for_build_editable(config_settings) + _requirements()
