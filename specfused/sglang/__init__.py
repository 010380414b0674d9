# SPDX-License-Identifier: Apache-2.0
"""specfused inside SGLang. The only place that imports SGLang; `compat` alone knows its versions."""
