"""Dense layers with rounded weights, the baselines of FP8 and of decoding; FP8 for whole models.

FP8: all three products, with one scale a row (`Float8Linear`'s), one a tensor, or by torchao where
it is installed. int8 has a scale for each row, and Inductor widens the weights inside its product,
once it searches for one (OPTIONS). int4 has a scale for each GROUP weights of a row, and torch's
own product. x, h and the arithmetic of integer weights stay in bf16. A result is compared with fp64
of the same rounded weights, so `relative_rms` does not say what rounding costs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twell.measure.providers import FP8, FP8_ALL, FP8_TENSOR, FP8_TORCHAO, INT4, INT8, Provider
from twell.models.llama import SparseLlamaForCausalLM
from twell.models.quantize import QUANTIZED
from twell.sparse import float8
from twell.sparse.float8 import Float8Linear

PROJECTIONS = "gate_proj", "up_proj", "down_proj"
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
MAX_TOKENS = 16  # of integer weights: above, products are not bound by reading the weights
GROUP = 128
OPTIONS = {"coordinate_descent_tuning": True, "max_autotune": True}
# Relative RMS. int4: one token with 34 active neurons had 1.9e-2 on an H200 [kernel log, FP8].
ALLOWED = {INT8: 1e-2, INT4: 3e-2}


def by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 values and the one scale of a tensor."""
    amax = x.abs().amax().float().clamp(min=float8.SMALLEST)
    values = (x.float() * (float8.LARGEST / amax)).clamp(-float8.LARGEST, float8.LARGEST)
    return values.to(float8.FLOAT8), amax / float8.LARGEST


class Rows(nn.Module):
    """A product in FP8 with one scale a row, of an input that `read` has quantised."""

    read = staticmethod(float8.quantize)

    def __init__(self, weight: Tensor):
        super().__init__()
        self.values, self.scale = (nn.Buffer(t) for t in self.read(weight.contiguous()))

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return float8.linear(*x, self.values, self.scale, None)

    def wide(self) -> Tensor:
        return float8.wide(self.values, self.scale)


class ByTensor(Rows):
    """The same with one scale a tensor."""

    read = staticmethod(by_tensor)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        scales = {"scale_a": x[1], "scale_b": self.scale}
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(x[0], self.values.t(), **scales, **options)


class Int8(nn.Module):
    """A product with a weight [N, K] of integers, and a scale for each row."""

    def __init__(self, weight: Tensor):
        super().__init__()
        scale = (weight.abs().amax(1).float() / 127).clamp(min=1e-12).to(weight.dtype)
        values = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127)
        self.values, self.scale = nn.Buffer(values.to(torch.int8)), nn.Buffer(scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values.to(x.dtype)) * self.scale

    def wide(self) -> Tensor:
        return self.values.double() * self.scale.double()[:, None]


class Int4(nn.Module):
    """A product with integers 0 to 15: (integer - 8) * scale, by groups of a row.

    torch's product also adds a zero for each group, which is 0 here.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        rows = weight.float().view(len(weight), -1, GROUP)
        scale = (rows.abs().amax(-1) / 7).clamp(min=1e-6).to(weight.dtype)
        values = (rows / scale.float()[..., None] + 8).round().clamp(0, 15)
        self.widened = ((values - 8) * scale.double()[..., None]).view_as(weight)
        integers = values.to(torch.int32).view_as(weight)
        if weight.is_cuda:
            pairs = (integers[:, ::2] << 4 | integers[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
        groups = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
        self.values, self.groups = nn.Buffer(packed), nn.Buffer(groups)

    def forward(self, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm
        product = product if x.is_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        return product(x, self.values, GROUP, self.groups)

    def wide(self) -> Tensor:
        return self.widened


# torchao rounds by rows, too.
KINDS = {FP8: Rows, FP8_TORCHAO: Rows, FP8_TENSOR: ByTensor, INT8: Int8, INT4: Int4}


def dense_precisions(num_tokens: int, sizes: Sequence[int], device: torch.device) -> list[str]:
    """Return the precisions of dense layers that can be measured here."""
    fits = [INT8] if any(size % GROUP for size in sizes) else [INT8, INT4]
    precisions = fits if num_tokens <= MAX_TOKENS else []
    if float8.why_not(device) is None:
        precisions = [*precisions, FP8, FP8_TENSOR]
        precisions += [FP8_TORCHAO] if importlib.util.find_spec("torchao") else []
    return precisions


@torch.no_grad()
def round_weights(layer: nn.Module, precision: str) -> None:
    """Replace the projections of a dense layer by those of a precision, in place."""
    if precision == FP8_TORCHAO:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow
        from torchao.quantization import quantize_ as quantize_all

        # Without a lower bound torchao divides by zero for a token without active neurons.
        options = {"granularity": PerRow(), "activation_value_lb": float8.SMALLEST}
        quantize_all(layer, Float8DynamicActivationFloat8WeightConfig(**options))
        return
    kind = KINDS[precision]
    layer.read = getattr(kind, "read", layer.read)
    for name in PROJECTIONS:
        if (part := getattr(layer, name)) is not None:
            setattr(layer, name, kind(part.weight))


class Linears:
    """The linear layers of a model in bf16, of which those of a provider are in FP8.

    A dense provider has gate, up and down in FP8, a sparse one gate and up. With FP8_ALL the four
    of attention are in FP8 too.
    """

    def __init__(self, model: SparseLlamaForCausalLM):
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
