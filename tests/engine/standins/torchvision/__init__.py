# SPDX-License-Identifier: Apache-2.0
"""An inert torchvision: SGLang imports a few names of it and a text model calls none of them."""

import sys
import types

from cpu_only import require_cpu_engine

require_cpu_engine("torchvision")

__version__ = "0.26.0"


class _InertType(type):
    """Class attributes (`InterpolationMode.BICUBIC`) are inert classes too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Inert(metaclass=_InertType):
    """Stands for any torchvision class or function."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torchvision is a stand-in here")


def _any_name(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Inert


def _add_submodule(path):
    module = types.ModuleType(f"{__name__}.{path}")
    module.__path__ = []
    module.__getattr__ = _any_name
    sys.modules[module.__name__] = module
    parent, _, leaf = module.__name__.rpartition(".")
    setattr(sys.modules[parent], leaf, module)


for _path in (
    "io",
    "ops",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _add_submodule(_path)

__getattr__ = _any_name
