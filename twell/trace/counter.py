"""The observer that fills an aggregate: counts on the model's device, and candidates for places.

Its size does not depend on the number of tokens. Counts are sums of integers: neither the batches
nor the device change them. The sampled firings depend on the seed and on the order of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from twell.trace import contexts
from twell.trace.aggregates import BLOCKS, COMPRESSIONS, OCTAVES, TILE_N, Aggregate
from twell.trace.contexts import CONTEXTS, SAMPLE, Best, Near, Table
from twell.trace.texts import token_strings

# Counted octaves 2^(e-1) <= |h| < 2^e: these exponents e, first for h >= 0, then for h < 0.
LOWEST, HIGHEST = -31, 32
WIDTH = HIGHEST - LOWEST + 1
OFTEN = 8  # firings that both neurons of a pair need for a correlation


class Counter:
    """Counts the batches of a model of L layers with N neurons; `finish` returns the Aggregate.

    context: the length of the longest sequence; seed: decides which firings are sampled.
    """

    def __init__(
        self,
        num_layers: int,
        intermediate_size: int,
        vocab_size: int,
        context: int,
        *,
        seed: int = 0,
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
        self.both = zeros(num_layers, intermediate_size, intermediate_size, dtype=torch.int32)
        unions = zeros(3, num_layers, len(BLOCKS))
        self.union_sum, self.union_max, self.union_active = unions
        # For each layer: token and neuron of the entries in the unfinished largest block.
        self.waiting = [zeros(2, 0)] * num_layers
        groups = num_layers * intermediate_size
        self.top = Best(groups, CONTEXTS[0].top, device)
        self.sample = Best(groups, SAMPLE, device)
        self.random = np.random.default_rng(seed)

    def begin(self, ids: Tensor) -> None:
        self.shape, self.ids = ids.shape, ids.reshape(-1)
        self.occurrences += torch.bincount(self.ids, minlength=len(self.occurrences))
        # One random key a token: a neuron's firings with the highest keys are an even sample, and
        # neurons share places, so that fewer words are stored.
        keys = self.random.random(len(self.ids)).astype(np.float32)
        self.keys = torch.from_numpy(keys).to(ids.device)

    def layer(self, layer: int, token: Tensor, neuron: Tensor, value: Tensor) -> None:
        self.count_active(layer, token)
        self.count_values(layer, neuron, value)
        self.count_tiles(layer, token, neuron)
        self._count_unions(layer, token, neuron)
        self._count_pairs(layer, token, neuron)
        group, at = layer * self.intermediate_size + neuron, self.num_tokens + token
        self.top.add(group, at, value.abs(), value)
        self.sample.add(group, at, self.keys[token], value)

    def count_active(self, layer: int, token: Tensor) -> None:
        active = torch.bincount(token, minlength=len(self.ids))
        histogram = torch.bincount(active, minlength=self.intermediate_size + 1)
        self.active_histogram[layer] += histogram
        self.token_active.index_add_(0, self.ids, active)
        self.position_active[layer, : self.shape[1]] += active.view(self.shape).sum(0)

    def count_values(self, layer: int, neuron: Tensor, value: Tensor) -> None:
        size, magnitude = self.intermediate_size, value.abs()
        exponent = torch.where(magnitude > 0, torch.frexp(magnitude).exponent, LOWEST)
        octave = exponent.clamp(LOWEST, HIGHEST) - LOWEST + WIDTH * (value < 0)
        cells = torch.bincount(neuron * 2 * WIDTH + octave, minlength=size * 2 * WIDTH)
        self.value_histogram[layer] += cells.view(size, -1)
        self.value_sum[layer].index_add_(0, neuron, value.double())
        self.abs_sum[layer].index_add_(0, neuron, magnitude.double())
        self.max_abs[layer].scatter_reduce_(0, neuron, magnitude, "amax")

    def count_tiles(self, layer: int, token: Tensor, neuron: Tensor) -> None:
        num_tokens, num_tiles = len(self.ids), -(-self.intermediate_size // TILE_N)
        tile = token * num_tiles + neuron // TILE_N
        in_tile = torch.bincount(tile, minlength=num_tokens * num_tiles)
        for n, compression in enumerate(COMPRESSIONS):
            over = in_tile.view(num_tokens, num_tiles) > TILE_N // compression - 1
            self.overflow_rows[layer, n] += over.any(1).sum()
            self.overflow_tiles[layer, n] += over.sum()

    def _count_unions(self, layer: int, token: Tensor, neuron: Tensor) -> None:
        start = self.num_tokens % BLOCKS[-1]
        whole = (start + len(self.ids)) // BLOCKS[-1] * BLOCKS[-1]
        batch = torch.stack([start + token, neuron])
        token, neuron = torch.cat([self.waiting[layer], batch], 1)
        done = token < whole
        self._count_blocks(layer, token[done], neuron[done], whole)
        self.waiting[layer] = torch.stack([token[~done] - whole, neuron[~done]])

    def _count_blocks(self, layer: int, token: Tensor, neuron: Tensor, num_tokens: int) -> None:
        """Count the whole blocks of num_tokens tokens. Each size is a multiple of the smallest."""
        num_smallest = -(-num_tokens // BLOCKS[0])
        active = token.new_zeros(num_smallest, self.intermediate_size, dtype=torch.bool)
        active[token // BLOCKS[0], neuron] = True
        for n, block in enumerate(BLOCKS):
            if num_blocks := num_tokens // block:
                smallest = active[: num_blocks * block // BLOCKS[0]]
                sizes = smallest.view(num_blocks, -1, self.intermediate_size).any(1).sum(1)
                self.union_sum[layer, n] += sizes.sum()
                self.union_max[layer, n] = torch.maximum(self.union_max[layer, n], sizes.max())
                self.union_active[layer, n] += (token < num_blocks * block).sum()

    def _count_pairs(self, layer: int, token: Tensor, neuron: Tensor) -> None:
        """Count the tokens that activate each pair of neurons, without first tokens."""
        later = token % self.shape[1] > 0
        # A dense product of zeros and ones is exact in fp32, and costs less than the layer.
        active = torch.zeros(len(self.ids), self.intermediate_size, device=token.device)
        active[token[later], neuron[later]] = 1
        self.both[layer] += (active.t() @ active).int()

    def end(self, logprob: Tensor) -> None:
        self.num_predicted += logprob[:, 1:].numel()
        self.nll -= logprob[:, 1:].double().sum()
        self.num_tokens += len(self.ids)
        wrong = (~self.abs_sum.isfinite()).any(1).nonzero()
        if len(wrong):
            raise FloatingPointError(
                f"layer {int(wrong[0])} has values that are not finite; they cannot be counted"
            )

    def places(self) -> Table:
        """Return `contexts.places` of these counts."""
        shape = (self.num_layers, self.intermediate_size, -1)
        tables = self.top.table(), self.sample.table()
        return contexts.places(*(tuple(part.reshape(shape) for part in one) for one in tables))

    def near(self, sequences: Sequence[Sequence[int]]) -> Near:
        """Return the observer of a second run, over the sequences that have places."""
        return Near(self.places()[0], self.max_abs.cpu().numpy(), sequences)

    def finish(
        self,
        sequences: Sequence[Sequence[int]],
        near: Near,
        tokenizer: PreTrainedTokenizerBase,
        max_bytes: int,
        meta: dict,
    ) -> Aggregate:
        """Return the aggregate of all batches, within max_bytes.

        sequences: of all batches; near: after the second run. Raises ValueError when the counts
        alone exceed max_bytes.
        """
        for layer, (token, neuron) in enumerate(self.waiting):
            self._count_blocks(layer, token, neuron, self.num_tokens % BLOCKS[-1])
        counted = vars(self).keys() & Aggregate.arrays()
        counts = {name: getattr(self, name).cpu().numpy() for name in counted}
        octaves = _octaves(counts["value_histogram"], counts["max_abs"])
        counts["value_edges"], counts["value_histogram"] = octaves
        counts |= {name: counts[name].astype(np.float32) for name in ("value_sum", "abs_sum")}
        ids = np.flatnonzero(counts["occurrences"])
        counts |= {name: counts[name][ids] for name in ("occurrences", "token_active")}
        counts |= {
            "token_ids": ids,
            "strings": token_strings(tokenizer, ids),
            "lengths": np.array([len(sequence) for sequence in sequences], np.int64),
            "cross_entropy": float(self.nll / self.num_predicted),  # NaN where none is predicted
        }
        meta = meta | {"num_tokens": self.num_tokens, "max_bytes": max_bytes}
        together = self._together(self.num_tokens - len(sequences))
        return contexts.fit(counts, self.places(), near.table(), together, sequences, meta)

    def _together(self, num_tokens: int) -> Table:
        """Return for each neuron those whose firings correlate most, and phi, both [L, N, J].

        num_tokens: without first tokens.
        """
        number = CONTEXTS[0].together
        shape = self.num_layers, self.intermediate_size, number
        at, phi = np.full(shape, -1), np.zeros(shape, np.float32)
        for layer, counted in enumerate(self.both):
            both = counted.double().cpu().numpy()
            fires = both.diagonal()
            spread = np.sqrt(fires * (num_tokens - fires))
            often = (fires >= OFTEN) & (spread > 0)
            scale = np.where(often, spread, np.inf)
            table = (both * num_tokens - np.outer(fires, fires)) / scale / scale[:, None]
            np.fill_diagonal(table, 0)
            kept = slice(min(number, len(table)))
            best = np.argpartition(-table, kept.stop - 1, axis=-1)[:, kept]
            values = np.take_along_axis(table, best, -1)
            order = np.argsort(-values, axis=-1, kind="stable")
            best, values = (np.take_along_axis(part, order, -1) for part in (best, values))
            at[layer, :, kept] = np.where(values > 0, best, -1)
            phi[layer, :, kept] = values.clip(0)
        return at, phi


def _octaves(histogram: np.ndarray, max_abs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return edges and histogram of the last OCTAVES octaves; the innermost has all below.

    histogram: [L, N, 2 * WIDTH].
    """
    top = int(np.clip(np.frexp(max_abs.max())[1], LOWEST + OCTAVES - 1, HIGHEST))
    end = top - LOWEST + 1
    first = end - OCTAVES
    sides = []
    for side in (histogram[..., :WIDTH], histogram[..., WIDTH:]):
        inner = side[..., : first + 1].sum(-1, keepdims=True)
        sides.append(np.concatenate([inner, side[..., first + 1 : end]], -1))
    edges = 2.0 ** np.arange(top - OCTAVES + 1, top + 1)
    edges = np.concatenate([-edges[::-1], [0], edges]).astype(np.float32)
    return edges, np.concatenate([sides[1][..., ::-1], sides[0]], -1)
