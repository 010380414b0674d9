# SPDX-License-Identifier: Apache-2.0
"""specfused inside SGLang: the only place that imports it; `compat` alone knows its versions."""
