"""Chooses the places in the text at which an aggregate shows a neuron.

While a model runs, `Best` holds the strongest firings of each neuron and an even sample of them. In
a second run `Near` reads the values of the tokens around them. `fit` keeps as many places, and as
many words around them, as the size of the file allows.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twell.trace.aggregates import Aggregate

Table = tuple[np.ndarray, np.ndarray]  # firings [L, N, k]: numbers of tokens, -1 for none; their h


class Contexts(NamedTuple):
    """How much an aggregate shows of each neuron.

    top: strongest places; quantiles: of h, one place each; before, after: tokens around a place;
    together: neurons that fire with it.
    """

    top: int
    quantiles: list[float]
    before: int
    after: int
    together: int


# An aggregate takes the first row that keeps its file within its limit. Counts are never reduced.
CONTEXTS = (
    Contexts(8, [0.1, 0.3, 0.5, 0.7, 0.9], 24, 12, 8),
    Contexts(8, [0.1, 0.3, 0.5, 0.7, 0.9], 16, 8, 8),
    Contexts(8, [0.1, 0.5, 0.9], 12, 4, 5),
    Contexts(5, [0.1, 0.5, 0.9], 12, 4, 5),
    Contexts(3, [0.1, 0.5, 0.9], 12, 4, 5),
    Contexts(3, [0.1, 0.5, 0.9], 8, 3, 3),
    Contexts(3, [0.5], 8, 3, 3),
    Contexts(2, [0.5], 8, 3, 3),
    Contexts(2, [0.5], 5, 2, 1),
    Contexts(1, [0.5], 5, 2, 1),
    Contexts(1, [0.5], 3, 1, 0),
    Contexts(1, [], 3, 1, 0),
    Contexts(0, [], 0, 0, 0),
)
SAMPLE = 32  # firings of a neuron that are drawn evenly, for the quantiles


class Best:
    """The k entries of each group with the highest score in a stream; of equal ones the earliest.

    An entry that does not exceed its group's k-th score is dropped on its device. The others go to
    main memory, and are merged when they are more than groups * k.
    """

    def __init__(self, groups: int, k: int, device: torch.device | str):
        self.groups, self.k = groups, k
        self.threshold = torch.full((groups,), -torch.inf, device=device)
        kinds = (np.int64, np.int64, np.float32, np.float32)
        self.parts = [tuple(np.zeros(0, kind) for kind in kinds)]
        self.waiting = 0

    def add(self, group: Tensor, at: Tensor, score: Tensor, value: Tensor) -> None:
        """Add entries [n]: int64; int64, ascending from call to call in a group; both float32."""
        better = score > self.threshold[group]
        self.parts.append(tuple(t[better].cpu().numpy() for t in (group, at, score, value)))
        self.waiting += len(self.parts[-1][0])
        if self.waiting > self.groups * self.k:
            self.merge()

    def merge(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return group, rank in the group, at and value, sorted by group and rank."""
        group, at, score, value = (np.concatenate(parts) for parts in zip(*self.parts, strict=True))
        order = np.lexsort((at, -score, group))
        rank = np.arange(len(order)) - np.searchsorted(group[order], group[order])
        order, rank = order[rank < self.k], rank[rank < self.k]
        self.parts, self.waiting = [(group[order], at[order], score[order], value[order])], 0
        last = order[rank == self.k - 1]
        full, scores = (torch.from_numpy(part[last]) for part in (group, score))
        self.threshold[full.to(self.threshold.device)] = scores.to(self.threshold.device)
        return group[order], rank, at[order], value[order]

    def table(self) -> Table:
        """Return `at` [groups, k], -1 for none, and `value` [groups, k], 0 for none."""
        group, rank, at, value = self.merge()
        table = np.full((self.groups, self.k), -1), np.zeros((self.groups, self.k), np.float32)
        table[0][group, rank], table[1][group, rank] = at, value
        return table


def places(top: Table, sample: Table) -> Table:
    """Return the places of the first row of CONTEXTS, [L, N, P]: all that an aggregate may show.

    The strongest come first, then those at the quantiles of the sampled values. These repeat where
    a neuron fires rarely.
    """
    wide = CONTEXTS[0]
    of_sample = _at_quantiles(*sample, wide.quantiles)
    parts = zip((part[..., : wide.top] for part in top), of_sample, strict=True)
    at, value = (np.concatenate(pair, -1) for pair in parts)
    return at, value


class Near:
    """An observer that keeps the values of neurons at the tokens around their places.

    at [L, N, P]: the places; max_abs [L, N]. It observes `held`, the sequences with a place.
    """

    def __init__(self, at: np.ndarray, max_abs: np.ndarray, sequences: Sequence[Sequence[int]]):
        _, _, self.before, self.after, _ = CONTEXTS[0]
        self.at, self.size = at.reshape(len(at), -1), at.shape[1:]
        self.unit = torch.from_numpy(np.where(max_abs > 0, max_abs, 1) / 127)
        self.order = np.argsort(self.at, kind="stable")
        self.sorted = np.take_along_axis(self.at, self.order, -1)
        ends = np.cumsum([len(sequence) for sequence in sequences])
        numbers = np.unique(np.searchsorted(ends, at[at >= 0], side="right"))
        self.starts = ends[numbers] - [len(sequences[number]) for number in numbers]
        self.held = [sequences[number] for number in numbers]
        self.values = np.zeros((*self.at.shape, self.before + 1 + self.after), np.int8)
        self.done = 0

    def begin(self, ids: Tensor) -> None:
        """Find the places of each layer in these sequences, and the tokens around them."""
        number, length = ids.shape
        starts = self.starts[self.done : self.done + number]
        self.done += number
        self.num_tokens, self.inside = ids.numel(), []
        for at, order in zip(self.sorted, self.order, strict=True):
            here = slice(*np.searchsorted(at, [starts[0], starts[-1] + length]))
            sequence = np.searchsorted(starts, at[here], side="right") - 1
            near = (at[here] - starts[sequence])[:, None] + np.arange(-self.before, self.after + 1)
            outside = (near < 0) | (near >= length)
            row = np.where(outside, self.num_tokens, sequence[:, None] * length + near)
            self.inside.append((order[here], row))

    def layer(self, layer: int, token: Tensor, neuron: Tensor, value: Tensor) -> None:
        code = (value / self.unit[layer].to(value.device)[neuron]).round()
        code = torch.where(code == 0, value.sign(), code).to(torch.int8)
        codes = code.new_zeros(self.num_tokens + 1, self.size[0])  # the last row is no token
        codes[token, neuron] = code
        place, row = self.inside[layer]
        self.values[layer, place] = codes.cpu().numpy()[row, (place // self.size[1])[:, None]]

    def end(self, logprob: Tensor) -> None:
        """Nothing: the first run has the probabilities."""

    def table(self) -> np.ndarray:
        """Return the values, int8 [L, N, P, before + 1 + after]."""
        return self.values.reshape(len(self.at), *self.size, -1)


def fit(
    counts: dict,
    every: Table,
    near: np.ndarray,
    together: Table,
    sequences: Sequence[Sequence[int]],
    meta: dict,
) -> Aggregate:
    """Return the aggregate with the most places that meta["max_bytes"] allows.

    counts: the other fields of Aggregate; every: `places`; near: their values, as Near's table;
    together: neurons and correlations [L, N, J]. Raises ValueError when the counts alone are too
    large.
    """

    def aggregate(contexts: Contexts) -> Aggregate:
        kept, wanted = contexts._asdict(), CONTEXTS[0]._asdict()
        reduced = {name: wanted[name] for name in wanted if kept[name] != wanted[name]}
        described = meta | {"kept": kept, "reduced": reduced}
        partners = {"together_at": together[0][..., : contexts.together]}
        partners["together"] = rounded(together[1][..., : contexts.together])
        shown = _shown(contexts, every, near, sequences)
        return Aggregate(**counts, **partners, **shown, meta=described)

    def size(contexts: Contexts) -> int:
        return len(aggregate(contexts).pack())

    most = meta["max_bytes"]
    # Packing is slow, and rows get smaller: bisection needs four trials.
    first = bisect.bisect_left(CONTEXTS, True, key=lambda contexts: size(contexts) <= most)
    if first == len(CONTEXTS):
        needed = size(CONTEXTS[-1])
        raise ValueError(f"the counts alone need {needed} bytes; max_bytes is {most}")
    return aggregate(CONTEXTS[first])


def _shown(
    contexts: Contexts, every: Table, near: np.ndarray, sequences: Sequence[Sequence[int]]
) -> dict:
    """Return the fields of an Aggregate about places."""
    wide = CONTEXTS[0]
    columns = [wide.top + wide.quantiles.index(quantile) for quantile in contexts.quantiles]
    (top_at, quantile_at), (top_value, quantile_value) = (
        (part[..., : contexts.top], part[..., columns]) for part in every
    )
    repeated = np.diff(quantile_at, axis=-1, prepend=-1) == 0
    quantile_at = np.where(repeated, -1, quantile_at)
    around = slice(wide.before - contexts.before, wide.before + 1 + contexts.after)
    at = np.concatenate([top_at, quantile_at], -1)
    near = near[:, :, [*range(contexts.top), *columns], around]
    text_at, text = _around(np.unique(at[at >= 0]), contexts.before, contexts.after, sequences)
    return {
        "top_at": top_at,
        "top_value": rounded(top_value),
        "quantile_at": quantile_at,
        "quantile_value": rounded(np.where(repeated, 0, quantile_value)),
        "near": np.where(at[..., None] >= 0, near, 0).astype(np.int8),
        "text_at": text_at,
        "text": text,
        "quantiles": contexts.quantiles,
        "before": contexts.before,
        "after": contexts.after,
    }


def _at_quantiles(at: np.ndarray, value: np.ndarray, quantiles: Sequence[float]) -> Table:
    """Return the firings of a sample [L, N, R] at the quantiles of their values."""
    num_firings = (at >= 0).sum(-1, keepdims=True)
    order = np.argsort(np.where(at >= 0, value, np.inf), axis=-1, kind="stable")
    rank = np.rint(np.array(quantiles) * (num_firings - 1).clip(0)).astype(np.int64)
    chosen = np.take_along_axis(order, rank, -1)
    return np.take_along_axis(at, chosen, -1), np.take_along_axis(value, chosen, -1)


def _around(at: np.ndarray, before: int, after: int, sequences: Sequence[Sequence[int]]) -> Table:
    """Return numbers and ids of the tokens around the numbers `at`, in their sequences."""
    tokens = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
    ends = np.cumsum([len(sequence) for sequence in sequences])
    starts = np.concatenate([[0], ends[:-1]])
    sequence = np.searchsorted(ends, at, side="right")
    near = at[:, None] + np.arange(-before, after + 1)
    inside = (near >= starts[sequence, None]) & (near < ends[sequence, None])
    numbers = np.unique(near[inside])
    return numbers, tokens[numbers]


def rounded(values: np.ndarray) -> np.ndarray:
    """Round float32 to 12 significant bits, half away from zero, since more compress badly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x800)) & np.uint32(0xFFFFF000)).view(np.float32)
