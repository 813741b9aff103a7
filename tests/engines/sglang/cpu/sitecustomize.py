"""Lets SGLang's engine run on a CPU, in each of its processes: Python imports this where the folder is on its path.

Two packages that SGLang imports exist for GPUs alone. `sgl_kernel` is made up: each of its functions raises when it is
called, and with the attention of PyTorch none is. So is `soundfile`, which the HTTP server imports for transcriptions.
Of torchvision the operators are declared, which its build for a CPU of another index would bring; nothing here works on
pictures.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Absent:
    """A function, or a namespace of functions, that is not there."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} needs a GPU")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Kernels(types.ModuleType):
    __version__ = "9.9.9"  # SGLang asks for a least version

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _declare_operators_of_torchvision() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in (
        "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align",
        "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
    ):  # fmt: skip
        library.define(f"{name}(Tensor a) -> Tensor")
    _declared.append(library)  # its operators go with it


_declared: list[Any] = []


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in ("sgl_kernel", "soundfile") or name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, _Loader(), origin=__file__, is_package=True)
        if name == "torchvision" and not _declared:
            _declare_operators_of_torchvision()
        return None


sys.meta_path.insert(0, _Finder())
