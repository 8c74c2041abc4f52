"""A language model that computes its feed-forward layers by one provider and then by another.

All providers share one model: the same weights, attention, norms and head. A compiled model has
each decoder layer and the last norm compiled, not the whole: transformers materialises the causal
mask where a whole model without a cache is compiled, and attention with a mask takes another
kernel, which computes the masked part too. All layers share the compiled code.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from twell.config import TrainConfig
from twell.measure import check, imposed
from twell.measure.check import TOLERANCE
from twell.measure.layer import ThirdPartyLayer, check_sizes
from twell.measure.providers import COMPILED, EAGER, FP8_ALL, TUNED, Provider
from twell.measure.rows import require, significant
from twell.measure.runner import Call, Gpu, Run, bench
from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.quantize import QUANTIZED
from twell.sparse import calibration
from twell.sparse.float8 import Float8Linear
from twell.sparse.layer import SparseFFN
from twell.sparse.projections import PROJECTIONS

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
COMPILE_OPTIONS = {COMPILED: None, TUNED: {"coordinate_descent_tuning": True}}


def compile_layers(model: SparseLlamaForCausalLM, compilation: str) -> None:
    """Compile a model's decoder layers and last norm, or undo it where `compilation` is EAGER.

    torch keeps the compiled code, so nothing is compiled twice.
    """
    for module in (*model.model.layers, model.model.norm):
        module._compiled_call_impl = None  # torch has no public way to undo nn.Module.compile
        if compilation != EAGER:
            module.compile(fullgraph=True, dynamic=False, options=COMPILE_OPTIONS[compilation])


def embed(model: SparseLlamaForCausalLM, ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the embeddings [B, S, K] of `ids` [B, S] and the rotary embeddings of positions."""
    hidden = model.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return hidden, model.model.rotary_emb(hidden, positions)


def forward(model: SparseLlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last hidden states [B, S, K] of `ids` [B, S] and the last tokens' logits [B, V].

    The states are normed, and attention has no mask. The paper does not say which logits its passes
    compute, but it cannot be all: its times for 64 x 2048 tokens (Table 1) rise by 39.1 ms a layer
    from 8 to 38 layers, which leaves 7 ms for the rest, and all logits take as long as 1.8 layers.
    """
    hidden, rotary = embed(model, ids)
    for layer in model.model.layers:
        hidden = layer(hidden, position_embeddings=rotary)
    hidden = model.model.norm(hidden)
    return hidden, model.lm_head(hidden[:, -1])


def exact_hidden_states(model: SparseLlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the hidden states of `forward` in fp32, densely, by a copy of the model."""
    wide = copy.deepcopy(model).float()
    wide.set_ffn_backend("dense")
    return forward(wide, ids)[0]


class Linears:
    """The linear layers of a model in bf16; the provider decides which of them are in FP8.

    A dense provider has gate, up and down in FP8, a sparse one gate and up. With FP8_ALL the four
    of attention are in FP8 too. A third party's feed-forward layers take the places of ours.
    """

    def __init__(self, model: SparseLlamaForCausalLM):
        if any(ffn.quantized for ffn in model.ffns):
            raise ValueError("the model has FP8 weights already; take the one in bf16")
        self.parts = [
            (module, name, part)
            for layer in model.model.layers
            for module, names in ((layer.mlp, PROJECTIONS), (layer.self_attn, ATTENTION))
            for name in names
            if (part := getattr(module, name)) is not None
        ]
        self.in_fp8: tuple[str, ...] = ()
        self.quantized = functools.cache(Float8Linear.of)  # of the weights they had first
        self.mlps = [(layer, layer.mlp) for layer in model.model.layers]
        self.third_party = functools.cache(self._third_party)

    def become(self, provider: Provider) -> None:
        names = PROJECTIONS if provider.backend == "dense" else QUANTIZED
        names = names if provider.in_fp8 else ()
        names += ATTENTION if provider.precision == FP8_ALL else ()
        before, self.in_fp8 = self.in_fp8, names
        for module, name, part in self.parts:
            if (name in names) != (name in before):  # others may be joined, see decode.py
                setattr(module, name, self.quantized(part) if name in names else part)
        for layer, ffn in self.mlps:
            layer.mlp = self.third_party(provider.backend, ffn) if provider.third_party else ffn

    def _third_party(self, backend: str, ffn: SparseFFN) -> ThirdPartyLayer:
        parts = (getattr(ffn, name) for name in PROJECTIONS)
        return ThirdPartyLayer(Provider(backend), [part and part.weight for part in parts])


class Subject:
    """A model that computes by one provider and then by another, with the columns of its rows.

    Dense providers have down projections stored as nn.Linear does. A Triton provider has no path:
    each layer takes the kernels' own choice. graphs: whether few tokens run in CUDA graphs, which
    decides how "auto" chooses.
    """

    def __init__(
        self, name: str, model: SparseLlamaForCausalLM, profile: str, gpu: Gpu, graphs: bool = True
    ):
        self.model, self.gpu, self.graphs = model, gpu, graphs
        self.columns = model_columns(name, model, profile)
        self.calibrations = [ffn.calibration for ffn in model.ffns]  # of layers in bf16
        self.take_weights()

    def take_weights(self) -> None:
        """Copy the present down projections in both layouts; called in bf16."""
        self.linears = Linears(self.model)
        self.down = [ffn.down_proj.weight for ffn in self.model.ffns]
        self.plain = [weight.detach().contiguous() for weight in self.down]
        self.by_neuron = [weight.t().contiguous().t() for weight in self.plain]

    def become(self, provider: Provider) -> None:
        """Compute by `provider` from now on."""
        compile_layers(self.model, provider.compilation)
        layouts = self.plain if provider.backend == "dense" else self.by_neuron
        for weight, layout in zip(self.down, layouts, strict=True):
            weight.data = layout
        self.linears.become(provider)
        if provider.third_party:
            return
        for ffn, of_bf16 in zip(self.model.ffns, self.calibrations, strict=True):
            if ffn.chooser.quantized != provider.in_fp8:
                ffn.chooser.quantized = provider.in_fp8
                ffn.calibration = None if provider.in_fp8 else of_bf16
        self.model.set_ffn_backend(provider.backend)

    def observe(self, ids: Tensor, activity: Sequence[dict]) -> dict:
        """Give "auto" each layer's activity on a batch [B, S]; return the columns of the batch.

        They are means over layers, and the most active neurons of a token.
        """
        tokens = ids.numel()
        for ffn, layer in zip(self.model.ffns, activity, strict=True):
            seen = {min(tokens, calibration.BLOCK): (layer["mean"], layer["union"])}
            ffn.chooser.freeze(seen)  # eager calls of the check would count, and be adopted later
        return self.columns | {
            "batch": ids.shape[0],
            "context": ids.shape[1],
            "tokens": tokens,
            "active": round(fmean(layer["mean"] for layer in activity), 2),
            "active_max": int(max(layer["max"] for layer in activity)),
            "union": round(fmean(layer["union"] for layer in activity), 1),
        }

    def paths(self, provider: Provider, tokens: int) -> str:
        """Return the number of layers by the path that computes `tokens` tokens: "union 38"."""
        from twell.sparse import ops

        if provider.third_party:
            return provider.backend
        fixed = {"dense": "dense", "triton": ops.choose(tokens)}.get(provider.backend)
        # With many tokens, which are not captured, all situations have one plan.
        situation = calibration.COMPILED if provider.compiled else calibration.EAGER
        situation = calibration.GRAPH if self.graphs else situation
        paths = Counter(fixed or ffn.chooser.path(tokens, situation) for ffn in self.model.ffns)
        return ", ".join(f"{path} {number}" for path, number in sorted(paths.items()))

    def measure(
        self,
        case: dict,
        providers: Sequence[Provider],
        titles: tuple[str, str],
        ids: Tensor,
        exact: Callable[[Tensor], Tensor],
        once: Run,
        take: Callable[[Provider], tuple[Tensor, Run, dict]],
        per_run: int = 1,
    ) -> list[dict]:
        """Check and time passes; return a row of each provider.

        titles: of results, and of the pass, for messages. exact: returns the result of some of the
        `ids` [B, S] in fp32. once: a pass, whose layers are compared with fp64, once for each
        backend and precision. take: returns a provider's result [B, ...], the run to be timed and
        columns; the model computes by the provider already. per_run: the calls that a run makes.

        Results are compared with exact ones, and with the first one, the dense provider's. A result
        in FP8 has one limit, and is not compared with the first. A third party's has no limit.
        """
        kind, title = titles
        few = max(1, min(len(ids), check.SAMPLE // ids.shape[1]))
        right = exact(ids[:few])
        dense: tuple[float, Tensor] | None = None  # error and result

        @functools.cache
        def worst_layer(eager: Provider) -> float:
            self.become(eager)
            what = f"{eager.backend} {eager.precision or 'bf16'} of {title}"
            mlps = [layer.mlp for layer in self.model.model.layers]
            return check.check_layers(mlps, once, what, eager.allowed)

        def prepare(provider: Provider) -> Call:
            nonlocal dense
            layer_rms = worst_layer(replace(provider, compilation=EAGER))
            self.become(provider)
            path = self.paths(provider, case["tokens"])
            result, run, columns = take(provider)
            error = check.relative(result[:few], right)
            what = f"{kind} ({title}) of {provider}"
            if provider.in_fp8:
                check.accept(error, TOLERANCE["FP8 hidden states"], f"{what} are wrong")
            elif not provider.third_party:
                limit = check.AS_DENSE * dense[0] if dense else TOLERANCE["hidden states"]
                check.accept(error, limit, f"{what} are wrong")
                dense = dense or (error, result)
                limit, distance = check.FROM_DENSE * dense[0], check.relative(result, dense[1])
                check.accept(distance, limit, f"{what} differ from dense ones")
            columns |= {"provider": provider.name, "path": path}
            columns["relative_rms"] = significant(error, 3)
            columns["layer_rms"] = significant(layer_rms, 3)
            return Call(run, columns, per_run, enter=functools.partial(self.become, provider))

        calls = bench(self.gpu, prepare, providers, "pass")
        return [case | call.columns for call in calls.values()]


def model_columns(name: str, model: SparseLlamaForCausalLM, profile: str) -> dict:
    """Return the columns of a model."""
    config = model.config
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "gated": getattr(config, "gated_mlp", True),
        "dtype": "bfloat16",
        "profile": profile,
        "sdpa": "default",  # recorded files name attention's kernel; it is torch's choice
        **{n: getattr(config, n) for n in ("hidden_size", "intermediate_size", "vocab_size")},
    }


def check_model(name: str, config: SparseLlamaConfig, context: int) -> None:
    """Raise ValueError for a model that the kernels do not take."""
    unfit = f"{name} has the activation {config.hidden_act!r}; sparse layers need 'relu'"
    require(config.hidden_act == "relu", unfit)
    most = config.max_position_embeddings
    require(context <= most, f"{name} is for {most} tokens; {context} were asked for")
    check_sizes([context], config.hidden_size)


def random_model(
    size: str, overrides: Sequence[str], context: int, device: torch.device
) -> tuple[SparseLlamaForCausalLM, TrainConfig]:
    """Return a model of `imposed.draw_weights` in bf16 for `context` tokens, and its sizes."""
    config = TrainConfig.load(size, overrides)
    sizes = config.model_config()
    sizes.max_position_embeddings = context
    check_model(size, sizes, context)
    with device:
        model = AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16)
    imposed.draw_weights(model.requires_grad_(False), config.seed)
    return model.eval(), config
