# SPDX-License-Identifier: Apache-2.0
"""The one version string; read by the build without importing torch."""

__version__ = "0.1.0"
