"""A plugin of vLLM: Llama-like models with sparse feed-forward layers.

All else is vLLM's own. vLLM traces a model once, for all numbers of tokens and without guards, so
the operator here chooses the path when it runs. Where all is dense, vLLM compiles plain code.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.decomposition import register_decomposition
from torch._inductor.lowering import make_fallback
from torch.nn import functional as F
from vllm import ModelRegistry
from vllm.compilation.passes.inductor_pass import get_pass_context
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models import llama, mistral, qwen2, qwen3
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.utils import set_weight_attrs

from twell.models.convert import ACTIVITY
from twell.models.loading import CALIBRATION
from twell.sparse import activations, float8, ops
from twell.sparse.activations import ACTIVATIONS, Activation, Weights, get_activation
from twell.sparse.calibration import COMPILED, FLOAT8, GRAPH, Calibration
from twell.sparse.plan import POWERS, Chooser

# Passes outside of CUDA graphs wait for Python where a dense layer has at most so many operations:
# 8,192 tokens of 2048 x 5632 on an H200. There launching our kernels takes longer than they save.
WAITING = 8192 * 2048 * 5632
MODELS = {"Llama": llama, "SparseLlama": llama, "Mistral": mistral, "Qwen2": qwen2, "Qwen3": qwen3}
SCHEMA = (
    "Tensor x, Tensor w_first, Tensor w_down, Tensor? b_first, Tensor? b_down, Tensor? x_scale, "
    "Tensor? s_first, *, bool gated, str activation, float threshold, int[] most, str[] paths, "
    "str code"
)
# An argument of the operator, since the caches of vLLM and torch know no code of decompositions.
FILES = __file__, activations.__file__, float8.__file__
CODE = hashlib.sha256(b"".join(Path(file).read_bytes() for file in FILES)).hexdigest()
# Not a custom_op of torch, whose checks take 0.05 to 0.15 ms in each call.
torch.library.define(PLANNED := "twell::planned_ffn", f"({SCHEMA}) -> Tensor")


@torch.library.impl(PLANNED, "default")
def planned_ffn(x, *tensors, most, paths, code, **layer):
    """y as of twell::ffn. w_first has the rows of gate and up.

    paths[i] serves up to most[i] tokens, the last one also more.
    """
    weights, x_scale = weights_of(*tensors, **layer)
    path = paths[place(len(x), most)]
    # Not by `ops.sparse_ffn`, whose CUDA graphs would take memory that vLLM does not know of.
    return ops.PATHS[path](ops.prepare(x), ops.align_weights(weights), x_scale)


@torch.library.register_fake(PLANNED)
def _(x, *tensors, most, paths, code, **layer):
    ops.check_tensors(x, *weights_of(*tensors, **layer))
    return ops.empty_output(x)


@register_decomposition([PLANNED_FFN := torch.ops.twell.planned_ffn.default])
def dense_code(x, *tensors, most, paths, code, gated, activation, threshold):
    """The code that vLLM compiles for a range of tokens where all is dense: it starts sooner."""
    w_first, w_down, b_first, b_down, x_scale, s_first = tensors
    try:
        tokens = get_pass_context().compile_range
    except (AssertionError, AttributeError):  # not compiled by ranges
        return NotImplemented
    if {*paths[place(tokens.start, most) : place(tokens.end, most) + 1]} != {"dense"}:
        return NotImplemented
    if x_scale is None:
        first = F.linear(x, w_first, b_first)
    else:
        first = float8.linear(x, x_scale, w_first, s_first, b_first)
    act = get_activation(activation, threshold, gated=gated)
    return F.linear(hidden(act, first, gated), w_down, b_down)


make_fallback(PLANNED_FFN, override_decomp=True)  # for the other ranges


def place(tokens: int, most: list[int]) -> int:
    return min(bisect_left(most, tokens), len(most) - 1)


def halves(tensor: Tensor | None, gated: bool, dim: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """The parts of gate and up."""
    return (None, tensor) if tensor is None or not gated else tensor.chunk(2, dim)


def hidden(act: Activation, first: Tensor, gated: bool) -> Tensor:
    g, u = halves(first, gated, -1)
    return act.hidden(act.gate(u), None) if g is None else act.hidden(act.gate(g), u)


def weights_of(
    w_first, w_down, b_first, b_down, x_scale, s_first, *, gated, activation, threshold
) -> tuple[Weights, Tensor | None]:
    """The weights and x_scale of the operator's arguments behind x."""
    (w_gate, w_up), (b_gate, b_up), (s_gate, s_up) = (
        halves(both, gated) for both in (w_first, b_first, s_first)
    )
    tensors = w_gate, w_up, w_down, b_gate, b_up, b_down, x_scale, s_gate, s_up
    return ops.weights_of(activation, threshold, *tensors)


class SparseMLP(nn.Module):
    """A feed-forward layer; vLLM's projections compute it where `paths` is None."""

    def __init__(self, stock: nn.Module, config: Any):
        super().__init__()
        self.gated, first = getattr(config, "gated_mlp", True), stock.gate_up_proj
        threshold = getattr(config, "activation_threshold", 0.0)
        self.act = get_activation(config.hidden_act, threshold, gated=self.gated)
        if not self.gated:
            given = first.input_size, first.output_sizes[1:], first.has_bias
            options = {"quant_config": first.quant_config, "prefix": first.prefix}
            first = linear.MergedColumnParallelLinear(*given, **options)
        self.gate_up_proj, self.down_proj = first, stock.down_proj
        self.quantized = isinstance(first.quant_method, Float8Method)
        self.paths: dict[str, Any] | None = None  # options of planned_ffn
        self.turns: set[int] = set()  # numbers of tokens above which plain code begins or ends

    def plan(self, config: Any, layer: int, folder: Path, captured: int, longest: int) -> None:
        """Choose the paths of passes of up to `longest` tokens; up to `captured` by CUDA graphs."""
        down, backend = self.down_proj, getattr(config, "ffn_backend", "auto")
        methods = {type(self.gate_up_proj.quant_method), type(down.quant_method)}
        size, shards = down.input_size_per_partition, down.tp_size
        fits = self.act.sparse and methods <= {Float8Method, linear.UnquantizedLinearMethod}
        if backend not in ("auto", "triton") or not (fits and ops.takes(down.weight.t(), size)):
            return
        down.weight.data = down.weight.data.t().contiguous().t()  # vLLM copies into it
        waiting = WAITING // (config.hidden_size * size)
        most = sorted({*POWERS, captured, waiting} - {0})
        paths = [ops.choose(tokens) for tokens in most]
        if backend == "auto":
            chooser = Chooser(config.hidden_size, size, self.gated)
            chooser.quantized = self.quantized
            chooser.set_device(down.weight.device)
            if (file := folder / CALIBRATION).is_file():
                times = Calibration.load(file)
                if (times.dtype == FLOAT8) == self.quantized:
                    chooser.calibration = times if shards == 1 else times.scaled(*chooser.shape)
            if (activity := getattr(config, ACTIVITY, None)) is not None:
                tokens, active, union = activity[layer]
                chooser.freeze({int(tokens): (active / shards, union / shards)})
            ours = {n: chooser.path(n, GRAPH if n <= captured else COMPILED) for n in most}
            paths = ["dense" if captured < n <= waiting else ours[n] for n in most]
        if {*paths[: place(longest, most) + 1]} != {"dense"}:
            self.paths = {"most": most, "paths": paths, "code": CODE}
            plain = [path == "dense" and n > captured for n, path in zip(most, paths, strict=True)]
            changes = zip(most, plain, plain[1:], strict=False)
            self.turns = {n for n, one, other in changes if one != other}

    def forward(self, x: Tensor) -> Tensor:
        first, down, act = self.gate_up_proj, self.down_proj, self.act
        if self.paths is None:
            return down(hidden(act, first(x)[0], self.gated))[0]
        x_scale = scale = None
        if self.quantized:  # here, where it is fused with the norm before the layer
            (x, x_scale), scale = float8.quantize(x), first.weight_scale
        b_down = down.bias if down.tp_rank == 0 else None
        tensors = first.weight, down.weight, first.bias, b_down, x_scale, scale
        layer = {"gated": self.gated, "activation": act.name, "threshold": act.threshold}
        y = torch.ops.twell.planned_ffn(x, *tensors, **layer, **self.paths)
        return tensor_model_parallel_all_reduce(y) if down.tp_size > 1 else y


class Sparse:
    """Gives a model of vLLM sparse layers; one with SiLU stays as it is."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        activation, gated = config.hidden_act, getattr(config, "gated_mlp", True)
        replaces = activation in ACTIVATIONS and not (gated and activation == "silu")
        config.hidden_act = "silu" if replaces else activation  # vLLM refuses others
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config.hidden_act = activation
        if not replaces:
            return
        if not gated:
            up = WeightsMapper(orig_to_new_stacked={".up_proj": (".gate_up_proj", 0)})
            self.model.hf_to_vllm_mapper = self.model.hf_to_vllm_mapper | up
        folder = Path(vllm_config.model_config.model)
        compilation, turns = vllm_config.compilation_config, set()
        captured = compilation.max_cudagraph_capture_size or 0
        longest = vllm_config.scheduler_config.max_num_batched_tokens
        config.ffn_paths = []  # vLLM's cache of compiled code goes by the configuration
        for layer, block in enumerate(self.model.layers):
            if hasattr(block, "mlp"):  # the others are of another stage of a pipeline
                block.mlp = SparseMLP(block.mlp, config)
                if vllm_config.lora_config is None:  # LoRA replaces the projections
                    block.mlp.plan(config, layer, folder, captured, longest)
                config.ffn_paths.append(block.mlp.paths)
                turns |= block.mlp.turns
        if ends := compilation.compile_ranges_endpoints:
            turns = {turn for turn in turns if turn < ends[-1]}
            compilation.compile_ranges_endpoints = sorted({*ends, *turns})
        if not any(config.ffn_paths):
            why = "ffn_backend, LoRA, quantisation, 'auto', or no CUDA graphs, GPU, bf16, fp16 or twell.tune"
            init_logger("vllm.twell").warning("the feed-forward layers compute densely: %s", why)


class Float8Config(QuantizationConfig):
    """The FP8 weights of `twell.quantize_`; down stays in bf16."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Float8Config:
        if config not in (float8.QUANTIZATION, float8.FP8_DOWN):
            raise ValueError(f"quantization_config is {config}; expected {float8.QUANTIZATION}")
        return cls()

    def get_name(self) -> str:
        return float8.QUANTIZATION["quant_method"]

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> linear.LinearMethodBase | None:
        if not isinstance(layer, linear.LinearBase):
            return None
        in_fp8 = prefix.endswith(".gate_up_proj")
        return Float8Method() if in_fp8 else linear.UnquantizedLinearMethod()


class Float8Method(linear.LinearMethodBase):
    """Weights [N, K] float8_e4m3fn, and a scale for each row."""

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, *, weight_loader, **_
    ):
        size = sum(output_partition_sizes)
        weight = torch.empty(size, input_size_per_partition, dtype=float8.FLOAT8)
        scale = torch.empty(size, dtype=torch.float32)
        for name, tensor in (("weight", weight), ("weight_scale", scale)):
            parameter = nn.Parameter(tensor, requires_grad=False)
            set_weight_attrs(parameter, {"output_dim": 0, "weight_loader": weight_loader})
            layer.register_parameter(name, parameter)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return float8.linear(*float8.quantize(x), layer.weight, layer.weight_scale, bias)


def register() -> None:
    """Tell vLLM of the models and of the FP8 weights; vLLM calls it in each process."""
    register_quantization_config(float8.QUANTIZATION["quant_method"])(Float8Config)
    for name, module in MODELS.items():
        stock = getattr(module, f"{name.removeprefix('Sparse')}ForCausalLM")
        model = type(f"{name}ForCausalLM", (Sparse, stock), {"__module__": __name__})
        ModelRegistry.register_model(model.__name__, model)
