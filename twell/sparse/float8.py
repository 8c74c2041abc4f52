"""FP8 weights for inference: gate and up in float8_e4m3fn, as torchao quantises a linear layer.

A row of x, or of a weight, is stored as values of float8_e4m3fn, whose largest is 448, and one
fp32 scale, so that the row is values * scale:

    amax = max(max |row|, 1e-12)    scale = amax * (1 / 448)    values = round(row * (448 / amax))

A neuron's weights are quantised once, a token's x in every call. Products are summed by the FP8
tensor cores, with their short accumulators (torchao's "fast accumulation"), and scaled in fp32;
g, h and y are rounded to bf16, and the sparse paths keep the down projection in bf16: its rows are
gathered by neuron, and widening them costs the kernels more than it saves. Dense passes multiply in
FP8 there too, by a copy. A row of x with NaN or inf gets the scale NaN, so this token's y
is NaN and no other token's.

Ours, not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twell.sparse.activations import Weights, add_bias

FLOAT8 = torch.float8_e4m3fn
# In config.json, where transformers looks: it warns of a method that it does not know.
QUANTIZATION = {"quant_method": "twell_float8", "granularity": "per_row"}
FP8_DOWN = {**QUANTIZATION, "down": True}  # where dense passes have down in FP8, too
LARGEST = torch.finfo(FLOAT8).max
SMALLEST = 1e-12  # of amax, as in torchao: a row of zeros has a scale too
CAPABILITY = 8, 9  # the first with tensor cores for FP8
MULTIPLE = 16  # of K, and of N in torch's product


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig:
    """How `quantize_` stores a layer, named as torchao's configuration of the same kind.

    Each row has one scale, as with torchao's `PerRow`: a neuron's weights, a token's x.

    down: dense passes compute the down projection in FP8 too, with a copy of its weights, a byte an
        entry, where N is a multiple of 16. On recorded models of 85 M it costs 0.01% of the
        cross-entropy (data/bench/quality.csv). False: the copy is not kept.
    keep_original: keep the bf16 weights on the CPU, so that `dequantize_` restores every bit; they
        take 4 bytes for each entry of gate and up together.
    """

    keep_original: bool = False
    down: bool = True


def why_not(device: torch.device) -> str | None:
    """Return None where FP8 products run on tensor cores, else the reason why not."""
    if device.type != "cuda":
        return "it needs a GPU; the CPU computes it slowly, for tests"
    if torch.version.hip:
        return "AMD's GPUs have other FP8 types"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        name = f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"
        return f"{name} has no tensor cores for FP8, sm_89 and newer have; use the bf16 weights"
    return None


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values [M, K] float8_e4m3fn and scales [M] fp32 of rows [M, K].

    In plain torch operators, which torch.compile fuses with the norm before the layer.
    """
    wide = rows.float()
    amax = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)  # NaN stays NaN
    finite = amax < torch.inf
    # In fp64, since torch.compile divides fp32 inexactly; rounded twice, the quotient is the same.
    inverse = (LARGEST / amax.double()).float()
    values = torch.where(finite, wide * inverse, 0.0).clamp(-LARGEST, LARGEST)
    scale = torch.where(finite, amax * (1 / LARGEST), torch.nan)
    return values.to(FLOAT8).contiguous(), scale.squeeze(-1)


def wide(values: Tensor, scale: Tensor) -> Tensor:
    """Return values * scale in fp64, with one scale, or one for each row."""
    return values.double() * scale.double()[..., None]


def _product(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """x w^T [M, N] in bf16, scaled; N a multiple of MULTIPLE."""
    if not x.is_cuda:
        return ((x.float() @ w.float().t()) * (w_scale * x_scale[:, None])).bfloat16()
    scales = {"scale_a": x_scale[:, None], "scale_b": w_scale[None, :]}
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_mm(x, w.t(), **scales, **options)


def linear(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, b: Tensor | None) -> Tensor:
    """Return x w^T + b [M, N] in bf16, for FP8 x [M, K] and w [N, K] with a scale a row.

    The product is rounded to bf16 before b is added.
    """
    size = w.shape[0]
    if type(x.shape[0]) is int and not x.shape[0]:  # a symbolic size is not 0
        return x.new_empty(0, size, dtype=torch.bfloat16)
    if more := -size % MULTIPLE:  # rows of zeros
        w = nn.functional.pad(w.view(torch.uint8), (0, 0, 0, more)).view(FLOAT8)
        w_scale = nn.functional.pad(w_scale, (0, more))
        y = _product(x, x_scale, w, w_scale)[:, :size].contiguous()
    else:
        y = _product(x, x_scale, w, w_scale)
    return y if b is None else (y + b).to(torch.bfloat16)


def ffn(x: Tensor, weights: Weights, x_scale: Tensor | None = None) -> Tensor:
    """Return y [M, K] bf16 of x [M, K]: the reference of all sparse paths.

    Without x_scale [M], x is in bf16. Sums are in fp32; g and h are rounded to bf16.
    """
    x, x_scale = quantize(x) if x_scale is None else (x, x_scale)
    x, act = x.float() * x_scale[:, None], weights.act
    h = add_bias(x @ (weights.w_up.float() * weights.s_up[:, None]).t(), weights.b_up)
    if weights.gated:
        gate = x @ (weights.w_gate.float() * weights.s_gate[:, None]).t()
        g = act.gate(add_bias(gate, weights.b_gate).bfloat16())
        # Select, do not multiply: an inactive neuron's u may be infinite.
        h = torch.where(g != 0, act.of_gate(g).float() * act.of_up(h), 0)
    else:
        h = act.of_gate(act.gate(h.bfloat16()))
    return add_bias(h.bfloat16().float() @ weights.w_down_t.float(), weights.b_down).bfloat16()


def dense(x: Tensor, weights: Weights, x_scale: Tensor | None = None) -> Tensor:
    """Return the same y by three products, the last in FP8 too where the weights have `down_fp8`.

    g, u and h are rounded to bf16.
    """
    x, x_scale = quantize(x) if x_scale is None else (x, x_scale)
    g = linear(x, x_scale, weights.w_up, weights.s_up, weights.b_up)
    u = None
    if weights.gated:
        g, u = linear(x, x_scale, weights.w_gate, weights.s_gate, weights.b_gate), g
    h = weights.act.hidden(weights.act.gate(g), u)
    if weights.down_fp8 is not None:
        return linear(*quantize(h), *weights.down_fp8, weights.b_down)
    return nn.functional.linear(h, weights.w_down_t.t(), weights.b_down)


def refuse_values(ffn: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Refuse FP8 values for a layer's bf16 weights: without scales they mean nothing. A hook."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = state_dict.get(f"{prefix}{name}.weight")
        in_fp8 = weight is not None and weight.dtype == FLOAT8
        if in_fp8 and not isinstance(getattr(ffn, name), Float8Linear):
            raise ValueError(f"{prefix}{name}.weight is in FP8; twell.quantize_ the layer first")


class Float8Linear(nn.Module):
    """A linear layer with FP8 weights, for inference: y [..., N] in bf16 of x [..., K].

    weight [N, K] float8_e4m3fn, weight_scale [N] fp32 and bias [N] bf16 or None are saved under
    these names, unless `saved` is False. `original`, if kept, is the bf16 weight, on the CPU.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        device: torch.device | None = None,
        saved: bool = True,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(out_features, in_features, dtype=FLOAT8, device=device)
        self.register_buffer("weight", weight, persistent=saved)
        scale = torch.empty(out_features, dtype=torch.float32, device=device)
        self.register_buffer("weight_scale", scale, persistent=saved)
        self.register_parameter("bias", bias)
        self.original: Tensor | None = None
        self.trained = True  # whether the weight was a parameter to train

    @classmethod
    def of(cls, part: nn.Linear, keep_original: bool = False, saved: bool = True) -> Float8Linear:
        """Return the quantised form of a linear layer in bf16; without its bias if not saved."""
        bias = part.bias if saved else None
        result = cls(part.in_features, part.out_features, bias, part.weight.device, saved)
        result.weight, result.weight_scale = quantize(part.weight.detach())
        result.trained = part.weight.requires_grad
        if keep_original:
            result.original = part.weight.detach().to("cpu", copy=True)
        return result

    def forward(self, x: Tensor) -> Tensor:
        y = linear(*quantize(x.reshape(-1, self.in_features)), *self.tensors)
        return y.reshape(*x.shape[:-1], self.out_features)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.weight, self.weight_scale, self.bias

    def dense(self, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
        """Return an nn.Linear: the original weight if it was kept, else values * scale in bf16."""
        weight = self.original
        if weight is None:
            weight = (self.weight.float() * self.weight_scale[:, None]).bfloat16()
        part = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = weight.to(self.weight.device, dtype)
        part.weight = nn.Parameter(weight, requires_grad=self.trained)
        part.bias = self.bias
        return part.train(self.training)

    def _load_from_state_dict(self, state_dict, prefix, *others) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.dtype != FLOAT8:
            raise ValueError(
                f"{prefix}weight is {weight.dtype}, and the layer has FP8 weights; load it before "
                "twell.quantize_"
            )
        self.original = None if weight is not None else self.original
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn, recurse: bool = True) -> Float8Linear:
        kept = self.weight, self.weight_scale
        super()._apply(fn, recurse)
        if self.weight.dtype != FLOAT8:  # model.to(dtype) is about the other weights
            self.weight, self.weight_scale = (t.to(self.weight.device) for t in kept)
        return self

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{text}, bias={self.bias is not None}, weight=float8_e4m3fn by rows"
