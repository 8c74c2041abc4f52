"""The times that "auto" chooses by, and up to which activity sparse training is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from twell import results
from twell.measure import runner
from twell.measure.layer import Case, TrainingCase, check_sizes, default_mode
from twell.measure.patterns import synthetic_layer
from twell.measure.providers import DENSE_COMPILED, FP8, UNION, Provider
from twell.measure.rows import significant
from twell.measure.runner import bench
from twell.sparse.calibration import COMPILED, EAGER, FLOAT8, Calibration, Floor, crossing
from twell.sparse.plan import WAITING

CALIBRATION_TOKENS = 1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16384, 131072
BEHIND = 2  # a path this many times slower than dense is not timed at higher activity
# Where a call may wait for Python: up to 4 tokens, up to 512, and more take different kernels.
FLOOR_TOKENS = 1, 2, 4, 8, 512, 2048
CROSSOVER_TOKENS = 16384
CROSSOVER_SHARES = 0.005, 0.02, 0.05, 0.1, 0.2  # mean active neurons per token, of all


@torch.no_grad()
def calibrate(
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    gated: bool = True,
    quantized: bool = False,
    out: str | Path | None = None,
    tokens: Sequence[int] = CALIBRATION_TOKENS,
) -> Calibration:
    """Time the kernels' dense path and each sparse path, by which "auto" chooses.

    The layer is in bf16, or with `quantized` in FP8, its activity skewed, from one neuron per token
    to all; `out` is the JSON file to write, if any. Calls that may wait for Python are also timed
    eager and compiled, without a CUDA graph. About two minutes on an H100. `crossover` measures
    training. Raises as `ffn` does, and FileNotFoundError where `out` has no folder. Ours.
    """
    if out and (not Path(out).parent.is_dir() or Path(out).is_dir()):
        raise FileNotFoundError(f"{out} cannot be written: name a file in a folder that exists")
    gpu = runner.Gpu()
    check_sizes(tokens, hidden_size, intermediate_size)
    layers = Layers(gpu, (hidden_size, intermediate_size), gated, FP8 if quantized else None)
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
    if out:
        calibration.save(out)
        print(f"{out}: {len(rows)} times", flush=True)
    return calibration


@dataclass(frozen=True)
class Layers:
    """Layers of one size [K, N], to be timed at any number of tokens and activity."""

    gpu: runner.Gpu
    size: tuple[int, int]
    gated: bool
    precision: str | None

    def case(self, num_tokens: int, active: float, mode: str) -> Case:
        inputs = synthetic_layer(num_tokens, *self.size, active=active, device=self.gpu.device)
        return Case(self.gpu, "skewed", inputs, mode, gated=self.gated)

    def time(self, case: Case, turns: str, by: dict[str, Provider], column: str) -> dict:
        """Return ms by path."""
        measured = bench(case, by.values(), turns)
        times = {path: measured[provider][column] for path, provider in by.items()}
        shown = "  ".join(f"{path} {ms:.4f}" for path, ms in times.items())
        print(f"{case}  {case.mode:<8}  {shown}", flush=True)
        return times

    def by_path(self, case: Case) -> dict[str, Provider]:
        return {path: Provider("triton", path, precision=self.precision) for path in case.paths()}

    def times(self, num_tokens: int) -> list[dict]:
        """Return rows of tokens, active, union, path and p50 for each level of activity."""
        rows, behind, neurons = [], set(), self.size[1]
        half = neurons // 2
        levels = {level for level in (1, 10, 30, 100, 300, 1000) if level < half}
        for active in sorted(levels | {max(half, 1), neurons}):
            case = self.case(num_tokens, active, default_mode(num_tokens))
            by = {path: one for path, one in self.by_path(case).items() if path not in behind}
            times = self.time(case, "calibration", by, "p50")
            behind |= {path for path, ms in times.items() if ms > BEHIND * times["dense"]}
            columns = {name: case.columns[name] for name in ("tokens", "active", "union")}
            rows += [columns | {"path": path, "p50": p50} for path, p50 in times.items()]
        return rows

    def floors(self, num_tokens: int) -> Iterator[Floor]:
        """Yield the times of eager and of compiled calls of a layer with hardly any activity."""
        for situation in (EAGER, COMPILED):
            case = self.case(num_tokens, 1, situation)
            by = self.by_path(case)
            # As "auto" calls dense where it does not wait for the kernels.
            if self.precision is None and (situation == COMPILED or num_tokens <= WAITING):
                by["dense"] = Provider("dense", "dense")
            yield Floor(situation, num_tokens, self.time(case, "floor", by, "p20"))
        torch.compiler.reset()  # compiled anew for each path, up to a limit


def crossover(
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    gated: bool = True,
    tokens: int = CROSSOVER_TOKENS,
) -> float:
    """Return up to how many active neurons per token a sparse step is faster than a dense one.

    The value of `Calibration.training`: by the path "union", over dense torch.compile. Activity is
    skewed and rises from 0.5% to 20% of the neurons until sparse is slower; each level is printed.
    0: sparse is slower at the lowest. Raises as `ffn` does. Ours.
    """
    gpu = runner.Gpu()
    check_sizes([tokens], hidden_size, intermediate_size)
    levels: list[tuple[float, float]] = []
    for active in sorted({max(share * intermediate_size, 1.0) for share in CROSSOVER_SHARES}):
        size = tokens, hidden_size, intermediate_size
        inputs = synthetic_layer(*size, active=active, device=gpu.device)
        case = TrainingCase(gpu, "skewed", inputs, gated=gated)
        measured = bench(case, [DENSE_COMPILED, UNION], "step")
        dense, sparse = (columns["p50"] for columns in measured.values())
        print(f"{case}  step: dense {dense:.4f} ms  sparse {sparse:.4f} ms", flush=True)
        levels.append((case.columns["active"], dense / sparse))
        if dense < sparse:
            break
    torch.compiler.reset()
    result = crossing(levels)
    if result < levels[-1][0]:
        result = significant(result, 4)
    print(f"training is faster sparsely up to {result:g} active neurons per token", flush=True)
    return result
