# SPDX-License-Identifier: Apache-2.0
"""Arguments of the suites of whole engines, `python bench/run.py --suite serve` and others."""

import argparse
import importlib.util
import json
import sys

import torch

from bench.argtypes import count, json_file, numbers, seconds
from bench.report import command_line
from bench.serve.flips import Flips
from bench.serve.load import Load, pool_tokens
from bench.serve.rescore import Rescore
from bench.serve.setups import check, setup, tiny
from bench.serve.steps import Steps
from bench.serve.suite import Suite

SUITES = {"serve": Suite, "load": Load, "rescore": Rescore, "steps": Steps, "flips": Flips}

LOAD = "specfused-tree-auto,specfused-tree-on,specfused-tree-off"
FLIPS = "specfused-tree-schedule:10,specfused-chain-schedule:10"
# What an argument is without being given: on a GPU and on the CPU, ...
DEFAULTS = {
    "setups": (
        "sglang-plain-triton,specfused-plain,specfused-chain,sglang-chain-triton,"
        "specfused-tree,sglang-tree-triton",
        "sglang-plain-torch_native,specfused-plain,specfused-chain,specfused-tree",
    ),
    "concurrency": ([1, 8, 32, 128], [1, 4]),
    "acceptance": ("simulated", "simulated"),
    "model": ("llama8b", "tiny"),
    "tokens_in": (1024, 64),
    "pool_tokens": (180_000, 4096),
    "decode_seconds": (3.0, 1.0),
    "parallel": (3, 1),
    "flips": (1000, 100),
    "phases": ([4, 128, 4], [1, 6, 1]),
    "phase_seconds": (6.0, 4.0),
    "stream_interval": (4, 1),
}
# ... and where a suite wants something else.
OF_SUITE = {
    "load": {"setups": (LOAD, LOAD)},
    "steps": {
        "setups": (
            "sglang-plain-triton,specfused-plain,specfused-chain-off,specfused-chain-on,"
            "sglang-chain-triton,specfused-tree-on,sglang-tree-triton",
            DEFAULTS["setups"][1],
        ),
        "concurrency": ([8], [4]),
        "acceptance": ("real", "real"),
    },
    "flips": {"setups": (FLIPS, FLIPS), "pool_tokens": (240_000, 4096)},
}


def engine_arguments(text: str) -> dict:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def parser(suite: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=f"python bench/run.py --suite {suite}", description=__doc__, allow_abbrev=False
    )
    defaults = {**DEFAULTS, **OF_SUITE.get(suite, {})}

    def add(name: str, text: str, to=p, **options):
        key = name[2:].replace("-", "_")
        if key in defaults:
            gpu, cpu = (",".join(map(str, x)) if isinstance(x, list) else x for x in defaults[key])
            text += f"; default {gpu}" + (f", on the CPU {cpu}" if cpu != gpu else "")
        to.add_argument(name, help=text, **options)

    add("--setups", "comma-separated, see bench/serve/setups.py")
    add("--concurrency", "requests at once, comma-separated", type=numbers)
    add("--model", "8B shape with made-up weights, or the tiny pair", choices=("llama8b", "tiny"))
    add("--tokens-in", "prompt length", type=count)
    add("--pool-tokens", "KV slots", type=count)
    add("--acceptance", "of drafts, with made-up weights", choices=("simulated", "real"))
    add("--repeats", "least repeats of a point; default 3", type=count, default=3)
    add("--decode-seconds", "least decode time of a point", type=seconds)
    add("--parallel", "engines alive at once", type=count)
    add("--tp", "ranks of every engine; default 1", type=count, default=1)
    add("--engine", "more arguments of every engine, as JSON", type=engine_arguments, default={},
        metavar="JSON")  # fmt: skip
    add("--seconds", "start nothing after it", type=seconds, default=float("inf"))
    add("--start-seconds", "limit of an engine's start; default 300", type=seconds, default=300)
    add("--json", "write results, after every case", type=json_file, metavar="FILE")
    add("--plot", "draw what was measured (needs matplotlib)", metavar="DIR")
    add("--id", f"first part of the case ids; default {suite}", default=suite)
    add("--logs", "keep the engines' logs and traces there", metavar="DIR")
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    p.add_argument("--resume", action="store_true", help="keep the cases that --json has already, "
                   "if they are of this commit, and measure the others")  # fmt: skip
    of = p.add_argument_group("of some suites")
    of.add_argument("--profile", metavar="BS", type=count, help="serve: profile steps of each "
                    "engine at this concurrency, after its timing")  # fmt: skip
    of.add_argument("--tokens-out", type=count, default=160, help="rescore, load (there 30 %% more "
                    "or less): of an answer; default 160")  # fmt: skip
    of.add_argument("--requests", type=count, help="rescore; default: the concurrency")
    add("--flips", "flips: least changes of mode at a point", to=of, type=count)
    of.add_argument("--pending", type=numbers, default=[1, 4, 16, 64],
                    help="flips: pairs to catch up; default 1,4,16,64")  # fmt: skip
    add("--phases", "load: clients", to=of, type=numbers)
    add("--phase-seconds", "load: of each phase", to=of, type=seconds)
    of.add_argument("--prompts", type=count, help="load: different ones; default: one per client")
    add("--stream-interval", "load: tokens of a chunk", to=of, type=count)
    return p


def parse(argv: list[str], suite: str = "serve") -> argparse.Namespace:
    p = parser(suite)
    args = p.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = args.device == "cuda"
    for name, (gpu, cpu) in {**DEFAULTS, **OF_SUITE.get(suite, {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, gpu if cuda else cpu)
    args.setups = args.setups.split(",")
    args.prompts = args.prompts or max(args.phases)
    for name in args.setups:
        try:
            check(name)
        except ValueError as error:
            p.error(str(error))
    if args.profile not in (None, *args.concurrency):
        p.error(f"--profile must be of --concurrency, got {args.profile}")
    if cuda and not torch.cuda.is_available():
        p.error("--device cuda needs a GPU that torch can use")
    if cuda and args.tp > torch.cuda.device_count():
        p.error(f"--tp must be at most {torch.cuda.device_count()}, the GPUs here, got {args.tp}")
    if args.resume and suite in ("rescore", "flips"):
        p.error(f"--resume is for --suite serve, load and steps, not for {suite}")
    if suite == "load":
        least = pool_tokens(args.prompts, args.tokens_in, max(args.phases), args.tokens_out)
        if args.pool_tokens < least:
            p.error(f"--pool-tokens must be at least {least} for all clients and prompts at once, "
                    f"got {args.pool_tokens}")  # fmt: skip
    if suite == "flips" and not all(setup(n, tiny(cuda), cuda).switches for n in args.setups):
        p.error("--suite flips needs engines that switch, e.g. specfused-tree-schedule:10")
    return args


def main(suite: str, argv: list[str]) -> int:
    args = parse(argv, suite)
    if importlib.util.find_spec("sglang") is None:
        print("the serving suites need SGLang: pip install sglang==0.5.17", file=sys.stderr)
        return 2
    return SUITES[suite](args, command_line(["--suite", suite, *argv])).run()
