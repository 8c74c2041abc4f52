"""Language models with sparse feed-forward layers: a Llama of our own, other models made sparse, checkpoints.

SparseLlamaForCausalLM is transformers' Llama with one part exchanged: attention, norms, rotary positions, caching
and generation are untouched. Weights have Llama's names, so a stock `LlamaForCausalLM` with `hidden_act="relu"` loads
what a gated model saves. `sparsify` exchanges the same part in a model that exists. Importing this module registers the
classes with `AutoConfig` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from twell.sparse.calibration import Calibration
from twell.sparse.layer import SparseFFN


class SparseLlamaConfig(LlamaConfig):
    """Llama's configuration and four fields more; the defaults are those of the paper's 1.5B model (Table 2).

    Args:
        hidden_act: "relu", or "silu" for comparison.
        gated_mlp: gated or non-gated feed-forward layers.
        l1_coefficient: weight of the L1 term in the training loss (SparseLlamaForCausalLM defines the term). None where
            `from_dict` read a list; a forward pass in training mode with labels then raises ValueError.
        ffn_backend: backend of every SparseFFN.
    """

    model_type = "twell_llama"

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 28
    num_attention_heads: int = 32
    hidden_act: str = "relu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    gated_mlp: bool = True
    l1_coefficient: float | None = 0.0
    ffn_backend: str = "dense"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if not isinstance(self.gated_mlp, bool):
            raise ValueError(f"gated_mlp is {self.gated_mlp!r}; expected true or false")
        number = self.l1_coefficient
        if number is not None and not (isinstance(number, Real) and 0 <= number < math.inf):
            raise ValueError(
                f"l1_coefficient is {number!r}; it has to be a finite number, 0 or more"
            )

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in transformers. Earlier versions stored a list of L1 coefficients; it is read as None."""
        if isinstance(config_dict.get("l1_coefficient"), list):
            config_dict = config_dict | {"l1_coefficient": None}
        return super().from_dict(config_dict, **kwargs)


@dataclass
class SparseCausalLMOutput(CausalLMOutputWithPast):
    """transformers' output with the two parts of the loss.

    `cross_entropy`: mean over predicted tokens, nats. `l1`: mean over non-padding tokens and over layers of
    sum_n |h|. Both are given with labels, in training and in evaluation.
    """

    cross_entropy: Tensor | None = None
    l1: Tensor | None = None


class SparseLlamaForCausalLM(LlamaForCausalLM):
    """Llama for causal language modelling with sparse feed-forward layers.

    With `labels` [B, S], `loss` is cross_entropy + l1_scale * l1_coefficient * l1 in training mode and cross_entropy in
    evaluation mode; `l1_scale` is for schedules. Where all labels are -100, cross_entropy and its gradients are 0;
    where all tokens are padding, l1 and its gradients are. The L1 term is the mean over non-padding tokens and layers
    of the SUM over neurons of |h|: the paper's formula also divides by N, but its recommended coefficient 2e-5 belongs
    to this definition.

    `attention_mask` says which tokens are padding. In a mask [B, keys] these are the zeros. In a mask
    [B or 1, heads or 1, S or 1, keys] a token is padding if no head lets it attend to itself. There a query
    may attend to a key where a bool or integer is nonzero, or where a floating-point number, which is added
    to the scores, is above -100. Token i is key number `keys` - S + i; with a cache, the number of
    cached tokens + i. Other masks raise ValueError where padding counts: with labels, in training mode,
    and while `recording`.

    A step of several micro-batches gives the value of one big batch when every call is told the totals of
    the step: `num_items_in_batch`, the predicted tokens (labels other than -100, the first of each sequence left out),
    and `num_tokens_in_batch`, the tokens that are no padding. With only the first, as transformers' Trainer passes it,
    the L1 term is weighted by the micro-batch's share of predicted tokens, which is the same for equal sequences.
    """

    config_class = SparseLlamaConfig
    recording = False  # set to count evaluation passes too in the layers' statistics; training passes always are

    def __init__(self, config: SparseLlamaConfig):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = SparseFFN(
                config.hidden_size,
                config.intermediate_size,
                gated=config.gated_mlp,
                activation=config.hidden_act,
                bias=config.mlp_bias,
                backend=config.ffn_backend,
            )
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers."""
        loaded = super().from_pretrained(*args, **kwargs)
        for ffn in (loaded[0] if isinstance(loaded, tuple) else loaded).ffns:
            ffn.backend = ffn.backend  # weights were assigned: the kernels' strides anew
        return loaded

    @property
    def ffns(self) -> list[SparseFFN]:
        """The feed-forward layers in order."""
        return [layer.mlp for layer in self.model.layers]

    def set_ffn_backend(self, backend: str, calibration: Calibration | None = None) -> None:
        """Compute every feed-forward layer with `backend` from now on; `calibration`, if given, is for "auto"."""
        for ffn in self.ffns:
            ffn.backend = backend
            if calibration is not None:
                ffn.calibration = calibration
        self.config.ffn_backend = backend

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_tokens_in_batch: Tensor | int | None = None,
        l1_scale: Tensor | float = 1.0,
        **kwargs,
    ) -> SparseCausalLMOutput:
        """Run the model; see the class for `loss` and its parts, and LlamaForCausalLM for everything else."""
        coefficient = self.config.l1_coefficient
        if coefficient is None and labels is not None and self.training:
            raise ValueError(
                "the model was stored with a list of L1 coefficients; set config.l1_coefficient to a number"
            )
        ffns = self.ffns
        mask = None
        if labels is not None or self.training or self.recording:  # otherwise nothing is counted
            inputs = kwargs.get("inputs_embeds") if input_ids is None else input_ids
            mask = _token_mask(attention_mask, inputs, kwargs.get("past_key_values"))
        if mask is not None and kwargs.get("inputs_embeds") is not None:
            # A masked key has the weight 0, and 0 times NaN is NaN.
            embeds = kwargs["inputs_embeds"]
            finite = embeds.nan_to_num(0.0, 0.0, 0.0)
            kwargs["inputs_embeds"] = torch.where(mask[..., None] != 0, embeds, finite)
        items = None
        if labels is not None:
            targets = kwargs.get("shift_labels")
            targets = labels[..., 1:] if targets is None else targets
            items = (targets != kwargs.get("ignore_index", -100)).sum()  # predicted tokens
            if num_items_in_batch is not None:
                num_items_in_batch = _divisor(num_items_in_batch, items)
        for ffn in ffns:
            # Stays set after the pass: activation checkpointing repeats the layer during backward, and has to
            # build the same graph. Recording ends with the pass, so that the repetition is not counted.
            ffn.collect_l1 = labels is not None
            ffn.record = self.training or self.recording
            ffn.token_mask = mask
        try:
            kwargs["return_dict"] = True
            output = super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                labels=labels,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
        finally:
            for ffn in ffns:
                ffn.record, ffn.token_mask = False, None
        cross_entropy = loss = output.loss
        l1 = None
        if labels is not None:
            # The mean over no label is NaN.
            cross_entropy = loss = torch.where(items.to(loss.device) > 0, loss, 0.0)
            layers = l1_by_layer(self, mask, num_tokens_in_batch)
            if num_items_in_batch is not None and num_tokens_in_batch is None:
                layers = layers * items / num_items_in_batch
            l1 = layers.mean()
            if self.training:
                loss = cross_entropy + l1_scale * coefficient * l1
        return SparseCausalLMOutput(**{**output, "loss": loss}, cross_entropy=cross_entropy, l1=l1)


MASKED = -100.0  # an additive mask of this and less means that a key is not attended to


def _token_mask(
    attention_mask: object, inputs: Tensor | None, cache: Cache | None
) -> Tensor | None:
    """Return [B, S], zero for the padding among the tokens of this pass; None where nothing is padding.

    `inputs` [B, S, ...] are ids or embeddings. SparseLlamaForCausalLM says which masks are read.
    Raises ValueError for others.
    """
    if attention_mask is None or inputs is None:
        return None
    shape, (batch, length) = tuple(getattr(attention_mask, "shape", ())), inputs.shape[:2]
    is_tensor = isinstance(attention_mask, Tensor)
    if is_tensor and len(shape) == 2 and shape[0] == batch and shape[1] >= length:
        return attention_mask[:, -length:].to(inputs.device)
    fits = (
        len(shape) == 4
        and shape[0] in (1, batch)
        and shape[2] in (1, length)
        and shape[3] >= length
    )
    if not (is_tensor and fits):
        given = f"has shape {shape}" if is_tensor else f"is a {type(attention_mask).__name__}"
        raise ValueError(
            f"attention_mask {given}; expected None, ({batch}, {length} or more) or "
            f"({batch} or 1, heads or 1, {length} or 1, {length} or more): "
            "the loss or the statistics have to know which tokens are padding"
        )
    attention_mask = attention_mask.to(inputs.device)
    # A static cache has room for later keys too, so that the last key is not the last token.
    first = shape[3] - length if cache is None else cache.get_seq_length()
    own = torch.arange(length, device=inputs.device) + first
    own = own.clamp(max=shape[3] - 1)[:, None].expand(batch, shape[1], length, 1)
    may = attention_mask.expand(batch, -1, length, -1).gather(-1, own)[..., 0]
    may = may > MASKED if may.is_floating_point() else may != 0
    return may.any(1)


def sparse_ffns(model: nn.Module) -> list[SparseFFN]:
    """Return the SparseFFN layers of any model, in order. Raises ValueError when it has none."""
    ffns = [module for module in model.modules() if isinstance(module, SparseFFN)]
    if not ffns:
        raise ValueError(
            f"{type(model).__name__} has no SparseFFN layer; twell.sparsify(model) puts them in"
        )
    return ffns


def l1_by_layer(
    model: nn.Module, token_mask: Tensor | None = None, num_tokens: Tensor | int | None = None
) -> Tensor:
    """Return each layer's L1 term of the last forward pass, [L]: the sum over tokens of sum_n |h|, by `num_tokens`.

    `token_mask` [B, S] is zero for padding; `num_tokens` are by default the tokens of this pass that are none. Where
    all tokens are padding the terms are 0. For any model in training mode, to add
    `coefficient * l1_by_layer(model).mean()` to its loss. Paper: the L1 loss; SparseLlamaForCausalLM says which
    definition. Raises RuntimeError when the layers kept no L1 term, ValueError for a mask of another shape.
    """
    ffns = sparse_ffns(model)
    if any(ffn.l1 is None for ffn in ffns):
        raise RuntimeError("the layers kept no L1 term: run the model in training mode first")
    per_token = torch.stack([ffn.l1 for ffn in ffns])
    trains = any(parameter.requires_grad for ffn in ffns for parameter in ffn.parameters())
    if ffns[0].training and torch.is_grad_enabled() and trains and not per_token.requires_grad:
        raise RuntimeError(
            "the L1 term has no gradient: activation checkpointing with use_reentrant=True drops it; "
            "use model.gradient_checkpointing_enable({'use_reentrant': False})"
        )
    counted = per_token[0].numel()
    if token_mask is not None:
        if token_mask.shape != per_token.shape[1:]:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask.shape)}; expected {tuple(per_token.shape[1:])}, "
                "one entry a token"
            )
        counted = (token_mask != 0).sum()
        # not a product: whatever stands at a padding position, inf and NaN included, stays out
        per_token = torch.where(token_mask != 0, per_token, 0.0)
    return per_token.flatten(1).sum(1) / _divisor(
        counted if num_tokens is None else num_tokens, counted
    )


def _divisor(total: Tensor | int, counted: Tensor | int) -> Tensor | int:
    """Return `total`, plus 1 where nothing is counted, so that the mean and its gradients are 0 and not 0/0."""
    if not isinstance(total, Tensor) and total != 0:  # saves a copy to the device
        return total
    nothing = counted == 0
    if isinstance(total, Tensor) and isinstance(nothing, Tensor):
        total = total.to(nothing.device)
    return total + nothing


@contextlib.contextmanager
def silence(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    neurons: int | Iterable[int] | None = None,
) -> Iterator[None]:
    """While it lasts, the given feed-forward layers (default: all), or neurons of one layer, add nothing to the residual stream.

    layers: their numbers, or one; neurons: one or more of this one layer. Works with every backend, in training too: what
    is silent gets no gradient from the output. Statistics and the L1 term still count it. One `with` in another silences
    both, and each restores what was before; a captured CUDA graph keeps what it captured. Raises IndexError for a layer or
    neuron that the model does not have, ValueError for neurons without one layer.
    """
    ffns = sparse_ffns(model)
    if neurons is not None and not isinstance(layers, Integral):
        raise ValueError(
            f"neurons belong to one layer, as in silence(model, 3, [17, 40]); layers is {layers!r}"
        )
    chosen = (
        range(len(ffns))
        if layers is None
        else [layers]
        if isinstance(layers, Integral)
        else list(layers)
    )
    for layer in chosen:
        if not 0 <= layer < len(ffns):
            raise IndexError(
                f"layer {layer} does not exist: the model has SparseFFN layers 0 to {len(ffns) - 1}"
            )
    before = [(ffn.silenced, ffn.muted) for ffn in ffns]
    try:
        for layer in chosen:
            if neurons is None:
                ffns[layer].silenced = True
            else:
                ffns[layer].muted = _muted(ffns[layer], neurons)
        yield
    finally:
        for ffn, (silenced, muted) in zip(ffns, before, strict=True):
            ffn.silenced, ffn.muted = silenced, muted


def _muted(ffn: SparseFFN, neurons: int | Iterable[int]) -> Tensor:
    """A mask of these neurons and of those that are silent already."""
    size, device = ffn.intermediate_size, ffn.device
    mask = (
        torch.zeros(size, dtype=torch.bool, device=device)
        if ffn.muted is None
        else ffn.muted.clone()
    )
    for neuron in [neurons] if isinstance(neurons, Integral) else neurons:
        if not 0 <= neuron < size:
            raise IndexError(
                f"neuron {neuron} does not exist: the layer has neurons 0 to {size - 1}"
            )
        mask[neuron] = True
    return mask


# --- existing models --------------------------------------------------------------------------------

SPARSIFIABLE = ("llama", "mistral", "qwen2", "qwen3")


def sparsify(model: nn.Module, *, relufy: bool = False, backend: str = "dense") -> nn.Module:
    """Put SparseFFN in place of the feed-forward layers of a Llama, Mistral or Qwen2/3 model, in place, and return it.

    Weights are shared, not copied; names and saved files stay those of the model. Adapters (a peft model too) and hooks stay
    where they are and act, on every backend: where the kernels cannot read plain weights the layer computes densely
    (`SparseFFN.readable`). A model with ReLU computes what it did before. A model with SiLU is refused unless `relufy` is
    set, which exchanges the activation: the model then computes something else and needs training. Raises ValueError for a
    model of another kind, and for feed-forward modules that are not the model's own.
    """
    base = _without_adapters(model)
    kind, activation = base.config.model_type, base.config.hidden_act
    if kind not in SPARSIFIABLE:
        raise ValueError(
            f"a model of type {kind!r} cannot be made sparse; supported are {', '.join(SPARSIFIABLE)}"
        )
    layers = base.base_model.layers
    for layer in layers:
        if not isinstance(layer.mlp, SparseFFN):
            _check_replaceable(layer.mlp, kind, relufy or activation != "relu")
    if activation != "relu" and not relufy:
        raise ValueError(
            f"the model's activation is {activation!r}, which makes nothing zero; relufy=True exchanges it for ReLU, "
            "after which the model needs training"
        )
    if activation != "relu":
        warnings.warn(
            f"activation {activation!r} became 'relu': the model needs training", stacklevel=2
        )
    for layer in layers:
        if not isinstance(layer.mlp, SparseFFN):
            layer.mlp = SparseFFN.around(layer.mlp)
        layer.mlp.backend = backend
    base.config.hidden_act = "relu"
    return model


def _without_adapters(model: nn.Module) -> PreTrainedModel:
    """The transformers model within one of peft, which computes with its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_replaceable(mlp: nn.Module, kind: str, any_activation: bool) -> None:
    """Refuse a feed-forward module that may compute something else than the model's own."""
    name = f"{type(mlp).__module__}.{type(mlp).__qualname__}"
    if not name.startswith(f"transformers.models.{kind}.modeling_"):
        raise ValueError(
            f"a feed-forward module is a {name}, not the one of {kind!r}; sparsify before wrapping or sharding"
        )
    if "forward" in mlp.__dict__ and "_hf_hook" not in mlp.__dict__:
        raise ValueError(
            f"a feed-forward module, a {name}, has a forward of its own, which SparseFFN would replace"
        )
    if not any_activation and not isinstance(mlp.act_fn, nn.ReLU):
        raise ValueError(
            f"the configuration says 'relu', and a feed-forward module has {mlp.act_fn}; make them agree"
        )


def densify(model: nn.Module) -> nn.Module:
    """Put the model's own feed-forward layers back, with the present weights: what `sparsify` did is undone, in place.

    The activation stays ReLU, which the weights now belong to. Raises ValueError for a model that was not sparsified.
    """
    layers = _without_adapters(model).base_model.layers
    for layer in layers:
        if not isinstance(layer.mlp, SparseFFN) or layer.mlp.replaced is None:
            raise ValueError(
                f"{type(model).__name__} was not made by twell.sparsify; there is nothing to undo"
            )
    for layer in layers:
        layer.mlp = layer.mlp.restored()
    return model


# --- checkpoints --------------------------------------------------------------------------------------

CALIBRATION = "calibration.json"  # beside the weights
# The paper's field: its kernels for training store down_proj.weight as [intermediate, hidden].
HYBRID = "sparsity_use_hybrid_kernel"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of weights
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
NO_WEIGHTS = re.compile(r"(^|\.)(tracker|metrics_accumulator)\.|rotary_emb\.inv_freq$")


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, **options
) -> None:
    """Write a model and its tokenizer in Hugging Face layout. Raises OSError naming the folder when it cannot."""
    try:
        model.save_pretrained(folder, **options)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # Both libraries are written in Rust and have no OSError: one has a class of its own, the other plain Exception.
        if isinstance(error, SafetensorError) or type(error) is Exception:
            raise OSError(f"{folder} could not be written: {error}") from None
        raise


def load(
    name_or_path: str | Path, *, backend: str | None = None, dtype: torch.dtype | None = None
) -> tuple[SparseLlamaForCausalLM, PreTrainedTokenizerBase | None]:
    """Load a model, in evaluation mode, and its tokenizer (None when there is none) from a folder or the hub.

    Takes a run folder, a folder that `save_pretrained` wrote, and the paper's checkpoints (`SakanaAI/SparseLM1.5B` and its
    sisters) in each of their layouts. Where config.json sets `sparsity_use_hybrid_kernel`, `down_proj.weight`
    is stored as [intermediate, hidden]. `backend` computes the feed-forward layers, "auto" by the times in
    `calibration.json`, where the folder of the weights has one.

    All weights get one type: `dtype`, else the type that config.json names (`dtype`, or the older
    `torch_dtype`), else a type that holds all stored ones. Weights keep their values bit for bit, unless
    `dtype` or the type in config.json rounds them. Where the type in config.json does, a UserWarning names
    a tensor.

    Raises FileNotFoundError for a missing file. Raises ValueError for a damaged file, an impossible
    configuration, and a tensor that is missing, unknown or of the wrong shape or type, by name.
    """
    folder, config = load_config(name_or_path)
    if backend is not None:
        config.ffn_backend = backend
    tensors = _canonical(_read_tensors(folder), config, folder)
    _check_types(tensors, folder)
    with torch.device("meta"):
        expected = SparseLlamaForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        _check_tied(tensors, folder)
        expected.pop("lm_head.weight")
    _check_tensors(tensors, expected, folder)
    dtype = dtype or _dtype_of(tensors, config, folder)
    with _no_progress_bar():
        model = SparseLlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype
        )
    if config.ffn_backend == "auto" and (folder / CALIBRATION).is_file():
        model.set_ffn_backend("auto", _calibration_of(folder))
    has_tokenizer = any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    return model.eval(), _tokenizer_of(folder) if has_tokenizer else None


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without transformers' bar of loading weights: ours are read before, and notebooks keep the bar at 0%."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_config(name_or_path: str | Path) -> tuple[Path, SparseLlamaConfig]:
    """Return the folder with a model's weights, and its configuration, by what `load` takes; errors as there."""
    folder = _resolve(name_or_path)
    return folder, _config_of(folder)


def _calibration_of(folder: Path) -> Calibration:
    calibration = Calibration.load(folder / CALIBRATION)
    if torch.cuda.is_available() and (device := torch.cuda.get_device_name()) != calibration.device:
        warnings.warn(
            f"{folder / CALIBRATION} has times of {calibration.device!r}, and this is {device!r}: "
            "`twell measure calibrate` measures here",
            stacklevel=3,
        )
    return calibration


def _resolve(name: str | Path) -> Path:
    folder = Path(name)
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no model: it has no config.json")
        return folder
    if folder.exists():
        raise ValueError(
            f"{folder} is a file; a model is a folder with config.json and *.safetensors"
        )
    try:
        return Path(
            snapshot_download(
                str(name), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]
            )
        )
    except HFValidationError:
        raise FileNotFoundError(
            f"no model at {name}: it is no folder, and no name on the Hugging Face hub"
        ) from None
    except Exception as error:  # offline, no such repository, no access: the hub has a dozen kinds
        raise FileNotFoundError(
            f"no model {name}: it is no folder here, and the hub answered: {error}"
        ) from None


def _config_of(folder: Path) -> SparseLlamaConfig:
    """The configuration, whatever its dialect: ours, Llama's with ReLU, or the paper's with `sparsity_` fields."""
    path = folder / "config.json"
    fields = _json_object(path)
    missing = [name for name in SIZES if name not in fields]
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(missing)}; put back the file that came with the weights"
        )
    kind = fields.pop("model_type", None)
    if kind not in (SparseLlamaConfig.model_type, "llama", "llama_sparse_relu"):
        raise ValueError(f"{folder} holds a model of type {kind!r}; expected a Llama with ReLU")
    fields["dtype"] = _named_dtype(
        [fields.pop("dtype", None), fields.pop("torch_dtype", None)], folder
    )
    if "quantization_config" in fields:
        raise ValueError(f"{path} has a quantization_config; quantised weights cannot be read")
    if kind == SparseLlamaConfig.model_type:
        return _described(path, fields)
    sparsity = {name: fields.pop(name) for name in list(fields) if name.startswith("sparsity_")}
    if not sparsity and kind == "llama" and fields.get("hidden_act") != "relu":
        raise ValueError(
            f"{folder} holds a Llama with activation {fields.get('hidden_act')!r}; "
            "load it with transformers and use twell.sparsify(model, relufy=True)"
        )
    fields |= {
        "hidden_act": "relu",  # the paper's files may say "silu" and mean ReLU
        "gated_mlp": sparsity.get("sparsity_gated_mlp", True),
        "l1_coefficient": sparsity.get("sparsity_l1_coeff") or 0.0,
        "intermediate_size": sparsity.get("sparsity_new_intermediate_size")
        or fields.get("intermediate_size"),
        # Llama's own default, which differs from that of SparseLlamaConfig
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
        "rms_norm_eps": fields.get("rms_norm_eps", 1e-6),
    }
    return _described(
        path, {name: value for name, value in fields.items() if name != "architectures"}
    )


def _json_object(path: Path) -> dict:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON: {error}; put back the file that came with the weights"
        ) from None
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        raise ValueError(
            f"{path} holds a {kind}, expected a JSON object; put back the file that came with the weights"
        )
    return fields


def _described(path: Path, fields: dict) -> SparseLlamaConfig:
    """The configuration of these fields, of which a model can be made."""
    try:
        config = SparseLlamaConfig.from_dict(fields)
        rope = {"rope_type": "default", "rope_theta": 1e4} | (config.rope_parameters or {})
        if rope["rope_type"] not in (known := sorted({"default", *ROPE_INIT_FUNCTIONS})):
            raise ValueError(f"rope_type is {rope['rope_type']!r}; use one of {', '.join(known)}")
        if not 0 < rope["rope_theta"] < math.inf:
            raise ValueError(
                f"rope_theta is {rope['rope_theta']}; it has to be a finite number above 0"
            )
        with torch.device("meta"):  # with a backend that is there on every machine
            SparseLlamaForCausalLM(SparseLlamaConfig.from_dict(fields | {"ffn_backend": "dense"}))
    except Exception as error:  # transformers has a dozen kinds
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} describes no model: {' '.join(reason.split())}") from None
    return config


def _tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except ImportError:
        raise
    except Exception as error:  # of damaged files: a dozen kinds
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                _json_object(folder / name)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{folder / 'tokenizer.json'} and tokenizer_config.json make no tokenizer ({reason}); "
            "put back the files that came with the weights"
        ) from None


def _named_dtype(fields: list, folder: Path) -> str | None:
    """The type that config.json names in the newer or the older field; None without one."""
    names = [str(name).removeprefix("torch.") for name in fields if name not in (None, "auto")]
    if not names:
        return None
    if getattr(torch, names[0], None) not in DTYPES:
        raise ValueError(
            f"{folder / 'config.json'}: dtype is {names[0]!r}; expected one of {_names(DTYPES)}"
        )
    return names[0]


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index, files = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.is_file():
        places = _json_object(index).get("weight_map")
        if not (
            isinstance(places, dict)
            and places
            and all(isinstance(name, str) for name in places.values())
        ):
            raise ValueError(
                f"{index} has no weight_map with a file for each tensor; put back the one that came with them"
            )
        files = set(places.values())
    tensors: dict[str, Tensor] = {}
    layouts: dict[str, str] = {}  # of each weight, whichever of its names it has
    for name in sorted(files):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}, which holds weights of the model")
        try:
            part = load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(
                f"{folder / name} is damaged or cut short: {error}; put back a whole copy"
            ) from None
        for tensor in part:
            weight = re.sub(r"\.mlp\.(gate|up|down)_weight$", r".mlp.\1_proj.weight", tensor)
            if weight in layouts:
                both = tensor if layouts[weight] == tensor else f"{layouts[weight]} and {tensor}"
                raise ValueError(
                    f"{folder / name}: {both} would be one weight twice; take one of them out"
                )
            layouts[weight] = tensor
            counts = part[tensor].dtype in DTYPES and not NO_WEIGHTS.search(tensor)
            if counts and not part[tensor].isfinite().all():
                raise ValueError(
                    f"{folder / name}: the tensor {tensor} has NaN or infinite values: put back a whole copy"
                )
        tensors |= part
    return tensors


def _dtype_of(tensors: dict[str, Tensor], config: SparseLlamaConfig, folder: Path) -> torch.dtype:
    """The type that the configuration names, else one that holds all tensors; warns where it rounds."""
    widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    if config.dtype is None:
        return widest
    for name, tensor in tensors.items():
        if torch.promote_types(tensor.dtype, config.dtype) != config.dtype:
            warnings.warn(
                f"{folder}: the tensor {name} is stored as {tensor.dtype} and rounded to the type in "
                f"config.json, {config.dtype}; dtype={widest} keeps the stored values",
                stacklevel=3,
            )
            break
    return config.dtype


def _canonical(
    tensors: dict[str, Tensor], config: SparseLlamaConfig, folder: Path
) -> dict[str, Tensor]:
    """Llama's names and shapes from either layout; what is no weight (trackers, rotary tables) left out."""
    found, hybrid = {}, _is_hybrid(folder)
    turned = {"gate_weight", "down_weight"} if config.gated_mlp else {"up_weight", "down_weight"}
    for name, tensor in tensors.items():
        if NO_WEIGHTS.search(name):
            continue
        if match := re.search(r"\.mlp\.((gate|up|down)_weight)$", name):
            if tensor.dim() != 2:
                raise ValueError(
                    f"{folder}: the tensor {name} has shape {tuple(tensor.shape)}; expected a matrix"
                )
            tensor = tensor.t().contiguous() if match[1] in turned else tensor
            name = name.replace(match[1], f"{match[2]}_proj.weight")
        elif name.endswith(".mlp.down_proj.weight") and hybrid is not None:
            shape = (config.hidden_size, config.intermediate_size)
            _check_down(name, tensor, shape, hybrid, folder)
            tensor = tensor.t().contiguous() if hybrid else tensor
        found[name] = tensor
    return found


def _is_hybrid(folder: Path) -> bool | None:
    """Whether the paper's configuration has down_proj.weight transposed; None for a configuration of ours."""
    fields = _json_object(folder / "config.json")
    if fields.get("model_type") == SparseLlamaConfig.model_type:
        return None
    hybrid = fields.get(HYBRID) or False
    if not isinstance(hybrid, bool):
        raise ValueError(
            f"{folder / 'config.json'}: {HYBRID} is {hybrid!r}; expected true or false"
        )
    return hybrid


def _check_down(
    name: str, tensor: Tensor, shape: tuple[int, int], hybrid: bool, folder: Path
) -> None:
    """Refuse a down projection whose shape contradicts the configuration."""
    stored, other = (shape[::-1], shape) if hybrid else (shape, shape[::-1])
    if tuple(tensor.shape) != stored and (hybrid or tuple(tensor.shape) == other):
        says, remedy = ("true", "false") if hybrid else ("not true", "true")
        hint = f"; if the file is right, set it to {remedy}" if tuple(tensor.shape) == other else ""
        raise ValueError(
            f"{folder}: the tensor {name} has shape {tuple(tensor.shape)}; "
            f"expected {stored}, since {HYBRID} in config.json is {says}{hint}"
        )


def _check_types(tensors: dict[str, Tensor], folder: Path) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{folder}: the tensor {name} has type {tensor.dtype}; expected one of {_names(DTYPES)}"
            )


def _check_tied(tensors: dict[str, Tensor], folder: Path) -> None:
    """Drop a head that only repeats the embedding; one that differs would be lost silently."""
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}: lm_head.weight differs from model.embed_tokens.weight, but config.json ties them"
        )


def _check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    for name, tensor in expected.items():
        if name not in tensors:
            raise ValueError(
                f"{folder}: the tensor {name} is missing, expected with shape {tuple(tensor.shape)}"
            )
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"{folder}: the tensor {name} has shape {tuple(tensors[name].shape)}; expected {tuple(tensor.shape)}"
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise ValueError(
            f"{folder}: the tensor {unknown[0]} is not part of the model ({len(unknown)} such)"
        )


AutoConfig.register(SparseLlamaConfig.model_type, SparseLlamaConfig)
AutoModelForCausalLM.register(SparseLlamaConfig, SparseLlamaForCausalLM)
