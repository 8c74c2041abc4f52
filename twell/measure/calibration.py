"""The times that "auto" chooses by, and a check of its choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from twell import results
from twell.measure import runner
from twell.measure.case import GRAPH_TOKENS, WEIGHT_SETS, Case, check_sizes
from twell.measure.layer import LayerBench
from twell.measure.patterns import EVEN, SKEWED, Pattern, synthetic_layer
from twell.measure.providers import DENSE_COMPILED, DENSE_FP8, FP8, Provider
from twell.measure.runner import bench
from twell.sparse.calibration import COMPILED, EAGER, FLOAT8, GRAPH, Calibration, Floor
from twell.sparse.plan import WAITING

CALIBRATION_TOKENS = 1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16384, 131072
BEHIND = 2  # a path that takes so many times dense's time is not followed to higher activity
# Where a call may wait for Python: up to 4 tokens, up to 512, and more take different kernels.
FLOOR_TOKENS = 1, 2, 4, 8, 512, 2048
CHECKED_TOKENS = 8, 512, 8192
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
    those it observed; the worst of each is printed. About two minutes on an H100.
    Training is not part of it: see `crossover`. Raises as `ffn` does, and FileNotFoundError where
    the folder of `out` does not exist. Ours.
    """
    gpu = runner.Gpu()
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
        gpu: runner.Gpu,
        hidden_size: int,
        intermediate_size: int,
        gated: bool,
        quantized: bool = False,
    ):
        self.gpu, self.size, self.gated = gpu, (hidden_size, intermediate_size), gated
        self.precision = FP8 if quantized else None

    def case(
        self,
        num_tokens: int,
        active: float,
        pattern: Pattern = SKEWED,
        calibration: Calibration | None = None,
    ) -> Case:
        options = {"active": active, "pattern": pattern, "device": self.gpu.device}
        inputs = synthetic_layer(num_tokens, *self.size, **options)
        sets = WEIGHT_SETS if num_tokens <= GRAPH_TOKENS else 1
        return Case.of(pattern.kind, inputs, sets, gated=self.gated, calibration=calibration)

    def provider(self, path: str | None) -> Provider:
        """The layer by a path of the kernels; None: by "auto"."""
        return Provider("triton" if path else "auto", path, precision=self.precision)

    def times(self, num_tokens: int) -> list[dict]:
        """Return rows of tokens, active, union, path and p50 for each level of activity."""
        rows, behind = [], set()
        for active in calibration_levels(self.size[1]):
            case = self.case(num_tokens, active)
            paths = {self.provider(path): path for path in case.paths() if path not in behind}
            measured = bench(LayerBench(self.gpu, case, _mode(num_tokens)), paths, "calibration")
            times = {paths[provider]: columns["p50"] for provider, columns in measured.items()}
            behind |= {path for path, ms in times.items() if ms > BEHIND * times["dense"]}
            columns = {name: case.columns[name] for name in ("tokens", "active", "union")}
            rows += [columns | {"path": path, "p50": p50} for path, p50 in times.items()]
            _say(case, "", "  ".join(f"{path} {p50:.4f}" for path, p50 in times.items()))
        return rows

    def floors(self, num_tokens: int) -> Iterator[Floor]:
        """Yield the times of eager and of compiled calls of a layer with hardly any activity."""
        case = self.case(num_tokens, 1)
        for situation in (EAGER, COMPILED):
            # As "auto" calls dense where it does not wait for the kernels.
            waits = self.precision is None and (situation == COMPILED or num_tokens <= WAITING)
            by = {path: self.provider(path) for path in case.paths()}
            if waits:
                by["dense"] = Provider("dense", "dense")
            measured = bench(LayerBench(self.gpu, case, situation), by.values(), "floor")
            times = {path: measured[provider]["p20"] for path, provider in by.items()}
            _say(case, situation, "  ".join(f"{path} {ms:.4f}" for path, ms in times.items()))
            yield Floor(situation, num_tokens, times)
        torch.compiler.reset()  # compiled anew for each path, up to a limit

    def check_choices(self, calibration: Calibration) -> dict[str, float]:
        """Time "auto" where nothing was calibrated; print and return the worst ratios to dense.

        Dense is torch.compile. "alike": the layer knows the activity of its inputs. "even": it
        does, and they are even, where skewed ones were calibrated. "busier": it was planned for 29
        active neurons and all are active, before it can notice. "eager" and "compiled": calls of
        layers, and of dense torch.compile, one after the other.
        """
        n = self.size[1]
        planned = min(PLANNED_ACTIVE, n)
        levels = [active for active in CHECKED_ACTIVE if active < n]
        checks = [
            (kind, tokens, _mode(tokens), active, EVEN if kind == "even" else SKEWED)
            for tokens in CHECKED_TOKENS
            for kind, active in (
                *(("alike", active) for active in (*levels, n)),
                ("even", planned),
                ("busier", n),
            )
        ]
        checks += [
            (situation, tokens, situation, planned, SKEWED)
            for tokens, situation in product(CHECKED_CALLS, (EAGER, COMPILED))
        ]
        worst: dict[str, float] = {}
        for kind, tokens, mode, active, pattern in checks:
            case = self.case(tokens, active, pattern, calibration)
            path = None
            if kind == "busier":
                (layer, *_) = self.case(tokens, planned, SKEWED, calibration).layers(
                    self.provider(None)
                )
                path = layer.chooser.path(tokens, GRAPH if mode == "graph" else EAGER)
            ratio, path = self._ratio(case, mode, path)
            worst[kind] = max(ratio, worst.get(kind, 0.0))
            _say(case, kind, f"auto took {path:<7} {ratio:.2f} of the time of torch.compile")
            torch.compiler.reset()
        print(
            "worst against dense torch.compile:",
            f"{worst['alike']:.2f} of its time with the activity known,",
            f"{worst['even']:.2f} with even activity,",
            f"{worst['busier']:.2f} planned for {PLANNED_ACTIVE} active neurons with all active;",
            f"{worst[EAGER]:.2f} in eager and {worst[COMPILED]:.2f} in compiled calls",
            flush=True,
        )
        return worst

    def _ratio(self, case: Case, mode: str, path: str | None) -> tuple[float, str]:
        """The time of "auto", or of a path, over dense; and the path."""
        subject, own = LayerBench(self.gpu, case, mode), self.provider(path)
        dense = [DENSE_COMPILED, *[DENSE_FP8] * (self.precision is not None)]
        waits = mode in (EAGER, COMPILED)  # for the host, which other work slows for a while
        measured = bench(subject, [own, *dense], "floor" if waits else "calibration")
        ms = {key: columns["p20" if waits else "p50"] for key, columns in measured.items()}
        path = path or subject.path_of_auto[own]()
        return ms[own] / min(ms[provider] for provider in dense), path


def _mode(num_tokens: int) -> str:
    return "graph" if num_tokens <= GRAPH_TOKENS else "stream"


def _say(case: Case, kind: str, what: str) -> None:
    print(f"{case}  {kind:<8}  {what}", flush=True)
