# SPDX-License-Identifier: Apache-2.0
"""The layer rules, as greps: who may include what, where versions are, how long a file may be."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "csrc").is_dir():
    pytest.skip("no source tree around the tests", allow_module_level=True)

CPP = (".h", ".cuh", ".cpp", ".cu")
# Programs above the package's layers that start an engine or measure its kernels.
SGLANG_USERS = re.compile(r"specfused/(sglang/|demo\.py)|tests/engine/|bench/(peers_|serve/)")


def tracked():
    """Files of the project, as git sees them; without git, all that is no build output."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if listed.returncode == 0:
            return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    output = {"build", "dist", "shared", "__pycache__"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part in output or part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


FILES = sorted(tracked())


def name(path):
    return path.relative_to(ROOT).as_posix()


def under(*folders, suffixes=(*CPP, ".py")):
    return [path for path in FILES if name(path).startswith(folders) and path.suffix in suffixes]


def lines_with(pattern, paths, flags=0):
    """file:line of every match."""
    expression = re.compile(pattern, flags)
    return [
        f"{name(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if expression.search(line)
    ]


def code_of(path):
    """The text without // comments, which may speak of anything."""
    return re.sub(r"//.*", "", path.read_text())


def test_the_rules_look_at_something():
    """A rule over an empty list of files would always hold."""
    for folder in ("csrc/torch/", "csrc/cpu/", "csrc/smxx/", "specfused/sglang/", "tests/engine/"):
        assert under(folder), folder


def test_torch_only_in_csrc_torch():
    found = lines_with(r'#\s*include\s*[<"](torch|ATen|c10|Python)', under("csrc/"))
    assert not [line for line in found if not line.startswith("csrc/torch/")]


def test_cutlass_only_in_kernels():
    found = lines_with(r'#\s*include\s*[<"](cutlass|cute)/', under("csrc/"))
    assert not [line for line in found if not re.match(r"csrc/(sm\w+|ptx)/", line)]


def test_cuda_only_in_kernels():
    """Shared headers, CPU code and the binding compile where there is no CUDA."""
    found = lines_with(r'#\s*include\s*[<"](cuda|cuda_\w+|cooperative_groups)\.h', under("csrc/"))
    assert not [line for line in found if not re.match(r"csrc/(sm\w+|ptx)/", line)]


def test_no_architecture_includes_another():
    """All may include the portable one."""
    for path in under("csrc/sm"):
        own = name(path).split("/")[1]
        includes = re.findall(r'#\s*include\s*"([^"]+)"', path.read_text())
        others = [i for i in includes for part in i.split("/")[:-1] if re.match(r"sm\w+$", part)]
        allowed = {own, "smxx"}
        assert all(allowed & set(include.split("/")) for include in others), (
            f"{name(path)}: {others}"
        )


def test_layers_below_include_nothing_above():
    """csrc/*.h is the bottom; CPU code does not know the GPU folders, nor they it."""
    for path in FILES:
        if path.suffix not in CPP or not name(path).startswith("csrc/"):
            continue
        folder = name(path).split("/")[1] if name(path).count("/") > 1 else ""
        includes = re.findall(r'#\s*include\s*"([^"]+)"', path.read_text())
        if folder == "":
            assert not [i for i in includes if "/" in i], f"{name(path)}: {includes}"
        if folder in ("cpu", "host", "ptx") or folder.startswith("sm"):
            above = [i for i in includes if re.search(r"(^|/)(torch|host)/", i)]
            assert not above, f"{name(path)}: {above}"
        if folder.startswith("sm") or folder == "ptx":
            assert not [i for i in includes if re.search(r"(^|/)cpu/", i)], name(path)


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_shared_headers_are_plain_cpp17():
    """Each alone, with warnings as errors: no CUDA, no torch, nothing they forgot to include."""
    headers = sorted((ROOT / "csrc").glob("*.h"))
    assert len(headers) >= 6
    for header in headers:
        done = subprocess.run(
            ["g++", "-std=c++17", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
            + ["-x", "c++", "-I", ROOT / "csrc", "-"],
            input=f'#include "{header.name}"\n#include "{header.name}"\nint main() {{}}\n',
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_kernels_neither_print_nor_stop_nor_allocate():
    """A captured graph can hold them, and a server survives them. bench.cu measures the machine."""
    calls = (
        "v?f?printf|exit|abort|cudaMalloc\\w*|cudaFree|cudaDeviceSynchronize|cudaStreamSynchronize"
    )
    forbidden = re.compile(rf"\b({calls})\s*\(")
    for path in under("csrc/"):
        if path.name != "bench.cu":
            assert not forbidden.search(code_of(path)), name(path)


def imported(path):
    """Top-level names that a Python file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_sglang_only_in_its_layer():
    for path in under("specfused/", "tests/", "bench/", "models/", suffixes=(".py",)):
        if "sglang" in imported(path):
            assert SGLANG_USERS.match(name(path)), f"{name(path)} imports sglang"


def test_core_imports_only_torch():
    for path in (ROOT / "specfused").glob("*.py"):
        if path.name in ("__main__.py", "demo.py"):
            continue
        strangers = set(imported(path)) - set(sys.stdlib_module_names) - {"torch", "specfused"}
        assert not strangers, f"{name(path)}: {strangers}"


def test_policy_is_plain_python():
    """Nothing but the standard library and itself; no clock, and no float through libm."""
    paths = under("specfused/policy/")
    assert len(paths) >= 4
    for path in paths:
        strangers = set(imported(path)) - set(sys.stdlib_module_names) - {"specfused"}
        assert not strangers, f"{name(path)}: {strangers}"
        assert not {"time", "datetime", "random", "os"} & set(imported(path)), name(path)
    assert not lines_with(r"from specfused(?!\.policy)|import specfused", paths)
    assert not lines_with(r"math\.(?!isfinite)|\*\* ?0\.", paths)


def test_sglang_versions_only_in_compat():
    """Other files ask compat, so that a third version changes one file."""
    for path in under("specfused/", suffixes=(".py",)):
        if name(path) == "specfused/sglang/compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            inside = isinstance(node, ast.Attribute) and node.attr == "__version__"
            if inside and isinstance(node.value, ast.Name):
                assert node.value.id != "sglang", f"{name(path)} asks for SGLang's version"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                exact = re.fullmatch(r"0\.5\.\d+", node.value)
                assert not exact, f"{name(path)} holds the version {node.value}"


def test_own_version_in_one_place():
    text = (ROOT / "specfused/_version.py").read_text()
    version = re.search(r'__version__ = "(.+)"', text).group(1)
    places = ("csrc/", "specfused/", "cmake/", "setup.py", "pyproject.toml", "CMakeLists.txt")
    kinds = (*CPP, ".py", ".toml", ".cmake", ".in", ".txt")
    paths = [path for path in under(*places, suffixes=kinds) if path.name != "_version.py"]
    assert len(paths) > 20
    assert not lines_with(rf"(?<![\d.]){re.escape(version)}(?![\d.])", paths)


SIZED = ("csrc/", "specfused/", "tests/", "bench/")


def test_file_lengths():
    long = {
        name(path): count
        for path in under(*SIZED)
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_line_lengths():
    assert not lines_with(r"^.{101,}$", under(*SIZED))


def test_licence_line():
    line = "SPDX-License-Identifier: Apache-2.0"
    texts = {name(path): path.read_text() for path in under(*SIZED)}
    missing = [file for file, text in texts.items() if text and line not in text[:200]]
    assert not missing


DOCS = [p for p in FILES if p.suffix == ".md" and (p.parent == ROOT or "docs/" in name(p))]
# Things that look like paths and are none of ours.
NOT_OURS = re.compile(r"^(https?:|/|\.venv|\.sglang|--|lib|site-packages)|[<>*$={}]|\s")


@pytest.mark.parametrize("doc", DOCS, ids=name)
def test_paths_in_documents_exist(doc):
    """Backticked words and link targets that name a file or folder of this repository."""
    text = doc.read_text()
    words = re.findall(r"`([^`\n]+)`", text) + re.findall(r"\]\(([^)#]+)", text)
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    dead = []
    for word in words:
        word = word.strip().rstrip("/").split("#")[0]
        if NOT_OURS.search(word) or not re.fullmatch(r"[\w./-]+", word):
            continue
        looks_like = word.split("/")[0] in folders and "/" in word
        looks_like |= bool(re.fullmatch(r"[\w-]+\.(md|toml|txt|cu|cuh|cpp|h)", word))
        if looks_like and not ((ROOT / word).exists() or (doc.parent / word).exists()):
            dead.append(word)
    assert not dead, f"{name(doc)} names {dead}"


def test_make_targets_in_documents_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for doc in DOCS:
        for target in re.findall(r"^\s{4}make (\w+)|`make (\w+)`", doc.read_text(), re.MULTILINE):
            assert "".join(target) in targets, f"{name(doc)}: make {''.join(target)}"
