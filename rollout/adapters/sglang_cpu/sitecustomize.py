"""Lets stock SGLang start on a machine without CUDA; first on PYTHONPATH of the engine and so of all it spawns.

SGLang imports `torchvision` and `sgl_kernel` at module scope on paths that a text model on CPU never executes, and
neither installs here without CUDA. Each one that is really missing is answered by permissive stub modules. With CUDA
nothing is stubbed, whatever the path says.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

STUBBED = ("torchvision", "sgl_kernel")


class _Class(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name[:1].isupper():
            value: Any = _Class(name, (), {"__module__": self.__name__})
        else:
            value = importlib.import_module(full)  # a module or a function, nobody can tell: it serves as both
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__}: this machine has no CUDA, the function is a stub")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in missing and not fullname.rsplit(".", 1)[-1][:1].isupper():
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__dict__["__version__"] = "0.0.0"
        module.__file__ = __file__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


missing = () if os.path.exists("/dev/nvidiactl") else tuple(n for n in STUBBED if importlib.util.find_spec(n) is None)
if missing:
    sys.meta_path.append(_Finder())
