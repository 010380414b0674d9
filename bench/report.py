# SPDX-License-Identifier: Apache-2.0
"""Lines on the terminal, JSON on disk, and what the run was made with."""

import datetime
import importlib.metadata
import json
import math
import os
import shlex
import subprocess
from pathlib import Path

import torch

import specfused
from bench import fa3_library

OURS = "specfused"
PACKAGES = {
    "flashinfer": ("flashinfer-python",),
    "sglang": ("sglang",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
    "triton": ("triton",),
}


def _run(*command: str, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit_and_dirty() -> tuple[str | None, bool | None]:
    """SPECFUSED_COMMIT and SPECFUSED_DIRTY where a copy of the tree is measured, else from git."""
    if commit := os.environ.get("SPECFUSED_COMMIT"):
        dirty = os.environ.get("SPECFUSED_DIRTY", "").strip().lower()
        return commit, {"": None, "0": False, "false": False, "no": False}.get(dirty, True)
    root = Path(__file__).resolve().parent.parent
    commit = None
    if (root / ".git").exists():
        commit = _run("git", "rev-parse", "HEAD", cwd=root)
    return (
        (commit, bool(_run("git", "status", "--porcelain", cwd=root))) if commit else (None, None)
    )


def command_line(argv: list[str]) -> str:
    """The command as typed, without folders of this machine."""
    words = []
    for word in argv:
        head, separator, value = word.rpartition("=")
        if Path(value).is_absolute() or value.startswith(("~", "..")):
            value = Path(value).name
        words.append(head + separator + value)
    return shlex.join(["python", "bench/run.py", *words])


def version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def make_meta(device: torch.device, argv: list[str], harness, yard) -> dict:
    commit, dirty = commit_and_dirty()
    cuda = device.type == "cuda"
    meta = {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit,
        "dirty": dirty,
        "command": command_line(argv),
        "read_gbps": round(yard.read_gbps, 1),
        "launch_floor_us": round(yard.launch_floor_us, 3),
        "copy_gbps": round(yard.copy_gbps, 1),
        "read_source": yard.read_source,
        "floor_source": yard.empty_source,
        "l2_bytes": harness.l2_bytes,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "specfused": specfused.__version__,
        "archs": specfused.ops.build_info()["archs"],
        "threads": None if cuda else torch.get_num_threads(),
    }
    meta |= {name: version(*names) for name, names in PACKAGES.items()}
    meta["fa3_library"] = fa3_library.source()
    if cuda:
        meta["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return meta


def geomean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


class Report:
    """Prints each case when it is done and keeps the JSON file complete at any time."""

    def __init__(self, meta: dict, json_path: str | None):
        self.meta, self.cases = meta, []
        self.json_path = Path(json_path) if json_path else None
        self.ratios: dict[str, list[float]] = {}
        self.shares: dict[str, list[float]] = {}
        self.problems: list[str] = []
        self.notes: set[str] = set()

    def header(self):
        m = self.meta
        where = m["gpu"] or f"CPU, threads: {m['threads']}"
        self.line(f"{where} | torch {m['torch']} cuda {m['cuda']} | specfused {m['specfused']}")
        peers = ", ".join(f"{n} {m[n]}" for n in PACKAGES if m[n])
        self.line(f"peers: {peers or 'none installed'}")
        self.line(
            f"read {m['read_gbps']:.0f} GB/s ({m['read_source']}) | copy {m['copy_gbps']:.0f} GB/s"
            f" (read + written) | launch floor {m['launch_floor_us']:.2f} us ({m['floor_source']})"
        )

    def line(self, text: str):
        print(text, flush=True)

    def note(self, text: str):
        """Prints once, however often it is said."""
        if text not in self.notes:
            self.notes.add(text)
            self.line(f"# {text}")

    def problem(self, text: str):
        self.problems.append(text)
        self.line(f"! {text}")

    def case(self, case, times: dict, num_bytes: int, t_read_us: float | None, **options):
        """Records and prints one case.

        Args:
            times: implementation -> Stats; ours, where measured, comes first.
            num_bytes: least bytes that the case must move.
            options: shown, implementation -> name as printed (a chain says so); missing, what
                every comparison must say was not measured.
        """
        shown = options.get("shown", {})
        ours = times.get(OURS)
        for impl, t in times.items():
            entry = {
                "id": case.id,
                "impl": impl,
                "us": round(t.us, 3),
                "p10": round(t.p10, 3),
                "p90": round(t.p90, 3),
                "bytes": num_bytes,
                "gbps": round(num_bytes / t.us * 1e-3, 1),
                "t_read_us": None if t_read_us is None else round(t_read_us, 3),
                "rounds": t.rounds,
            }
            self.cases.append(entry)
            share = f"{100 * t_read_us / t.us:4.0f}% t_read" if t_read_us else f"{'':12s}"
            tail = []
            if impl == OURS:
                for peer, p in times.items():
                    if peer != OURS:
                        self.ratios.setdefault(shown.get(peer, peer), []).append(p.us / t.us)
                        tail.append(f"{shown.get(peer, peer)} {p.us / t.us:.2f}x")
                if t_read_us:
                    self.shares.setdefault(case.id.split("/")[0], []).append(t_read_us / t.us)
            elif ours:
                tail.append(f"{OURS} {ours.us / t.us:.2f}x")
            tail += options.get("missing", [])
            self.line(
                f"{case.label:64s} | {shown.get(impl, impl):24s} | {t.us:9.1f} us |"
                f" {entry['gbps']:7.1f} GB/s | {share:12s} | {'  '.join(tail)}"
            )
        self.write()

    def launches(self, case, counts: dict[str, int | None]):
        """Adds launch counts to a recorded case."""
        for entry in self.cases:
            if entry["id"] == case.id and counts.get(entry["impl"]) is not None:
                entry["launches"] = counts[entry["impl"]]
        self.line(
            f"{case.label:64s} | launches: " + ", ".join(f"{k} {v}" for k, v in counts.items())
        )
        self.write()

    def write(self):
        if self.json_path is None:
            return
        self.json_path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.json_path.with_name(self.json_path.name + ".tmp")
        partial.write_text(json.dumps({"meta": self.meta, "cases": self.cases}, indent=1) + "\n")
        partial.replace(self.json_path)

    def summary(self):
        self.line("")
        for kind, values in self.shares.items():
            n = f"{len(values)} case{'s' * (len(values) != 1)}"
            self.line(f"geomean {kind}: {100 * geomean(values):.0f}% of t_read ({n})")
        for peer, values in self.ratios.items():
            n = f"{len(values)} case{'s' * (len(values) != 1)}, worst {min(values):.2f}x"
            self.line(f"geomean {peer} / {OURS}: {geomean(values):.2f}x ({n})")
        if self.json_path is not None:
            self.write()
            self.line(f"wrote {self.json_path}")
        for text in self.problems:
            self.line(f"! {text}")
