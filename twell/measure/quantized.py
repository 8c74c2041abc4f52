"""Dense layers in FP8, the baselines of our FP8; and models whose linear layers are in FP8.

A dense layer in FP8 has all three products in FP8, with one scale a row (as `Float8Linear` has) or
one scale a tensor. Its result is compared with fp64 of the same rounded weights, so `relative_rms`
does not show what rounding costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from twell.measure.providers import FP8, FP8_ALL, FP8_TENSOR, Provider
from twell.models.llama import SparseLlamaForCausalLM
from twell.models.quantize import QUANTIZED
from twell.sparse import float8
from twell.sparse.float8 import Float8Linear

PROJECTIONS = "gate_proj", "up_proj", "down_proj"
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"


class Rows(Float8Linear):
    """A product in FP8 with one scale a row, of an input that `read` has quantised."""

    read = staticmethod(float8.quantize)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return float8.linear(*x, *self.tensors)


class ByTensor(Rows):
    """The same product with one scale a tensor."""

    @staticmethod
    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        amax = x.abs().amax().float().clamp(min=float8.SMALLEST)
        values = (x.float() * (float8.LARGEST / amax)).clamp(-float8.LARGEST, float8.LARGEST)
        return values.to(float8.FLOAT8), amax / float8.LARGEST

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        scales = {"scale_a": x[1], "scale_b": self.weight_scale}
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(x[0], self.weight.t(), **scales, **options)


@torch.no_grad()
def round_weights(layer: nn.Module, precision: str) -> None:
    """Replace the projections of a dense layer by FP8 ones, in place."""
    kind = {FP8: Rows, FP8_TENSOR: ByTensor}[precision]
    layer.read = kind.read
    for name in PROJECTIONS:
        if (part := getattr(layer, name)) is not None:
            rounded = kind(part.in_features, part.out_features, None, part.weight.device)
            rounded.weight, rounded.weight_scale = kind.read(part.weight)
            setattr(layer, name, rounded)


class Linears:
    """The linear layers of a model in bf16, some of them in FP8 as a provider wants.

    A dense provider has gate, up and down in FP8, a sparse one gate and up. With FP8_ALL the four
    of attention are in FP8 too.
    """

    def __init__(self, model: SparseLlamaForCausalLM):
        if any(ffn.quantized for ffn in model.ffns):
            raise ValueError("the model has FP8 weights already; take the one in bf16")
        self.model = model
        self.replaced: list[tuple[nn.Module, str, nn.Linear]] = []
        self.quantized: dict[nn.Linear, Float8Linear] = {}  # of the weights they had first

    def become(self, provider: Provider) -> None:
        for module, name, part in self.replaced:
            setattr(module, name, part)
        self.replaced = []
        names = PROJECTIONS if provider.backend == "dense" else QUANTIZED
        for layer in self.model.model.layers:
            self._quantize(layer.mlp, names if provider.in_fp8 else ())
            self._quantize(layer.self_attn, ATTENTION if provider.precision == FP8_ALL else ())

    def _quantize(self, module: nn.Module, names: Sequence[str]) -> None:
        for name in names:
            part = getattr(module, name)
            if part is not None:
                if part not in self.quantized:
                    self.quantized[part] = Float8Linear.of(part)
                self.replaced.append((module, name, part))
                setattr(module, name, self.quantized[part])
