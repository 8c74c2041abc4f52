"""Side results of a layer's pass: the L1 term, activity counts and the capacity that it needed.

A layer gives them to the open `Collector`. A context variable holds the open collectors, so each
thread and each replica has its own. torch.compile cannot trace context variables. So a compiled
layer stores its side results in its `Outbox`, and the collector empties the box when it closes. A
layer in a graph break of the code that opened the collector does the same.
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


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Return whether torch.export traces this call; torch 2.11 folds its own function to True."""
    return torch.compiler.is_exporting()


def _has_values(tensor: Tensor) -> bool:
    """Return whether later passes can read a tensor: not one of a trace or of torch.func."""
    if torch.compiler.is_compiling():
        return not is_exporting()
    transformed = torch._C._are_functorch_transforms_active()
    return type(tensor) is Tensor and not tensor.is_meta and not transformed


class Activity(NamedTuple):
    """Active entries of one pass over M tokens and N neurons.

    token_counts [M] integer: active neurons of each token. neuron_counts [N] integer: tokens for
    which each neuron was active, without the tokens that the token mask leaves out. needed: 0-d
    int64, entries per token that a sparse training pass needed, at least `mean_entries`; None
    elsewhere.
    """

    token_counts: Tensor
    neuron_counts: Tensor
    needed: Tensor | None = None

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
    """What a pass computes in addition to y; the token mask is 0 for tokens not to count."""

    l1: bool
    activity: bool
    token_mask: Tensor | None = None
    hidden: bool = False

    def beside(self, other: Wants | None) -> Wants:
        """Return the union of two wants; this one's mask comes first."""
        if other is None:
            return self
        token_mask = other.token_mask if self.token_mask is None else self.token_mask
        hidden = self.hidden or other.hidden
        return Wants(self.l1 or other.l1, self.activity or other.activity, token_mask, hidden)


class Result(NamedTuple):
    """One pass of a layer: y [M, K]; l1 [M] fp32, the sum of |h| of each token, and activity.

    Both are None where nobody asked for them. hidden: g and h, only of a dense pass.
    """

    y: Tensor
    l1: Tensor | None = None
    activity: Activity | None = None
    hidden: tuple[Tensor, Tensor] | None = None


class ActivityStats:
    """Exact counters of a layer's activity, kept on its device without synchronising with it.

    `neuron_counts` [N] int64: tokens for which each neuron was active. `histogram` [N + 1] int64:
    tokens by their number of active neurons, so that mean, maximum and every percentile are exact.
    `counters` holds both; replicas and threads add to the same ones. They are not registered
    buffers: DistributedDataParallel would overwrite them with rank 0's. Traces (fake
    tensors, the meta device, torch.export) and passes inside of torch.func are not counted.
    """

    def __init__(self, intermediate_size: int):
        self.intermediate_size = intermediate_size
        # Replaced and never written, so whoever holds an earlier one can put it back.
        self.counters: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def add(self, activity: Activity, token_mask: Tensor | None = None) -> None:
        """Add the counts of a pass; `token_mask` [M] is zero for padding, which is left out."""
        token_counts, neuron_counts, _ = activity
        if not _has_values(neuron_counts):
            return
        keep = torch.ones_like(token_counts) if token_mask is None else token_mask.reshape(-1) != 0
        counts, device = token_counts.to(torch.int64), neuron_counts.device
        with _locked():
            neurons, histogram = (part.to(device) for part in self.counters or self._zeros(device))
            histogram = histogram.scatter_add(0, counts, keep.to(torch.int64))
            self.counters = neurons + neuron_counts, histogram

    def _zeros(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        options, size = {"dtype": torch.int64, "device": device}, self.intermediate_size
        return torch.zeros(size, **options), torch.zeros(size + 1, **options)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return (neuron_counts, histogram), and start from zero."""
        with _LOCK:
            counted, self.counters = self.counters or self._zeros(), None
        return counted


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


ONE_BLOCK = (
    "a compiled layer, which holds one pass; open a `with twell.collect_l1(...)` block for each "
    "pass of compiled layers, in one thread at a time"
)


class Collector:
    """Collects the side results of SparseFFN layers inside a `with` block.

    Args:
        ffns: the layers whose passes count.
        wants_l1: compute the L1 term in evaluation mode too, as layers always do in training mode.
        counts: add the activity of the passes to the layers' `stats`.
        token_mask: zero for tokens that the statistics leave out, of the passes' leading shape.
        hidden: call `see` with g and h of each eager pass, whatever the backend.

    `terms` are pairs (layer, sum_n |h| of each token) in the order of the passes: fp32, of the
    input's leading shape, part of the autograd graph. Each block starts with none. Every open
    collector receives them. Activation checkpointing repeats layers in the backward pass, when the
    collector is closed. Raises RuntimeError if it is open already.
    """

    def __init__(
        self,
        ffns: Iterable[nn.Module],
        *,
        wants_l1: bool = False,
        counts: bool = False,
        token_mask: Tensor | None = None,
        hidden: bool = False,
    ):
        self.ffns = list(ffns)
        self._ids = set(map(id, self.ffns))
        self._own_wants = self.wants = Wants(wants_l1, counts, token_mask, hidden)
        self.terms: list[tuple[nn.Module, Tensor]] = []
        self.no_grad = False  # whether a training layer ran without gradients in a block with them
        self.is_open = False

    def __enter__(self) -> Collector:
        if self.is_open:
            raise RuntimeError("this collector is open already; make one for each block")
        self._grad, compiled, around = torch.is_grad_enabled(), torch.compiler.is_compiling(), None
        if not compiled:
            around = open_collector()
            if any(ffn.outbox.is_taken() for ffn in self.ffns):
                raise RuntimeError(f"another thread or task collects the terms of {ONE_BLOCK}")
            _OPEN.set((*_OPEN.get(), self))
        self.terms, self.no_grad, self.is_open = [], False, True
        self.wants = self._own_wants.beside(None if around is None else around.wants)
        self._before = []
        for box in (ffn.outbox for ffn in self.ffns):
            self._before.append((box.wants, box.compiled, box.l1 is not None))
            box.reset(self.wants.beside(box.wants if compiled else None), compiled)
            if not compiled:
                box.owner = self
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        self.is_open, compiled, lost = False, torch.compiler.is_compiling(), False
        if not compiled:
            # No token, which only the context that set it may reset: blocks of generators and tasks
            # may end elsewhere, or before a block that was opened inside.
            _OPEN.set(tuple(one for one in _OPEN.get() if one.is_open))
        for ffn, (wants, by_compiled, lost_pass) in zip(self.ffns, self._before, strict=True):
            box = ffn.outbox
            l1, activity, grad = box.l1, box.activity, box.grad
            lost = lost or box.overwritten
            if compiled:
                box.reset(wants, by_compiled)
            else:
                lost = lost or (box.used and box.owner is not self)
                box.owner = open_collector(ffn)
                box.reset(box.owner and box.owner.wants)
            box.overwritten = lost_pass  # of a collector around: __enter__ dropped it
            if activity is not None:
                ffn.stats.add(activity, self.wants.token_mask)
            if l1 is None:
                continue
            self.receive(ffn, l1, grad)
            if not compiled:
                hand_on(ffn, l1, grad)  # to the collectors around it: this one is closed
            elif wants is not None:
                box.leave(l1, None, grad)
        if lost and error is None:
            raise RuntimeError(f"more than one pass, or thread, left its terms with {ONE_BLOCK}")

    def see(self, ffn: nn.Module, g: Tensor, h: Tensor) -> None:
        """Take g and h [M, N] of a pass, before interventions."""

    def receive(self, ffn: nn.Module, l1: Tensor, grad: bool) -> None:
        """Store the L1 term of one of these layers; grad: whether the pass had gradients on."""
        if id(ffn) in self._ids:
            self.terms.append((ffn, l1))
            # Only training repeats layers by checkpointing; evaluation may leave gradients out.
            self.no_grad = self.no_grad or (ffn.training and self._grad and not grad)


# A tuple of those opened in this context, the innermost last; some may have ended elsewhere.
_OPEN: ContextVar[tuple[Collector, ...]] = ContextVar("twell_collectors", default=())


def open_collector(ffn: nn.Module | None = None) -> Collector | None:
    """Return this thread's innermost open collector, with `ffn` of this layer. Not compiled."""
    for one in reversed(_OPEN.get()):
        if one.is_open and (ffn is None or id(ffn) in one._ids):
            return one
    return None


def hand_on(ffn: nn.Module, l1: Tensor, grad: bool) -> None:
    """Give the L1 term of a pass to every open collector of this thread."""
    for one in _OPEN.get():
        if one.is_open:
            one.receive(ffn, l1, grad)


def show_hidden(ffn: nn.Module, g: Tensor, h: Tensor) -> None:
    """Give g and h [..., N] of a pass to the open collectors that want them."""
    for one in _OPEN.get():
        if one.is_open and one._own_wants.hidden and id(ffn) in one._ids:
            one.see(ffn, *(t.reshape(-1, t.shape[-1]) for t in (g, h)))


class Outbox:
    """Holds the side results of a layer that cannot reach a collector.

    Compiled code reads here what an open collector wants, and stores the L1 term and the activity
    of one pass. Without a collector, `last` is the L1 term of the last pass in training mode, for
    a check of SparseLlamaForCausalLM. While `watch_capacity` is set, `needed` (0-d int64, on the
    device) is the largest capacity that a pass in training mode needed since `needed` was reset,
    for `twell.SparseTraining`. A copy is empty.
    """

    def __init__(self):
        self.owner: Collector | None = None  # the last that opened it outside of compiled code
        self.used = False  # whether any pass left something for a collector
        self.l1: Tensor | None = None
        self.activity: Activity | None = None
        self.last: Tensor | None = None
        self.watch_capacity = False
        self.needed: Tensor | None = None
        self.reset(None)

    def __reduce__(self) -> tuple:
        return Outbox, ()

    def reset(self, wants: Wants | None, compiled: bool = False) -> None:
        """Empty the box and set its wants; compiled: compiled code opened the collector."""
        self.wants, self.compiled = wants, compiled
        self.l1 = self.activity = self.last = None
        self.grad, self.overwritten = True, False

    def is_taken(self) -> bool:
        """Return whether a collector of another thread or task waits for this box."""
        owner = self.owner if self.used else None
        return owner is not None and owner.is_open and owner not in _OPEN.get()

    def leave(self, l1: Tensor | None, activity: Activity | None, grad: bool) -> None:
        """Store the side results of a pass; grad: whether it had gradients on."""
        if self.wants is None:
            self.last = l1
            return
        if self.l1 is not None or self.activity is not None:
            self.overwritten = True
        self.l1, self.grad, self.used = l1, grad, True
        self.activity = activity if self.wants.activity else None

    def show(
        self,
        ffn: nn.Module,
        receiver: Collector | Outbox | None,
        wants: Wants,
        result: Result,
        leading: torch.Size,
    ) -> None:
        """Hand on the L1 term, as [...] of the input, and the activity of a pass of this layer."""
        grad = torch.is_grad_enabled()
        l1 = result.l1.reshape(leading) if wants.l1 and result.l1 is not None else None
        if receiver is None:
            self.last = l1
        elif receiver is self:
            self.leave(l1, result.activity, grad)
        else:
            if receiver.wants.activity:
                ffn.stats.add(result.activity, receiver.wants.token_mask)
            if l1 is not None:
                hand_on(ffn, l1, grad)
        if ffn.training and self.watch_capacity:
            self.need(result.activity)

    @torch.no_grad()
    def need(self, activity: Activity) -> None:
        """Raise `needed` to the capacity that a pass in training mode needed."""
        if not _has_values(activity.token_counts):
            return
        needed = activity.needed
        if needed is None:
            needed = mean_entries(activity.token_counts)
        with _locked():
            self.needed = needed if self.needed is None else torch.maximum(self.needed, needed)
