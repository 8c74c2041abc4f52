"""A Llama whose feed-forward layers are SparseFFN: transformers' own classes with one part exchanged.

Attention, norms, rotary positions, caching and generation are transformers' Llama, untouched. Weights have
Llama's names, so a stock `LlamaForCausalLM` with `hidden_act="relu"` loads what a gated model saves. Importing
this module registers the classes with `AutoConfig` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from twell.ffn import SparseFFN


class SparseLlamaConfig(LlamaConfig):
    """Llama's configuration and four fields more; the defaults are those of the paper's 1.5B model (Table 2).

    Args:
        hidden_act: "relu", or "silu" for comparison.
        gated_mlp: gated or non-gated feed-forward layers.
        l1_coefficient: weight of the L1 term in the training loss (SparseLlamaForCausalLM defines the term).
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
    l1_coefficient: float = 0.0
    ffn_backend: str = "dense"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if not self.l1_coefficient >= 0:
            raise ValueError(f"l1_coefficient is {self.l1_coefficient}; it has to be 0 or more")


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

    With `labels` [B, S], `loss` is cross_entropy + l1_coefficient * l1 in training mode and cross_entropy in
    evaluation mode. The L1 term is the mean over non-padding tokens and layers of the SUM over neurons of |h|: the
    paper's formula also divides by N, but its recommended coefficient 2e-5 belongs to this definition.

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

    @property
    def ffns(self) -> list[SparseFFN]:
        """The feed-forward layers in order."""
        return [layer.mlp for layer in self.model.layers]

    def set_ffn_backend(self, backend: str) -> None:
        """Compute every feed-forward layer with `backend` from now on."""
        for ffn in self.ffns:
            ffn.backend = backend
        self.config.ffn_backend = backend

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_tokens_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> SparseCausalLMOutput:
        """Run the model; see the class for `loss` and its parts, and LlamaForCausalLM for everything else."""
        ffns = self.ffns
        mask = self._token_mask(input_ids, attention_mask, kwargs.get("inputs_embeds"))
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
            l1 = self._l1(mask, labels, num_items_in_batch, num_tokens_in_batch)
            if self.training:
                loss = cross_entropy + self.config.l1_coefficient * l1
        return SparseCausalLMOutput(**{**output, "loss": loss}, cross_entropy=cross_entropy, l1=l1)

    @staticmethod
    def _token_mask(input_ids: Tensor | None, attention_mask: Tensor | None, embeds: Tensor | None) -> Tensor | None:
        """[B, S] mask of the tokens in this pass, or None when none is padding."""
        if attention_mask is None or attention_mask.dim() != 2:
            return None
        return attention_mask[:, -(embeds if input_ids is None else input_ids).shape[1] :]

    def _l1(self, mask: Tensor | None, labels: Tensor, items_in_batch, tokens_in_batch) -> Tensor:
        per_token = torch.stack([ffn.l1 for ffn in self.ffns]).mean(0)
        if self.training and torch.is_grad_enabled() and not per_token.requires_grad and self._any_ffn_trains():
            raise RuntimeError(
                "the L1 term has no gradient: activation checkpointing with use_reentrant=True drops it; "
                "use model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
        tokens = per_token.numel()
        if mask is not None:
            # not a product: whatever stands at a padding position, inf and NaN included, stays out
            per_token = torch.where(mask != 0, per_token, 0.0)
            tokens = (mask != 0).sum()
        if tokens_in_batch is not None:
            return per_token.sum() / tokens_in_batch
        mean = per_token.sum() / tokens
        if items_in_batch is not None:
            mean = mean * (labels[:, 1:] != -100).sum() / items_in_batch
        return mean

    def _any_ffn_trains(self) -> bool:
        return any(parameter.requires_grad for ffn in self.ffns for parameter in ffn.parameters())


@contextlib.contextmanager
def silence(model: nn.Module, layers: Iterable[int] | None = None) -> Iterator[None]:
    """While it lasts, the feed-forward layers with the given numbers (default: all) add nothing to the residual stream.

    Raises IndexError for a layer that the model does not have.
    """
    ffns = [module for module in model.modules() if isinstance(module, SparseFFN)]
    chosen = range(len(ffns)) if layers is None else list(layers)
    for layer in chosen:
        if not 0 <= layer < len(ffns):
            raise IndexError(f"layer {layer} does not exist: the model has SparseFFN layers 0 to {len(ffns) - 1}")
    hooks = [ffns[layer].register_forward_hook(lambda _, __, y: torch.zeros_like(y)) for layer in chosen]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


AutoConfig.register(SparseLlamaConfig.model_type, SparseLlamaConfig)
AutoModelForCausalLM.register(SparseLlamaConfig, SparseLlamaForCausalLM)
