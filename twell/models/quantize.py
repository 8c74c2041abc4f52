"""FP8 weights for the SparseFFN layers of a model, and back."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from twell.models.convert import hand_mover, sparse_ffns
from twell.sparse import float8
from twell.sparse.float8 import Float8DynamicActivationFloat8WeightConfig, Float8Linear
from twell.sparse.layer import SparseFFN
from twell.sparse.projections import why_called

QUANTIZED = "gate_proj", "up_proj"


@torch.no_grad()
def quantize_(
    module: nn.Module, config: Float8DynamicActivationFloat8WeightConfig | None = None
) -> None:
    """Store gate and up of every SparseFFN layer in FP8, in place, for inference; ours.

    module: a SparseFFN, or a model with such layers in bf16, on a GPU or not yet. config: None
    takes the defaults. The weights take 5 bytes for each entry of gate, up and down together, where
    bf16 takes 6 (non-gated: 4 of 4), and one less with `down=False`. Every backend computes with
    them; `twell.sparse.float8` has the formula. Saved Llamas keep them, and `twell.load` reads
    them; it refuses saved FP8 weights of other models.

    Nothing changes unless every layer can be quantised. Raises ValueError for a model without
    SparseFFN layers, another configuration, and a layer whose activation makes no zeros, or weights
    that are not bf16, not finite, not plain or in FP8 already, or a K that is no multiple of 16;
    RuntimeError on a GPU without FP8, by name.
    """
    config = config or Float8DynamicActivationFloat8WeightConfig()
    if not isinstance(config, Float8DynamicActivationFloat8WeightConfig):
        kind = f"{type(config).__module__}.{type(config).__name__}"
        raise ValueError(f"config is a {kind}; expected twell's own configuration")
    ffns = sparse_ffns(module)
    if hasattr(module, "config") and (other := _other(module)) is not None:
        raise ValueError(f"the model is quantised by {type(other).__name__} already")
    for number, ffn in enumerate(ffns):
        _check(ffn, f"layer {number}")
    for ffn in ffns:
        for name, part in _parts(ffn):
            quantized = Float8Linear.of(part, keep_original=config.keep_original)
            setattr(ffn, name, quantized.train(part.training))
            hand_mover(part, getattr(ffn, name))
        ffn.chooser.quantized = True
    _keep_down(module, config.down)


def _keep_down(module: nn.Module, in_fp8: bool) -> None:
    for ffn in sparse_ffns(module):
        ffn.keep_down(in_fp8 and ffn.intermediate_size % float8.MULTIPLE == 0)
    _note(module, dict(float8.FP8_DOWN if in_fp8 else float8.QUANTIZATION))


def _parts(ffn: SparseFFN) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name in QUANTIZED if (part := getattr(ffn, name)) is not None]


def _note(module: nn.Module, quantization: dict | None) -> None:
    """Say in the configuration of every model in `module` with such layers what its weights are."""
    for part in module.modules():
        if hasattr(part, "config") and any(isinstance(m, SparseFFN) for m in part.modules()):
            note_quantization(part.config, quantization)


def note_quantization(config: PreTrainedConfig, quantization: Any) -> None:
    """Set `quantization_config`; None removes it, since other readers take null for a method."""
    if quantization is not None:
        config.quantization_config = quantization
    elif hasattr(config, "quantization_config"):
        del config.quantization_config


def _check(ffn: SparseFFN, owner: str) -> None:
    if not ffn.act.sparse:
        raise ValueError(f"{owner} has activation {ffn.activation!r}; FP8 is for kinds of ReLU")
    if ffn.quantized:
        raise ValueError(f"{owner} is in FP8 already")
    if ffn.hidden_size % float8.MULTIPLE:
        raise ValueError(f"{owner} has hidden_size={ffn.hidden_size}; expected a multiple of 16")
    reason = float8.why_not(ffn.device) if ffn.device.type == "cuda" else None
    if reason is not None:
        raise RuntimeError(f"FP8 weights cannot be used here: {reason}")
    for name, part in (*_parts(ffn), ("down_proj", ffn.down_proj)):
        if (reason := why_called(part)) is not None:
            raise ValueError(f"{name} of {owner} is {reason}; expected a plain nn.Linear")
        for tensor in part.parameters():
            if tensor.dtype != torch.bfloat16:
                raise ValueError(f"{name} of {owner} is {tensor.dtype}; expected torch.bfloat16")
        if name in QUANTIZED and not part.weight.isfinite().all():
            raise ValueError(f"{name} of {owner} has NaN or infinite weights")


@torch.no_grad()
def dequantize_(module: nn.Module) -> None:
    """Undo `quantize_` in place: gate and up in bf16 again.

    With the originals kept every bit is restored. Without them a weight is its FP8 value times the
    scale of its row, rounded to bf16, and a UserWarning says so. Raises ValueError for a module
    without FP8 layers.
    """
    ffns = [ffn for ffn in sparse_ffns(module) if ffn.quantized]
    if not ffns:
        raise ValueError(f"{type(module).__name__} has no layer in FP8; there is nothing to undo")
    rounded = 0
    for ffn in ffns:
        for name, part in _parts(ffn):
            rounded += part.original is None
            setattr(ffn, name, part.dense(ffn.down_proj.weight.dtype))
            hand_mover(part, getattr(ffn, name))
        ffn.keep_down(False)
        ffn.chooser.quantized = False
    _note(module, None)
    if rounded:
        lost = f"{rounded} weights were not kept in bf16: they are their FP8 values now"
        warnings.warn(f"{lost} (keep_original=True keeps every bit)", stacklevel=2)


# --- files


def quantization_of(module: nn.Module) -> Any:
    """Return what config.json says of a model's weights: FP8, another quantisation, or None."""
    in_fp8 = {ffn.quantized for ffn in sparse_ffns(module)}
    if len(in_fp8) == 2:
        raise ValueError("some layers are in FP8 and others not; twell.quantize_ the model")
    if (other := _other(module)) is not None or in_fp8 == {False}:
        return other
    down = any(ffn.dense_down is not None for ffn in sparse_ffns(module))
    return dict(float8.FP8_DOWN if down else float8.QUANTIZATION)


def _other(part: nn.Module) -> Any:
    """Return the quantisation of a model's configuration, if it is another than FP8."""
    present = getattr(part.config, "quantization_config", None)
    ours = isinstance(present, _Config) or present in (float8.QUANTIZATION, float8.FP8_DOWN)
    return None if ours else present


@register_quantization_config(float8.QUANTIZATION["quant_method"])
class _Config(QuantizationConfigMixin):
    def __init__(self, **fields: Any):
        if fields not in (float8.QUANTIZATION, float8.FP8_DOWN):
            raise ValueError(f"quantization_config is {fields}; expected {float8.QUANTIZATION}")
        self.quant_method = fields["quant_method"]
        self.down = fields.get("down", False)


@register_quantizer(float8.QUANTIZATION["quant_method"])
class _Quantizer(HfQuantizer):
    requires_calibration = True  # transformers' word for: other weights cannot be loaded so
    is_trainable = False

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        for ffn in sparse_ffns(model):
            for name, part in _parts(ffn):  # weights without values
                shape = part.in_features, part.out_features
                setattr(ffn, name, Float8Linear(*shape, part.bias, part.weight.device))
            ffn.chooser.quantized = True

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        self.remove_quantization_config(model)  # the layers are those of `quantize_`
        _keep_down(model, self.quantization_config.down)


def num_weights(model: nn.Module) -> int:
    """Return the number of weights and biases, those in FP8 too, without scales."""
    copies = {ffn.dense_down for ffn in model.modules() if isinstance(ffn, SparseFFN)}
    parts = [m for m in model.modules() if isinstance(m, Float8Linear) and m not in copies]
    in_fp8 = sum(part.weight.numel() for part in parts)
    return in_fp8 + sum(parameter.numel() for parameter in model.parameters())
