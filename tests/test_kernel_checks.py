# SPDX-License-Identifier: Apache-2.0
"""The kernel check programs (tests/kernels) compile; without a GPU they end with a sentence.

Compiling the kernels again would take minutes: they come from the build of the library.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tests/kernels").is_dir() or not (ROOT / "csrc").is_dir():
    pytest.skip("no source tree around the tests", allow_module_level=True)

PROGRAMS = ("attn_check", "commit_check")
NO_GPU = 3  # check.h


def find_tool(name):
    """On PATH, or beside this Python."""
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], sys.exec_prefix + "/bin"]))


def find_nvcc():
    ask = f"import sys; sys.path.insert(0, {str(ROOT / 'cmake')!r}); import build_backend as b; "
    done = subprocess.run(
        [sys.executable, "-c", ask + "print(b.find_nvcc() or '')"], capture_output=True, text=True
    )
    return done.stdout.strip()


def compile_targets(build, targets, **more):
    """With CMake, for sm_90a, into the folder `build`."""
    cmake, ninja, nvcc = find_tool("cmake"), find_tool("ninja"), find_nvcc()
    if not (cmake and ninja and nvcc):
        pytest.skip(f"needs cmake, ninja and nvcc, found {cmake}, {ninja}, {nvcc or None}")
    options = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_CUDA_COMPILER": nvcc,
        "SPECFUSED_CHECKS": "ON",
        "SPECFUSED_MODULES": "OFF",
        "SPECFUSED_ARCHS": "90a",
        "SPECFUSED_WERROR": "ON",
        **more,
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    for command in (
        [cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *defines],
        [cmake, "--build", build, "--parallel", "2", "--target", *targets],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The folder in which what is in tests/kernels was compiled."""
    build = tmp_path_factory.mktemp("checks")
    compile_targets(build, [f"{program}_objects" for program in PROGRAMS])
    return build


@pytest.fixture(scope="module")
def programs(objects):
    """The programs, linked with the kernels that the library's build left."""
    for name in ("cuda", "checks"):
        folder = ROOT / "build" / name / "CMakeFiles"
        kernels = [
            p
            for part in ("smxx", "sm90", "cpu")
            for p in folder.glob(f"specfused_{part}.dir/**/*.o")
        ]
        if kernels:
            break
    else:
        pytest.skip("no compiled kernels in build/cuda or build/checks")
    cache = (objects / "CMakeCache.txt").read_text()
    cudart = re.search(r"^SPECFUSED_CUDART:FILEPATH=(.+)$", cache, re.MULTILINE).group(1)
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.+)$", cache, re.MULTILINE).group(1)
    for program in PROGRAMS:
        own = sorted((objects / f"CMakeFiles/{program}_objects.dir").glob("**/*.o"))
        command = [compiler, *own, *kernels, cudart, "-lpthread", "-ldl", "-lrt"]
        done = subprocess.run(
            [*command, "-o", objects / program], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    return objects


def run(program, *options):
    """On a machine that has a GPU it must not see it."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([program, *options], capture_output=True, text=True, env=env, timeout=60)


def test_they_compile(objects):
    sources = sorted(path.name for path in (ROOT / "tests/kernels").glob("*.cu"))
    found = sorted(path.name.removesuffix(".o") for path in objects.glob("CMakeFiles/*/**/*.cu.o"))
    assert found == sources


def test_random_delays_compile(tmp_path):
    """One kernel with wgmma, one portable; each file with delays has a seed of its own."""
    instance = "attn/instantiations/{}_bf16_d64.cu.o"
    files = ["smxx/device.cu.o", "smxx/" + instance.format("decode")]
    files += ["sm90/" + instance.format("verify")]
    targets = [f"CMakeFiles/specfused_{f.split('/')[0]}.dir/csrc/{f}" for f in files]
    compile_targets(tmp_path, targets, SPECFUSED_RANDOM_DELAY="ON")
    for target in targets:
        assert b"10delay_seedE" in (tmp_path / target).read_bytes(), target


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_gpu_one_sentence(programs, program):
    done = run(programs / program)
    assert done.returncode == NO_GPU and done.stdout == ""
    assert done.stderr.startswith(f"{program}: no GPU to check (")
    assert done.stderr.endswith("); --list works without one.\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_wrong_options(programs, program):
    for options, said in [
        (["--fast"], "options are --quick --sanitize --bench --list --delays SEEDS"),
        (["--seed"], "--seed must have a number >= 0, got nothing."),
        (["--seconds", "soon"], "--seconds must have a number >= 0, got soon."),
        (["--list", "--filter", "none"], "--filter must be in some name, got none."),
        (["--delays", "9"], "--delays must have a build with SPECFUSED_RANDOM_DELAY: make delay-"),
    ]:
        done = run(programs / program, *options)
        assert done.returncode == 2 and done.stderr.startswith(f"{program}: {said}"), options


def test_lists(programs):
    """Each type, head_dim, width and source has its group; the sanitizer's lists have them, too."""

    def names(program, *options):
        done = run(programs / program, "--list", *options)
        assert done.returncode == 0, done.stderr
        listed = done.stdout.splitlines()
        assert len(listed) == len(set(listed))
        return set(listed)

    dims = ("d64", "d128", "d256")
    attn = names("attn_check")
    kinds = [(t, d, w) for t in ("bf16", "fp16", "fp32") for d in dims for w in (1, 4, 16, 64)]
    assert {f"attn/{t}/{d}/w{w}" for t, d, w in kinds} | {"plan", "tree_words"} <= attn
    assert {f"graph/{d}/w{w}" for d in dims for w in (1, 4, 16)} <= attn
    kinds = [(t, d, w) for t in ("bf16", "fp16") for d in dims for w in (16, 32, 64)]
    assert {f"probe/{t}/{d}/w{w}" for t, d, w in kinds} <= attn
    assert names("attn_check", "--quick") < attn
    delayed = names("attn_check", "--delays", "1")
    assert {n.split()[-1] for n in delayed} >= {"ctas0", "ctas1", "store", "window_slots", "pages"}
    words = {word for name in delayed for word in name.split()}
    assert {"W1", "W4", "W16", "W64", "d64", "d128", "d256", "fp16"} <= words
    small = names("attn_check", "--sanitize")
    assert small == {"plan", "tree_words", *(f"sanitize/{d}" for d in dims)}
    assert names("attn_check", "--filter", "graph") == {n for n in attn if n.startswith("graph")}

    sources = ("targets", "argmax", "sampled", "probs", "probs_draft", "logits_draft")
    commit = names("commit_check")
    assert commit == {*(f"commit/{s}" for s in sources), "compact", "many_requests"}
    assert names("commit_check", "--delays", "1") == {f"delays/{s}" for s in sources}
    small = names("commit_check", "--sanitize")
    assert small == {*(f"sanitize/{s}" for s in sources), "sanitize/compact"}
    for program in PROGRAMS:
        assert all(name.startswith("bench/") for name in names(program, "--bench"))
