# SPDX-License-Identifier: Apache-2.0
"""Run the engine tests against the SGLang versions that specfused supports.

    python tests/engine/run.py                          # all versions
    python tests/engine/run.py 0.5.23 -- -k tree -x     # one version, pytest arguments after --

Each version is a folder made by `pip install --no-deps --target FOLDER/VERSION sglang==VERSION`
(requirements.txt says what else); FOLDER is SPECFUSED_SGLANG_DIR or .sglang in the repository
root. A version gets a pytest process of its own, because it decides what `import sglang` means.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERSIONS = ("0.5.17", "0.5.23")

# Read when sglang is imported; spawned processes inherit them.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # The first tree of topk > 1 would be compiled for 20 s.
    "TORCHDYNAMO_DISABLE": "1",
}


def version_folder(version: str) -> Path:
    """Where this version of SGLang is expected."""
    root = os.environ.get("SPECFUSED_SGLANG_DIR") or HERE.parents[1] / ".sglang"
    return Path(root).resolve() / version


def missing(version: str) -> str | None:
    """Why this version cannot be tested, or None."""
    folder = version_folder(version)
    if (folder / f"sglang-{version}.dist-info").is_dir():
        return None
    return (
        f"SGLang {version} is not in {folder}: "
        f"pip install --no-deps --target {folder} sglang=={version}"
    )


def run_version(version: str, *pytest_args: str) -> int:
    """Run the tests of one version; return pytest's exit code."""
    path = [str(HERE / "standins"), str(version_folder(version))]
    if inherited := os.environ.get("PYTHONPATH"):
        path.append(inherited)
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "SPECFUSED_ENGINE_VERSION": version,
        "PYTHONPATH": os.pathsep.join(path),
    }
    command = [sys.executable, "-m", "pytest", str(HERE), "-p", "no:cacheprovider", *pytest_args]
    # From here, so that the specfused that is tested is the one that is installed.
    return subprocess.run(command, env=environment, cwd=HERE, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help=f"default: {' '.join(VERSIONS)}")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    versions = parser.parse_args(sys.argv[1:split]).versions or VERSIONS
    failed = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("SPECFUSED_ENGINE_CACHE", cache)
        for version in versions:
            print(f"== SGLang {version}", flush=True)
            if reason := missing(version):
                print(reason)
                failed.append(version)
            elif run_version(version, *sys.argv[split + 1 :]) != 0:
                failed.append(version)
    print(f"== failed: {' '.join(failed)}" if failed else "== all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
