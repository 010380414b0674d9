# SPDX-License-Identifier: Apache-2.0
"""Registers and shared memory of the kernels in a built library, as a Markdown table.

python tests/kernel_resources.py [LIBRARY] [--arch sm_90a]
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
from dataclasses import astuple, dataclass, replace
from pathlib import Path

# SMs, bytes of shared memory of an SM and of a CTA, threads and CTAs of an SM.
LIMITS = {
    "sm_80": (108, 167936, 166912, 2048, 32),
    "sm_89": (142, 102400, 101376, 1536, 24),
    "sm_90a": (132, 233472, 232448, 2048, 32),
    "sm_100a": (148, 233472, 232448, 2048, 32),
}
ELEMENTS = {"13__nv_bfloat16": "bf16", "6__half": "fp16", "f": "fp32"}
ATTENTION = re.compile(r"(decode|verify)_attn_kernelI.*(Attn|Wgmma)TraitsI(\w+?)Li(\d+)ELi(\d+)E")
COMMIT = re.compile(
    r"\d(sampled_commit|commit|compact|row_stats|residual)_kernel(?:I(\w+?)Lb(\d)E)?E"
)
VARIANTS = {("row_stats", "1"): ", with sums", ("residual", "1"): " of probabilities",
            ("sampled_commit", "1"): " of probabilities"}  # fmt: skip


def cuobjdump() -> str | None:
    """The disassembler of a CUDA toolkit, or the one that triton's wheel brings along."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    path = triton and Path(triton.origin).with_name("backends") / "nvidia/bin/cuobjdump"
    return str(path) if path and path.is_file() else None


def ask(tool: str, *arguments) -> str:
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def resource_usage(text: str) -> dict[str, dict[str, dict[str, int]]]:
    """What `cuobjdump -res-usage` says: arch -> kernel -> resource -> number."""
    usage: dict[str, dict[str, dict[str, int]]] = {}
    arch = kernel = None
    for line in text.splitlines():
        if found := re.match(r"arch = (\w+)", line):
            arch = usage.setdefault(found[1], {})
        elif found := re.match(r"\s*Function (\S+):", line):
            kernel = found[1]
        elif kernel and "STACK:" in line:
            arch[kernel] = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}
            kernel = None
    return usage


def most_threads(text: str) -> dict[str, int]:
    """What `cuobjdump -elf` says of launch bounds: kernel -> threads of a CTA."""
    threads, kernel, wanted = {}, None, False
    for line in text.splitlines():
        if found := re.match(r"\.nv\.info\.(\S+)", line):
            kernel = found[1]
        elif "Attribute:" in line:
            wanted = "EIATTR_MAX_THREADS" in line
        elif wanted and (found := re.match(r"\s*Value:\s*(\w+)", line)):
            threads[kernel] = int(found[1], 16)
    return threads


@dataclass(frozen=True)
class Kernel:
    """One instantiation; bytes per CTA, stack and local memory per thread."""

    name: str
    elements: str
    head_dim: int | None
    rows: int | None
    threads: int
    registers: int
    stack: int
    local: int
    static_smem: int
    dynamic_smem: int
    ctas_per_sm: int  # that fit


def resident_ctas(arch: str, threads: int, registers: int, smem: int) -> int:
    """CTAs of an SM, of 65536 registers in units of 8 x 32 and four warps; 1 KiB of shared memory
    is the system's."""
    _, smem_per_sm, _, threads_per_sm, most = LIMITS[arch]
    warps = -(-threads // 32)
    of_registers = 65536 // (-(-registers // 8) * 8 * 32) // 4 * 4 // warps
    return min(threads_per_sm // threads, of_registers, smem_per_sm // (smem + 1024), most)


def kernels(usage: dict[str, dict[str, int]], threads: dict[str, int], arch: str, select):
    """Attention and commit kernels of one architecture, in a fixed order.

    Args:
        usage, threads: of `resource_usage` and `most_threads`.
        select: `specfused._host.select_attn`.
    """
    found = []
    # Attention has no static shared memory: what is said to be is the system's (sm_90 and later).
    system = min(used["SHARED"] for symbol, used in usage.items() if ATTENTION.search(symbol))
    for symbol, used in usage.items():
        dynamic, rows, head_dim = 0, None, None
        if at := ATTENTION.search(symbol):
            wgmma = at[2] == "Wgmma"
            name, element = at[1] + (", wgmma" if wgmma else ""), ELEMENTS[at[3]]
            head_dim, rows = int(at[4]), int(at[5])
            dynamic = select(rows, head_dim, *LIMITS[arch][:3], wgmma)["smem_bytes"]
        elif at := COMMIT.search(symbol):
            name, element = at[1] + VARIANTS.get((at[1], at[3]), ""), ELEMENTS.get(at[2], "")
        else:
            continue
        static = used["SHARED"] - system
        ctas = resident_ctas(arch, threads[symbol], used["REG"], static + dynamic)
        found.append(
            Kernel(name, element, head_dim, rows, threads[symbol], used["REG"], used["STACK"],
                   used["LOCAL"], static, dynamic, ctas)
        )  # fmt: skip
    return sorted(found, key=lambda k: (not k.head_dim, k.name, k.head_dim or 0, k.rows or 0))


def of_library(library: Path, arch: str, select) -> list[Kernel]:
    """The same of a built library; needs `cuobjdump`."""
    usage = resource_usage(ask(cuobjdump(), "-res-usage", library))
    if arch not in usage:
        raise SystemExit(f"{library}: --arch must be one of {', '.join(usage)}, got {arch}")
    return kernels(
        usage[arch], most_threads(ask(cuobjdump(), "-arch", arch, "-elf", library)), arch, select
    )


def table(found: list[Kernel]) -> str:
    """Markdown; element types that need the same share a row."""
    merged: dict[Kernel, list[str]] = {}
    for k in found:
        merged.setdefault(replace(k, elements=""), []).append(k.elements)
    lines = [
        "| kernel | type | D | rows | threads | registers | stack | local | static smem "
        "| dynamic smem | CTAs per SM |",
        "|---" * 11 + "|",
    ]
    for k, elements in merged.items():
        types = ", ".join(sorted(e for e in elements if e))
        cells = [k.name, types, *astuple(k)[2:]]
        lines.append("| " + " | ".join("-" if c in (None, "") else str(c) for c in cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    from specfused import _host

    p = argparse.ArgumentParser(prog="python tests/kernel_resources.py", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    default = Path(_host.__file__).with_name("_C.so")
    p.add_argument("library", nargs="?", type=Path, default=default)
    p.add_argument("--arch", choices=LIMITS, default="sm_90a")
    args = p.parse_args(argv)
    if cuobjdump() is None:
        raise SystemExit("no cuobjdump: neither a CUDA toolkit nor triton is here")
    print(table(of_library(args.library, args.arch, _host.select_attn)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
