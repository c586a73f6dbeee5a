"""A stand-in for SGLang's kernel package on machines without CUDA. Put its parent folder first on PYTHONPATH.

Any attribute and any submodule imports, and calling one raises NotImplementedError. The engine then runs
PyTorch's own operators. It is a test aid and is never installed.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Missing:
    """A kernel that is not there. SGLang may decorate, subscript and pass it around; only calling it fails."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} is a CUDA kernel, and this is the stand-in without kernels")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


def _attribute_of(module):
    def missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{module}.{name}")

    return missing


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _attribute_of(spec.name)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _StandIn())
__getattr__ = _attribute_of(__name__)
