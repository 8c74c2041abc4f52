"""Counts the activity of a model, and chooses the places in the text that show a neuron.

`Counter` takes the batches of a first run: exact counts, the strongest firings of each neuron and
an even sample of them. `Near` takes those of a second run: histograms of the values, and the values
at the tokens around these places. `Counter.finish` keeps as many places, and as many words around
them, as the file may have. Neither batches nor the device change the counts. The samples depend on
the order of tokens.
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
OFTEN = 8  # firings that both neurons of a pair need for a correlation
SAMPLE = 32  # firings of a neuron that are drawn evenly, for the quantiles
CHUNK = 1024  # tokens of a merge
LAST_TOKEN = 2**32 - 1  # the highest number of a token in `Best`


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
    """The k firings of each neuron with the highest score so far; of equal ones the earliest."""

    def __init__(self, num_layers: int, k: int, intermediate_size: int, device: torch.device | str):
        # Score and token as one integer; -1 for none.
        self.keys = torch.full((num_layers, k, intermediate_size), -1, device=device)
        self.values = torch.zeros(self.keys.shape, device=device)

    def add(self, layer: int, at: Tensor, active: Tensor, score: Tensor, h: Tensor) -> None:
        """Add the firings of tokens `at` [T]: bool, score (fp32, 0 or more) and h, all [T, N]."""
        for part in torch.arange(len(at), device=at.device).split(CHUNK):
            # The bits of floats of one sign are ordered as the floats.
            keys = score[part].view(torch.int32).long() << 32 | (LAST_TOKEN - at[part])[:, None]
            keys = torch.cat([self.keys[layer], torch.where(active[part], keys, -1)])
            self.keys[layer], chosen = keys.topk(self.keys.shape[1], dim=0)
            self.values[layer] = torch.cat([self.values[layer], h[part]]).gather(0, chosen)

    def table(self) -> Table:
        at = torch.where(self.keys < 0, -1, LAST_TOKEN - (self.keys & LAST_TOKEN))
        return tuple(part.mT.cpu().numpy() for part in (at, self.values))


class Counter:
    """Counts the batches of a model: all `sequences` in their order."""

    def __init__(
        self,
        num_layers: int,
        intermediate_size: int,
        sequences: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        neurons = self.num_layers, self.intermediate_size = num_layers, intermediate_size
        self.tokens = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
        self.bounds = np.cumsum([0, *map(len, sequences)])  # of sequences
        self.done = 0  # tokens
        self.active = np.zeros((num_layers, len(self.tokens)), np.int64)  # neurons of each token
        self.nll = zeros(dtype=torch.float64)
        self.value_sum, self.abs_sum = zeros(2, *neurons, dtype=torch.float64)
        self.max_abs = zeros(*neurons, dtype=torch.float32)
        self.overflow_rows, self.overflow_tiles = zeros(2, num_layers, len(COMPRESSIONS))
        self.both = zeros(*neurons, intermediate_size, dtype=torch.int32)
        unions = zeros(3, num_layers, len(BLOCKS))
        self.union_sum, self.union_max, self.union_active = unions
        # Of each layer, which neurons are active for the tokens of the unfinished largest block.
        self.waiting = [zeros(0, intermediate_size, dtype=torch.float32)] * num_layers
        self.top = Best(num_layers, CONTEXTS[0].top, intermediate_size, device)
        self.sample = Best(num_layers, SAMPLE, intermediate_size, device)
        self.random = np.random.default_rng(0)

    def add(
        self, ids: Tensor, layers: Sequence[tuple[Tensor, Tensor, Tensor]], logprob: Tensor
    ) -> None:
        """Count a batch of `tracing.passes`; FloatingPointError for values that are not finite."""
        first, self.done = self.done, self.done + ids.numel()
        # One random key a token: a neuron's firings with the highest keys are an even sample, and
        # neurons share places, so that fewer words are stored.
        keys = self.random.random((ids.numel(), 1)).astype(np.float32)
        keys = torch.from_numpy(keys).to(ids.device)
        at = torch.arange(first, self.done, device=ids.device)
        for layer, (token, neuron, value) in enumerate(layers):
            h = value.new_zeros(ids.numel(), self.intermediate_size)
            # Zeros and ones, whose sums and products are exact in fp32.
            active = torch.zeros_like(h)
            h[token, neuron], active[token, neuron] = value, 1
            self.active[layer, first : self.done] = active.sum(1).cpu().numpy()
            # Pairs of neurons, without first tokens. The product costs less than the layer.
            later = active.view(*ids.shape, -1)[:, 1:].flatten(0, 1)
            self.both[layer] += (later.t() @ later).int()
            self._count_tiles(layer, active)
            self._count_values(layer, neuron, value)
            rows = torch.cat([self.waiting[layer], active])
            whole = len(rows) // BLOCKS[-1] * BLOCKS[-1]
            self._count_blocks(layer, rows[:whole])
            self.waiting[layer] = rows[whole:].clone()
            self.top.add(layer, at, active > 0, h.abs(), h)
            self.sample.add(layer, at, active > 0, keys, h)
        self.nll -= logprob[:, 1:].double().sum()
        wrong = (~self.abs_sum.isfinite()).any(1).nonzero()
        if len(wrong):
            layer = int(wrong[0])
            raise FloatingPointError(f"layer {layer} has values that are not finite: no counts")

    def _count_tiles(self, layer: int, active: Tensor) -> None:
        padding = 0, -self.intermediate_size % TILE_N
        tiles = torch.nn.functional.pad(active, padding).view(len(active), -1, TILE_N)
        in_tile = tiles.sum(2)
        for n, compression in enumerate(COMPRESSIONS):
            over = in_tile > TILE_N // compression - 1
            self.overflow_rows[layer, n] += over.any(1).sum()
            self.overflow_tiles[layer, n] += over.sum()

    def _count_values(self, layer: int, neuron: Tensor, value: Tensor) -> None:
        magnitude = value.abs()
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

    def finish(
        self, near: Near, tokenizer: PreTrainedTokenizerBase, max_bytes: int, meta: dict
    ) -> Aggregate:
        """Return the aggregate of all sequences, with the most places that max_bytes allows.

        near: after the second run. Raises ValueError when the counts alone exceed max_bytes.
        """
        counts, partners = self._counts(tokenizer), self._together()
        meta = meta | {"num_tokens": self.done, "max_bytes": max_bytes}

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

    def _counts(self, tokenizer: PreTrainedTokenizerBase) -> dict:
        """Return the fields of an Aggregate that are counts of the first run."""
        for layer, rows in enumerate(self.waiting):
            self._count_blocks(layer, rows)
        counted = vars(self).keys() & Aggregate.arrays()
        counts = {name: getattr(self, name).cpu().numpy() for name in counted}
        counts |= {name: counts[name].astype(np.float32) for name in ("value_sum", "abs_sum")}
        bins, lengths = self.intermediate_size + 1, np.diff(self.bounds)
        position = np.arange(self.done) - np.repeat(self.bounds[:-1], lengths)
        ids, token, occurrences = np.unique(self.tokens, return_inverse=True, return_counts=True)
        by_position = [np.bincount(position, weights=active) for active in self.active]
        return counts | {
            "token_ids": ids,
            "strings": token_strings(tokenizer, ids),
            "occurrences": occurrences,
            "token_active": np.bincount(token, weights=self.active.sum(0)).astype(np.int64),
            "lengths": lengths,
            "position_active": np.stack(by_position).astype(np.int64),
            "active_histogram": np.stack([np.bincount(a, minlength=bins) for a in self.active]),
            "cross_entropy": float(self.nll / (self.done - len(lengths))),  # NaN for no prediction
        }

    def _together(self) -> Table:
        """Return for each neuron those whose firings correlate most, and phi, both [L, N, J]."""
        num_tokens, number = self.done - len(self.bounds) + 1, CONTEXTS[0].together
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
    """Keeps the values of neurons at the tokens around their places, and counts all values.

    counter: after the first run. It takes the same batches.
    """

    def __init__(self, counter: Counter):
        wide, max_abs = CONTEXTS[0], counter.max_abs.cpu().numpy()
        sample = _at_quantiles(*counter.sample.table(), wide.quantiles)
        pairs = zip(counter.top.table(), sample, strict=True)
        self.places = tuple(np.concatenate(pair, -1) for pair in pairs)  # both [L, N, P]
        self.tokens, self.bounds = counter.tokens, counter.bounds
        self.unit = torch.from_numpy(np.where(max_abs > 0, max_abs, 1) / 127)
        self.values = np.zeros((*self.places[0].shape, wide.before + 1 + wide.after), np.int8)
        _, exponent = np.frexp(max_abs.max())
        self.octaves = 2.0 ** np.arange(exponent - OCTAVES + 1, exponent + 1, dtype=np.float32)
        self.histogram = torch.zeros(*max_abs.shape, 2 * OCTAVES, dtype=torch.int64)
        self.done = 0  # tokens

    def _around(self, at: np.ndarray, contexts: Contexts) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens around places [n, before + 1 + after], and which their sequence has."""
        tokens = at[:, None] + np.arange(-contexts.before, contexts.after + 1)
        sequence = np.searchsorted(self.bounds, at, side="right")[:, None] - 1
        return tokens, (tokens >= self.bounds[sequence]) & (tokens < self.bounds[sequence + 1])

    def add(self, ids: Tensor, layers: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        first, self.done = self.done, self.done + ids.numel()
        for layer, (token, neuron, value) in enumerate(layers):
            self._count_octaves(layer, neuron, value)
            code = (value / self.unit[layer].to(value.device)[neuron]).round()
            code = torch.where(code == 0, value.sign(), code).to(torch.int8)
            codes = code.new_zeros(ids.numel() + 1, len(self.unit[layer]))  # the last: no token
            codes[token, neuron] = code
            at = self.places[0][layer]
            here = np.nonzero((at >= first) & (at < self.done))
            tokens, inside = self._around(at[here], CONTEXTS[0])
            row = np.where(inside, tokens - first, -1)
            self.values[layer][here] = codes.cpu().numpy()[row, here[0][:, None]]

    def _count_octaves(self, layer: int, neuron: Tensor, value: Tensor) -> None:
        inner = torch.from_numpy(self.octaves[:-1]).to(value.device)
        octave = torch.bucketize(value.abs(), inner, right=True)
        side = torch.where(value < 0, OCTAVES - 1 - octave, OCTAVES + octave)
        histogram = self.histogram[layer]
        cells = torch.bincount(neuron * 2 * OCTAVES + side, minlength=histogram.numel())
        histogram += cells.view(histogram.shape).to(histogram.device)

    def shown(self, contexts: Contexts) -> dict:
        """Return the fields of an Aggregate about values and places, for a row of CONTEXTS."""
        wide = CONTEXTS[0]
        columns = [wide.top + wide.quantiles.index(quantile) for quantile in contexts.quantiles]
        (top_at, quantile_at), (top_value, quantile_value) = (
            (part[..., : contexts.top], part[..., columns]) for part in self.places
        )
        repeated = np.diff(quantile_at, axis=-1, prepend=-1) == 0
        quantile_at = np.where(repeated, -1, quantile_at)
        at = np.concatenate([top_at, quantile_at], -1)
        around = slice(wide.before - contexts.before, wide.before + 1 + contexts.after)
        near = self.values[:, :, [*range(contexts.top), *columns], around]
        tokens, inside = self._around(np.unique(at[at >= 0]), contexts)
        text_at = np.unique(tokens[inside])
        return {
            "value_edges": np.concatenate([-self.octaves[::-1], [0], self.octaves], dtype="f4"),
            "value_histogram": self.histogram.numpy(),
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
