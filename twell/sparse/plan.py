"""Which path computes a layer: measured times, the activity that was seen, and the choice between
the paths.

A sparse path is fast or slow by the inputs it meets: row-wise work grows with the active neurons of
a token, work by unions with the neurons that any token of a block has active, and dense work with
neither. `Calibration` holds times measured on one device and predicts from them; `Chooser` belongs
to one layer, keeps count of its activity without ever waiting for the device, and says which path a
number of tokens takes. The choice concerns speed alone: every path is exact for every input.
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# What each path's time depends on besides the number of tokens.
DEPENDS_ON = {"dense": None, "rowwise": "active", "union": "union", "decode": "union"}
# A sparse path has to be predicted so much faster than dense. Two measurements of the same call
# differ by 1 to 2%, and where the two are this close a wrong choice for sparse costs more than is
# to be won.
MARGIN = 0.03
# Times that were scaled from another layer's, and perhaps are another device's, say less.
SCALED_MARGIN = 0.10
# Tokens of a block whose active neurons are counted as one union, as in the kernels.
BLOCK = 64

# What is assumed without a calibration: one of an H200, K = 2048, N = 5632, gated.
DEFAULT = Path(__file__).with_name("default_calibration.json")


@dataclass(frozen=True)
class Point:
    """Times of one case: ms by path at `tokens` with a mean of `active` neurons and unions of a
    mean of `union`.
    """

    tokens: float
    active: float
    union: float
    ms: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Times of the paths of one layer on one device, and the choice that follows from them. Ours.

    Args:
        device: its name, as torch gives it. hidden_size, intermediate_size, gated: the layer, K, N
        and kind. dtype: of weights and inputs. versions, date: of the measurement, for the reader.
        times: one Point for each case; every calibration has dense times. expected: mean active
        neurons and mean union of 64 tokens of the model that was calibrated: what a layer
            assumes until it has seen its own. None: it starts densely.
        margin: by how much a sparse path has to be predicted faster than dense to be chosen, as a
        fraction. training: mean active neurons per token below which a sparse training step is
        faster than a dense one. None: a
            sparse one never is.

    Raises ValueError for a size below 1, a time that is not positive, and other values that cannot
    be.
    """

    device: str
    hidden_size: int
    intermediate_size: int
    gated: bool
    dtype: str
    versions: str
    date: str
    times: tuple[Point, ...]
    expected: tuple[float, float] | None = None
    margin: float = MARGIN
    training: float | None = None

    def __post_init__(self):
        for name in ("hidden_size", "intermediate_size"):
            _require(
                isinstance(size := getattr(self, name), int) and size >= 1,
                name,
                size,
                "an integer from 1",
            )
        _require(isinstance(self.gated, bool), "gated", self.gated, "true or false")
        _require(
            _is_number(self.margin) and 0 <= self.margin < 1,
            "margin",
            self.margin,
            "0 or more and below 1",
        )
        if self.expected is not None:
            pair = isinstance(self.expected, tuple) and len(self.expected) == 2
            good = pair and all(
                _is_number(value) and 0 <= value <= self.intermediate_size
                for value in self.expected
            )
            _require(
                good, "expected", self.expected, f"two numbers from 0 to {self.intermediate_size}"
            )
        if self.training is not None:
            good = _is_number(self.training) and 0 <= self.training <= self.intermediate_size
            _require(
                good, "training", self.training, f"a number from 0 to {self.intermediate_size}"
            )
        for point in self.times:
            _require(
                _is_number(point.tokens) and point.tokens > 0,
                "tokens",
                point.tokens,
                "a number above 0",
            )
            for name in ("active", "union"):
                value = getattr(point, name)
                good = _is_number(value) and 0 <= value <= self.intermediate_size
                _require(good, name, value, f"a number from 0 to {self.intermediate_size}")
            _require(isinstance(point.ms, Mapping), "ms", point.ms, "times by path")
            for path, ms in point.ms.items():
                _require(path in DEPENDS_ON, "a path", path, f"one of {', '.join(DEPENDS_ON)}")
                _require(_is_number(ms) and ms > 0, f"the time of {path!r}", ms, "a number above 0")
        _require(
            any("dense" in point.ms for point in self.times), "times", "without dense ones", "some"
        )

    def __deepcopy__(self, memo: dict) -> Calibration:
        return self  # never changes

    # --- from measurements, from and to files

    @classmethod
    def fit(cls, rows: Iterable[Mapping[str, Any]], **about: Any) -> Calibration:
        """Return the calibration that measured rows give; `about` are the other fields.

        Rows have tokens, active, union, path and p50 (ms). Rows of a `provider` that is not the
        layer's own ("dense eager", "dense torch.compile", "auto") are left out; of several for one
        case the median counts.
        """
        cases: dict[tuple[int, float, float], dict[str, list[float]]] = {}
        for row in rows:
            if row.get("provider") not in ("dense eager", "dense torch.compile", "auto"):
                case = int(row["tokens"]), float(row["active"]), float(row["union"])
                cases.setdefault(case, {}).setdefault(row["path"], []).append(float(row["p50"]))
        times = tuple(
            Point(*case, {path: median(times) for path, times in paths.items()})
            for case, paths in sorted(cases.items())
        )
        return cls(times=times, **about)

    def save(self, path: str | Path) -> None:
        """Write the calibration as JSON, one case a line."""
        fields = asdict(self)
        times = ",\n    ".join(json.dumps(point) for point in fields.pop("times"))
        text = json.dumps(fields, indent=2).removesuffix("\n}")
        Path(path).write_text(f'{text},\n  "times": [\n    {times}\n  ]\n}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a calibration that `save` wrote. Raises ValueError, with the file and what is wrong
        in it.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(fields, dict) or not isinstance(fields.get("times"), list):
                raise ValueError("it has no list 'times'")
            fields["times"] = tuple(_made(Point, point, "times") for point in fields["times"])
            if isinstance(fields.get("expected"), list):
                fields["expected"] = tuple(fields["expected"])
            return _made(cls, fields, "the file")
        except (ValueError, UnicodeDecodeError) as problem:
            reason = (
                f"it is not JSON ({problem})"
                if isinstance(problem, json.JSONDecodeError)
                else problem
            )
            raise ValueError(f"{path} is no calibration: {reason}") from None

    def check_shape(self, hidden_size: int, intermediate_size: int, gated: bool) -> None:
        """Raise ValueError unless the calibration is one for layers of this kind."""
        own, other = (
            (self.hidden_size, self.intermediate_size, self.gated),
            (hidden_size, intermediate_size, gated),
        )
        if own != other:
            raise ValueError(
                f"the calibration is for {_kind(*own)}; this layer has {_kind(*other)}"
            )

    # --- the choice

    @cached_property
    def _curves(self) -> dict[str, list[tuple[float, list[tuple[float, float]]]]]:
        """For each path, by rising tokens, a curve: pairs (what the time depends on, ms), rising
        too.
        """
        found: dict[str, dict[float, dict[float, list[float]]]] = {}
        for point in self.times:
            for path, ms in point.ms.items():
                x = getattr(point, DEPENDS_ON[path]) if DEPENDS_ON[path] else 0.0
                found.setdefault(path, {}).setdefault(point.tokens, {}).setdefault(x, []).append(ms)
        return {
            path: [
                (tokens, [(x, median(ms)) for x, ms in sorted(curve.items())])
                for tokens, curve in sorted(by.items())
            ]
            for path, by in found.items()
        }

    def predict(self, num_tokens: float, active: float, union: float) -> dict[str, float]:
        """Return ms by path for so many tokens, a mean of `active` neurons per token and unions of
        a mean of `union`.

        `union`: of blocks of 64 consecutive tokens, of all tokens where there are fewer. Linear in
        the activity and in log tokens, log time; in proportion to tokens beyond the most that were
        measured. Of sparse paths only those are given that were measured at this activity or above,
        and at as few tokens: what lies outside is not known.
        """
        at = {None: 0.0, "active": active, "union": union}
        times = {
            path: _interpolate(curves, num_tokens, at[DEPENDS_ON[path]])
            for path, curves in self._curves.items()
        }
        fewest = {path: curves[0][0] for path, curves in self._curves.items()}
        return {
            path: ms
            for path, ms in times.items()
            if path == "dense" or (ms is not None and num_tokens >= fewest[path])
        }

    def choose(self, num_tokens: float, active: float, union: float) -> str:
        """Return the fastest path by `predict`; a sparse one only where it beats dense by the
        margin.
        """
        times = self.predict(num_tokens, active, union)
        best = min(times, key=times.get)
        return best if times[best] <= (1 - self.margin) * times["dense"] else "dense"

    def scaled(self, hidden_size: int, intermediate_size: int, gated: bool) -> Calibration:
        """Return what these times suggest for another layer: the same time for the same
        floating-point operations.

        So a layer with half the weights needs twice the tokens for it. Activity counts as a share
        of N. A non-gated layer has no up projection: dense saves a third, a sparse path half of
        what it does after the gate.
        """
        if gated and not self.gated:
            raise ValueError("times of a non-gated layer say nothing about a gated one")
        wider = hidden_size * intermediate_size / (self.hidden_size * self.intermediate_size)
        own, other = (
            self.intermediate_size,
            intermediate_size,
        )  # multiplied before divided, so that all of N stays all of N

        def halve(ms: Mapping[str, float]) -> dict[str, float]:
            if gated == self.gated:
                return dict(ms)
            gate = ms["dense"] / 3
            return {
                path: 2 * gate if path == "dense" else min(time, (gate + time) / 2)
                for path, time in ms.items()
            }

        times = tuple(
            Point(p.tokens / wider, p.active * other / own, p.union * other / own, halve(p.ms))
            for p in self.times
        )
        return Calibration(
            device=f"{self.device}, scaled from {_kind(self.hidden_size, self.intermediate_size, self.gated)}",
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            gated=gated,
            dtype=self.dtype,
            versions=self.versions,
            date=self.date,
            times=times,
            margin=SCALED_MARGIN,
            training=None if self.training is None else self.training * other / own,
        )


def _interpolate(
    curves: list[tuple[float, list[tuple[float, float]]]], tokens: float, x: float
) -> float | None:
    """ms at (tokens, x), or None where x is above all that was measured at the tokens on either
    side.
    """
    place = bisect_left(curves, tokens, key=lambda curve: curve[0])
    if place == len(curves):
        last, curve = curves[-1]
        ms = _at(curve, x)
        return None if ms is None else ms * tokens / last
    high, curve = curves[place]
    above = _at(curve, x)
    if place == 0 or high == tokens or above is None:
        return above
    low, curve = curves[place - 1]
    below = _at(curve, x)
    if below is None:
        return None
    share = math.log(tokens / low) / math.log(high / low)
    return below ** (1 - share) * above**share


def _at(curve: list[tuple[float, float]], x: float) -> float | None:
    """ms at x: linear between the points, that of the first below it, None above the last."""
    place = bisect_left(curve, x, key=lambda point: point[0])
    if place == len(curve):
        return None
    high, above = curve[place]
    if place == 0:
        return above
    low, below = curve[place - 1]
    return below + (above - below) * (x - low) / (high - low)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(good: bool, name: str, value: Any, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}; expected {wanted}")


def _made(kind: type, fields: Any, where: str) -> Any:
    """An object of a dataclass from a dict; ValueError for fields that are missing or unknown."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where} holds {fields!r}; expected an object")
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name, field in known.items():
        if name not in fields and field.default is dataclasses.MISSING:
            raise ValueError(f"{where} has no field {name!r}")
    for name in fields:
        if name not in known:
            raise ValueError(f"{where} has an unknown field {name!r}")
    return kind(**fields)


def _kind(hidden_size: int, intermediate_size: int, gated: bool) -> str:
    return f"hidden_size={hidden_size}, intermediate_size={intermediate_size}, gated={gated}"


@cache
def default(hidden_size: int, intermediate_size: int, gated: bool) -> Calibration:
    """Return what is assumed about a layer of this kind without a calibration: that of DEFAULT,
    scaled.
    """
    return Calibration.load(DEFAULT).scaled(hidden_size, intermediate_size, gated)


# --- one layer's choice
# -----------------------------------------------------------------------------------------

# Numbers of tokens at which a plan is made; the entry for P serves P / 2 + 1 to P tokens.
POWERS = tuple(2**n for n in range(21))
# Observations are kept apart by the number of tokens in a call, up to these: the union of a block
# depends on how many tokens stand in it, and reading a prompt differs from writing.
CLASSES = tuple(2**n for n in range(BLOCK.bit_length()))

# What watching costs, in tokens. On an H200 a layer of the paper's width takes 0.1 us a token, and
# no call less than some 50 us, as many as SMALLEST_CALL tokens.
# - Reading: one copy of 224 bytes and one event, about 10 us of the host's time, once in READ_EVERY
#   tokens = 1.6 ms,   which is every 32nd small call: 0.6%.
# - Probing: the gate of at most 1,024 tokens and a dozen small kernels, 60 to 100 us, once in
#   PROBE_EVERY tokens   = 13 ms, which is every 256th small call: under 0.8%.
SMALLEST_CALL = 512
READ_EVERY = 2**14
PROBE_EVERY = 2**17
PROBE_BLOCKS = 1024 // BLOCK
# Plans are made anew when an observation differs from the one behind the plan by this factor: code
# compiled for a plan is compiled again for another.
NOTICEABLE = 1.2


class Chooser:
    """Chooses the path of one layer for every number of tokens, from a calibration and from what
    the layer saw. Ours.

    `plan` says it all: pairs (most tokens, path) in rising order, the last for any number above
    too. Code which torch.compile made for a number of tokens notices when these take another path,
    and is compiled again; layers whose plans differ for other numbers share it. `observed` holds
    the newest mean of active neurons per token and of neurons in a block's union; None at first.
    While nothing was observed, and the calibration expects nothing, the plan is dense.

    Counters are int64 [4] for each of CLASSES, on the layer's device; the kernels add to them. Now
    and then they are copied to the host, and whichever later call finds the copy complete uses it;
    no call waits. What was added since the copy before is the newest window, and it alone decides:
    older activity is forgotten. Copies and pickles of a chooser keep its plan and start with
    counters of their own.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, gated: bool):
        self.shape = hidden_size, intermediate_size, gated
        self.observed: tuple[float, float] | None = None
        self._calibration: Calibration | None = None
        self._known: dict[
            int, tuple[float, float]
        ] = {}  # by class: the observations behind the plan
        self._choices: dict[
            int, tuple[tuple[float, float] | None, str]
        ] = {}  # by power: observation and path
        self.plan: tuple[tuple[int, str], ...] = ()
        self._paths: list[
            str
        ] = []  # the same by power; of a list torch.compile guards what it read, of a tuple all
        self._forget_counters()
        self._make_plan()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_counters", "_copy")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_counters()

    @property
    def calibration(self) -> Calibration | None:
        """The measured times; None: `default`. Raises ValueError for a calibration of other layers."""
        return self._calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        if calibration is not None:
            calibration.check_shape(*self.shape)
        self._calibration = calibration
        self._choices.clear()
        self._make_plan()

    def observe(self, active: float, union: float, tokens: int = BLOCK) -> None:
        """Plan for a mean of `active` neurons per token and of `union` in blocks of `tokens` (1 to
        64) tokens.

        In place of all that was observed before. Later calls of the layer observe for themselves
        again.
        """
        size = self.shape[1]
        for name, value in (("active", active), ("union", union)):
            _require(
                _is_number(value) and 0 <= value <= size, name, value, f"a number from 0 to {size}"
            )
        _require(
            isinstance(tokens, int) and 1 <= tokens <= BLOCK,
            "tokens",
            tokens,
            f"an integer from 1 to {BLOCK}",
        )
        self.observed = active, union
        self._known = {CLASSES[_class(tokens)]: self.observed}
        self._make_plan()

    def path(self, num_tokens: int) -> str:
        """Name of the path that so many tokens take."""
        place = 0
        while place + 1 < len(POWERS) and num_tokens > POWERS[place]:
            place += 1
        return self._paths[place]

    # --- the plan

    def _make_plan(self) -> None:
        calibration = self._calibration or default(*self.shape)
        activities = {size: self._activity(size, calibration) for size in CLASSES}
        plan: list[tuple[int, str]] = []
        for power in POWERS:
            activity = activities[min(power, BLOCK)]
            if power not in self._choices or self._choices[power][0] != activity:
                path = "dense" if activity is None else calibration.choose(power, *activity)
                self._choices[power] = activity, path
            path = self._choices[power][1]
            if plan and plan[-1][1] == path:
                plan.pop()
            plan.append((power, path))
        self.plan = tuple(plan)
        self._paths = [self._choices[power][1] for power in POWERS]

    def _activity(self, size: int, calibration: Calibration) -> tuple[float, float] | None:
        """Active neurons and union to expect in calls of a class; None when nothing is known."""
        known = self._known
        if not known and calibration.expected is not None:
            known = {BLOCK: calibration.expected}
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
        if active == 0:
            return active, union
        return active, active * (union / active) ** (math.log(size) / math.log(larger))

    # --- counting and reading; never while torch.compile traces or a stream is captured

    def _forget_counters(self) -> None:
        self._counters: Tensor | None = None
        self._read = [[0] * 4 for _ in CLASSES]  # the totals up to the newest window
        self._copy: tuple[Tensor, Callable[[], bool]] | None = (
            None  # under way, and whether it arrived
        )
        self._changed = False  # since the last copy
        self._unread, self._unprobed = READ_EVERY, PROBE_EVERY  # the first is due at once

    def counters(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the int64 tensor [4] to which a call of so many tokens adds, as the kernels'
        operators define it.
        """
        if self._counters is None or self._counters.device != device:
            self._forget_counters()
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._counters = torch.zeros(len(CLASSES), 4, dtype=torch.int64, device=device)
        self._changed = True
        return self._counters[_class(num_tokens)]

    def update(self, num_tokens: int) -> None:
        """Take notice of a copy that arrived, and begin the next when it is time; called before
        each call's choice.
        """
        work = max(num_tokens, SMALLEST_CALL)
        self._unread += work
        self._unprobed += work
        if self._copy is None and self._changed and self._unread >= READ_EVERY:
            self._copy = _begin_copy(self._counters)
            self._changed, self._unread = False, 0
        if self._copy is not None and self._copy[1]():
            totals, self._copy = self._copy[0].tolist(), None
            self._notice(
                [
                    [b - a for a, b in zip(*pair, strict=True)]
                    for pair in zip(self._read, totals, strict=True)
                ]
            )
            self._read = totals

    def _notice(self, window: list[list[int]]) -> None:
        most, noticed = 0, False
        for size, (tokens, blocks, active, union) in zip(CLASSES, window, strict=True):
            if tokens == 0:
                continue
            new = active / tokens, union / blocks
            old = self._known.get(size)
            if old is None or any(_differ(*pair) for pair in zip(old, new, strict=True)):
                self._known[size] = new
                noticed = True
            if tokens > most:
                most, self.observed = tokens, new
        if noticed:
            self._make_plan()

    def probe(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Count the activity of some of the tokens x [M, K] when it is time: on the dense path
        nothing else does.

        `weight` [N, K] and `bias` are the gate's, in a non-gated layer up's. Blocks of 64
        consecutive tokens from the whole batch, 16 at most; all tokens where there are fewer than
        64.
        """
        if self._unprobed < PROBE_EVERY:
            return
        count_activity(sampled_blocks(x), weight, bias, self.counters(len(x), x.device))
        self._unprobed = 0


def sampled_blocks(x: Tensor) -> Tensor:
    """Return up to 16 blocks of 64 consecutive tokens of x [M, K], as [blocks, 64, K]; M < 64: all,
    [1, M, K].
    """
    num_blocks = len(x) // BLOCK
    if num_blocks == 0:
        return x[None]
    # An odd step: sequences mostly have a power of two of tokens, and their first ones are more
    # active than others.
    step = max(num_blocks // PROBE_BLOCKS - 1, 0) | 1
    return x[: num_blocks * BLOCK].view(num_blocks, BLOCK, -1)[::step][:PROBE_BLOCKS]


@torch.no_grad()
def count_activity(blocks: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor) -> None:
    """Add tokens, blocks, active entries and entries of unions of `blocks` [B, T, K] to `counters`,
    without waiting.
    """
    active = F.relu(F.linear(blocks, weight, bias)) != 0
    # Numbers of the host are arguments of a kernel here; as a tensor they would have to be copied.
    counters[0] += active.shape[0] * active.shape[1]
    counters[1] += active.shape[0]
    counters[2] += active.sum()
    counters[3] += active.any(1).sum()


def _begin_copy(counters: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy on the host that will be complete once the second result says so."""
    if not counters.is_cuda:
        return counters.clone(), lambda: True
    copy = torch.empty(counters.shape, dtype=counters.dtype, pin_memory=True)
    copy.copy_(counters, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(counters.device))
    return copy, arrived.query


def _class(num_tokens: int) -> int:
    """Place in CLASSES of calls with so many tokens."""
    return min((num_tokens - 1).bit_length(), len(CLASSES) - 1)


def _differ(old: float, new: float) -> bool:
    """Whether the numbers differ noticeably; the 1 is for those near zero."""
    return not 1 / NOTICEABLE <= (new + 1) / (old + 1) <= NOTICEABLE
