"""The providers of a benchmark: backend, path, compilation and precision, by their recorded names.

A leaf: it imports no torch, so tables and figures use it too.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

BACKENDS = "dense", "triton", "auto"
SPARSE_PATHS = "rowwise", "union", "decode", "hybrid"
# "Tuned": Inductor searches for launch options, and generates its own products of a single row.
COMPILATIONS = EAGER, COMPILED, TUNED = "eager", "torch.compile", "torch.compile tuned"
# Weights and inputs in FP8; of a dense layer all three products. "FP8 all": attention's too.
FP8, FP8_TENSOR, FP8_TORCHAO, FP8_ALL = "FP8", "FP8 by tensors", "FP8 torchao", "FP8 all"
# torchao and integer weights are in recorded rows only.
PRECISIONS = None, FP8, FP8_TENSOR, FP8_TORCHAO, FP8_ALL, "int8 weights", "int4 weights"


@dataclass(frozen=True)
class Provider:
    """How a row's feed-forward layers are computed.

    backend: "dense" (plain torch), "triton" (our kernels), "auto", "reference", or a third party's
    layer as "package.module:function". path: the path that the kernels are forced to take; None
    where the layer takes its own. compilation: one of COMPILATIONS. precision: one of PRECISIONS;
    None for the layer's own type.
    """

    backend: str
    path: str | None = None
    compilation: str = EAGER
    precision: str | None = None

    @property
    def name(self) -> str:
        """The name in recorded rows: "dense torch.compile", "triton union", "auto"."""
        if self == DENSE_KERNELS:
            return "dense"
        words = [self.backend, self.path, self.precision]
        if self.backend == "dense" or self.compiled:
            words.append(self.compilation)
        return " ".join(word for word in words if word)

    __str__ = name.fget

    @classmethod
    def parse(cls, name: str) -> Provider:
        """Return the provider of a recorded name. Raises ValueError for another name."""
        backend, _, compilation = name.partition(" ")
        if ":" in backend and compilation in ("", *COMPILATIONS[1:]):
            return cls(backend, compilation=compilation or EAGER)
        if name not in _BY_NAME:
            raise ValueError(f"provider {name!r} is unknown; such as 'dense eager', 'triton union'")
        return _BY_NAME[name]

    @property
    def third_party(self) -> bool:
        return ":" in self.backend

    @property
    def allowed(self) -> float:
        """The relative RMS that is allowed beyond the tolerance: any, for a third party's layer."""
        return math.inf if self.third_party else 0.0

    def load(self) -> Callable:
        """Return the third party's function. Raises ValueError where there is none."""
        module, _, name = self.backend.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"provider {self}: {error}; write package.module:function") from None

    @property
    def compiled(self) -> bool:
        return self.compilation != EAGER

    @property
    def in_fp8(self) -> bool:
        return (self.precision or "").startswith(FP8)

    @property
    def untuned(self) -> Provider:
        """The same provider without tuning."""
        return replace(self, compilation=COMPILED) if self.compilation == TUNED else self

    @property
    def sparse_path(self) -> bool:
        """Whether the kernels are forced to take a sparse path."""
        return self.path in SPARSE_PATHS


DENSE_EAGER = Provider("dense")
DENSE_COMPILED = Provider("dense", compilation=COMPILED)
DENSE_KERNELS = Provider("triton", "dense")  # named "dense": our kernels on the dense path
AUTO, TRITON = Provider("auto"), Provider("triton")
ROWWISE, UNION, DECODE, HYBRID = (Provider("triton", path) for path in SPARSE_PATHS)
TRITON_COMPILED = Provider("triton", compilation=COMPILED)
AUTO_COMPILED = Provider("auto", compilation=COMPILED)
UNION_COMPILED = Provider("triton", "union", COMPILED)
_PATHS = [(backend, None) for backend in (*BACKENDS, "reference")]
_PATHS += [("triton", path) for path in ("dense", *SPARSE_PATHS)]
_EVERY = (Provider(*path, *rest) for path, *rest in product(_PATHS, COMPILATIONS, PRECISIONS))
_BY_NAME = {provider.name: provider for provider in _EVERY}


def is_sparse(name: str) -> bool:
    """Return whether a recorded provider is forced to take a sparse path."""
    return Provider.parse(name).sparse_path


def third_party(names: Sequence[str]) -> list[Provider]:
    """Return the providers of third parties' layers. Raises ValueError for a wrong name."""
    providers = [Provider(name) for name in names]
    for provider in providers:
        provider.load()
    return providers


def by_compilation(
    providers: Sequence[Provider], compiled: bool | None, tuned: bool = False
) -> list[Provider]:
    """Return the providers compiled, eager, or with None both ways; and also tuned."""
    kinds = {None: [EAGER, COMPILED], True: [COMPILED], False: [EAGER]}[compiled]
    kinds += [TUNED] * tuned
    return [replace(provider, compilation=kind) for kind in kinds for provider in providers]


def model_providers(
    compiled: bool | None, tuned: bool = False, precisions: Sequence[str | None] = (None,)
) -> list[Provider]:
    """Return the providers of a whole model, by compilation; the first one is dense."""
    providers = [Provider(name, precision=kind) for kind, name in product(precisions, BACKENDS)]
    return by_compilation(providers, compiled, tuned)
