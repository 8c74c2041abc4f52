"""Sparse training that drops nothing, for any training loop, and the switch between dense and
sparse.

A layer that trains sparsely keeps its active entries in buffers with room for `capacity` entries
per token. The room is chosen before the activity is known, since to ask the device first would be
to wait for it in every layer. So each layer counts what it would have needed, and the loop reads
one number a layer at the end of a step. Where a buffer was too small the step is done again with
more room, from the random state and the statistics it began with: a step that counts is always
exact, and the same as if the room had been enough from the start.

The same numbers say how active each layer is. With the backend "auto" they decide whether it trains
densely or sparsely. All processes read the maximum over processes, so that all decide the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twell.sparse.calibration import default
from twell.sparse.layer import SparseFFN, backend_status

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Room over the most that recent steps needed: memory spent so that a step is seldom done again.
CAPACITY_MARGIN = 1.5
RECENT = 64  # steps that count as recent
# The smallest room, in entries per token. The others are 2^n and 1.5 * 2^n, so that code that
# torch.compile makes for a room is seldom made again.
SMALLEST = 32
# A layer's activity is its mean over about so many steps.
SMOOTHING = 8
# A layer begins to train sparsely at this share of the activity at which it stops, so that it does
# not go to and fro.
BEGIN = 0.9
# Each attempt but the last makes room by what the first layer without enough needed (layers after
# it saw wrong inputs, and their numbers say nothing); the last has room for everything, for this
# step alone.
ATTEMPTS = 4


class SparseTraining:
    """Has the SparseFFN layers of a model train sparsely, in any loop, and repeats a step where
    buffers were too small.

        sparse = twell.SparseTraining(model)
        for batch in data:
            for _ in sparse.attempts():  # once; again where buffers were too small
                optimizer.zero_grad()
                loss = ...
                loss.backward()  # as many micro-batches as you like
            optimizer.step()

    An attempt has to compute the whole step, from zero gradients. Its losses may be NaN: look at
    them, and count tokens, after the attempts. Repeated attempts begin with the random state of
    torch, on the CPU and the layers' devices, and the layers' statistics as they were. An attempt
    that is left by an exception or `break` was not checked, and what it computed is of no use.
    Gradients outside of attempts are computed densely.

    Layers with the backend "triton" always train sparsely. Those with "auto" begin densely and
    change to and fro by their activity and `Calibration.training`. Others, those with adapters or
    hooks (`SparseFFN.readable`), and all where the kernels cannot be used, are left dense; without
    any layer that could train sparsely nothing is read from the device. Where layers are compiled,
    call `allow_recompiling`.

    Args:
        model: any module; its layers are looked up once. path: how gradients are computed, "union"
        or "hybrid" (the paper's); None: densely, for a loop that decides. reduce: takes an int64
        tensor [layers] and returns its elementwise maximum over all processes; by default
            that of torch.distributed, where it is initialised.
        group: the processes that train this model, for the default `reduce`; None: all.

    Raises ValueError for another path, and for both `reduce` and `group`. Ours.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        path: str | None = "union",
        reduce: Callable[[Tensor], Tensor] | None = None,
        group: ProcessGroup | None = None,
    ):
        if path not in (None, "union", "hybrid"):
            raise ValueError(f"path {path!r} is unknown; use 'union', 'hybrid' or None")
        if reduce is not None and group is not None:
            raise ValueError(
                "reduce and group are both given; a function that reduces knows its processes"
            )
        self.layers = [module for module in model.modules() if isinstance(module, SparseFFN)]
        self.path = path if backend_status()["triton"] is None else None
        self.reduce = reduce or partial(_largest, group=group)
        self.rooms = rooms(max((ffn.intermediate_size for ffn in self.layers), default=1))
        self.capacity = self.rooms[0]
        self.repeated = 0
        self.activity: list[float | None] = [None] * len(self.layers)
        self.sparse = [False] * len(self.layers)
        self._recent: deque[int] = deque(
            maxlen=RECENT
        )  # the most that a sparse layer needed, by step
        self._running: object = None  # stands for the attempts that are under way
        self._decide()

    def __enter__(self) -> SparseTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allow_recompiling(self) -> None:
        """Set what compiled layers need of torch.compile, for the whole process.

        Call it once where the model or its layers are compiled. Code is made for dense and sparse
        layers, with and without statistics, and the second time that a room is seen for all rooms
        at once. Limits of recompilation are never lowered.
        """
        torch._dynamo.config.allow_unspec_int_on_nn_module = (
            True  # a layer's capacity need not be a constant
        )
        most = 16 * max(len(self.layers), 1)
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), most))

    def close(self) -> None:
        """Leave the layers dense for good: `attempts` then has one attempt."""
        self.path = None
        self._decide()
        self._release()

    @property
    def active(self) -> bool:
        """Whether any layer trains sparsely, or may come to."""
        return any(self._crossover(ffn) > 0 for ffn in self.layers)

    def summary(self) -> dict[str, int]:
        """Return capacity, the number of layers that train sparsely from now on, and the attempts
        made again so far.
        """
        return {
            "capacity": self.capacity,
            "sparse_layers": sum(self.sparse),
            "repeated_steps": self.repeated,
        }

    def attempts(self) -> Iterator[int]:
        """Yield 0, then 1, 2, ... as long as buffers were too small: see the class. All processes
        have to take part.
        """
        if not self.active:
            yield 0
            return
        # An attempt that was left by an exception may end when another one runs already.
        self._running = running = object()
        try:
            self._decide()  # backends and calibrations may have changed
            random = _RandomState(self.layers)
            counters = [(ffn.stats.neuron_counts, ffn.stats.histogram) for ffn in self.layers]
            for attempt in count():
                self._tell()
                yield attempt
                needed = self._read()
                short = self._first_short(needed)
                if short is None:
                    self._notice(needed, forced=attempt + 1 == ATTEMPTS)
                    return
                if self.capacity >= self.rooms[-1]:
                    raise AssertionError(
                        f"a layer needs room for {short} entries per token, and has {self.capacity}: all"
                    )
                self.repeated += 1
                self.capacity = self._room(short) if attempt + 2 < ATTEMPTS else self.rooms[-1]
                random.restore()
                for ffn, (neuron_counts, histogram) in zip(self.layers, counters, strict=True):
                    ffn.stats.neuron_counts, ffn.stats.histogram = neuron_counts, histogram
        finally:
            if self._running is running:
                self._release()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain numbers and lists: a run that takes it up makes the
        same choices.
        """
        return {
            "capacity": self.capacity,
            "recent": list(self._recent),
            "activity": list(self.activity),
            "sparse": list(self.sparse),
            "repeated": self.repeated,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. Raises ValueError for that of a model with another number of
        layers.
        """
        if len(state["activity"]) != len(self.layers):
            raise ValueError(
                f"the state is of {len(state['activity'])} layers; the model has {len(self.layers)}"
            )
        self.capacity, self.repeated = state["capacity"], state["repeated"]
        self.activity, self.sparse = list(state["activity"]), list(state["sparse"])
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._decide()

    # --- what the layers are told

    def _tell(self) -> None:
        nothing: dict[torch.device, Tensor] = {}
        for ffn, sparse in zip(self.layers, self.sparse, strict=True):
            device = ffn.device
            if device not in nothing:
                nothing[device] = torch.full((), -1, dtype=torch.int64, device=device)
            ffn.observer.watch_capacity = self._crossover(ffn) > 0
            ffn.observer.needed = nothing[
                device
            ]  # not None, for which compiled layers would need code of their own
            ffn.train_path = self.path if sparse else None
            ffn.capacity = self._capacity(ffn)

    def _release(self) -> None:
        self._running = None
        for ffn in self.layers:
            ffn.observer.watch_capacity, ffn.observer.needed, ffn.train_path = False, None, None

    def _capacity(self, ffn: SparseFFN) -> int:
        return min(self.capacity, ffn.intermediate_size)

    # --- what is decided from the numbers

    def _decide(self) -> None:
        """Decide which layers train sparsely."""
        for place, (ffn, activity) in enumerate(zip(self.layers, self.activity, strict=True)):
            most = self._crossover(ffn)
            if activity is None or most in (0, math.inf):
                self.sparse[place] = most == math.inf
            else:
                self.sparse[place] = (
                    activity <= most if self.sparse[place] else activity < BEGIN * most
                )

    def _crossover(self, ffn: SparseFFN) -> float:
        """Active neurons per token up to which the layer is to train sparsely: 0 never, inf always.
        """
        if self.path is None or ffn.backend not in ("triton", "auto") or not ffn.readable:
            return 0.0
        if ffn.backend == "triton":
            return math.inf
        shape = ffn.hidden_size, ffn.intermediate_size, ffn.gated
        return (ffn.calibration or default(*shape)).training or 0.0

    def _notice(self, needed: list[int], forced: bool) -> None:
        """Decide for the next step, from what this one needed; `forced`: its room was everything,
        as nothing was known.
        """
        for place, number in enumerate(needed):
            old = self.activity[place]
            if number >= 0:
                self.activity[place] = number if old is None else old + (number - old) / SMOOTHING
        self._decide()
        most = max(
            (number for number, sparse in zip(needed, self.sparse, strict=True) if sparse),
            default=-1,
        )
        if most < 0:
            return
        self._recent.append(most)
        wanted = self._room(max(self._recent))
        # Less room only where it is much less, and not before the recent steps are known.
        lower = bisect_left(self.rooms, self.capacity) - bisect_left(self.rooms, wanted)
        if wanted > self.capacity or forced or (lower >= 2 and len(self._recent) == RECENT):
            self.capacity = wanted

    def _room(self, needed: int) -> int:
        """The first room that is CAPACITY_MARGIN times what was needed; the last where none is."""
        return self.rooms[
            min(bisect_left(self.rooms, CAPACITY_MARGIN * needed), len(self.rooms) - 1)
        ]

    def _first_short(self, needed: list[int]) -> int | None:
        """What the first layer needed that had less room; layers after it saw wrong inputs."""
        layers = zip(self.layers, self.sparse, needed, strict=True)
        return next(
            (number for ffn, sparse, number in layers if sparse and number > self._capacity(ffn)),
            None,
        )

    def _read(self) -> list[int]:
        """What each layer needed, on no process more; -1 for a layer that computed nothing. Waits
        for the device, once.
        """
        device = self.layers[0].observer.needed.device
        return self.reduce(
            torch.stack([ffn.observer.needed.to(device) for ffn in self.layers])
        ).tolist()


def rooms(most: int) -> tuple[int, ...]:
    """Return the rooms, entries per token, that buffers may have: 32, 48, 64, 96, 128, ..., and
    last `most` neurons. Ours.
    """
    found = [
        room
        for n in range(most.bit_length())
        for room in (SMALLEST << n, 3 * SMALLEST << n >> 1)
        if room < most
    ]
    return (*found, most)


def _largest(numbers: Tensor, group: ProcessGroup | None) -> Tensor:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=group)
    return numbers


class _RandomState:
    """torch's random state on the CPU, the current GPU, and the GPUs of the layers; to copy it
    waits for no device.
    """

    def __init__(self, layers: list[SparseFFN]):
        self.cpu = torch.get_rng_state()
        devices = {ffn.device for ffn in layers if ffn.device.type == "cuda"}
        if torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self.gpus = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.gpus.items():
            torch.cuda.set_rng_state(state, device)
