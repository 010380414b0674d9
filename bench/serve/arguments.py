# SPDX-License-Identifier: Apache-2.0
"""Arguments of the suites of whole engines: `python bench/run.py --suite serve --help`."""

import argparse
import importlib.util
import sys

import torch

from bench.report import command_line
from bench.serve.flips import Flips
from bench.serve.rescore import Rescore
from bench.serve.setups import check, setup, tiny
from bench.serve.suite import Suite

GPU_SETUPS = "sglang-plain-triton,specfused-plain,specfused-chain,sglang-chain-triton"
GPU_SETUPS += ",specfused-tree,sglang-tree-triton"
CPU_SETUPS = "sglang-plain-torch_native,specfused-plain,specfused-chain,specfused-tree"
FLIPS_SETUPS = "specfused-tree-schedule:10,specfused-chain-schedule:10"


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
    p.add_argument("--tokens-out", type=count, default=160, help="of --suite rescore; default 160")
    p.add_argument("--pool-tokens", type=count, help="KV slots; default 180000; CPU 4096; "
                   "of --suite flips 240000")  # fmt: skip
    p.add_argument("--requests", type=count, help="of --suite rescore; default: the concurrency")
    p.add_argument("--flips", type=count, help="least changes of mode of --suite flips at a point; "
                   "default 1000; CPU 100")  # fmt: skip
    p.add_argument("--pending", type=numbers, default=[1, 4, 16, 64], help="pairs to catch up in "
                   "--suite flips; default 1,4,16,64")  # fmt: skip
    p.add_argument("--repeats", type=count, default=3, help="least repeats of a point")
    p.add_argument("--decode-seconds", type=seconds, help="least decode time of a point; 3; CPU 1")
    p.add_argument("--parallel", type=count, help="engines alive at once; default 3; CPU 1")
    p.add_argument("--seconds", type=seconds, default=float("inf"), help="start nothing after it")
    p.add_argument("--start-seconds", type=seconds, default=300, help="limit of an engine's start")
    p.add_argument("--json", metavar="FILE", help="write results, after every case")
    p.add_argument("--id", default=suite, help="first part of the case ids; default: the suite")
    p.add_argument("--resume", action="store_true", help="keep the cases that --json has already, "
                   "if they are of this commit, and measure the others")  # fmt: skip
    p.add_argument("--logs", metavar="DIR", help="keep the engines' logs there")
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    args = p.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda, flips = args.device == "cuda", suite == "flips"
    defaults = {
        "setups": FLIPS_SETUPS if flips else GPU_SETUPS if cuda else CPU_SETUPS,
        "concurrency": [1, 8, 32, 128] if cuda else [1, 4],
        "model": "llama8b" if cuda else "tiny",
        "tokens_in": 1024 if cuda else 64,
        "pool_tokens": (240_000 if flips else 180_000) if cuda else 4096,
        "decode_seconds": 3.0 if cuda else 1.0,
        "parallel": 3 if cuda else 1,
        "flips": 1000 if cuda else 100,
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
    if cuda and not torch.cuda.is_available():
        p.error("--device cuda needs a GPU that torch can use")
    if args.resume and suite != "serve":
        p.error(f"--resume is for --suite serve, not for {suite}")
    if flips and not all(setup(n, tiny(cuda), cuda).switches for n in args.setups):
        p.error("--suite flips needs engines that switch, e.g. specfused-tree-schedule:10")
    return args


SUITES = {"serve": Suite, "rescore": Rescore, "flips": Flips}


def main(suite: str, argv: list[str]) -> int:
    args = parse(argv, suite)
    if importlib.util.find_spec("sglang") is None:
        print("the serving suites need SGLang: pip install sglang==0.5.17", file=sys.stderr)
        return 2
    return SUITES[suite](args, command_line(["--suite", suite, *argv])).run()
