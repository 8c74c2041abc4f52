"""A Llama with sparse feed-forward layers.

SparseLlamaForCausalLM is transformers' Llama with SparseFFN as its feed-forward layer. Attention,
norms, rotary positions, caching and generation are transformers' own. Weights have Llama's names: a
stock `LlamaForCausalLM` with `hidden_act="relu"` loads the checkpoints of gated models. A saved
folder also holds modeling_twell.py, by which `trust_remote_code=True` finds these classes.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from transformers import AutoConfig, AutoModelForCausalLM, Cache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX
from transformers.utils import SAFE_WEIGHTS_NAME as WHOLE
from transformers.utils import can_return_tuple

from twell.models.convert import ACTIVITY, apply_activity, sparse_ffns
from twell.models.l1 import L1Terms, divisor, means, token_mask
from twell.models.quantize import note_quantization, quantization_of
from twell.sparse.layer import SparseFFN
from twell.sparse.observe import is_exporting

# Ends hidden_act in saved files where there is a threshold. transformers' Llama would ignore the
# threshold; it refuses an activation of such a name.
THRESHOLD = "_above_threshold"
# The file that goes into saved folders, and the classes that it has for transformers' Auto classes
CODE = Path(__file__).with_name("modeling_twell.py")
AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.SparseLlamaConfig",
    "AutoModelForCausalLM": f"{CODE.stem}.SparseLlamaForCausalLM",
}


class SparseLlamaConfig(LlamaConfig):
    """Llama's configuration with four more fields; defaults: the paper's 1.5B model (Table 2).

    Args:
        hidden_act: "relu" or another activation of twell/sparse/activations.py.
        activation_threshold: the threshold of every SparseFFN.
        gated_mlp: gated or non-gated feed-forward layers.
        l1_coefficient: weight of the L1 term in the training loss, which SparseLlamaForCausalLM
            defines.
        ffn_backend: backend of every SparseFFN.
    """

    model_type = "twell_llama"
    keys_to_ignore_at_inference = ["past_key_values", "cross_entropy", "l1"]  # by Trainer.predict

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 28
    num_attention_heads: int = 32
    hidden_act: str = "relu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    activation_threshold: float = 0.0
    gated_mlp: bool = True
    l1_coefficient: float = 0.0
    ffn_backend: str = "dense"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.hidden_act.endswith(THRESHOLD) and not self.activation_threshold:
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}, and activation_threshold "
                f"{self.activation_threshold!r}; expected a number above 0"
            )
        self.hidden_act = self.hidden_act.removesuffix(THRESHOLD)
        if not isinstance(self.gated_mlp, bool):
            raise ValueError(f"gated_mlp is {self.gated_mlp!r}; expected true or false")
        if not 0 <= self.l1_coefficient < math.inf:
            raise ValueError(f"l1_coefficient is {self.l1_coefficient!r}; expected 0 or more")

    def to_dict(self) -> dict:
        """As in transformers; `hidden_act` also says that there is a threshold."""
        fields = super().to_dict()
        if self.activation_threshold:
            fields["hidden_act"] = fields["hidden_act"].removesuffix(THRESHOLD) + THRESHOLD
        return fields

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: saved folders get modeling_twell.py, not the source of this module."""


@dataclass
class SparseCausalLMOutput(CausalLMOutputWithPast):
    """transformers' output with the two parts of the loss.

    `cross_entropy`: mean over predicted tokens, nats. `l1`: mean over non-padding tokens and over
    layers of sum_n |h|. Both are None without labels, but in training mode l1 is there.
    """

    cross_entropy: Tensor | None = None
    l1: Tensor | None = None


class SparseLlamaForCausalLM(LlamaForCausalLM):
    """Llama for causal language modelling with sparse feed-forward layers.

    Loss. With `labels` [B, S], `loss` is cross_entropy + l1_scale * l1_coefficient * l1 in training
    mode and cross_entropy in evaluation mode. Schedules set `l1_scale`. The L1 term is the mean
    over non-padding tokens and layers of the sum over neurons of |h|. The paper's formula also
    divides by N, but its recommended coefficient 2e-5 belongs to this definition. Where all labels
    are -100, cross_entropy and its gradients are 0. Where all tokens are padding, l1 and its
    gradients are 0.

    Padding. A mask [B, keys] is zero for padding. Other masks raise ValueError where padding
    counts: with labels, in training mode, and with `recording`.

    Micro-batches. Several micro-batches give the value of one big batch when every call gets the
    totals of the step. `num_items_in_batch` counts predicted tokens: labels other than -100,
    without the first of each sequence. `num_tokens_in_batch` counts tokens that are not padding.
    transformers' Trainer passes only the first. The micro-batch's share of predicted tokens then
    weights the L1 term, which is the same for sequences of equal length.
    """

    config_class = SparseLlamaConfig
    recording = False  # set it to count evaluation passes too; training passes always are

    def __init__(self, config: SparseLlamaConfig):
        activation, config.hidden_act = config.hidden_act.removesuffix(THRESHOLD), "relu"
        try:  # transformers, whose layers are replaced below, knows no dReLU
            super().__init__(config)
        finally:
            config.hidden_act = activation
        for layer in self.model.layers:
            layer.mlp = SparseFFN(
                config.hidden_size,
                config.intermediate_size,
                gated=config.gated_mlp,
                activation=activation,
                threshold=config.activation_threshold,
                bias=config.mlp_bias,
                backend=config.ffn_backend,
            )
        apply_activity(self.ffns, getattr(config, ACTIVITY, None))
        # Libraries that compute a loss of their own may call the backbone and not this model.
        self.model.register_forward_hook(_check_backbone)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers. `twell.load` also reads other layouts, and checks every tensor."""
        loaded = super().from_pretrained(*args, **kwargs)
        for ffn in (loaded[0] if isinstance(loaded, tuple) else loaded).ffns:
            ffn.backend = ffn.backend  # restores the kernels' strides: the weights were assigned
        return loaded

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, *args, **kwargs
    ):
        """As in transformers, with modeling_twell.py, for loading with `trust_remote_code=True`.

        An earlier save of one file is deleted where shards take its place, and the other way round.
        Raises ValueError where some layers are in FP8 and others not.
        """
        note_quantization(self.config, quantization_of(self))
        self.config.auto_map = dict(AUTO_MAP)
        if is_main_process:  # before transformers pushes the folder to the hub
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(CODE, Path(save_directory, CODE.name))
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        files = [Path(save_directory, name) for name in (WHOLE, INDEX)]
        if is_main_process and all(map(Path.is_file, files)):
            min(files, key=lambda path: path.stat().st_mtime_ns).unlink()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing, as SparseLlamaConfig."""

    @property
    def ffns(self) -> list[SparseFFN]:
        """The feed-forward layers in order; where peft wraps a layer, also its copies."""
        return _ffns(self.model)

    def set_ffn_backend(self, backend: str) -> None:
        """Set the backend of every feed-forward layer."""
        for ffn in self.ffns:
            ffn.backend = backend
        self.config.ffn_backend = backend

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        num_tokens_in_batch: Tensor | int | None = None,
        l1_scale: Tensor | float = 1.0,
        **kwargs,
    ) -> SparseCausalLMOutput:
        """Run the model. The class explains `loss`; LlamaForCausalLM the other arguments."""
        kwargs |= {"return_dict": True, "position_ids": position_ids, "use_cache": use_cache}
        kwargs |= {"past_key_values": past_key_values, "logits_to_keep": logits_to_keep}
        counts, wants_l1 = self.training or self.recording, self.training or labels is not None
        mask, terms = None, nullcontext()  # without a collector, dense layers take their quick way
        if counts or wants_l1:  # where padding counts
            inputs = inputs_embeds if input_ids is None else input_ids
            mask = token_mask(attention_mask, inputs)
            terms = L1Terms(self.ffns, wants_l1=wants_l1, counts=counts, token_mask=mask)
        predicted = None if labels is None else _predicted_tokens(labels, kwargs)
        if labels is not None and num_items_in_batch is not None:
            num_items_in_batch = divisor(num_items_in_batch, predicted)
        kwargs |= {"labels": labels, "num_items_in_batch": num_items_in_batch}
        with terms:
            output = super().forward(
                input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        if not wants_l1:
            return SparseCausalLMOutput(**output)
        coefficient = self.config.l1_coefficient if self.training else 0.0
        if coefficient > 0:
            terms.check_gradient()
        # By call: a layer may be in several places of a model.
        layers = means([term for _, term in terms.terms], mask, num_tokens_in_batch)
        if labels is None:
            l1 = layers.mean()
            if _checks_l1(self):
                _require_l1([output.logits, l1, *(term for _, term in terms.terms)])
            return SparseCausalLMOutput(**output, l1=l1)
        # The mean over no label is NaN.
        cross_entropy = torch.where(predicted.to(output.loss.device) > 0, output.loss, 0.0)
        if num_items_in_batch is not None and num_tokens_in_batch is None:
            layers = layers * predicted / num_items_in_batch
        loss, l1 = cross_entropy, layers.mean()
        if self.training:
            loss = cross_entropy + l1_scale * coefficient * l1
        return SparseCausalLMOutput(**{**output, "loss": loss}, cross_entropy=cross_entropy, l1=l1)


def _ffns(backbone: nn.Module) -> list[SparseFFN]:
    mlps = [layer.mlp for layer in backbone.layers]
    return [
        ffn for mlp in mlps for ffn in ([mlp] if isinstance(mlp, SparseFFN) else sparse_ffns(mlp))
    ]


def _checks_l1(model: nn.Module) -> bool:
    traced = is_exporting() or not torch.is_grad_enabled()
    return model.training and model.config.l1_coefficient > 0 and not traced


def _check_backbone(backbone: nn.Module, _: tuple, output: Sequence[Tensor]) -> None:
    """Check the loss of a training pass that no SparseLlamaForCausalLM collects the terms of."""
    if _checks_l1(backbone):
        # In two steps: torch.compile cannot trace a name that a comprehension assigns.
        last = [ffn.outbox.last for ffn in _ffns(backbone)]
        terms = [l1 for l1 in last if l1 is not None]
        if terms:
            _require_l1([output[0], *terms])


@torch.compiler.disable(
    reason="where config.l1_coefficient is above 0, a pass without labels checks in its backward "
    "pass that the loss has the L1 term: give labels, or set it to 0"
)
def _require_l1(tensors: Sequence[Tensor]) -> None:
    """Let the backward pass raise RuntimeError where only the first tensor has a gradient."""
    tensors = [tensor for tensor in tensors if tensor.requires_grad]
    if len(tensors) < 2:
        return

    def check(gradients: Sequence[Tensor | None]) -> None:
        if all(gradient is None for gradient in gradients[1:]):
            raise RuntimeError(
                "the loss has no L1 term, and config.l1_coefficient is above 0: the model got no "
                "labels, or its own forward was not called, as by a trainer with a loss of its own "
                "(label_smoothing_factor, compute_loss_func, trl). Give the trainer "
                "compute_loss_func=twell.with_l1(model, ...), or add output.l1 to your loss"
            )

    register_multi_grad_hook(tensors, check)


def check_llama(name: object, model: nn.Module) -> None:
    """Raise ValueError for a model of another class, which `name` names."""
    if not isinstance(model, SparseLlamaForCausalLM):
        kind = type(model).__name__
        raise ValueError(f"{name} is a {kind}; here only a SparseLlamaForCausalLM will do")


def _predicted_tokens(labels: Tensor, options: dict) -> Tensor:
    """Count the labels that cross-entropy averages over, as transformers' loss shifts them."""
    shifted = options.get("shift_labels")
    targets = labels[..., 1:] if shifted is None else shifted
    return (targets != options.get("ignore_index", -100)).sum()


AutoConfig.register(SparseLlamaConfig.model_type, SparseLlamaConfig)
AutoModelForCausalLM.register(SparseLlamaConfig, SparseLlamaForCausalLM)
# Trainer shifts the labels for label smoothing where it finds the class here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SparseLlamaConfig.model_type] = SparseLlamaForCausalLM.__name__
# `transformers serve` looks for the class in the module `transformers`. transformers loads itself a
# second time, so the server may hold another such module than `sys.modules`.
_server = sys.modules.get("transformers.cli.serving.model_manager")
for _module in {sys.modules["transformers"], getattr(_server, "transformers", None)} - {None}:
    _module.SparseLlamaForCausalLM = SparseLlamaForCausalLM
