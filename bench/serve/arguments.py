# SPDX-License-Identifier: Apache-2.0
"""Arguments of `python bench/run.py --suite serve`, and of load and rescore."""

import argparse
import importlib.util
import sys

import torch

from bench.report import command_line
from bench.serve.load import Load, pool_tokens
from bench.serve.rescore import Rescore
from bench.serve.setups import check
from bench.serve.suite import Suite

GPU_SETUPS = "sglang-plain-triton,specfused-plain,specfused-chain,sglang-chain-triton"
GPU_SETUPS += ",specfused-tree,sglang-tree-triton"
LOAD_SETUPS = "specfused-tree-auto,specfused-tree-on,specfused-tree-off"
CPU_SETUPS = "sglang-plain-torch_native,specfused-plain,specfused-chain,specfused-tree"


def count(text: str) -> int:
    """An argument of at least 1."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def numbers(text: str) -> list[int]:
    return [count(x) for x in text.split(",")]


def seconds(text: str) -> float:
    """An argument of more than 0 seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text!r}")
    return value


def parse(argv: list[str], suite: str = "serve") -> argparse.Namespace:
    p = argparse.ArgumentParser(prog=f"python bench/run.py --suite {suite}", description=__doc__,
                                allow_abbrev=False)  # fmt: skip
    p.add_argument("--setups", help="comma-separated, see bench/serve/setups.py")
    p.add_argument("--concurrency", type=numbers, help="default: 1,8,32,128; on the CPU 1,4")
    p.add_argument("--model", choices=("llama8b", "tiny"), help="default: llama8b; CPU: tiny")
    p.add_argument("--tokens-in", type=count, help="prompt length; default 1024; CPU 64")
    p.add_argument("--tokens-out", type=count, default=160, help="of an answer, in --suite rescore "
                   "and load (there 30 %% more or less); default 160")  # fmt: skip
    p.add_argument("--pool-tokens", type=count, help="KV slots; default 180000; CPU 4096")
    p.add_argument("--repeats", type=count, default=3, help="least repeats of a point")
    p.add_argument("--decode-seconds", type=seconds, help="least decode time of a point; 3; CPU 1")
    p.add_argument("--parallel", type=count, help="engines alive at once; default 3; CPU 1")
    p.add_argument("--seconds", type=seconds, default=float("inf"), help="start nothing after it")
    p.add_argument("--start-seconds", type=seconds, default=300, help="limit of an engine's start")
    p.add_argument("--json", metavar="FILE", help="write results, after every case")
    p.add_argument("--id", default=suite, help=f"first part of the case ids; default {suite}")
    p.add_argument("--resume", action="store_true", help="keep the cases that --json has already, "
                   "if they are of this commit, and measure the others")  # fmt: skip
    p.add_argument("--plot", metavar="DIR", help="draw what was measured (needs matplotlib)")
    p.add_argument("--logs", metavar="DIR", help="keep the engines' logs there")
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    if suite == "load":
        p.add_argument("--phases", type=numbers, help="clients; default 4,128,4; CPU 1,6,1")
        p.add_argument("--phase-seconds", type=seconds, help="of each phase; default 6; CPU 4")
        p.add_argument("--prompts", type=count, help="different ones; default: one per client")
        p.add_argument("--stream-interval", type=count, help="tokens of a chunk; default 4; CPU 1")
    args = p.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = args.device == "cuda"
    defaults = {
        "setups": GPU_SETUPS if cuda else CPU_SETUPS,
        "concurrency": [1, 8, 32, 128] if cuda else [1, 4],
        "model": "llama8b" if cuda else "tiny",
        "tokens_in": 1024 if cuda else 64,
        "pool_tokens": 180_000 if cuda else 4096,
        "decode_seconds": 3.0 if cuda else 1.0,
        "parallel": 3 if cuda else 1,
    }
    if suite == "load":
        args.phases = args.phases or ([4, 128, 4] if cuda else [1, 6, 1])
        defaults |= {
            "setups": LOAD_SETUPS,
            "phase_seconds": 6.0 if cuda else 4.0,
            "prompts": max(args.phases),
            "stream_interval": 4 if cuda else 1,
        }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.setups = args.setups.split(",")
    for name in args.setups:
        try:
            check(name)
        except ValueError as error:
            p.error(str(error))
    if suite == "load":
        least = pool_tokens(args.prompts, args.tokens_in, max(args.phases), args.tokens_out)
        if args.pool_tokens < least:
            p.error(f"--pool-tokens must be at least {least} for all clients and prompts at once, "
                    f"got {args.pool_tokens}")  # fmt: skip
    if cuda and not torch.cuda.is_available():
        p.error("--device cuda needs a GPU that torch can use")
    return args


SUITES = {"serve": Suite, "rescore": Rescore, "load": Load}


def main(suite: str, argv: list[str]) -> int:
    args = parse(argv, suite)
    if importlib.util.find_spec("sglang") is None:
        print("the serving suites need SGLang: pip install sglang==0.5.17", file=sys.stderr)
        return 2
    return SUITES[suite](args, command_line(["--suite", suite, *argv])).run()
