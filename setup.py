# SPDX-License-Identifier: Apache-2.0
"""Drives the CMake build and names the wheel. Metadata is in pyproject.toml."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))
import build_backend  # noqa: E402


def version() -> str:
    text = (ROOT / "specfused/_version.py").read_text()
    return re.search(r'__version__ = "(.+)"', text).group(1)


class CMakeBuild(build_ext):
    """Builds both modules with one CMake project, into the package folder."""

    def run(self):
        nvcc = build_backend.check_tools()
        ninja = shutil.which("ninja")  # pip's build environment is another one each time
        torch_dir = build_backend.find_torch()
        out = Path(self.get_ext_fullpath("specfused._C")).resolve().parent
        build = (ROOT / "build" / ("cuda" if nvcc else "cpu")).resolve()
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": ninja,
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": out,
            "SPECFUSED_VERSION": version(),
            "SPECFUSED_TORCH_DIR": torch_dir,
            "SPECFUSED_CUDA": "ON" if nvcc else "OFF",
            "SPECFUSED_ARCHS": os.environ.get("SPECFUSED_ARCHS", "").replace(",", ";"),
            "SPECFUSED_WERROR": os.environ.get("SPECFUSED_WERROR", "OFF"),
            "Python_EXECUTABLE": sys.executable,
        }
        if nvcc:
            options["CMAKE_CUDA_COMPILER"] = nvcc
        try:
            import pybind11

            options["pybind11_DIR"] = pybind11.get_cmake_dir()
            options["SPECFUSED_HOST"] = "ON"  # an earlier build here may have gone without
        except ImportError:  # the package works without _host
            options["SPECFUSED_HOST"] = "OFF"
        defines = [f"-D{name}={value}" for name, value in options.items()]
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 2))
        for command in (
            ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *defines],
            ["cmake", "--build", build, "--parallel", jobs],
        ):
            if subprocess.run(command).returncode:
                raise build_backend.BuildError("specfused: the C++ build failed, see above.")

    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"  # no CPython in it: _C serves every Python

    def get_outputs(self):
        out = Path(self.get_ext_fullpath("specfused._C")).parent
        return [str(p) for p in sorted(out.glob("_*.so"))]


class PlatformWheel(bdist_wheel):
    """py3-none: _C needs no CPython symbol. _host is for the building Python, others go without."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension("specfused._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
