"""Lets SGLang import on a machine without CUDA. Loaded by its environment's Python at start; standard library only.

SGLang's server imports CUDA packages that its CPU path never calls. When SGLang asks for one of them, it gets an empty
module whose every attribute is the same inert class. Libraries that look whether such a package is there still see
that it is missing. Do not trust features that the tests beside this file do not use.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType

CUDA_PACKAGES = frozenset(
    {
        *("cuda", "cutlass", "deep_ep", "deep_gemm", "flash_attn", "flash_mla", "flashinfer", "humming", "nvshmem"),
        *("quack", "sgl_kernel", "tilelang", "timm", "torch_memory_saver", "torchaudio", "torchvision"),
        *("deepseek_recipe", "smg_grpc_proto", "smg_grpc_servicer", "tml_renderers"),
    }
)
PROBING_PACKAGES = ("/transformers/", "/torch/")
"""Libraries that import a package to learn whether it is installed."""


class InertType(type):
    """A class that has every attribute, stands in annotations, and leaves what it decorates as it is."""

    def __getattr__(cls, name: str) -> "InertType":
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert

    def __or__(cls, other: object) -> "InertType":
        return cls

    def __ror__(cls, other: object) -> object:  # type: ignore[override]
        return other

    def __getitem__(cls, key: object) -> "InertType":
        return cls

    def __call__(cls, *arguments: object, **options: object) -> object:
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return super().__call__()


class Inert(metaclass=InertType):
    """What every attribute of a stand-in is: a class, a function, a decorator, a constant."""

    def __call__(self, *arguments: object, **_: object) -> object:
        return arguments[0] if arguments and callable(arguments[0]) else None

    def __getattr__(self, name: str) -> InertType:
        return Inert


class StandIn(ModuleType):
    """An empty package."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "9.9.9"

    def __getattr__(self, name: str) -> InertType:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each of `CUDA_PACKAGES`, for SGLang alone."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in CUDA_PACKAGES or not asked_by_sglang():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def asked_by_sglang() -> bool:
    """Whether the import under way comes from SGLang, and not from a library that SGLang imports."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(package in file for package in PROBING_PACKAGES):
            return False
        if "/sglang/" in file:
            return True
        frame = frame.f_back
    return False


sys.meta_path.insert(0, Finder())
# vLLM, of which SGLang imports a part, would load kernels that only a CPU with AVX-512 can run.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
