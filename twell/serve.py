"""A plugin of vLLM: Llama-like models with sparse feed-forward layers.

All else is vLLM's own. vLLM traces a model once, for all numbers of tokens and without guards, so
the operator here chooses the path when it runs. Where all is dense, vLLM compiles plain code.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._inductor.decomposition import register_decomposition
from torch._inductor.lowering import make_fallback
from vllm import ModelRegistry
from vllm.compilation.passes.inductor_pass import get_pass_context
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import fp8, register_quantization_config
from vllm.model_executor.models import llama, mistral, qwen2, qwen3
from vllm.model_executor.parameter import ChannelQuantScaleParameter

from twell.models.convert import ACTIVITY
from twell.models.loading import read_calibration
from twell.sparse import activations, float8, ops, reference
from twell.sparse.calibration import COMPILED, GRAPH
from twell.sparse.plan import POWERS, Chooser

# Passes outside of CUDA graphs wait for Python where a dense layer has at most so many operations:
# 8,192 tokens of 2048 x 5632 on an H200. There launching our kernels takes longer than they save.
WAITING = 8192 * 2048 * 5632
MODELS = {"Llama": llama, "SparseLlama": llama, "Mistral": mistral, "Qwen2": qwen2, "Qwen3": qwen3}
# An argument of the operator, since the caches of vLLM and torch know no code of decompositions.
FILES = __file__, *(module.__file__ for module in (activations, float8, ops, reference))
CODE = get_hash_for_files(FILES).hex()
OPTIONS = "str activation, float threshold, int[] most, str[] paths, str code"
# Not a custom_op of torch, whose checks take 0.05 to 0.15 ms in each call.
torch.library.define(PLANNED := "twell::planned_ffn", f"({ops.SCHEMA}*, {OPTIONS}) -> Tensor")
make_fallback(PLANNED_FFN := torch.ops.twell.planned_ffn.default)  # for ranges with a sparse path


@torch.library.impl(PLANNED, "default")
def planned_ffn(x, *tensors, activation, threshold, most, paths, code):
    """y as of twell::ffn; paths[i] serves up to most[i] tokens, the last path also more."""
    weights, x_scale = ops.weights_of(activation, threshold, *tensors)
    path = paths[bisect_left(most, len(x))]
    # Not by `ops.sparse_ffn`, whose CUDA graphs would take memory that vLLM does not know of.
    return ops.PATHS[path](ops.prepare(x), ops.align_weights(weights), x_scale)


@torch.library.register_fake(PLANNED)
def _(x, *tensors, activation, threshold, **_):
    ops.check_tensors(x, *ops.weights_of(activation, threshold, *tensors))
    return ops.empty_output(x)


@register_decomposition([PLANNED_FFN])
def dense_code(x, *tensors, activation, threshold, most, paths, code):
    """The code that vLLM compiles for a range of tokens where all is dense: it starts sooner."""
    with suppress(AssertionError):  # of get_pass_context, where vLLM compiles without ranges
        tokens = get_pass_context().compile_range
        first, last = bisect_left(most, tokens.start), bisect_left(most, tokens.end)
        if {*paths[first : last + 1]} == {"dense"}:
            weights, x_scale = ops.weights_of(activation, threshold, *tensors)
            return ops.sparse_ffn(x, weights, "dense", x_scale=x_scale)
    return NotImplemented


class SparseMLP(nn.Module):
    """A feed-forward layer; vLLM's projections compute it where `paths` is None."""

    def __init__(self, stock: nn.Module, act: activations.Activation, gated: bool):
        super().__init__()
        self.act, self.gated, first = act, gated, stock.gate_up_proj
        if not gated:  # no rows of a gate
            given = first.input_size, [0, first.output_sizes[1]], first.has_bias
            options = {"quant_config": first.quant_config, "prefix": first.prefix}
            first = linear.MergedColumnParallelLinear(*given, **options)
        self.gate_up_proj, self.down_proj = first, stock.down_proj
        self.paths: dict | None = None  # options of planned_ffn

    def plan(self, layer: int, vllm_config: VllmConfig) -> None:
        """Choose the path for each number of tokens, if the kernels take the layer."""
        config, compilation = vllm_config.model_config.hf_config, vllm_config.compilation_config
        down, backend = self.down_proj, getattr(config, "ffn_backend", "auto")
        methods = {type(self.gate_up_proj.quant_method), type(down.quant_method)}
        fits = self.act.sparse and methods <= {Float8Method, linear.UnquantizedLinearMethod}
        size, shards = down.input_size_per_partition, down.tp_size
        if backend not in ("auto", "triton") or not (fits and ops.takes(down.weight.t(), size)):
            return
        down.weight.data = down.weight.data.t().contiguous().t()  # vLLM copies into it
        longest = vllm_config.scheduler_config.max_num_batched_tokens
        captured = compilation.max_cudagraph_capture_size or 0
        waiting = WAITING // (config.hidden_size * size)
        most = [n for n in sorted({*POWERS, captured, waiting, longest}) if 0 < n <= longest]
        paths = [ops.choose(n) for n in most]
        if backend == "auto":
            chooser = Chooser(config.hidden_size, size, self.gated)
            chooser.quantized = Float8Method in methods
            chooser.set_device(down.weight.device)
            if times := read_calibration(vllm_config.model_config.model, chooser.quantized):
                chooser.calibration = times if shards == 1 else times.scaled(*chooser.shape)
            if activity := getattr(config, ACTIVITY, None):
                tokens, active, union = activity[layer]
                chooser.freeze({int(tokens): (active / shards, union / shards)})
            ours = {n: chooser.path(n, GRAPH if n <= captured else COMPILED) for n in most}
            paths = ["dense" if captured < n <= waiting else ours[n] for n in most]
        if {*paths} != {"dense"}:
            self.paths = {"activation": self.act.name, "threshold": self.act.threshold}
            self.paths |= {"most": most[:-1], "paths": paths, "code": CODE}
            if "dense" in paths:  # plain code begins or ends at these numbers
                ends = {captured, waiting} & {*most} | {*compilation.compile_ranges_endpoints}
                compilation.compile_ranges_endpoints = sorted(ends)

    def forward(self, x: Tensor) -> Tensor:
        first, down, act = self.gate_up_proj, self.down_proj, self.act
        if self.paths is None:
            g, *u = first(x)[0].chunk(1 + self.gated, -1)
            return down(act.hidden(act.gate(g), *u))[0]
        scale = getattr(first, "weight_scale", None)
        x, x_scale = (x, None) if scale is None else float8.quantize(x)  # the norm fuses with it
        (w_gate, w_up), (b_gate, b_up), (s_gate, s_up) = (
            both.chunk(2) if self.gated and both is not None else (None, both)
            for both in (first.weight, first.bias, scale)
        )
        b_down = down.bias if down.tp_rank == 0 else None
        tensors = w_gate, w_up, down.weight, b_gate, b_up, b_down, x_scale, s_gate, s_up
        return tensor_model_parallel_all_reduce(PLANNED_FFN(x, *tensors, **self.paths))


class Sparse:
    """Gives a model of vLLM sparse layers; one with SiLU stays as it is."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        activation, gated = config.hidden_act, getattr(config, "gated_mlp", True)
        config.hidden_act = "silu"  # vLLM refuses others
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config.hidden_act = activation
        if gated and activation == "silu":
            return
        threshold = getattr(config, "activation_threshold", 0.0)
        act = activations.get_activation(activation, threshold, gated=gated)
        config.ffn_paths = []  # vLLM's cache of compiled code goes by the configuration
        for layer, block in enumerate(self.model.layers):
            if hasattr(block, "mlp"):  # the others are of another stage of a pipeline
                block.mlp = SparseMLP(block.mlp, act, gated)
                if vllm_config.lora_config is None:  # LoRA replaces the projections
                    block.mlp.plan(layer, vllm_config)
                config.ffn_paths.append(block.mlp.paths)
        if not any(config.ffn_paths):
            why = "ffn_backend, LoRA, quantisation, auto, or no CUDA graphs, GPU, bf16/fp16 or tune"
            init_logger("vllm.twell").warning("the feed-forward layers compute densely: %s", why)


class Float8Config(fp8.Fp8Config):
    """The FP8 weights of `twell.quantize_`; down stays in bf16."""

    get_name = staticmethod(lambda: float8.QUANTIZATION["quant_method"])

    @classmethod
    def from_config(cls, config: dict) -> Float8Config:
        if config not in (float8.QUANTIZATION, float8.FP8_DOWN):
            raise ValueError(f"quantization_config is {config}; expected {float8.QUANTIZATION}")
        return cls()

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> linear.LinearMethodBase | None:
        if prefix.endswith(".gate_up_proj"):
            return Float8Method()
        return linear.UnquantizedLinearMethod() if isinstance(layer, linear.LinearBase) else None


class Float8Method(linear.UnquantizedLinearMethod):
    """Weights [N, K] float8_e4m3fn, and a scale for each row."""

    def create_weights(self, layer, **options):
        super().create_weights(layer, **options | {"params_dtype": float8.FLOAT8})
        scale = torch.empty(len(layer.weight), dtype=torch.float32)
        options = {"output_dim": 0, "weight_loader": options["weight_loader"]}
        layer.weight_scale = ChannelQuantScaleParameter(data=scale, **options)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return float8.linear(*float8.quantize(x), layer.weight, layer.weight_scale, bias)


def register() -> None:
    """Tell vLLM of the models and of the FP8 weights; vLLM calls it in each process."""
    register_quantization_config(float8.QUANTIZATION["quant_method"])(Float8Config)
    for name, module in MODELS.items():
        stock = getattr(module, f"{name.removeprefix('Sparse')}ForCausalLM")
        model = type(f"{name}ForCausalLM", (Sparse, stock), {"__module__": __name__})
        ModelRegistry.register_model(model.__name__, model)
