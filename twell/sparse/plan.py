"""Chooses a layer's path by the number of tokens, from a calibration and the observed activity.

`Chooser` belongs to one layer. It counts the layer's activity and adopts it at fixed numbers of
calls, so that the same program takes the same paths in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.sparse.calibration import (
    BLOCK,
    COMPILED,
    EAGER,
    GRAPH,
    SITUATIONS,
    Calibration,
    default,
)

# Numbers of tokens at which a plan is made; the entry for P serves P / 2 + 1 to P tokens.
LARGEST = 20
POWERS = tuple(2**n for n in range(LARGEST + 1))
# Observations are kept apart by the number of tokens in a call, up to these: the union of a block
# depends on how many tokens stand in it, and reading a prompt differs from writing.
CLASSES = tuple(2**n for n in range(BLOCK.bit_length()))

MODULES = "modules"  # torch's modules compute; the path "dense" is kernels/dense.py
# Up to so many tokens a dense eager call waits for Python: MODULES need 0.27 ms a layer less of it
# than the kernels (2,048 tokens, in a model on an H100).
WAITING = 4096
PROBE_BLOCKS = 1024 // BLOCK
# A plan changes when an observation differs by this factor: torch.compile then compiles again.
NOTICEABLE = 1.2


_by_hand = False  # see `captured_by_hand`


@contextmanager
def captured_by_hand() -> Iterator[None]:
    """Compile code inside this block for a CUDA graph that you capture with torch.cuda.graph.

    Where torch.compile itself captures, as in mode "reduce-overhead", "auto" notices it.
    """
    global _by_hand
    before, _by_hand = _by_hand, True
    try:
        yield
    finally:
        _by_hand = before


@torch.compiler.assume_constant_result  # called while torch.compile traces
def _captures_graphs() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend = InstructionTranslator.current_tx().output.compiler_fn
    configured = getattr(backend, "get_compiler_config", None)  # of Inductor alone
    return _by_hand or (configured is not None and bool(configured()["triton.cudagraphs"]))


def situation_of(x: Tensor) -> str:
    """Return how the layer is being called with x: one of SITUATIONS."""
    if torch.compiler.is_compiling():
        return GRAPH if _captures_graphs() else COMPILED
    return GRAPH if x.is_cuda and torch.cuda.is_current_stream_capturing() else EAGER


class Choice(NamedTuple):
    """How one call is computed.

    path: MODULES is a dense call without the kernels. activity: counters that the kernels add to.
    warm_up: the path of a CUDA graph of this call, whose kernels have to be loaded before. due:
    whether `Chooser.end` has to follow.
    """

    path: str
    activity: Tensor | None = None
    warm_up: str | None = None
    due: bool = False


class Chooser:
    """Chooses the path of one layer for every situation and number of tokens. Ours.

    `plans` is the choice by situation (calibration.py): pairs (most tokens, path) in rising order;
    the last serves any number above too. torch.compile compiles its code for a number of tokens
    again when their path changes.
    `observed` holds the newest mean of active neurons per token and of neurons in a block's union.
    At first it is None, and the plan is dense.

    Counters are int64 [4] for each of CLASSES, on the layer's device. Sparse kernels add to them in
    every eager call, a dense call only when it is due: the calls 1, 2, 4, 8 and so on of a class. A
    due call adopts the counters that the due call before it began to copy to the host, and waits
    for that copy if need be. Then it starts the next copy. Only the counts between two copies
    decide. A frozen chooser counts nothing (`freeze`). Copies and pickles of a chooser keep its
    plans and start with new counters.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, gated: bool):
        self.shape = hidden_size, intermediate_size, gated
        self.observed: tuple[float, float] | None = None
        self._calibration: Calibration | None = None
        self._quantized = self.frozen = False
        self.device_name: str | None = None  # unknown
        self._known: dict[int, tuple[float, float]] = {}  # activity of the plan, by class
        self._forget_counters()
        self._make_plan()

    def __getstate__(self) -> dict[str, Any]:
        derived = "_counters", "_of_class", "_copy", "_paths", "_quick", "plans"
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_counters()
        self._make_plan()

    @property
    def calibration(self) -> Calibration | None:
        """Measured times; None: `default`. Raises ValueError for times of other layers."""
        return self._calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        if calibration is not None:
            calibration.check(*self.shape, quantized=self._quantized)
        self._calibration = calibration
        self._make_plan()

    @property
    def quantized(self) -> bool:
        """Whether the layer has FP8 weights. A change drops the calibration."""
        return self._quantized

    @quantized.setter
    def quantized(self, quantized: bool) -> None:
        if quantized != self._quantized:
            self._quantized, self.calibration = quantized, None

    def observe(self, active: float, union: float, tokens: int = BLOCK) -> None:
        """Plan for a mean of `active` neurons per token and of `union` in blocks of tokens.

        `tokens`: 1 to 64, the size of these blocks. Replaces every earlier observation; later calls
        of the layer observe again.
        """
        most = self.shape[1]
        if not (0 <= active <= most and 0 <= union <= most and 1 <= tokens <= BLOCK):
            raise ValueError(
                f"active is {active}, union is {union} and tokens is {tokens}; "
                f"expected 0 to {most} neurons, and 1 to {BLOCK} tokens"
            )
        self.observed = active, union
        self._known = {CLASSES[_class(tokens)]: self.observed}
        self._make_plan()

    def freeze(self, activity: Mapping[int, tuple[float, float]] | None) -> None:
        """Plan for this activity for good: (active, union) by the size of blocks, 1 to 64 tokens.

        None: count and adopt again, from the first call on.
        """
        for tokens, (active, union) in (activity or {}).items():
            self.observe(active, union, tokens)
        self._known = {CLASSES[_class(size)]: seen for size, seen in (activity or {}).items()}
        self.frozen = activity is not None
        self._forget_counters()
        self._make_plan()

    def path(self, num_tokens: int, situation: str = EAGER) -> str:
        """Return the path of a call with `num_tokens` in a situation."""
        if torch.compiler.is_compiling() and _is_open(num_tokens):
            # One code for all numbers of tokens with the same path.
            *pairs, (_, last) = self.plans[situation]
            return next((path for most, path in pairs if num_tokens <= most), last)
        place = 0
        # Not by POWERS: compiled code would check every entry read, in every call.
        while place < LARGEST and num_tokens > 1 << place:
            place += 1
        return self._paths[situation][place]

    # --- eager calls

    def quick_path(self, num_tokens: int) -> str | None:
        """Return the path of an eager call that needs only `count`.

        None: the call needs `choose`.
        """
        calls = self._calls[_class(num_tokens)] + 1
        due = not self.frozen and calls & (calls - 1) == 0
        return None if due else self._quick.get(num_tokens)

    def count(self, num_tokens: int) -> None:
        """Count an eager call by `quick_path`."""
        self._calls[_class(num_tokens)] += 1

    def set_device(self, device: torch.device) -> None:
        """Plan by the times of this device's card, from the first call on it."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        if name != self.device_name:
            self.device_name = name
            self._make_plan()

    def choose(self, x: Tensor, gate: Callable[[Tensor], Tensor]) -> Choice:
        """Choose for a call with x [M, K], and count it if it is eager; `gate` gives g of tokens."""
        num_tokens, situation = x.shape[0], situation_of(x)
        # A trace with fake tensors shows no activity.
        if situation != EAGER or num_tokens == 0 or type(x) is not Tensor:
            return Choice(self.path(num_tokens, situation))
        if self.device_name is None:
            self.set_device(x.device)
        due, path = self.begin(num_tokens), self.path(num_tokens)
        activity = self.activity_of(path, num_tokens, x.device)
        if path == "dense" and due:
            count_activity(sampled_blocks(x), gate, self.counters(num_tokens, x.device))
        if num_tokens <= WAITING:  # calls of more are never replayed
            if path == "dense" and not self._quantized:
                path = MODULES
            self._quick[num_tokens] = path
        captured = self.path(num_tokens, GRAPH)  # kernels that count activity are others
        warm_up = None if captured == path and activity is None else captured
        return Choice(path, activity, warm_up, due)

    def activity_of(self, path: str, num_tokens: int, device: torch.device) -> Tensor | None:
        """Return the counters to which an eager call by a path adds, if it does."""
        if path == "dense" or self.frozen:
            return None
        return self.counters(num_tokens, device)

    def begin(self, num_tokens: int) -> bool:
        """Count an eager call; return whether it is due, and `end` has to follow it."""
        place = _class(num_tokens)
        self._calls[place] = calls = self._calls[place] + 1
        if self.frozen or calls & (calls - 1):
            return False
        copy, self._copy = self._copy, None  # another thread may take it meanwhile
        if copy is not None:
            totals, wait = copy
            wait()
            self._adopt(totals.tolist())
        return True

    def end(self) -> None:
        """Begin to copy the counters."""
        if self._counters is not None:
            self._copy = _begin_copy(self._counters)

    # --- the plans

    def _make_plan(self) -> None:
        calibration = self._calibration or default(
            *self.shape, self._quantized, self.device_name or ""
        )
        dense, choices = dict.fromkeys(SITUATIONS, "dense"), []
        for power in POWERS:
            activity = self._activity(min(power, BLOCK))
            choices.append(dense if activity is None else calibration.choices(power, *activity))
        # By power. Lists: torch.compile guards their read entries, of a tuple all entries.
        paths = {situation: [one[situation] for one in choices] for situation in SITUATIONS}
        plans: dict[str, tuple[tuple[int, str], ...]] = {}
        for situation in SITUATIONS:
            same = groupby(zip(POWERS, paths[situation], strict=True), key=itemgetter(1))
            plans[situation] = tuple(list(pairs)[-1] for _, pairs in same)
        # Replaced as a whole: another thread may read them.
        self._paths, self.plans, self._quick = paths, plans, {}

    def _activity(self, size: int) -> tuple[float, float] | None:
        """Return the active neurons and the union expected in calls of a class; None: unknown."""
        known = self._known
        if not known:
            return None
        if size in known:
            return known[size]
        larger = min((other for other in known if other > size), default=None)
        if larger is None:  # the most it can be: no two blocks have a neuron in common
            smaller = max(known)
            active, union = known[smaller]
            return active, min(self.shape[1], union * size / smaller)
        active, union = known[larger]
        share = math.log(size) / math.log(larger)
        return active, active * (union / active) ** share if active else union

    # --- counting and reading; never while torch.compile traces or a stream is captured

    def _forget_counters(self) -> None:
        self._counters: Tensor | None = None
        self._of_class: list[Tensor] = []  # its rows: to take one costs every call a microsecond
        self._read = [[0] * 4 for _ in CLASSES]  # the totals up to the newest window
        self._calls = [0] * len(CLASSES)  # eager ones
        # A copy to the host, and a function that waits for it.
        self._copy: tuple[Tensor, Callable[[], object]] | None = None

    def counters(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the int64 tensor [4] to which a call of `num_tokens` adds (ops.py)."""
        if self._counters is None or self._counters.device != device:
            self._copy, self._read = None, [[0] * 4 for _ in CLASSES]
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._counters = torch.zeros(len(CLASSES), 4, dtype=torch.int64, device=device)
                self._of_class = [self._counters[place] for place in range(len(CLASSES))]
        return self._of_class[_class(num_tokens)]

    def _adopt(self, totals: list[list[int]]) -> None:
        """Make a new plan if the counts since the last totals differ from those of the plan."""
        before, self._read = self._read, totals
        most, changed = 0, False
        for size, *pair in zip(CLASSES, before, totals, strict=True):
            tokens, blocks, active, union = (b - a for a, b in zip(*pair, strict=True))
            if tokens == 0 or blocks == 0:  # the copy may have come between the two
                continue
            new = active / tokens, union / blocks
            old = self._known.get(size)
            if old is None or any(_differ(*pair) for pair in zip(old, new, strict=True)):
                self._known = {**self._known, size: new}
                changed = True
            if tokens > most:
                most, self.observed = tokens, new
        if changed:
            self._make_plan()


def _is_open(num_tokens: int) -> bool:
    """Whether the code being compiled serves numbers of tokens that may take different paths."""
    # Not with the module: it loads sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    # Not by POWERS, see `Chooser.path`.
    powers = [1 << place for place in range(LARGEST + 1)]
    return not all(known(num_tokens <= n) or known(num_tokens > n) for n in powers)


def sampled_blocks(x: Tensor) -> Tensor:
    """Return up to 16 blocks of 64 consecutive tokens of x [M, K]; fewer tokens are one block."""
    num_blocks = len(x) // BLOCK
    if num_blocks == 0:
        return x[None]
    # An odd step: the first tokens of a sequence are the most active, and most are 2^n tokens long.
    step = max(num_blocks // PROBE_BLOCKS - 1, 0) | 1
    return x[: num_blocks * BLOCK].view(num_blocks, BLOCK, -1)[::step][:PROBE_BLOCKS]


@torch.no_grad()
def count_activity(blocks: Tensor, gate: Callable[[Tensor], Tensor], counters: Tensor) -> None:
    """Add tokens, blocks, active and union entries of `blocks` [B, T, K] without waiting."""
    active = gate(blocks) != 0
    # Host numbers are kernel arguments here; as tensors they would have to be copied.
    counters[0] += active.shape[0] * active.shape[1]
    counters[1] += active.shape[0]
    counters[2] += active.sum()
    counters[3] += active.any(1).sum()


def _begin_copy(counters: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Return a copy on the host, and a function that waits for it."""
    if not counters.is_cuda:
        return counters.clone(), lambda: None
    copy = torch.empty(counters.shape, dtype=counters.dtype, pin_memory=True)
    copy.copy_(counters, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(counters.device))
    return copy, arrived.synchronize


def _class(num_tokens: int) -> int:
    """Return the place in CLASSES of calls with `num_tokens`."""
    return min((num_tokens - 1).bit_length(), len(CLASSES) - 1)


def _differ(old: float, new: float) -> bool:
    """Whether the numbers differ noticeably; adding 1 ignores small changes near zero."""
    return not 1 / NOTICEABLE <= (new + 1) / (old + 1) <= NOTICEABLE
