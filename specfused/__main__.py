# SPDX-License-Identifier: Apache-2.0
"""python -m specfused info | demo"""

import argparse
import sys


def info() -> int:
    """Prints what this installation is."""
    import importlib.metadata

    import torch

    from specfused import __version__, ops

    build = ops.build_info()
    print(f"specfused {__version__}, torch {torch.__version__}")
    print(f"CUDA kernels: {', '.join(build['archs']) or 'none (CPU-only build)'}")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        print(f"GPU: {torch.cuda.get_device_name()}, sm_{major}{minor}")
    else:
        print("GPU: none, every op runs on its CPU implementation")
    try:
        print(f"SGLang: {importlib.metadata.version('sglang')}")
    except importlib.metadata.PackageNotFoundError:
        print("SGLang: not installed")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m specfused", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, kernels of this build, GPU, SGLang")
    demo = commands.add_parser("demo", help="serve a tiny model with and without speculation")
    from specfused import demo as demo_module

    demo_module.add_arguments(demo)
    options = parser.parse_args(arguments)
    return info() if options.command == "info" else demo_module.run(options)


if __name__ == "__main__":
    sys.exit(main())
