# SPDX-License-Identifier: Apache-2.0
"""The serving suite: whole engines beside each other. See bench/README.md."""
