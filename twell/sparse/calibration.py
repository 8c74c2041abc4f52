"""Measured times of a layer's paths on one device, and the fastest path that follows from them.

Row-wise work grows with the active neurons of a token, work by unions with the neurons that any
token of a block has active, and dense work with neither. A small call waits for Python, and for
some paths longer than for others. `Calibration` holds measured times and predicts from them. The
choice concerns speed alone: every path is exact for every input.
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median

import numpy as np

# The time of each path depends on the number of tokens and on this; see `Calibration._work`.
DEPENDS_ON = {"dense": None, "rowwise": "active", "union": "union", "decode": "union"}
# A sparse path must be predicted faster than dense by this share: two measurements of one call
# differ by 1 to 2%, and a wrong sparse choice costs more than such a gain.
MARGIN = 0.03
# Times of another layer or another card are less certain.
SCALED_MARGIN = 0.10
# How a layer is called: "eager", by code of torch.compile, or in a CUDA graph, which never waits.
SITUATIONS = EAGER, COMPILED, GRAPH = "eager", "compiled", "graph"
# The host time that a sparse call may take, as shares of dense's host time and of its GPU time; the
# larger counts. The rest of a model needs the host too, and slows Python more than torch's own
# launches. In compiled code dense launches are cheaper than in the single calls that were measured.
HOST_SHARES = {EAGER: (0.4, 0.4), COMPILED: (0.85, 1.0), GRAPH: (1.0, 1.0)}
DECODE_CHUNK = 512  # decode splits more tokens into chunks, each with its own launches
# Unions are counted over blocks of so many tokens; kernels also take 128 (`_work`).
BLOCK = 64

FLOAT8 = "float8_e4m3fn"  # the dtype of a calibration of FP8 weights
# Cards with default calibrations of their own, by a word in their name; others take an H200's.
CARDS = ("H100",)


@dataclass(frozen=True)
class Point:
    """Times in ms by path at `tokens`, with means of `active` neurons and of `union`."""

    tokens: float
    active: float
    union: float
    ms: Mapping[str, float]


@dataclass(frozen=True)
class Floor:
    """The least ms by path of a call with `tokens` in a situation: one active neuron a token."""

    situation: str
    tokens: float
    ms: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Times of the paths of one layer on one device, and the choice that follows from them. Ours.

    Args:
        device: its name, as torch gives it.
        hidden_size, intermediate_size, gated: K, N and kind of the layer.
        dtype: of weights and inputs.
        versions, date: of the measurement, for the reader.
        times: one Point for each case, of the GPU alone; every calibration has dense times.
        floors: where a call may wait for Python, one Floor for each situation and number of tokens.
        margin: the share by which a sparse path must be predicted faster than dense.
        training: mean active neurons per token below which a sparse training step is faster than a
            dense one. 0: it never is. None: not measured, so that of the times that ship.

    Raises ValueError for `times` without dense ones.
    """

    device: str
    hidden_size: int
    intermediate_size: int
    gated: bool
    dtype: str
    versions: str
    date: str
    times: tuple[Point, ...]
    margin: float = MARGIN
    training: float | None = None
    floors: tuple[Floor, ...] = ()

    def __post_init__(self):
        paths = {path for point in (*self.times, *self.floors) for path in point.ms}
        if unknown := paths.difference(DEPENDS_ON):
            raise ValueError(f"path {min(unknown)!r} is unknown; use {', '.join(DEPENDS_ON)}")
        if not any("dense" in point.ms for point in self.times):
            raise ValueError("times has no dense ones, with which sparse paths are compared")
        if not all(min(p.tokens, *p.ms.values()) > 0 for p in (*self.times, *self.floors)):
            raise ValueError("a point has tokens or ms that are not above 0")

    # --- files, and layers that they fit

    def save(self, path: str | Path) -> None:
        """Write the calibration as JSON, one case a line."""
        fields = asdict(self)
        lists = {name: fields.pop(name) for name in _LISTS}
        text = json.dumps(fields, indent=2).removesuffix("\n}")
        for name, points in lists.items():
            lines = ",".join(f"\n    {json.dumps(point)}" for point in points)
            text += f',\n  "{name}": [{lines}\n  ]'
        Path(path).write_text(text + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file of `save`. Raises ValueError for another file."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            for name, kind in _LISTS.items():
                fields[name] = tuple(kind(**point) for point in fields.get(name, ()))
            fields.pop("expected", None)  # null in files of older versions
            return cls(**fields)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no calibration: {error}") from None

    def check(self, *shape: int, quantized: bool) -> None:
        """Raise ValueError unless the times are of such layers: K, N, gated, and weights in FP8."""
        measured, layer = _kind(*self._shape), _kind(*shape)
        if measured != layer:
            raise ValueError(f"the calibration is for {measured}; this layer has {layer}")
        if (self.dtype == FLOAT8) != quantized:
            layer = "FP8" if quantized else "bf16 or fp16"
            raise ValueError(f"the calibration is for {self.dtype}; this layer has {layer} weights")

    @property
    def _shape(self) -> tuple[int, int, bool]:
        return self.hidden_size, self.intermediate_size, self.gated

    # --- the choice

    def _work(self, path: str, active: float, union: float) -> float:
        """Return the number of neurons on which the time of a path depends.

        In bf16 the path "union" has blocks of 128 tokens above 2,048 (kernels/options.py), here in
        all calls. Their unions follow from those of 64 tokens by a power law.
        """
        if path == "union" and self.dtype != FLOAT8 and active:
            return min(union * (union / active) ** (1 / 6), self.intermediate_size)
        return {None: 0.0, "active": active, "union": union}[DEPENDS_ON[path]]

    @cached_property
    def _curves(self) -> dict[str, list[tuple[float, np.ndarray]]]:
        """By path (tokens, curve), tokens rising; a curve has active or union, rising, and ms."""
        times = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for point in self.times:
            for path, ms in point.ms.items():
                times[path][point.tokens][self._work(path, point.active, point.union)].append(ms)
        return {
            path: sorted(
                (tokens, np.transpose(sorted((x, median(ms)) for x, ms in by_x.items())))
                for tokens, by_x in curves.items()
            )
            for path, curves in times.items()
        }

    @cached_property
    def _floors(self) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
        """By situation and path the logarithms of tokens, rising, and of the least ms.

        Fewer tokens do not take longer: other work on the host slows single measurements.
        """
        points = defaultdict(list)
        for floor in self.floors:
            for path, ms in floor.ms.items():
                points[floor.situation, path].append((floor.tokens, ms))
        floors = {}
        for key, pairs in points.items():
            tokens, ms = np.log(sorted(pairs)).T
            floors[key] = tokens, np.minimum.accumulate(ms[::-1])[::-1]
        return floors

    def predict(self, num_tokens: float, active: float, union: float) -> dict[str, float]:
        """Return ms of the GPU by path for means of `active` neurons per token and of `union`.

        `union`: of blocks of 64 consecutive tokens, or of all tokens where there are fewer. Linear
        in the activity, and in log time over log tokens; proportional to tokens beyond the largest
        measured number. A sparse path is left out where neither this activity nor a higher one was
        measured, and below its smallest measured number of tokens; decode also above its largest.
        """
        times = {}
        for path, curves in self._curves.items():
            x = self._work(path, active, union)
            above = min(bisect_left(curves, num_tokens, key=itemgetter(0)), len(curves) - 1)
            near = curves[max(above - 1, 0) : above + 1]
            ms_at = [np.interp(x, *curve, right=math.nan) for _, curve in near]
            # Not np.log, which may round otherwise: a measured number of tokens has to be found.
            sizes = [math.log(tokens) for tokens, _ in near]
            ms = math.exp(np.interp(math.log(num_tokens), sizes, np.log(ms_at)))
            (fewest, _), (most, _) = curves[0], curves[-1]
            ms *= max(num_tokens / most, 1)
            known = not math.isnan(ms) and num_tokens >= fewest
            known &= path != "decode" or num_tokens <= min(most, DECODE_CHUNK)
            if path == "dense" or known:
                times[path] = ms
        return times

    def _floor(self, path: str, num_tokens: float, situation: str) -> float:
        """Return the least ms of a path, the time of Python: constant beyond those measured."""
        floors = self._floors.get((situation, path))
        return math.exp(np.interp(math.log(num_tokens), *floors)) if floors else 0.0

    def choices(self, num_tokens: float, active: float, union: float) -> dict[str, str]:
        """Return the fastest path by situation, dense unless a sparse one wins by the margin."""
        gpu, paths = self.predict(num_tokens, active, union), {}
        for situation in SITUATIONS:
            host = {path: self._floor(path, num_tokens, situation) for path in gpu}
            of_host, of_gpu = HOST_SHARES[situation]
            most = max(of_host * host["dense"], of_gpu * gpu["dense"])
            fits = [path for path in gpu if path == "dense" or host[path] <= most]
            times = {path: max(gpu[path], host[path]) for path in fits}
            best = min(times, key=times.get)
            wins = times[best] <= (1 - self.margin) * times["dense"]
            paths[situation] = best if wins else "dense"
        return paths

    def scaled(self, hidden_size: int, intermediate_size: int, gated: bool) -> Calibration:
        """Return these times for another layer: the same time for the same operations.

        A layer with half the weights gets the time of half the tokens, and dense its floor. One
        token keeps its time in a smaller layer: it waits for memory and launches, not for
        operations. Floors of sparse paths keep their tokens in any layer, since the launches do.
        Activity scales with N. A non-gated layer has no up projection: dense saves a third, a
        sparse path half of its time after the gate.
        """
        if gated and not self.gated:
            raise ValueError("times of a non-gated layer say nothing about a gated one")
        size = hidden_size * intermediate_size / (self.hidden_size * self.intermediate_size)

        def neurons(number: float) -> float:
            # Multiply before dividing: N active neurons stay N.
            return number * intermediate_size / self.intermediate_size

        def without_up(p: Point) -> dict[str, float]:
            if gated == self.gated:
                return dict(p.ms)
            gate = p.ms.get("dense", self.predict(p.tokens, p.active, p.union)["dense"]) / 3
            return {
                path: 2 * gate if path == "dense" else min(ms, (gate + ms) / 2)
                for path, ms in p.ms.items()
            }

        times = tuple(
            Point(
                p.tokens if p.tokens == 1 and size < 1 else p.tokens / size,
                neurons(p.active),
                neurons(p.union),
                without_up(p),
            )
            for p in self.times
        )
        return dataclasses.replace(
            self,
            device=f"{self.device}, scaled from {_kind(*self._shape)}",
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            gated=gated,
            times=times,
            floors=tuple(
                Floor(f.situation, f.tokens / size if path == "dense" else f.tokens, {path: ms})
                for f in self.floors
                for path, ms in f.ms.items()
            ),
            margin=SCALED_MARGIN,
            training=None if self.training is None else neurons(self.training),
        )


_LISTS = {"times": Point, "floors": Floor}  # fields that are lists in files


def crossing(levels: Sequence[tuple[float, float]]) -> float:
    """Return the x at which a curve first falls below 1.

    levels: its points (x, y), x rising, all numbers above 0. Between two points the curve is linear
    in the logarithms of both. Without a fall: the last x if the curve ends at 1 or above, else 0.
    """
    for (x, y), (next_x, next_y) in pairwise(levels):
        if y >= 1 > next_y:
            start, above, below = math.log(x), math.log(y), math.log(next_y)
            return math.exp(start + (math.log(next_x) - start) * above / (above - below))
    x, y = levels[-1]
    return x if y >= 1 else 0.0


def _kind(hidden_size: int, intermediate_size: int, gated: bool) -> str:
    return f"hidden_size={hidden_size}, intermediate_size={intermediate_size}, gated={gated}"


@cache
def default(
    hidden_size: int,
    intermediate_size: int,
    gated: bool,
    quantized: bool = False,
    device_name: str = "",
) -> Calibration:
    """Return the times that ship with the package for a card, scaled to layers of other sizes.

    They were measured with K = 2048: gated with N = 5632, in bf16 and in FP8; without a gate in
    bf16, with N = 8192 or, on an H100, 5632. device_name: as torch.cuda.get_device_name gives it.
    """
    kind = "_fp8" if quantized else "" if gated else "_non_gated"
    card = next((f"_{card.lower()}" for card in CARDS if card in device_name), "")
    file = Path(__file__).with_name(f"default_calibration{kind}{card}.json")
    times, shape = Calibration.load(file), (hidden_size, intermediate_size, gated)
    return times if (times._shape, times.device) == (shape, device_name) else times.scaled(*shape)
