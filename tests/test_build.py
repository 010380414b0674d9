# SPDX-License-Identifier: Apache-2.0
"""The binary loads everywhere it promises to, and a build that cannot work says why."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elf import DT_NEEDED, DT_RPATH, DT_RUNPATH, Elf
from kernel_resources import LIMITS, ask, cuobjdump, main, of_library, resource_usage, table

import specfused
from specfused import ops

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(specfused.__file__).with_name("_C.so")
STREAM = "aoti_torch_get_current_cuda_stream"  # only in CUDA builds of torch: must stay weak
SYSTEM = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+$")
LINKER = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}

needs_source = pytest.mark.skipif(
    not (ROOT / "cmake/build_backend.py").is_file(), reason="no source tree around the tests"
)


@pytest.fixture(scope="module")
def library():
    return Elf(LIBRARY)


def test_undefined_symbols(library):
    """Only torch's stable C functions, and libc, libstdc++, libgcc."""
    strangers = [
        symbol
        for symbol in library.symbols()
        if not symbol.defined
        and not symbol.name.startswith(("aoti_torch_", "torch_"))
        and not SYSTEM.match(symbol.version)
        and not (symbol.weak and symbol.name in LINKER)
    ]
    assert not strangers


def test_no_cpython(library):
    """One binary for every Python: it neither uses the interpreter nor is a module of it."""
    names = [symbol.name for symbol in library.symbols()]
    assert not [name for name in names if re.match(r"_?Py", name)]
    assert not [name for name in names if "c10" in name or "at6Tensor" in name], "unstable ABI"


def test_stream_symbol_is_weak(library):
    found = [symbol for symbol in library.symbols() if symbol.name == STREAM]
    assert all(symbol.weak and not symbol.defined for symbol in found)
    if ops.build_info()["archs"]:
        assert found, "a CUDA build that never asks for the current stream"


def test_only_weak_torch_symbols_may_be_absent(library):
    """Everything else that it needs of torch is in the CPU build of 2.10."""
    cuda_only = [
        symbol.name
        for symbol in library.symbols()
        if not symbol.defined
        and not symbol.weak
        and "cuda" in symbol.name
        and symbol.name != "aoti_torch_device_type_cuda"
    ]
    assert not cuda_only


def test_needed_libraries(library):
    """libtorch.so must be there: it brings libtorch_cuda into the scope of the weak symbol."""
    needed = library.dynamic(DT_NEEDED)
    assert "libtorch.so" in needed
    allowed = r"lib(torch|torch_cpu|stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so|ld-linux"
    assert not [name for name in needed if not re.match(allowed, name)]


def test_no_build_path(library):
    assert library.dynamic(DT_RPATH) == library.dynamic(DT_RUNPATH) == []


def test_symbol_versions(library, record_property):
    """Reported, since they decide on which Linux a wheel can be installed."""
    for family in ("GLIBC", "GLIBCXX"):
        versions = [
            tuple(map(int, symbol.version.split("_")[1].split(".")))
            for symbol in library.symbols()
            if symbol.version.startswith(f"{family}_")
        ]
        highest = ".".join(map(str, max(versions)))
        record_property(family, highest)
        print(f"{family}_{highest}")


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm to compare with")
def test_reader_agrees_with_nm(library):
    done = subprocess.run(["nm", "-D", LIBRARY], capture_output=True, text=True, check=True)
    theirs = {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}
    assert {symbol.name for symbol in library.symbols()} == theirs


def run_python(code, *, python=sys.executable, cwd=None, **env):
    """A fresh interpreter; an environment variable that is None is unset."""
    full = {**os.environ, **{k: v for k, v in env.items() if v is not None}}
    for name in (name for name, value in env.items() if value is None):
        full.pop(name, None)
    return subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=cwd, env=full)


@pytest.fixture
def archs():
    """GPU architectures of this build; skips without any, or without cuobjdump."""
    found = {a.split(":")[1] for a in ops.build_info()["archs"] if ":sm_" in a}
    if not found:
        pytest.skip("this build has no CUDA kernels")
    if cuobjdump() is None:
        pytest.skip("no cuobjdump: neither a CUDA toolkit nor triton is here")
    return found


def test_no_kernel_uses_local_memory(archs):
    """No spills and no stack frame, in any kernel of any architecture of this build."""
    usage = resource_usage(ask(cuobjdump(), "-res-usage", LIBRARY))
    assert set(usage) == archs
    for arch, kernels in usage.items():
        assert len(kernels) > 20, arch
        spilling = {k: u for k, u in kernels.items() if u["STACK"] or u["LOCAL"]}
        assert not spilling, f"{arch}: {sorted(spilling)}"


def test_ctas_fit_as_planned(archs, host, capsys):
    """Registers of sm_90a leave room for the CTAs per SM that csrc/attn_select.h plans there."""
    with pytest.raises(SystemExit, match="--arch must be one of .*, got sm_70"):
        of_library(LIBRARY, "sm_70", host.select_attn)
    arch = "sm_90a"
    if arch not in archs:
        pytest.skip(f"this build is not for {arch}")
    found = of_library(LIBRARY, arch, host.select_attn)
    assert {k.name for k in found} >= {"commit", "compact", "sampled_commit"}
    assert {k.rows for k in found if "wgmma" in k.name} == {64, 128, 256}
    for k in found:
        if not k.head_dim:
            assert k.ctas_per_sm > 1, k
            continue
        plan = host.select_attn(k.rows, k.head_dim, *LIMITS[arch][:3], "wgmma" in k.name)
        assert plan["row_tile"] == k.rows and k.ctas_per_sm >= plan["ctas_per_sm"] > 0, k
    assert main([str(LIBRARY)]) == 0
    assert capsys.readouterr().out == table(found) + "\n"


def test_host_is_optional(tmp_path):
    code = """
import sys
sys.modules["specfused._host"] = None  # import raises ImportError
import specfused, torch
plan = torch.zeros(specfused.ops.plan_numel(1, 1), dtype=torch.int32)
specfused.ops.plan(torch.tensor([64]), 1, 1, plan)
print(plan.tolist())
"""
    done = run_python(code, cwd=tmp_path)
    assert done.stdout.strip() == "[2, 2, 1, 1, 0, 2, 0]", done.stderr


def test_import_does_nothing_else(tmp_path):
    """No GPU is touched, and SGLang is not imported, until somebody asks."""
    code = """
import sys, torch
before = set(sys.modules)
import specfused
assert not torch.cuda.is_initialized()
print(sorted(name for name in set(sys.modules) - before if not name.startswith("torch")))
"""
    done = run_python(code, cwd=tmp_path)
    parts = ("", "._load", "._sizes", "._version", ".ops")
    want = ["specfused" + part for part in parts]
    assert done.stdout.strip() == str(want), done.stderr


def test_missing_library_says_so(tmp_path):
    """A source tree that was not built: what to do, in one ImportError."""
    shutil.copytree(
        Path(specfused.__file__).parent,
        tmp_path / "specfused",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    done = run_python("import specfused", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: specfused: _C.so is missing beside")
    assert "pip install ." in last


@needs_source
def test_names_of_file_and_wheel():
    code = """
import sys
from setuptools import Distribution
from distutils.core import run_setup
dist = run_setup("setup.py", script_args=["--quiet"], stop_after="config")
print(dist.get_command_obj("build_ext").get_ext_filename("specfused._C"))
wheel = dist.get_command_obj("bdist_wheel")
wheel.ensure_finalized()
print(*wheel.get_tag())
"""
    done = run_python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    name, tag = done.stdout.strip().splitlines()[-2:]
    assert name == "specfused/_C.so" and LIBRARY.name == "_C.so"
    assert re.fullmatch(r"py3 none linux_\w+", tag)


BACKEND = f"import sys; sys.path.insert(0, {str(ROOT / 'cmake')!r}); import build_backend as b; "
# A toolkit in the usual place would answer for the one that a test takes away.
NO_TOOLKIT = """
from pathlib import Path
found = Path.is_file
Path.is_file = lambda self: "nvcc" not in self.name and found(self)
"""


@pytest.fixture
def tools(tmp_path):
    """A PATH that holds g++ alone."""
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin/g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    return str(tmp_path / "bin")


def sentence(done):
    """What the build says when it gives up: one line, no traceback."""
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("specfused: ") and lines[0].endswith(".")
    return lines[0]


@needs_source
def test_no_compiler(tmp_path):
    done = run_python(BACKEND + "b.check_tools()", PATH=str(tmp_path), CXX=None)
    assert sentence(done) == (
        "specfused: no C++ compiler: install g++ (for example: apt-get install g++), "
        "or name one in CXX."
    )


@needs_source
def test_no_nvcc(tools):
    env = {"PATH": tools, "CXX": None, "CUDA_HOME": None, "CUDA_PATH": None, "SPECFUSED_CUDA": None}
    done = run_python(BACKEND + NO_TOOLKIT + "b.check_tools()", **env)
    said = sentence(done)
    assert said.startswith("specfused: no nvcc: set CUDA_HOME, or pip install nvidia-cuda-nvcc==")
    assert said.endswith("or set SPECFUSED_CUDA=0 for a CPU-only build.")
    # pip then brings the compiler; a CPU-only build asks for nothing.
    ask = "print(b.get_requires_for_build_wheel(), b.get_requires_for_build_editable())"
    done = run_python(BACKEND + NO_TOOLKIT + ask, **env)
    assert done.stdout.count("nvidia-cuda-nvcc==") == 2, done.stderr
    env["SPECFUSED_CUDA"] = "0"
    done = run_python(BACKEND + NO_TOOLKIT + "print(b.check_tools());" + ask, **env)
    assert done.stdout.startswith("None\n") and "nvidia" not in done.stdout, done.stderr


@needs_source
def test_order_of_nvcc(tools, tmp_path):
    """CUDA_HOME before PATH; a CUDA_HOME without nvcc does not hide the one on PATH."""
    for folder in (tmp_path / "home/bin", Path(tools)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "nvcc").write_text("#!/bin/sh\n")
        (folder / "nvcc").chmod(0o755)
    for home, want in [("home", tmp_path / "home/bin/nvcc"), ("none", Path(tools) / "nvcc")]:
        env = {"PATH": tools, "CUDA_HOME": str(tmp_path / home)}
        done = run_python(BACKEND + "print(b.find_nvcc())", **env)
        assert done.stdout.strip() == str(want), done.stderr


@needs_source
def test_no_torch(tmp_path):
    """In an environment that holds setuptools and no torch; then with a folder named by hand."""
    import setuptools

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    site = Path(setuptools.__file__).parents[1]
    for package in ("setuptools", "_distutils_hack"):
        (packages / package).symlink_to(site / package)
    env = {
        "python": tmp_path / "venv/bin/python",
        "PYTHONPATH": str(packages),
        "VIRTUAL_ENV": None,
        "SPECFUSED_TORCH_DIR": None,
    }
    said = sentence(run_python(BACKEND + "b.find_torch()", **env))
    assert said.startswith("specfused: no torch >= 2.10 for ")
    assert said.endswith(
        ": install one first (pip install torch), or name its folder in SPECFUSED_TORCH_DIR."
    )
    header = tmp_path / "torch/include/torch/csrc/stable/library.h"
    env["SPECFUSED_TORCH_DIR"] = str(tmp_path / "torch")
    said = sentence(run_python(BACKEND + "b.find_torch()", **env))
    named = env["SPECFUSED_TORCH_DIR"]
    assert said == f"specfused: SPECFUSED_TORCH_DIR must name a torch >= 2.10, got {named}."
    header.parent.mkdir(parents=True)
    header.touch()
    done = run_python(BACKEND + "print(b.find_torch())", **env)
    assert done.stdout.strip() == str(tmp_path / "torch")
