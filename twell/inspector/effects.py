"""What parts of a model do to a prediction: direct effects on logits, and exact ones of silencing.

The last norm scales the residual stream, the sum of what embedding, attention and neurons write,
and the unembedding makes logits of it. With the norm's scale taken as fixed, logits are a sum over
the parts, too. A part's direct effect on a logit is its term of that sum. It leaves out what later
layers make of the part. Logits are against their mean over all words, which no probability needs.

Silencing a neuron and running the model again has no approximation.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate.utils import tqdm
from torch import Tensor, nn
from transformers import PreTrainedModel

from twell import trace
from twell.models import last_norm, sparse_ffns
from twell.trace import Trace

ENTRIES = 8192  # whose effects are computed at once


class Lens(NamedTuple):
    """How the last norm and the unembedding read the residual stream at T tokens.

    ids: two words [T, 2], the likeliest next token and the one that follows, -1 after the last of a
    sequence. scale: the norm's factor [T]. read: effects on both logits of the stream before each
    layer and behind the last [T, L + 1, 2]; constant: of the norm's bias [T, 2].
    """

    ids: np.ndarray
    scale: np.ndarray
    read: np.ndarray
    constant: np.ndarray


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


class Silenced(NamedTuple):
    """How the surprise of each token rises without one neuron: layer, neuron [M]; rise [M, T]."""

    layer: np.ndarray
    neuron: np.ndarray
    rise: np.ndarray  # nats, NaN at first tokens


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

    def read(_: nn.Module, __: tuple, logits: Tensor) -> None:
        done = sum(len(lens.ids) for lens in collected)
        logits = logits.flatten(0, -2)
        follows = following[done : done + len(logits)].to(logits.device)
        ids = torch.stack([logits.argmax(-1), follows], 1)
        both, zero = words[ids] * (ids >= 0)[..., None], norm(torch.zeros_like(streams[-1]))
        linear = [normed(norm, stream) for stream in streams]
        scale = ((norm(streams[-1]) - zero) * linear[-1]).sum(-1) / linear[-1].square().sum(-1)
        effects = [torch.einsum("tk,twk->tw", part, both) * scale[:, None] for part in linear]
        constant = torch.einsum("tk,twk->tw", zero, both)
        parts = ids, scale, torch.stack(effects, 1), constant
        collected.append(Lens(*(part.cpu().numpy() for part in parts)))
        streams.clear()

    def keep(_: nn.Module, inputs: tuple) -> None:
        streams.append(inputs[0].flatten(0, -2).float())

    hooks = [module.register_forward_pre_hook(keep) for module in (*_blocks(model), last)]
    hooks.append(model.get_output_embeddings().register_forward_hook(read))
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
    words, norm, ids = centred(model), full_norm(model), torch.as_tensor(lens.ids)
    size = passage.num_tokens
    sums, neurons = np.zeros((size, passage.num_layers, 2)), []
    for layer in range(passage.num_layers):
        written = normed(norm, down_rows(model, layer).float())
        h = passage.layer(layer).tocoo()
        effects = [np.zeros((0, 2), np.float32)]
        for start in range(0, len(h.data), ENTRIES):
            token, neuron, value = (
                torch.as_tensor(part[start : start + ENTRIES], device=written.device)
                for part in (*h.coords, h.data)
            )
            to = ids[token.cpu()].to(written.device)
            effect = torch.einsum("ek,ewk->ew", written[neuron], words[to]) * (to >= 0)
            effects.append((effect * value[:, None]).cpu().numpy())
        effect = np.concatenate(effects) * lens.scale[h.coords[0], None]
        np.add.at(sums[:, layer], h.coords[0], effect)
        neurons.append(effect)
    start = lens.read[:, 0] + lens.constant
    return Direct(start, np.diff(lens.read, axis=1) - sums, sums, np.concatenate(neurons))


def silence_each(
    model: PreTrainedModel,
    passage: Trace,
    sequences: Sequence[Sequence[int]],
    number: int,
    progress: bool = False,
) -> Silenced:
    """Silence the `number` neurons that are strongest at some token, one at a time.

    Their strength is the share of the sum of |h| in token and layer, first tokens apart.
    """
    size = np.abs(passage.values)
    row = np.repeat(np.arange(len(passage.indptr) - 1), np.diff(passage.indptr))
    layer, token = np.divmod(row, max(passage.num_tokens, 1))
    share = size / np.maximum(np.bincount(row, size, minlength=1)[row], 1e-30)
    share[passage.position[token] == 0] = 0
    best = np.zeros(passage.num_layers * passage.intermediate_size)
    np.maximum.at(best, layer * passage.intermediate_size + passage.indices, share)
    chosen = np.argsort(-best, kind="stable")[: min(number, np.count_nonzero(best))]
    pairs = np.stack(np.divmod(chosen, passage.intermediate_size))
    rises = [np.zeros((0, passage.num_tokens), np.float32)]
    for one in tqdm(pairs.T.tolist(), unit=" neurons silenced", disable=not progress):
        silent = trace.scaled_logprob(model, sequences, passage, *one, 0)
        rises.append((passage.logprob - silent)[None])
    return Silenced(*pairs, np.concatenate(rises))


# --- weights


def centred(model: PreTrainedModel) -> Tensor:
    """Return the unembedding [V, K] in fp32, less its mean over all words."""
    weight = model.get_output_embeddings().weight.detach().float()
    return weight - weight.mean(0)


def full_norm(model: PreTrainedModel) -> nn.Module:
    """Return a copy of the last norm in fp32."""
    return copy.deepcopy(last_norm(model)).float()


@torch.no_grad()
def down_rows(model: PreTrainedModel, layer: int) -> Tensor:
    """Return what each neuron of a layer writes to the residual stream, [N, K]."""
    ffn = sparse_ffns(model)[layer]
    return matrix(ffn.down_proj, ffn.intermediate_size, next(ffn.parameters()))


def matrix(projection: nn.Module, size: int, like: Tensor) -> Tensor:
    """Return what a projection makes of each unit vector, [size, outputs]; LoRA and FP8 as well."""
    zero_and_ones = torch.eye(size + 1, size, dtype=like.dtype, device=like.device).roll(1, 0)
    outputs = projection(zero_and_ones)
    return outputs[1:] - outputs[:1]


def normed(norm: nn.Module, directions: Tensor) -> Tensor:
    """Return what the last norm makes of directions [..., K], up to the stream's scale."""
    if isinstance(norm, nn.LayerNorm):  # centres too; Nemotron's adds 1 to its weight
        scale = directions.std(-1, correction=0, keepdim=True).clamp(min=1e-6)
        return (norm(directions / scale) - norm(torch.zeros_like(directions))) * scale
    weight = getattr(norm, "weight", None)
    return directions if weight is None else directions * weight
