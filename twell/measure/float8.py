"""A layer or a model in FP8: our paths with gate and up in FP8, and what dense layers take.

Dense FP8 has all three products in FP8, compiled, so that quantising x and h is fused with what is
around it: by rows (one scale a token and a neuron), by tensors (one scale each), and torchao's own
configuration where torchao is installed. Each result is compared with fp64 of the layer with the
same quantised weights.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twell.measure.case import Call, Case
from twell.measure.check import Exact
from twell.measure.providers import (
    DENSE_FP8,
    DENSE_FP8_TENSOR,
    DENSE_FP8_TORCHAO,
    FP8,
    FP8_ALL,
    Provider,
)
from twell.models.llama import SparseLlamaForCausalLM
from twell.models.quantize import QUANTIZED, quantize_
from twell.sparse import float8
from twell.sparse.calibration import Calibration
from twell.sparse.layer import SparseFFN

# These quantise h too, which fp64 does not.
ALL_IN_FP8 = DENSE_FP8, DENSE_FP8_TENSOR, DENSE_FP8_TORCHAO
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"


def dense_rows(x: Tensor, *weights: Tensor | None) -> Tensor:
    """y [M, K] of FP8 weights gate, up and down, each followed by its scales."""
    gate, s_gate, up, s_up, down, s_down = weights
    values, scale = float8.quantize(x)
    h = float8.linear(values, scale, up, s_up, None)
    if gate is not None:
        h = torch.relu(float8.linear(values, scale, gate, s_gate, None)) * h
    else:
        h = torch.relu(h)
    return float8.linear(*float8.quantize(h), down, s_down, None)


def _by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and the one scale of a tensor."""
    amax = x.abs().amax().float().clamp(min=float8.SMALLEST)
    values = (x.float() * (float8.LARGEST / amax)).clamp(-float8.LARGEST, float8.LARGEST)
    return values.to(float8.FLOAT8), amax / float8.LARGEST


def dense_tensor(x: Tensor, *weights: Tensor | None) -> Tensor:
    """As `dense_rows` with one scale for each tensor."""
    gate, s_gate, up, s_up, down, s_down = weights

    def linear(values: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(values, w.t(), scale_a=scale, scale_b=w_scale, **options)

    values = _by_tensor(x)
    h = linear(*values, up, s_up)
    h = torch.relu(h) if gate is None else torch.relu(linear(*values, gate, s_gate)) * h
    return linear(*_by_tensor(h), down, s_down)


class _Torchao(nn.Module):
    """The layer in torch, quantised by torchao."""

    def __init__(self, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor):
        super().__init__()
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow
        from torchao.quantization import quantize_ as quantize_all

        for name, weight in (("gate", w_gate), ("up", w_up), ("down", w_down)):
            part = None if weight is None else nn.Linear(*weight.shape[::-1], False, device="meta")
            if part is not None:
                part.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
            setattr(self, name, part)
        # Without a lower bound torchao divides by zero for a token without active neurons.
        options = {"granularity": PerRow(), "activation_value_lb": float8.SMALLEST}
        quantize_all(self, Float8DynamicActivationFloat8WeightConfig(**options))

    def forward(self, x: Tensor) -> Tensor:
        u = self.up(x)
        return self.down(torch.relu(u) if self.gate is None else torch.relu(self.gate(x)) * u)


def widened(tensor: Tensor | None, rule: Callable = float8.quantize) -> Tensor | None:
    """The tensor in fp64 after a round trip through FP8."""
    if tensor is None:
        return None
    return float8.wide(*rule(tensor.contiguous()))


@dataclass(frozen=True)
class Quantized:
    """The FP8 providers of a case: their calls, and what is exact for their weights."""

    case: Case

    @functools.cached_property
    def sparse(self) -> Exact:
        """Of x, gate and up by rows."""
        x, (gate, up, down) = self.case.x, self.case.sets[0]
        return Exact.of(widened(x), (widened(gate), widened(up), down), fp8=True)

    def exact(self, provider: Provider) -> tuple[Exact, float]:
        """Return what a provider's result is compared with, and the error it may have."""
        if provider not in ALL_IN_FP8:
            return self.sparse, 0.0
        rule = _by_tensor if provider == DENSE_FP8_TENSOR else float8.quantize
        x, *weights = (widened(tensor, rule) for tensor in (self.case.x, *self.case.sets[0]))
        exact = Exact.of(x, weights, fp8=True)
        return exact, exact.fp8_limit

    def dense_calls(self) -> dict[Provider, list[Call]]:
        """Return the calls of the dense layers, one for each set of weights."""
        calls = {DENSE_FP8: self._dense(dense_rows, float8.quantize)}
        calls[DENSE_FP8_TENSOR] = self._dense(dense_tensor, _by_tensor)
        if importlib.util.find_spec("torchao"):
            layers = [torch.compile(_Torchao(*weights)) for weights in self.case.sets]
            calls[DENSE_FP8_TORCHAO] = [functools.partial(one, self.case.x) for one in layers]
        return calls

    def sparse_calls(self) -> dict[Provider, list[Call]]:
        """Return the calls of our paths, dense included."""
        paths = self.case.paths()
        return {Provider("triton", path, precision=FP8): self.path_calls(path) for path in paths}

    def auto_layers(self, calibration: Calibration | None = None) -> list[SparseFFN]:
        """Return layers of backend "auto" in FP8 that know this activity."""
        return self.case.auto_layers(calibration, quantize_)

    def _dense(self, function: Callable[..., Tensor], quantize: Callable) -> list[Call]:
        compiled, calls = torch.compile(function, fullgraph=True, dynamic=False), []
        for weights in self.case.sets:
            stored = [None if w is None else quantize(w.contiguous()) for w in weights]
            pairs = [pair or (None, None) for pair in stored]
            calls.append(functools.partial(compiled, self.case.x, *sum(pairs, ())))
        return calls

    def path_calls(self, path: str) -> list[Call]:
        """Return the calls of one path of the kernels, which quantise x."""
        from twell.kernels import ops

        def call(gate, s_gate, up, s_up, down) -> Tensor:
            biases_and_scale = (None,) * 4
            return ops.run(path, self.case.x, gate, up, down, *biases_and_scale, s_gate, s_up)

        calls = []
        for gate, up, down in self.case.sets:
            gate = (None, None) if gate is None else float8.quantize(gate)
            calls.append(functools.partial(call, *gate, *float8.quantize(up), down))
        return calls


class Linears:
    """The linear layers of a model in bf16, of which those of a provider are in FP8.

    A dense provider has gate, up and down in FP8, a sparse one gate and up. With FP8_ALL the four
    of attention are in FP8 too.
    """

    def __init__(self, model: SparseLlamaForCausalLM):
        self.model = model
        self.replaced: list[tuple[nn.Module, str, nn.Linear]] = []
        self.quantized: dict[nn.Linear, float8.Float8Linear] = {}  # of the weights they had first

    def become(self, provider: Provider) -> None:
        for module, name, part in self.replaced:
            setattr(module, name, part)
        self.replaced = []
        names = () if not provider.in_fp8 else QUANTIZED
        if names and provider.backend == "dense":
            names = *QUANTIZED, "down_proj"
        for layer in self.model.model.layers:
            self._quantize(layer.mlp, names)
            self._quantize(layer.self_attn, ATTENTION if provider.precision == FP8_ALL else ())

    def _quantize(self, module: nn.Module, names: Sequence[str]) -> None:
        for name in names:
            part = getattr(module, name)
            if part is not None:
                if part not in self.quantized:
                    self.quantized[part] = float8.Float8Linear.of(part)
                self.replaced.append((module, name, part))
                setattr(module, name, self.quantized[part])
