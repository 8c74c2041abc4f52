"""Sparse training steps that lose nothing, for any training loop, and the switch to and from dense.

A layer that trains sparsely keeps its active entries in buffers of `capacity` entries per token.
The capacity is chosen before the activity is known, because asking the device first would wait for
it in every layer. So each layer counts the capacity that it needed, and the loop reads one number a
layer at the end of a step. If a buffer overflowed, the step is retried with a larger capacity, from
the same random state and statistics. So a step that counts is exact, and equal to a step whose
capacity sufficed at once.

The same numbers tell how active each layer is. With the backend "auto" they decide whether a layer
trains densely or sparsely. All processes read the maximum over processes and decide alike.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from twell.sparse.calibration import default
from twell.sparse.layer import SparseFFN, backend_status

# Capacity over the largest need of recent steps: memory spent to make retries rare.
CAPACITY_MARGIN = 1.5
RECENT = 64  # steps
# The smallest capacity. The others are 2^n and 1.5 * 2^n: code that torch.compile makes for a
# capacity is seldom made again.
SMALLEST = 32
# A layer's activity is its mean over about this many steps.
SMOOTHING = 8
# A layer begins to train sparsely at this share of the activity at which it stops, so that it does
# not alternate.
BEGIN = 0.9
# Each retry takes its capacity from the first layer that overflowed: layers after it saw wrong
# inputs. The last attempt takes the maximum, for this step alone.
ATTEMPTS = 4


class SparseTraining:
    """Lets the SparseFFN layers of a model train sparsely, and retries steps that overflow.

        sparse = twell.SparseTraining(model)
        for batch in data:
            for _ in sparse.attempts():  # once; again after an overflow
                optimizer.zero_grad()
                loss = ...
                loss.backward()  # as many micro-batches as you like
            optimizer.step()

    An attempt computes the whole step, from zero gradients. Its losses may be NaN: read them, and
    count tokens, after the attempts. A retry begins with torch's random state and the layers'
    statistics as they were. An attempt left by an exception or `break` is not checked: discard its
    gradients. Outside of attempts gradients are dense.

    Layers with the backend "triton" always train sparsely. Layers with "auto" begin densely and
    change by their activity and `Calibration.training`. All others stay dense: other backends,
    layers with adapters or hooks (`SparseFFN.readable`), and all where the kernels cannot be used.
    If all stay dense, nothing is read from the device. If compiled, call `allow_recompiling`.

    Args:
        model: any module; its layers are looked up once.
        path: how gradients are computed, "union" or "hybrid" (the paper's); None: densely.

    Raises ValueError for another path; a step by "hybrid" also for an activation other than ReLU.
    Ours.
    """

    def __init__(self, model: nn.Module, *, path: str | None = "union"):
        if path not in (None, "union", "hybrid"):
            raise ValueError(f"path {path!r} is unknown; use 'union', 'hybrid' or None")
        self.layers = [module for module in model.modules() if isinstance(module, SparseFFN)]
        self.path = path if backend_status()["triton"] is None else None
        largest = max((ffn.intermediate_size for ffn in self.layers), default=1)
        self.capacities = capacities(largest)
        self.capacity = self.capacities[0]
        self.repeated = 0
        self.activity: list[float | None] = [None] * len(self.layers)
        self.sparse = [False] * len(self.layers)
        for ffn in self.layers:
            ffn.chooser.set_device(ffn.device)
        self._recent: deque[int] = deque(maxlen=RECENT)  # the largest need of each step
        self._running: object = None  # identifies the attempts under way
        self._decide()

    def allow_recompiling(self) -> None:
        """Let torch.compile make the code that changing layers need, for the whole process.

        Call it once if the model or its layers are compiled. Code is made for dense and sparse
        layers, with and without statistics, and from the second capacity on for all capacities at
        once. Limits of recompilation are never lowered.
        """
        # A layer's capacity becomes a variable of the compiled code.
        torch._dynamo.config.allow_unspec_int_on_nn_module = True
        most = 16 * max(len(self.layers), 1)
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), most))

    @property
    def active(self) -> bool:
        """Whether any layer trains sparsely, or may come to."""
        return any(self._crossover(ffn) > 0 for ffn in self.layers)

    def summary(self) -> dict[str, int]:
        """Return the capacity, the number of layers that train sparsely, and the retries so far."""
        return {
            "capacity": self.capacity,
            "sparse_layers": sum(self.sparse),
            "repeated_steps": self.repeated,
        }

    def attempts(self) -> Iterator[int]:
        """Yield 0, then 1, 2, ... while buffers overflow: see the class.

        All processes have to take part.
        """
        if not self.active:
            yield 0
            return
        # Attempts left by an exception may end while newer ones run.
        self._running = running = object()
        try:
            self._decide()  # backends and calibrations may have changed
            restore = _random_state()
            counters = [ffn.stats.counters for ffn in self.layers]
            largest = self.capacities[-1]
            for attempt in range(ATTEMPTS):
                self._prepare_layers()
                yield attempt
                needed = self._read_needed()
                overflow = self._first_overflow(needed)
                if overflow is None:
                    self._update(needed, forced=attempt + 1 == ATTEMPTS)
                    return
                self.repeated += 1
                next_is_last = attempt + 2 >= ATTEMPTS
                self.capacity = largest if next_is_last else self._capacity_for(overflow)
                restore()
                for ffn, before in zip(self.layers, counters, strict=True):
                    ffn.stats.counters = before
            raise AssertionError(f"a layer needs a capacity of {overflow} and has {largest}")
        finally:
            if self._running is running:
                self._release()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in plain numbers and lists.

        A run that restores it makes the same choices.
        """
        return {
            "capacity": self.capacity,
            "recent": list(self._recent),
            "activity": list(self.activity),
            "sparse": list(self.sparse),
            "repeated": self.repeated,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state` of the same model."""
        self.capacity, self.repeated = state["capacity"], state["repeated"]
        self.activity, self.sparse = list(state["activity"]), list(state["sparse"])
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._decide()

    # --- the layers

    def _prepare_layers(self) -> None:
        """Set path and capacity of each layer, and clear the capacity that it needed."""
        # A tensor and not None, for which compiled layers would need code of their own; one for all
        # layers of a device.
        devices = [ffn.device for ffn in self.layers]
        none_needed = {d: torch.full((), -1, dtype=torch.int64, device=d) for d in set(devices)}
        for ffn, device, sparse in zip(self.layers, devices, self.sparse, strict=True):
            ffn.outbox.watch_capacity = self._crossover(ffn) > 0
            ffn.outbox.needed = none_needed[device]
            ffn.train_path = self.path if sparse else None
            ffn.capacity = self._layer_capacity(ffn)

    def _release(self) -> None:
        self._running = None
        for ffn in self.layers:
            ffn.outbox.watch_capacity = False
            ffn.outbox.needed = ffn.train_path = None

    def _layer_capacity(self, ffn: SparseFFN) -> int:
        return min(self.capacity, ffn.intermediate_size)

    def _read_needed(self) -> list[int]:
        """Return the capacity that each layer needed, the maximum over processes.

        -1 for a layer that computed nothing. Waits for the device, once.
        """
        needed = [ffn.outbox.needed for ffn in self.layers]
        device = needed[0].device
        numbers, distributed = torch.stack([n.to(device) for n in needed]), torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
        return numbers.tolist()

    def _first_overflow(self, needed: list[int]) -> int | None:
        """Return the need of the first layer that overflowed."""
        for ffn, sparse, number in zip(self.layers, self.sparse, needed, strict=True):
            if sparse and number > self._layer_capacity(ffn):
                return number
        return None

    # --- the decisions for the next step

    def _decide(self) -> None:
        """Decide which layers train sparsely."""
        for place, (ffn, activity) in enumerate(zip(self.layers, self.activity, strict=True)):
            most = self._crossover(ffn)
            if activity is None or most in (0, math.inf):
                self.sparse[place] = most == math.inf
            else:
                stays = self.sparse[place]
                self.sparse[place] = activity <= most if stays else activity < BEGIN * most

    def _crossover(self, ffn: SparseFFN) -> float:
        """Return up to which activity the layer trains sparsely: 0 never, inf always."""
        if self.path is None or ffn.backend not in ("triton", "auto") or not ffn.readable:
            return 0.0
        if ffn.backend == "triton":
            return math.inf
        shape = ffn.hidden_size, ffn.intermediate_size, ffn.gated
        ships = default(*shape, device_name=ffn.chooser.device_name or "").training
        own = ffn.calibration and ffn.calibration.training  # `tune` measures inference alone
        return (ships if own is None else own) or 0.0

    def _update(self, needed: list[int], forced: bool) -> None:
        """Decide for the next step; `forced`: this step took the largest capacity."""
        for place, number in enumerate(needed):
            old = self.activity[place]
            if number >= 0:
                self.activity[place] = number if old is None else old + (number - old) / SMOOTHING
        self._decide()
        sparse = [number for number, chosen in zip(needed, self.sparse, strict=True) if chosen]
        most = max(sparse, default=-1)
        if most < 0:
            return
        self._recent.append(most)
        capacity = self._capacity_for(max(self._recent))
        # Shrink only by two sizes or more, and not before the recent steps are known.
        sizes = bisect_left(self.capacities, self.capacity) - bisect_left(self.capacities, capacity)
        shrink = sizes >= 2 and len(self._recent) == RECENT
        if capacity > self.capacity or forced or shrink:
            self.capacity = capacity

    def _capacity_for(self, needed: int) -> int:
        """Return the first capacity of CAPACITY_MARGIN times the need, at most the largest."""
        place = bisect_left(self.capacities, CAPACITY_MARGIN * needed)
        return self.capacities[min(place, len(self.capacities) - 1)]


def capacities(most: int) -> tuple[int, ...]:
    """Return the capacities in entries per token: 32, 48, 64, 96, ..., and last `most`. Ours."""
    sizes = [
        size for n in range(most.bit_length()) for size in (SMALLEST << n, 3 * SMALLEST << n >> 1)
    ]
    return (*(size for size in sizes if size < most), most)


def _random_state() -> Callable[[], None]:
    """Copy torch's random state on the CPU and on all GPUs, without waiting.

    Returns a function that restores it.
    """
    cpu = torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(gpus)

    return restore
