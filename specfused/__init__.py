# SPDX-License-Identifier: Apache-2.0
"""specfused: speculative decoding that is free to have.

Importing loads the ops (`torch.ops.specfused.*`) and does nothing else: no GPU is queried, no
kernel is built, SGLang is not imported. `specfused.ops` documents every op.
"""

from specfused import ops
from specfused._version import __version__

__all__ = ["__version__", "ops"]
