# SPDX-License-Identifier: Apache-2.0
"""Device and random numbers of the unit tests.

The engine tests load this file as well, before their stand-ins are in place: nothing here may
import torch or specfused outside of a fixture.
"""

import os
import random
import zlib

import pytest

SEED = int(os.environ.get("SPECFUSED_TEST_SEED") or random.SystemRandom().randrange(1 << 31))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device and a build with kernels for it")


def pytest_report_header(config):
    return f"specfused: fresh random inputs, repeat them with SPECFUSED_TEST_SEED={SEED}"


def _missing_cuda():
    """Why the CUDA tests cannot run here, or None."""
    import torch

    from specfused import ops

    if not torch.cuda.is_available():
        return "no CUDA device that torch can use"
    if not ops.build_info()["archs"]:
        return "specfused was built without CUDA kernels"
    return None


def _require_cuda():
    reason = _missing_cuda()
    if reason is None:
        return "cuda"
    if os.environ.get("SPECFUSED_REQUIRE_CUDA") == "1":
        pytest.fail(f"SPECFUSED_REQUIRE_CUDA=1: {reason}")
    pytest.skip(reason)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Every test that takes it runs on the CPU always, on the GPU where there is one."""
    return "cpu" if request.param == "cpu" else _require_cuda()


@pytest.fixture
def cuda():
    """For what only a GPU can show."""
    return _require_cuda()


@pytest.fixture
def host():
    """The torch-free module; optional in an install, so its tests may be skipped."""
    return pytest.importorskip("specfused._host", reason="built without _host")


@pytest.fixture
def seed(request):
    """Differs per test and per run, but follows from the run's seed alone; shown on failure."""
    value = (SEED + zlib.crc32(request.node.name.encode())) % (1 << 31)
    print(f"SPECFUSED_TEST_SEED={SEED} (this test: {value})")
    return value


@pytest.fixture
def rng(seed):
    """On the CPU whatever the device, so that a seed means the same inputs everywhere."""
    import torch

    return torch.Generator().manual_seed(seed)
