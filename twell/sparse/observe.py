"""What a layer's passes show: the L1 term, activity counts, and the capacity that training needs.

The layer computes; its observer keeps what training, statistics and `twell.SparseTraining` ask for.
The layer asks `wants_l1` and `wants_activity` before a pass and calls `see` after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Activity(NamedTuple):
    """Active entries of one pass over M tokens and N neurons.

    token_counts [M] integer: active neurons of each token. neuron_counts [N] integer: tokens for
    which each neuron was active, without the tokens that the token mask leaves out. capacity: 0-d
    int64, entries per token that a sparse training pass needed, at least `mean_entries`; None
    elsewhere.
    """

    token_counts: Tensor
    neuron_counts: Tensor
    capacity: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, active: Tensor, token_mask: Tensor | None = None) -> Activity:
        """Count `active` [M, N] bool; `token_mask` of M entries is zero for tokens to leave out."""
        counted = active if token_mask is None else active & (token_mask.reshape(-1, 1) != 0)
        return cls(active.sum(1), counted.sum(0))


def mean_entries(token_counts: Tensor) -> Tensor:
    """Return the mean of `token_counts` [M], rounded up; 0-d int64."""
    tokens = max(token_counts.shape[0], 1)
    return (token_counts.sum() + (tokens - 1)) // tokens


class Result(NamedTuple):
    """One pass of a layer: y [M, K]; l1 [M] fp32, the sum of |h| of each token, and activity.

    Both are None where nobody asked for them.
    """

    y: Tensor
    l1: Tensor | None = None
    activity: Activity | None = None


class ActivityStats:
    """Exact counters of a layer's activity, kept on its device without synchronising with it.

    `neuron_counts` [N] int64: tokens for which each neuron was active. `histogram` [N + 1] int64:
    tokens by their number of active neurons, so that mean, maximum and every percentile are exact.
    The counters appear on the device of the first recorded tokens. They are not registered
    buffers: DistributedDataParallel would overwrite them with rank 0's.
    """

    def __init__(self, intermediate_size: int):
        self.intermediate_size = intermediate_size
        self.neuron_counts: Tensor | None = None
        self.histogram: Tensor | None = None

    def record(self, active: Tensor, token_mask: Tensor | None = None) -> None:
        """Count `active` [M, N] bool; `token_mask` [M] is zero for padding, which is left out."""
        self.add(Activity.of(active, token_mask), token_mask)

    @torch.no_grad()
    def add(self, activity: Activity, token_mask: Tensor | None = None) -> None:
        """Add the counts of a pass; `token_mask` as in `record`.

        The counters are replaced, not written: whoever holds the old ones can put them back.
        """
        token_counts, neuron_counts, _ = activity
        device = neuron_counts.device
        if self.neuron_counts is None or self.neuron_counts.device != device:
            self.neuron_counts, self.histogram = self._zeros(device)
        keep = torch.ones_like(token_counts) if token_mask is None else token_mask.reshape(-1) != 0
        self.neuron_counts = self.neuron_counts + neuron_counts
        counts = token_counts.to(torch.int64)
        self.histogram = self.histogram.scatter_add(0, counts, keep.to(torch.int64))

    def _zeros(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        size = self.intermediate_size
        zeros = torch.zeros(2 * size + 1, dtype=torch.int64, device=device)
        return zeros[:size], zeros[size:]

    def take(self) -> tuple[Tensor, Tensor]:
        """Return (neuron_counts, histogram) and start again from zero."""
        taken = (self.neuron_counts, self.histogram)
        self.neuron_counts = self.histogram = None
        return self._zeros() if taken[0] is None else taken


def summarize_activity(neuron_counts: Tensor, histogram: Tensor) -> dict[str, float]:
    """Return tokens, active neurons per token (mean, p99, max), and the fraction of dead neurons.

    `neuron_counts` [N] and `histogram` [N + 1] as ActivityStats counts them. p99 is the smallest
    number of active neurons that at least 99% of the tokens do not exceed. A dead neuron was never
    active. NaN when no token was counted.
    """
    tokens = int(histogram.sum())
    if tokens == 0:
        return dict.fromkeys(("mean", "p99", "max", "dead"), float("nan")) | {"tokens": 0}
    number = torch.arange(len(histogram), device=histogram.device)
    cumulative = histogram.cumsum(0)
    return {
        "tokens": tokens,
        "mean": float((number * histogram).sum() / tokens),
        "p99": int((cumulative * 100 < 99 * tokens).sum()),
        "max": int(number[histogram > 0].max()),
        "dead": float((neuron_counts == 0).double().mean()),
    }


class Observer:
    """Keeps what the passes of one layer show.

    collect_l1: keep the L1 term in evaluation mode too; training mode always keeps it.
    l1: sum_n |h| of each token of the last pass, fp32, of the input's leading shape, part of the
        autograd graph; None where it was not kept.
    record: count the pass in `stats`, without the tokens where `token_mask` [...] is zero.
    watch_capacity: keep in `needed` (0-d int64, on the device) the most entries per token that
        any pass in training mode needed since it was last set to None.
    """

    def __init__(self, intermediate_size: int):
        self.collect_l1 = False
        self.l1: Tensor | None = None
        self.record = False
        self.token_mask: Tensor | None = None
        self.stats = ActivityStats(intermediate_size)
        self.watch_capacity = False
        self.needed: Tensor | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "l1": None, "needed": None}  # parts of the last pass' graph

    def wants_l1(self, training: bool) -> bool:
        return training or self.collect_l1

    def wants_activity(self, training: bool) -> bool:
        return self.record or (self.watch_capacity and training)

    def see(self, result: Result, shape: torch.Size, training: bool) -> None:
        """Take a pass over tokens of the leading `shape`."""
        self.l1 = None if result.l1 is None else result.l1.reshape(shape)
        if self.record:
            self.stats.add(result.activity, self.token_mask)
        if self.watch_capacity and training:
            self._see_capacity(result.activity)

    @torch.no_grad()
    def _see_capacity(self, activity: Activity) -> None:
        needed = activity.capacity
        if needed is None:
            needed = mean_entries(activity.token_counts)
        self.needed = needed if self.needed is None else torch.maximum(self.needed, needed)
