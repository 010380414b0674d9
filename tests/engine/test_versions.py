# SPDX-License-Identifier: Apache-2.0
"""Runs the engine tests once per supported SGLang version, each in a pytest of its own."""

import os
import xml.etree.ElementTree as ElementTree

import pytest
from run import VERSIONS, missing, run_version

pytestmark = pytest.mark.engine

FEWEST_TESTS = 90  # fewer means that something was not collected


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.mark.parametrize("version", VERSIONS)
def test_engine(version, shared_cache, tmp_path, monkeypatch, capfd):
    """Absence of a version skips, unless SPECFUSED_REQUIRE_ENGINE=1 makes it a failure."""
    if reason := missing(version):
        if os.environ.get("SPECFUSED_REQUIRE_ENGINE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    monkeypatch.setenv("SPECFUSED_ENGINE_CACHE", str(shared_cache))
    report = tmp_path / "report.xml"
    with capfd.disabled():
        code = run_version(version, f"--junitxml={report}")
    assert code == 0, f"pytest of SGLang {version} ended with {code}"
    counts = ElementTree.parse(report).getroot().find("testsuite").attrib
    assert int(counts["skipped"]) == 0, "an engine test was skipped"
    assert int(counts["tests"]) >= FEWEST_TESTS
