# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of specfused beside its peers. `python bench/run.py`; see README.md."""
