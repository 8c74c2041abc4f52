"""The times that "auto" chooses by, and a check of its choices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from operator import truediv
from pathlib import Path

import torch

from twell import results
from twell.measure import clock
from twell.measure.case import GRAPH_TOKENS, WEIGHT_SETS, Call, Case, check_sizes, in_mode
from twell.measure.check import Exact
from twell.measure.float8 import Quantized
from twell.measure.layer import checked
from twell.measure.patterns import EVEN, SKEWED, Pattern, synthetic_layer
from twell.measure.providers import DENSE_COMPILED, DENSE_FP8
from twell.sparse import reference
from twell.sparse.calibration import COMPILED, EAGER, FLOAT8, GRAPH, Calibration, Floor
from twell.sparse.plan import WAITING

CALIBRATION_TOKENS = 1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16384, 131072
BEHIND = 2  # a path that takes so many times dense's time is not followed to higher activity
# Where a call may wait for Python: up to 4 tokens, up to 512, and more take different kernels.
FLOOR_TOKENS = 1, 2, 4, 8, 512, 2048
CHECKED_TOKENS = 8, 512, 8192
FLOOR_ROUNDS = 4
CHECKED_CALLS = 8, 512, 2048  # of eager and of compiled calls
CHECKED_ACTIVE = 20, 200
PLANNED_ACTIVE = 29


def calibration_levels(intermediate_size: int) -> list[int]:
    """Return the mean active neurons to time: 1 to 1,000 in steps of three, N / 2 and N."""
    half = intermediate_size // 2
    low = {level for level in (1, 10, 30, 100, 300, 1000) if level < half}
    return sorted(low | {max(half, 1), intermediate_size})


@torch.no_grad()
def calibrate(
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    gated: bool = True,
    quantized: bool = False,
    out: str | Path,
    tokens: Sequence[int] = CALIBRATION_TOKENS,
) -> Calibration:
    """Time the kernels' dense path and each sparse one, and save what "auto" chooses by.

    The layer is in bf16, or with `quantized` in FP8, its activity skewed, from one neuron per token
    to all; `out` is the JSON file. Calls that may wait for Python are timed eager and compiled too,
    without a CUDA graph. Then "auto" is compared with dense torch.compile, in FP8 with the faster
    of it and dense FP8, at sizes between those measured, in each situation, and on inputs unlike
    those it observed; the worst of each is printed. About two minutes on an H200.
    Training is not part of it: see `crossover`. Raises as `ffn` does, and FileNotFoundError where
    the folder of `out` does not exist. Ours.
    """
    gpu = clock.Gpu()
    check_sizes(tokens, hidden_size, intermediate_size)
    out = Path(out)
    if not out.parent.is_dir() or out.is_dir():
        raise FileNotFoundError(f"{out} cannot be written: name a file in a folder that exists")
    layers = Layers(gpu, hidden_size, intermediate_size, gated, quantized)
    rows = [row for num_tokens in tokens for row in layers.times(num_tokens)]
    few = [number for number in FLOOR_TOKENS if number <= max(tokens)]
    floors = tuple(floor for num_tokens in few for floor in layers.floors(num_tokens))
    origin = results.provenance()
    calibration = Calibration.fit(
        rows,
        device=origin["device"],
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        gated=gated,
        dtype=FLOAT8 if quantized else "bfloat16",
        versions="; ".join(f"{name} {version}" for name, version in origin["versions"].items()),
        date=origin["date"],
        floors=floors,
    )
    calibration.save(out)
    print(f"{out}: {len(rows)} times", flush=True)
    layers.check_choices(calibration)
    return calibration


class Layers:
    """Layers of one size, to be timed at any number of tokens and activity."""

    def __init__(
        self,
        gpu: clock.Gpu,
        hidden_size: int,
        intermediate_size: int,
        gated: bool,
        quantized: bool = False,
    ):
        self.gpu, self.size, self.gated = gpu, (hidden_size, intermediate_size), gated
        self.quantized = quantized

    def case(self, num_tokens: int, active: float, pattern: Pattern = SKEWED) -> Case:
        options = {"active": active, "pattern": pattern, "device": self.gpu.device}
        inputs = synthetic_layer(num_tokens, *self.size, **options)
        sets = WEIGHT_SETS if num_tokens <= GRAPH_TOKENS else 1
        return Case.of(pattern.kind, inputs, self.gated, sets)

    def milliseconds(
        self,
        case: Case,
        name: str,
        calls: list[Call],
        exact: tuple[Exact, *tuple[float, ...]],
        mode: str | None = None,
        quantile: str = "p50",
    ) -> float:
        """Return a quantile of the calls after a check, by default in the mode that `ffn` takes."""
        mode = mode or ("graph" if len(case.x) <= GRAPH_TOKENS else "stream")
        _, times, _ = checked(self.gpu, exact, f"{name} at {case}", calls, mode)
        return clock.quantiles(times(clock.CALIBRATION_TURN))[quantile]

    def times(self, num_tokens: int) -> list[dict]:
        """Return rows of tokens, active, union, path and p50 for each level of activity."""
        rows, behind = [], set()
        for active in calibration_levels(self.size[1]):
            case, times = self.case(num_tokens, active), {}
            side = self._side(case)
            for path in case.paths():  # dense comes first
                if path not in behind:
                    times[path] = self.milliseconds(
                        case, path, side.path_calls(path), self._exact(side)
                    )
                    if times[path] > BEHIND * times["dense"]:
                        behind.add(path)
            columns = {name: case.columns[name] for name in ("tokens", "active", "union")}
            rows += [columns | {"path": path, "p50": p50} for path, p50 in times.items()]
            speeds = "  ".join(f"{path} {p50:.4f}" for path, p50 in times.items())
            print(f"{case}  {speeds}", flush=True)
        return rows

    def floors(self, num_tokens: int) -> list[Floor]:
        """Return the times of eager and of compiled calls of a layer with hardly any activity."""
        case = self.case(num_tokens, 1)
        side = self._side(case)
        layer, floors = side.auto_layers()[0], []
        for situation in (EAGER, COMPILED):
            call = functools.partial(in_mode(layer, situation), case.x)
            calls, times = [call] * WEIGHT_SETS, {}  # in a row: the clock's own work counts once
            # In turns, and the least of all: other work on the host slows every path for a while.
            for _, path in product(range(FLOOR_ROUNDS), case.paths()):
                waits = path == "dense" and (situation == COMPILED or num_tokens <= WAITING)
                by_torch = waits and not self.quantized  # as "auto" calls it
                layer.path, layer.backend = path, "dense" if by_torch else "triton"
                name, exact = f"{path}, {situation},", self._exact(side)
                ms = self.milliseconds(case, name, calls, exact, situation, "p20")
                times[path] = min(ms, times.get(path, ms))
            floors.append(Floor(situation, num_tokens, times))
            speeds = "  ".join(f"{path} {ms:.4f}" for path, ms in times.items())
            print(f"{case}  {situation:<8}  {speeds}", flush=True)
        torch.compiler.reset()  # compiled anew for each path, up to a limit
        return floors

    def _side(self, case: Case) -> Case | Quantized:
        """The case in the precision of these layers."""
        return Quantized(case) if self.quantized else case

    def _exact(self, side: Case | Quantized) -> tuple[Exact]:
        return (side.sparse if self.quantized else side.exact,)

    def _dense(
        self, case: Case, side: Case | Quantized, compiled, mode: str | None = None
    ) -> float:
        """Return ms of dense torch.compile; of FP8 layers, of the faster of bf16 and FP8."""
        calls, quantile = case.calls(compiled, plain=True), "p50"
        if mode:
            calls, quantile = case.dense_calls("compiled"), "p20"
        how = mode, quantile
        dense = self.milliseconds(case, DENSE_COMPILED.name, calls, (case.exact,), *how)
        if self.quantized:
            calls = side.dense_calls()[DENSE_FP8]
            exact = side.exact(DENSE_FP8)
            dense = min(dense, self.milliseconds(case, DENSE_FP8.name, calls, exact, *how))
        return dense

    def check_choices(self, calibration: Calibration) -> dict[str, float]:
        """Time "auto" where nothing was calibrated; print and return the worst ratios to dense.

        Dense is torch.compile. "alike": the layer knows the activity of its inputs. "even": it
        does, and they are even, where skewed ones were calibrated. "busier": it was planned for 29
        active neurons and all are active, before it can notice. "eager" and "compiled": calls of
        layers, and of dense torch.compile, one after the other.
        """
        compiled = torch.compile(reference.ffn, fullgraph=True, dynamic=False)
        worst = self._check_calls(calibration, compiled)
        worst |= {"alike": 0.0, "even": 0.0, "busier": 0.0}
        n = self.size[1]
        planned = min(PLANNED_ACTIVE, n)
        for tokens in CHECKED_TOKENS:
            situation = GRAPH if tokens <= GRAPH_TOKENS else EAGER
            known = self._side(self.case(tokens, planned))
            plan = known.auto_layers(calibration)[0].chooser.path(tokens, situation)
            full = self.case(tokens, n)
            alike = [self.case(tokens, active) for active in CHECKED_ACTIVE if active < n]
            for kind, case in (
                *(("alike", case) for case in (*alike, full)),
                ("even", self.case(tokens, planned, EVEN)),
                ("busier", full),
            ):
                side = self._side(case)
                layers = side.auto_layers(calibration)
                path = layers[0].chooser.path(tokens, situation)
                path = plan if kind == "busier" else path
                calls = [functools.partial(layer, case.x) for layer in layers]
                if kind == "busier":
                    calls = side.path_calls(path)
                ratio = self.milliseconds(case, f"auto ({path})", calls, self._exact(side))
                ratio /= self._dense(case, side, compiled)
                worst[kind] = max(ratio, worst[kind])
                choice = f"auto took {path:<7} {ratio:.2f} of the time of torch.compile"
                print(f"{case}  {kind:<6} {choice}", flush=True)
        torch.compiler.reset()
        print(
            f"worst against dense torch.compile: {worst['alike']:.2f} of its time with the "
            f"activity known, {worst['even']:.2f} with even activity, {worst['busier']:.2f} "
            f"planned for {PLANNED_ACTIVE} active neurons with all active; {worst[EAGER]:.2f} "
            f"in eager and {worst[COMPILED]:.2f} in compiled calls one after the other",
            flush=True,
        )
        return worst

    def _check_calls(self, calibration: Calibration, compiled) -> dict[str, float]:
        """The worst ratios to dense of calls one after the other, with the activity known."""
        worst = {EAGER: 0.0, COMPILED: 0.0}
        for tokens, situation in product(CHECKED_CALLS, worst):
            case = self.case(tokens, min(PLANNED_ACTIVE, self.size[1]))
            side = self._side(case)
            layers = side.auto_layers(calibration)
            path = layers[0].chooser.path(tokens, situation)
            calls = [functools.partial(in_mode(layer, situation), case.x) for layer in layers]
            auto = case, f"auto ({path})", calls, self._exact(side), situation, "p20"
            pairs = [  # in turns, as in `floors`
                (self.milliseconds(*auto), self._dense(case, side, compiled, situation))
                for _ in range(FLOOR_ROUNDS)
            ]
            ratio = truediv(*map(min, zip(*pairs, strict=True)))
            worst[situation] = max(ratio, worst[situation])
            print(
                f"{case}  {situation:<8} auto took {path:<7} {ratio:.2f} of the time of "
                "torch.compile",
                flush=True,
            )
            torch.compiler.reset()
        return worst
