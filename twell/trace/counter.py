"""Counts the activity of a model, and chooses the places in the text that show a neuron.

`Counter` takes the batches of a first run: exact counts, the strongest firings of each neuron and
an even sample of them. `Near` takes those of a second run: the values at the tokens around these
places. `Counter.finish` keeps as many places, and as many words around them, as the file may
have. Neither batches nor the device change the counts. The samples depend on the order of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from twell.trace.records import BLOCKS, COMPRESSIONS, OCTAVES, TILE_N, Aggregate
from twell.trace.texts import token_strings

Table = tuple[np.ndarray, np.ndarray]  # firings [L, N, k]: numbers of tokens, -1 for none; their h
# Counted octaves 2^(e-1) <= |h| < 2^e: these exponents e, first for h >= 0, then for h < 0.
LOWEST, HIGHEST = -31, 32
WIDTH = HIGHEST - LOWEST + 1
OFTEN = 8  # firings that both neurons of a pair need for a correlation
SAMPLE = 32  # firings of a neuron that are drawn evenly, for the quantiles


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
    Contexts(8, [0.1, 0.5, 0.9], 12, 4, 5),
    Contexts(3, [0.1, 0.5, 0.9], 12, 4, 5),
    Contexts(3, [0.5], 8, 3, 3),
    Contexts(1, [0.5], 5, 2, 1),
    Contexts(0, [], 0, 0, 0),
)


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
        """Add entries [n]; `at` ascends from call to call in a group."""
        better = score > self.threshold[group]
        self.parts.append(tuple(t[better].cpu().numpy() for t in (group, at, score, value)))
        self.waiting += len(self.parts[-1][0])
        if self.waiting > self.groups * self.k:
            self.merge()

    def merge(self) -> np.ndarray:
        """Keep the best entries, sorted by group and rank; return their ranks."""
        group, at, score, value = (np.concatenate(parts) for parts in zip(*self.parts, strict=True))
        order = np.lexsort((at, -score, group))
        rank = np.arange(len(order)) - np.searchsorted(group[order], group[order])
        order, rank = order[rank < self.k], rank[rank < self.k]
        self.parts, self.waiting = [(group[order], at[order], score[order], value[order])], 0
        last = order[rank == self.k - 1]
        full, scores = (torch.from_numpy(part[last]) for part in (group, score))
        self.threshold[full.to(self.threshold.device)] = scores.to(self.threshold.device)
        return rank

    def table(self, *shape: int) -> Table:
        """Return the entries of the groups in this shape, [*shape, k]; h is 0 where none is."""
        rank = self.merge()
        group, at, _, value = self.parts[0]
        table = np.full((self.groups, self.k), -1), np.zeros((self.groups, self.k), np.float32)
        table[0][group, rank], table[1][group, rank] = at, value
        return tuple(part.reshape(*shape, self.k) for part in table)


class Counter:
    """Counts the batches of a model. `context` is the length of the longest sequence."""

    def __init__(
        self,
        num_layers: int,
        intermediate_size: int,
        vocab_size: int,
        context: int,
        device: torch.device | str = "cpu",
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        neurons = self.num_layers, self.intermediate_size = num_layers, intermediate_size
        self.num_tokens = self.num_predicted = 0
        self.nll = zeros(dtype=torch.float64)
        self.occurrences, self.token_active = zeros(2, vocab_size)
        self.position_active = zeros(num_layers, context)
        self.active_histogram = zeros(num_layers, intermediate_size + 1)
        self.value_histogram = zeros(*neurons, 2 * WIDTH)
        self.value_sum, self.abs_sum = zeros(2, *neurons, dtype=torch.float64)
        self.max_abs = zeros(*neurons, dtype=torch.float32)
        self.overflow_rows, self.overflow_tiles = zeros(2, num_layers, len(COMPRESSIONS))
        self.both = zeros(*neurons, intermediate_size, dtype=torch.int32)
        unions = zeros(3, num_layers, len(BLOCKS))
        self.union_sum, self.union_max, self.union_active = unions
        # Of each layer, which neurons are active for the tokens of the unfinished largest block.
        self.waiting = [zeros(0, intermediate_size, dtype=torch.float32)] * num_layers
        groups = num_layers * intermediate_size
        self.top = Best(groups, CONTEXTS[0].top, device)
        self.sample = Best(groups, SAMPLE, device)
        self.random = np.random.default_rng(0)

    def add(
        self, ids: Tensor, layers: Sequence[tuple[Tensor, Tensor, Tensor]], logprob: Tensor
    ) -> None:
        """Count a batch of `tracing.passes`; FloatingPointError for values that are not finite."""
        self.shape, self.ids = ids.shape, ids.reshape(-1)
        self.occurrences += torch.bincount(self.ids, minlength=len(self.occurrences))
        # One random key a token: a neuron's firings with the highest keys are an even sample, and
        # neurons share places, so that fewer words are stored.
        keys = self.random.random(len(self.ids)).astype(np.float32)
        keys = torch.from_numpy(keys).to(ids.device)
        for layer, (token, neuron, value) in enumerate(layers):
            # Zeros and ones, whose sums and products are exact in fp32.
            active = torch.zeros(len(self.ids), self.intermediate_size, device=token.device)
            active[token, neuron] = 1
            self._count_tokens(layer, active)
            self._count_values(layer, neuron, value)
            rows = torch.cat([self.waiting[layer], active])
            whole = len(rows) // BLOCKS[-1] * BLOCKS[-1]
            self._count_blocks(layer, rows[:whole])
            self.waiting[layer] = rows[whole:].clone()
            group, at = layer * self.intermediate_size + neuron, self.num_tokens + token
            self.top.add(group, at, value.abs(), value)
            self.sample.add(group, at, keys[token], value)
        self.num_predicted += logprob[:, 1:].numel()
        self.nll -= logprob[:, 1:].double().sum()
        self.num_tokens += len(self.ids)
        wrong = (~self.abs_sum.isfinite()).any(1).nonzero()
        if len(wrong):
            layer = int(wrong[0])
            raise FloatingPointError(f"layer {layer} has values that are not finite: no counts")

    def _count_tokens(self, layer: int, active: Tensor) -> None:
        numbers, size = active.sum(1).long(), self.intermediate_size
        self.active_histogram[layer] += torch.bincount(numbers, minlength=size + 1)
        self.token_active.index_add_(0, self.ids, numbers)
        self.position_active[layer, : self.shape[1]] += numbers.view(self.shape).sum(0)
        tiles = torch.nn.functional.pad(active, (0, -size % TILE_N)).view(len(active), -1, TILE_N)
        in_tile = tiles.sum(2)
        for n, compression in enumerate(COMPRESSIONS):
            over = in_tile > TILE_N // compression - 1
            self.overflow_rows[layer, n] += over.any(1).sum()
            self.overflow_tiles[layer, n] += over.sum()
        # Pairs of neurons, without first tokens. The product costs less than the layer.
        later = active.view(*self.shape, -1)[:, 1:].flatten(0, 1)
        self.both[layer] += (later.t() @ later).int()

    def _count_values(self, layer: int, neuron: Tensor, value: Tensor) -> None:
        size, magnitude = self.intermediate_size, value.abs()
        exponent = torch.where(magnitude > 0, torch.frexp(magnitude).exponent, LOWEST)
        octave = exponent.clamp(LOWEST, HIGHEST) - LOWEST + WIDTH * (value < 0)
        cells = torch.bincount(neuron * 2 * WIDTH + octave, minlength=size * 2 * WIDTH)
        self.value_histogram[layer] += cells.view(size, -1)
        self.value_sum[layer].index_add_(0, neuron, value.double())
        self.abs_sum[layer].index_add_(0, neuron, magnitude.double())
        self.max_abs[layer].scatter_reduce_(0, neuron, magnitude, "amax")

    def _count_blocks(self, layer: int, active: Tensor) -> None:
        for n, block in enumerate(BLOCKS):
            whole = len(active) // block * block
            blocks = active[:whole].view(-1, block, self.intermediate_size)
            if whole:
                sizes = blocks.amax(1).sum(1).long()
                self.union_sum[layer, n] += sizes.sum()
                self.union_max[layer, n] = torch.maximum(self.union_max[layer, n], sizes.max())
                self.union_active[layer, n] += blocks.count_nonzero()

    def near(self, sequences: Sequence[Sequence[int]]) -> Near:
        """Return what takes the second run, at the places of the first of CONTEXTS."""
        shape, wide = (self.num_layers, self.intermediate_size), CONTEXTS[0]
        sample = _at_quantiles(*self.sample.table(*shape), wide.quantiles)
        pairs = zip(self.top.table(*shape), sample, strict=True)
        places = tuple(np.concatenate(pair, -1) for pair in pairs)
        return Near(places, self.max_abs.cpu().numpy(), sequences)

    def finish(
        self,
        sequences: Sequence[Sequence[int]],
        near: Near,
        tokenizer: PreTrainedTokenizerBase,
        max_bytes: int,
        meta: dict,
    ) -> Aggregate:
        """Return the aggregate of all sequences, with the most places that max_bytes allows.

        near: after the second run. Raises ValueError when the counts alone exceed max_bytes.
        """
        counts = self._counts(sequences, tokenizer)
        partners = self._together(self.num_tokens - len(sequences))
        meta = meta | {"num_tokens": self.num_tokens, "max_bytes": max_bytes}

        for contexts in CONTEXTS:
            kept, wanted = contexts._asdict(), CONTEXTS[0]._asdict()
            reduced = {name: wanted[name] for name in wanted if kept[name] != wanted[name]}
            at, phi = (part[..., : contexts.together] for part in partners)
            together = {"together_at": at, "together": rounded(phi)}
            described = meta | {"kept": kept, "reduced": reduced}
            result = Aggregate(**counts, **together, **near.shown(contexts), meta=described)
            if (size := len(result.pack())) <= max_bytes:
                return result
        raise ValueError(f"the counts alone need {size} bytes; max_bytes is {max_bytes}")

    def _counts(
        self, sequences: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
    ) -> dict:
        """Return the fields of an Aggregate that are counts."""
        for layer, rows in enumerate(self.waiting):
            self._count_blocks(layer, rows)
        counted = vars(self).keys() & Aggregate.arrays()
        counts = {name: getattr(self, name).cpu().numpy() for name in counted}
        octaves = _octaves(counts["value_histogram"], counts["max_abs"])
        counts["value_edges"], counts["value_histogram"] = octaves
        counts |= {name: counts[name].astype(np.float32) for name in ("value_sum", "abs_sum")}
        ids = np.flatnonzero(counts["occurrences"])
        counts |= {name: counts[name][ids] for name in ("occurrences", "token_active")}
        return counts | {
            "token_ids": ids,
            "strings": token_strings(tokenizer, ids),
            "lengths": np.array([len(sequence) for sequence in sequences], np.int64),
            "cross_entropy": float(self.nll / self.num_predicted),  # NaN where none is predicted
        }

    def _together(self, num_tokens: int) -> Table:
        """Return for each neuron those whose firings correlate most, and phi, both [L, N, J]."""
        number = CONTEXTS[0].together
        shape = self.num_layers, self.intermediate_size, number
        at, phi = np.full(shape, -1), np.zeros(shape, np.float32)
        number = min(number, shape[1])
        for layer, counted in enumerate(self.both):
            both = counted.double()
            fires = both.diagonal()
            spread = (fires * (num_tokens - fires)).sqrt()
            scale = torch.where((fires >= OFTEN) & (spread > 0), spread, torch.inf)
            table = (both * num_tokens - torch.outer(fires, fires)) / scale / scale[:, None]
            values, best = table.fill_diagonal_(0).topk(number)
            at[layer, :, :number] = torch.where(values > 0, best, -1).cpu()
            phi[layer, :, :number] = values.clamp(min=0).cpu()
        return at, phi


class Near:
    """Keeps the values of neurons at the tokens around their places.

    places [L, N, P]; max_abs [L, N]. It takes the batches of `held`, the sequences with a place.
    """

    def __init__(self, places: Table, max_abs: np.ndarray, sequences: Sequence[Sequence[int]]):
        self.places, at = places, places[0]
        self.at, self.size = at.reshape(len(at), -1), at.shape[1:]
        self.unit = torch.from_numpy(np.where(max_abs > 0, max_abs, 1) / 127)
        self.order = np.argsort(self.at, kind="stable")
        self.sorted = np.take_along_axis(self.at, self.order, -1)
        self.tokens = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
        self.bounds = np.cumsum([0, *map(len, sequences)])
        numbers = np.unique(self._sequence(at[at >= 0]))
        self.starts = self.bounds[numbers]
        self.held = [sequences[number] for number in numbers]
        _, _, before, after, _ = CONTEXTS[0]
        self.values = np.zeros((*self.at.shape, before + 1 + after), np.int8)
        self.done = 0

    def _sequence(self, at: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.bounds, at, side="right") - 1

    def _around(self, at: np.ndarray, contexts: Contexts) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens around places [n, before + 1 + after], and which their sequence has."""
        tokens = at[:, None] + np.arange(-contexts.before, contexts.after + 1)
        sequence = self._sequence(at)[:, None]
        return tokens, (tokens >= self.bounds[sequence]) & (tokens < self.bounds[sequence + 1])

    def add(self, ids: Tensor, layers: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        starts = self.starts[self.done : self.done + len(ids)]
        self.done += len(ids)
        batch = (starts[:, None] + np.arange(ids.shape[1])).reshape(-1)  # ascending
        for layer, (token, neuron, value) in enumerate(layers):
            code = (value / self.unit[layer].to(value.device)[neuron]).round()
            code = torch.where(code == 0, value.sign(), code).to(torch.int8)
            codes = code.new_zeros(len(batch) + 1, self.size[0])  # the last row is no token
            codes[token, neuron] = code
            here = slice(*np.searchsorted(self.sorted[layer], [batch[0], batch[-1] + 1]))
            place = self.order[layer, here]
            tokens, inside = self._around(self.sorted[layer, here], CONTEXTS[0])
            row = np.where(inside, np.searchsorted(batch, tokens), -1)
            self.values[layer, place] = codes.cpu().numpy()[row, (place // self.size[1])[:, None]]

    def shown(self, contexts: Contexts) -> dict:
        """Return the fields of an Aggregate about places, for a row of CONTEXTS."""
        wide = CONTEXTS[0]
        columns = [wide.top + wide.quantiles.index(quantile) for quantile in contexts.quantiles]
        (top_at, quantile_at), (top_value, quantile_value) = (
            (part[..., : contexts.top], part[..., columns]) for part in self.places
        )
        repeated = np.diff(quantile_at, axis=-1, prepend=-1) == 0
        quantile_at = np.where(repeated, -1, quantile_at)
        at = np.concatenate([top_at, quantile_at], -1)
        around = slice(wide.before - contexts.before, wide.before + 1 + contexts.after)
        near = self.values.reshape(len(self.at), *self.size, -1)
        near = near[:, :, [*range(contexts.top), *columns], around]
        tokens, inside = self._around(np.unique(at[at >= 0]), contexts)
        text_at = np.unique(tokens[inside])
        return {
            "top_at": top_at,
            "top_value": rounded(top_value),
            "quantile_at": quantile_at,
            "quantile_value": rounded(np.where(repeated, 0, quantile_value)),
            "near": np.where(at[..., None] >= 0, near, 0).astype(np.int8),
            "text_at": text_at,
            "text": self.tokens[text_at],
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


def rounded(values: np.ndarray) -> np.ndarray:
    """Round float32 to 12 significant bits, half away from zero, since more compress badly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x800)) & np.uint32(0xFFFFF000)).view(np.float32)


def _octaves(histogram: np.ndarray, max_abs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return edges and histogram [L, N, 24] of the last OCTAVES octaves of [L, N, 2 * WIDTH]."""
    top = int(np.clip(np.frexp(max_abs.max())[1], LOWEST + OCTAVES - 1, HIGHEST))
    end = top - LOWEST + 1
    starts = [0, *range(end - OCTAVES + 1, end)]  # the first takes all octaves below, too
    sides = np.split(histogram, 2, axis=-1)
    positive, negative = (np.add.reduceat(side[..., :end], starts, axis=-1) for side in sides)
    edges = 2.0 ** np.arange(top - OCTAVES + 1, top + 1)
    edges = np.concatenate([-edges[::-1], [0], edges]).astype(np.float32)
    return edges, np.concatenate([negative[..., ::-1], positive], -1)
