"""What parts of a model do to a prediction: their direct effects on logits.

The last norm scales the residual stream, the sum of what embedding, attention and neurons write,
and the unembedding makes logits of it. With the norm's scale taken as fixed, logits are a sum over
the parts, too. A part's direct effect on a logit is its term of that sum. It leaves out what later
layers make of the part. Logits are against their mean over all words, which no probability needs.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twell.models import last_norm, sparse_ffns
from twell.trace import Trace


class Lens(NamedTuple):
    """How the last norm and the unembedding read the residual stream at T tokens.

    ids: two words [T, 2], the likeliest next token and the one that follows, -1 after the last of a
    sequence. scale: the norm's factor [T]. read: effects on both logits of the stream before each
    layer and behind the last, with the norm's bias [T, L + 1, 2].
    """

    ids: np.ndarray
    scale: np.ndarray
    read: np.ndarray


class Direct(NamedTuple):
    """Direct effects on two logits of each token; 0 on a word that is not there.

    start [T, 2]: of the embedding, and of the norm's bias. attention [T, L, 2]: what a layer adds
    beside its neurons, a bias of down included. neurons [E, 2]: of the trace's entries; sums
    [T, L, 2] of them.
    """

    start: np.ndarray
    attention: np.ndarray
    sums: np.ndarray
    neurons: np.ndarray


@contextlib.contextmanager
def lenses(model: PreTrainedModel, following: Sequence[int]) -> Iterator[list[Lens]]:
    """Collect a `Lens` of each pass inside a `with` block; none for a model without a last norm.

    following: the next token of each token of all passes, -1 for none.
    """
    collected, streams, following = [], [], torch.as_tensor(following)
    if (last := last_norm(model)) is None:
        yield collected
        return
    norm, words = full_norm(model), centred(model)

    def look(_: nn.Module, __: tuple, logits: Tensor) -> None:
        done = sum(len(lens.ids) for lens in collected)
        logits = logits.flatten(0, -2)
        follows = following[done : done + len(logits)].to(logits.device)
        ids = torch.stack([logits.argmax(-1), follows], 1)
        streams[-1] = streams[-1].float()
        both, zero = words[ids] * (ids >= 0)[..., None], norm(torch.zeros_like(streams[-1]))
        linear = normed(norm, streams[-1])
        scale = ((norm(streams[-1]) - zero) * linear).sum(-1) / linear.square().sum(-1)
        effects = [
            torch.einsum("tk,twk->tw", normed(norm, stream.float()) * scale[:, None] + zero, both)
            for stream in streams
        ]
        parts = ids, scale, torch.stack(effects, 1)
        collected.append(Lens(*(part.cpu().numpy() for part in parts)))
        streams.clear()

    def keep(_: nn.Module, inputs: tuple) -> None:
        streams.append(inputs[0].flatten(0, -2))

    hooks = [module.register_forward_pre_hook(keep) for module in (*_blocks(model), last)]
    hooks.append(model.get_output_embeddings().register_forward_hook(look))
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the module of each layer, attention and feed-forward, such as model.layers.0."""
    names = {module: name for name, module in model.named_modules()}
    blocks = (re.match(r".*?\.\d+(?=\.)", names[ffn])[0] for ffn in sparse_ffns(model))
    return [model.get_submodule(name) for name in blocks]


@torch.no_grad()
def direct(model: PreTrainedModel, passage: Trace, lens: Lens) -> Direct:
    """Return the direct effects of all parts of a traced passage."""
    ids, norm = torch.as_tensor(lens.ids, device=model.device), full_norm(model)
    words = (centred(model)[ids] * (ids >= 0)[..., None]).numpy(force=True)
    to = torch.as_tensor(words * lens.scale[:, None, None]).to(model.device)
    sums, neurons = np.zeros((passage.num_tokens, passage.num_layers, 2)), []
    for layer in range(passage.num_layers):
        h = passage.layer(layer).tocoo()
        token, neuron = h.coords
        effects = to @ normed(norm, written(model, layer)).t()
        neurons.append(effects[token, :, neuron].cpu().numpy() * h.data[:, None])
        np.add.at(sums[:, layer], token, neurons[-1])
    attention = np.diff(lens.read, axis=1) - sums
    return Direct(lens.read[:, 0], attention, sums, np.concatenate(neurons))


# --- weights


def centred(model: PreTrainedModel) -> Tensor:
    """Return the unembedding [V, K] in fp32, less its mean over all words."""
    weight = model.get_output_embeddings().weight.detach().float()
    return weight - weight.mean(0)


def full_norm(model: PreTrainedModel) -> nn.Module:
    """Return a copy of the last norm in fp32."""
    return copy.deepcopy(last_norm(model)).float()


def written(model: PreTrainedModel, layer: int) -> Tensor:
    """Return what each neuron of a layer writes to the residual stream, [N, K] in fp32."""
    ffn = sparse_ffns(model)[layer]
    return _matrix(ffn.down_proj, ffn.intermediate_size, ffn)


def read(model: PreTrainedModel, layer: int) -> Tensor:
    """Return the directions that make each neuron of a layer fire, [N, K] in fp32."""
    ffn = sparse_ffns(model)[layer]
    gate = ffn.up_proj if ffn.gate_proj is None else ffn.gate_proj
    return _matrix(gate, model.config.hidden_size, ffn).t()


@torch.no_grad()
def _matrix(projection: nn.Module, size: int, ffn: nn.Module) -> Tensor:
    """Return what a projection makes of each unit vector, [size, outputs]; LoRA and FP8 as well."""
    like = next(ffn.parameters())
    zero_and_ones = torch.eye(size + 1, size, dtype=like.dtype, device=like.device).roll(1, 0)
    outputs = projection(zero_and_ones)
    return (outputs[1:] - outputs[:1]).float()


def normed(norm: nn.Module, directions: Tensor) -> Tensor:
    """Return what the last norm makes of directions [..., K], up to the stream's scale."""
    if isinstance(norm, nn.LayerNorm):  # centres too; Nemotron's adds 1 to its weight
        scale = directions.std(-1, correction=0, keepdim=True).clamp(min=1e-6)
        return (norm(directions / scale) - norm(torch.zeros_like(directions))) * scale
    weight = getattr(norm, "weight", None)
    return directions if weight is None else directions * weight
