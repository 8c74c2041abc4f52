"""What a pass shows beside its output: the L1 term, activity counts, the capacity that it needed.

A layer hands these to the `Collector` that is open around its pass. A context variable holds it,
so passes in other threads and of other replicas have collectors of their own. torch.compile cannot
trace context variables: compiled layers leave them in their `Outbox`, which the collector empties.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

_LOCK = threading.Lock()  # for sums to which several threads add


def _locked() -> threading.Lock | nullcontext:
    return nullcontext() if torch.compiler.is_compiling() else _LOCK


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


class Wants(NamedTuple):
    """What a pass computes beside y: the L1 term, and activity without the tokens masked by 0."""

    l1: bool
    activity: bool
    token_mask: Tensor | None = None


class Result(NamedTuple):
    """One pass of a layer: y [M, K]; l1 [M] fp32, the sum of |h| of each token, and activity.

    Both are None where nobody asked for them.
    """

    y: Tensor
    l1: Tensor | None = None
    activity: Activity | None = None


class ActivityStats:
    """Exact counters of a layer's activity, kept on its devices without synchronising with them.

    `neuron_counts` [N] int64: tokens for which each neuron was active. `histogram` [N + 1] int64:
    tokens by their number of active neurons, so that mean, maximum and every percentile are exact.
    `counters` holds both by device; replicas and threads add to the same ones. They are not
    registered buffers: DistributedDataParallel would overwrite them with rank 0's.
    """

    def __init__(self, intermediate_size: int):
        self.intermediate_size = intermediate_size
        # Replaced and never written, so whoever holds an earlier one can put it back.
        self.counters: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def record(self, active: Tensor, token_mask: Tensor | None = None) -> None:
        """Count `active` [M, N] bool; `token_mask` [M] is zero for padding, which is left out."""
        self.add(Activity.of(active, token_mask), token_mask)

    @torch.no_grad()
    def add(self, activity: Activity, token_mask: Tensor | None = None) -> None:
        """Add the counts of a pass; `token_mask` as in `record`."""
        token_counts, neuron_counts, _ = activity
        keep = torch.ones_like(token_counts) if token_mask is None else token_mask.reshape(-1) != 0
        counts, device = token_counts.to(torch.int64), neuron_counts.device
        with _locked():
            neurons, histogram = self.counters.get(device) or self._zeros(device)
            histogram = histogram.scatter_add(0, counts, keep.to(torch.int64))
            self.counters = {**self.counters, device: (neurons + neuron_counts, histogram)}

    def _zeros(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        size = self.intermediate_size
        zeros = torch.zeros(2 * size + 1, dtype=torch.int64, device=device)
        return zeros[:size], zeros[size:]

    def take(self) -> tuple[Tensor, Tensor]:
        """Return (neuron_counts, histogram), summed on the first device, and start from zero."""
        with _LOCK:
            parts, self.counters = list(self.counters.values()), {}
        (neurons, histogram), *others = parts or [self._zeros()]
        for other in others:
            neurons = neurons + other[0].to(neurons.device)
            histogram = histogram + other[1].to(neurons.device)
        return neurons, histogram


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


class Collector:
    """Receives what passes of SparseFFN layers show while it is open, as a `with` block.

    Args:
        ffns: the layers whose passes count.
        wants_l1: compute the L1 term in evaluation mode too, as layers always do in training mode.
        counts: add the activity of the passes to the layers' `stats`.
        token_mask: zero for tokens that the statistics leave out, of the passes' leading shape.

    `terms` are pairs (layer, sum_n |h| of each token) in the order of the passes: fp32, of the
    input's leading shape, part of the autograd graph. An outer collector receives them too.
    Activation checkpointing repeats layers in the backward pass, when the collector is closed.
    """

    def __init__(
        self,
        ffns: Iterable[nn.Module],
        *,
        wants_l1: bool = False,
        counts: bool = False,
        token_mask: Tensor | None = None,
    ):
        self.ffns = list(ffns)
        self._ids = set(map(id, self.ffns))
        self.wants_l1, self.counts, self.token_mask = wants_l1, counts, token_mask
        self.terms: list[tuple[nn.Module, Tensor]] = []
        self.no_grad = False  # whether a layer ran without gradients inside a pass with gradients

    def __enter__(self) -> Collector:
        self._grad, self._outer = torch.is_grad_enabled(), None
        if not torch.compiler.is_compiling():
            self._outer = _OPEN.get()
            self._token = _OPEN.set(self)
        if self._outer is not None:
            self.wants_l1 |= self._outer.wants_l1
            self.counts |= self._outer.counts
            self.token_mask = self._outer.token_mask if self.token_mask is None else self.token_mask
        for ffn in self.ffns:
            ffn.outbox.open(self)
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        if not torch.compiler.is_compiling():
            _OPEN.reset(self._token)
        for ffn in self.ffns:
            box = ffn.outbox
            l1, activity, overwritten = box.l1, box.activity, box.overwritten
            box.open(self._outer)
            if overwritten and error is None:
                raise RuntimeError(
                    "a compiled layer ran twice inside one `with twell.collect_l1(...)` block, "
                    "which holds one pass of compiled layers; open a block for each pass"
                )
            if activity is not None:
                ffn.stats.add(activity, self.token_mask)
            if l1 is not None:
                self.terms.append((ffn, l1))
                if self._outer is not None:
                    self._outer.receive(ffn, l1)

    def receive(self, ffn: nn.Module, l1: Tensor) -> None:
        """Take the term of a pass, if it is of these layers."""
        if id(ffn) in self._ids:
            self.terms.append((ffn, l1))
            self.no_grad |= self._grad and not torch.is_grad_enabled()
        if self._outer is not None:
            self._outer.receive(ffn, l1)


_OPEN: ContextVar[Collector | None] = ContextVar("twell_collector", default=None)


def open_collector() -> Collector | None:
    """Return the innermost collector that is open in this thread; not in compiled code."""
    return _OPEN.get()


class Outbox:
    """What a layer leaves behind where it cannot reach a collector.

    Code of torch.compile reads here what an open collector wants, and leaves the L1 term and the
    activity of one pass. Without a collector the L1 term of the last pass in training mode stays in
    `last`, for `l1_by_layer`. For `twell.SparseTraining`, `needed` (0-d int64, on the device) is
    the most entries per token that any pass in training mode needed since it was last set to None,
    while `watch_capacity` is set. A copy is empty.
    """

    def __init__(self):
        self.last: Tensor | None = None
        self.watch_capacity = False
        self.needed: Tensor | None = None
        self.open(None)

    def __reduce__(self) -> tuple:
        return Outbox, ()

    def open(self, collector: Collector | None) -> None:
        """Empty it, and let compiled code know what the collector wants."""
        self.opened = collector is not None
        self.wants_l1 = self.opened and collector.wants_l1
        self.counts = self.opened and collector.counts
        self.token_mask = collector.token_mask if self.opened else None
        self.l1: Tensor | None = None
        self.activity: Activity | None = None
        self.overwritten = False
        self.last = None

    def leave(self, l1: Tensor | None, activity: Activity | None) -> None:
        """Take what a compiled pass shows."""
        if not self.opened:
            self.last = l1
            return
        if self.l1 is not None:
            self.overwritten = True
        self.l1 = l1
        self.activity = activity if self.counts else None

    @torch.no_grad()
    def need(self, activity: Activity) -> None:
        """Take the capacity that a pass in training mode needed."""
        needed = activity.capacity
        if needed is None:
            needed = mean_entries(activity.token_counts)
        with _locked():
            self.needed = needed if self.needed is None else torch.maximum(self.needed, needed)
