# SPDX-License-Identifier: Apache-2.0
"""The attention kernels on a CPU emulator (tests/emulation): every schedule gives the right rows.

The kernels' sources are compiled as they are, by g++, with the emulator's PTX layer in the place of
csrc/ptx. Planted mistakes show that what they break would be noticed.
"""

import re
import shutil
import subprocess
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
from test_kernel_checks import find_nvcc

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = ROOT / "tests/emulation"
COMMON = ("attention", "copies", "fibers", "launch", "tensor")
FLAGS = ("-std=c++17", "-Wall", "-Werror", "-Wno-unknown-pragmas")

BF16, FP16 = 0, 1  # DType of csrc/common.h
ELEMENT = {BF16: "__nv_bfloat16", FP16: "__half"}
DTYPES = [(BF16, 128), (FP16, 64)]
WRONG_RESULTS, BROKEN_RULE = 1, 2  # exit status of attention.cpp


@dataclass(frozen=True)
class Case:
    row_tile: int
    stages: int
    width: int
    group: int
    kv_heads: int
    ctas: int
    lengths: tuple
    store: bool = False
    window_slots: bool = False

    def __str__(self):
        return f"tile{self.row_tile}-stages{self.stages}-W{self.width}-requests{len(self.lengths)}"

    def arguments(self):
        _, *sizes, lengths, store, window_slots = astuple(self)
        return [str(int(x)) for x in (*sizes, store, window_slots, *lengths)]


MANY = tuple(i * 37 % 70 for i in range(20))  # more segments than the table holds

WGMMA = [
    Case(64, 3, 16, 4, 2, 1, (0, 3, 100, 64, 500, 1), store=True),
    Case(64, 4, 13, 3, 2, 5, (300, 64, 190), window_slots=True),
    Case(64, 2, 64, 4, 1, 3, (63, 190)),  # four row tiles
    Case(64, 2, 16, 4, 2, 2, MANY),
    Case(128, 4, 16, 7, 1, 3, (300, 5, 1, 0, 64), store=True, window_slots=True),
    Case(128, 2, 32, 4, 2, 7, (300, 127)),
    Case(256, 4, 64, 4, 1, 1, (0,)),
    Case(256, 3, 33, 4, 2, 5, (300, 0, 130), store=True),
    Case(256, 2, 64, 7, 1, 6, (300, 128)),  # two row tiles, combined over splits
]
PORTABLE = [
    (FP16, 64, Case(16, 3, 1, 4, 2, 3, (0, 100, 64, 300))),  # the non-spec kernel
    (FP16, 64, Case(16, 2, 4, 4, 2, 1, (0, 3, 64, 200, 1), store=True)),
    (BF16, 128, Case(32, 3, 8, 4, 1, 5, (300, 64, 190), window_slots=True)),
    (FP16, 64, Case(64, 2, 16, 4, 1, 2, MANY, store=True)),
    (BF16, 128, Case(128, 2, 33, 4, 1, 3, (130, 0))),
    # One stage is what head_dim 256 gets where a CTA has 99 KiB of shared memory.
    (BF16, 256, Case(64, 1, 16, 4, 1, 2, (150, 1))),
]


class Builder:
    """Compiles the emulator once, and a kernel when it is first asked for."""

    def __init__(self, folder, include):
        self.folder, self.include = folder, include
        self.programs = {}
        self.tree = self.make_tree("tree", {})
        sources = [EMULATOR / f"{name}.cpp" for name in COMMON]
        sources += [self.tree / f"csrc/cpu/{name}.cpp" for name in ("verify", "decode", "store")]
        self.common = [self.compile(file, f"{file.stem}.o", self.tree, "-O1") for file in sources]

    def make_tree(self, name, edits):
        """csrc as links to the real files, ptx/ as links to the emulator's, but for the edited."""
        tree = self.folder / name
        for path in (ROOT / "csrc").rglob("*.[ch]*"):
            link = tree / path.relative_to(ROOT)
            link.parent.mkdir(parents=True, exist_ok=True)
            emulated = EMULATOR / "ptx" / path.name
            ours = link.parent.name == "ptx" and emulated.exists()
            link.symlink_to(emulated if ours else path)
        for file, changes in edits.items():
            text = (ROOT / file).read_text()
            for old, new in changes:
                assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
                text = text.replace(old, new)
            (tree / file).unlink()
            (tree / file).write_text(text)
        return tree

    def compile(self, source, output, tree, *options):
        output = self.folder / output
        includes = ["-I", tree, "-I", ROOT / "tests", "-isystem", self.include]
        self.run(["g++", *FLAGS, *includes, *options, "-c", source, "-o", output])
        return output

    def program(self, kernels, dtype, head_dim, row_tile, mistake="", edits=None):
        key = re.sub(r"\W+", "_", f"{kernels} {dtype} {head_dim} {row_tile} {mistake}")
        if key not in self.programs:
            tree = self.make_tree(key, edits) if edits else self.tree
            values = {"ELEMENT": ELEMENT[dtype], "HEAD_DIM": head_dim, "ROW_TILE": row_tile}
            defines = [f"-D{name}={value}" for name, value in values.items()]
            source = EMULATOR / f"attention_{kernels}.cpp"
            # Most of the time is compilation, and the kernel's own code is little of the rest.
            main = self.compile(source, f"{key}.o", tree, "-O0", *defines)
            self.programs[key] = self.folder / f"{key}.run"
            self.run(["g++", main, *self.common, "-o", self.programs[key]])
        return self.programs[key]

    @staticmethod
    def run(command):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    nvcc = find_nvcc()
    if not (nvcc and shutil.which("g++")):
        pytest.skip("needs g++ and the headers of the CUDA toolkit")
    # nvcc may be a script: it is asked for its headers.
    asked = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True
    )
    include = re.search(r'INCLUDES="-I([^"]+)"', asked.stderr)
    if not include or not Path(include.group(1), "cuda_bf16.h").is_file():
        pytest.skip(f"no cuda_bf16.h beside {nvcc}")
    return Builder(tmp_path_factory.mktemp("emulation"), include.group(1))


def attend(program, case, dtype, head_dim, seed):
    command = [program, str(seed), str(dtype), str(head_dim), *case.arguments()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def check(builder, kernels, case, dtype, head_dim, seed, schedules):
    program = builder.program(kernels, dtype, head_dim, case.row_tile)
    for i in range(schedules):
        done = attend(program, case, dtype, head_dim, seed + i)
        assert done.returncode == 0, f"seed {seed + i}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("dtype, head_dim", DTYPES, ids=["bf16-d128", "fp16-d64"])
@pytest.mark.parametrize("case", WGMMA, ids=str)
def test_wgmma(builder, case, dtype, head_dim, seed):
    check(builder, "sm90", case, dtype, head_dim, seed, schedules=2)


@pytest.mark.parametrize("dtype, head_dim, case", PORTABLE, ids=str)
def test_portable(builder, case, dtype, head_dim, seed):
    check(builder, "smxx", case, dtype, head_dim, seed, schedules=2)


COMBINE = "csrc/smxx/attn/combine.cuh"
MATH = "csrc/sm90/attn/math.cuh"
LOADER = "csrc/sm90/attn/loader.cuh"
PORTABLE_BODY = "csrc/smxx/attn/kernel.cuh"
RELEASE_KEYS = "        if (b == kBlocks - 1) release(shared.keys, at);\n"
RELEASE_VALUES = "        if (before == kBlocks - 1) release(shared.values, values);\n"
SCORES_THERE = "        ptx::wgmma_wait<1>();\n        ptx::pin(scores);\n"
VALUES_THERE = "        ptx::wgmma_wait<0>();\n        ptx::pin(state.o[before]);\n"
LOADERS_WAIT = "ptx::barrier_wait(ptx::smem_address(&shared.{}.empty[stage]), parity);"

# What is wrong -> kernels, edits, and what the emulator says: a rule's name or wrong results.
MISTAKES = {
    "K released before its last read": (
        "sm90",
        {MATH: [(SCORES_THERE + RELEASE_KEYS, RELEASE_KEYS + SCORES_THERE)]},
        "released or not written",
    ),
    "V released before its last read": (
        "sm90",
        {MATH: [(VALUES_THERE + RELEASE_VALUES, RELEASE_VALUES + VALUES_THERE)]},
        "released or not written",
    ),
    "no proxy fence": ("sm90", {MATH: [("ptx::async_proxy_fence();", "")]}, "no fence"),
    "no wait for scores": ("sm90", {MATH: [("ptx::wgmma_wait<1>();", "")]}, "out differs"),
    "parity of the math stays": ("sm90", {MATH: [("at.parity ^ 1", "at.parity")]}, ""),
    "loaders of K do not wait for the math": (
        "sm90",
        {LOADER: [(LOADERS_WAIT.format("keys"), "")]},
        "",
    ),
    "loaders of V do not wait for the math": (
        "sm90",
        {LOADER: [(LOADERS_WAIT.format("values"), "")]},
        "",
    ),
    "index ring without the entry of the slowest loader": (
        "sm90",
        {LOADER: [("entries = 2 * stages + 1", "entries = stages + 1")]},
        "",
    ),
    "a unit closed without its parts": (
        "sm90",
        {COMBINE: [("shared.closes = num_arrived(seen) == others;", "shared.closes = true;")]},
        "",
    ),
    "a closed unit's word left as it is": (
        "smxx",
        {COMBINE: [("if (shared.closes) ptx::store_relaxed(word, 0);", "")]},
        "counters are not zero",
    ),
    "one arrival too few": (
        "sm90",
        {"csrc/sm90/attn/verify.cuh": [("Traits::kLoadThreads + 1", "Traits::kLoadThreads + 2")]},
        "deadlock",
    ),
    "V's leading offset": (
        "sm90",
        {"csrc/sm90/attn/smem_layout.h": [("block, rows * kChunkRowBytes", "block, 16")]},
        "",
    ),
    "no barrier before a stage is loaded again": (
        "smxx",
        {PORTABLE_BODY: [("__syncthreads();  // this stage is there", "  // ")]},
        "out differs",
    ),
    "no barrier behind the first window": (
        "smxx",
        {PORTABLE_BODY: [("if (stages == 1) __syncthreads();  // no barrier yet", "  // ")]},
        "out differs",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(builder, mistake):
    """With fixed seeds: one of them must show it."""
    kernels, edits, words = MISTAKES[mistake]
    case = Case(64, 2 if kernels == "sm90" else 1, 16, 4, 2, 3, (3, 300, 70, 200))
    program = builder.program(kernels, BF16, 128, case.row_tile, mistake, edits)
    said = []
    for seed in range(30):
        done = attend(program, case, BF16, 128, seed)
        said.append(f"{seed}: {done.returncode} {done.stdout}")
        if done.returncode in (WRONG_RESULTS, BROKEN_RULE) and words in done.stdout:
            return
    pytest.fail("\n".join(said))
