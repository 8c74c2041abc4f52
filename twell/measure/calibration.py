"""The times that "auto" chooses by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from twell import results
from twell.measure import runner
from twell.measure.case import WEIGHT_SETS, Case, check_sizes, default_mode
from twell.measure.layer import LayerBench
from twell.measure.patterns import synthetic_layer
from twell.measure.providers import FP8, Provider
from twell.measure.runner import bench
from twell.sparse.calibration import COMPILED, EAGER, FLOAT8, Calibration, Floor
from twell.sparse.plan import WAITING

CALIBRATION_TOKENS = 1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16384, 131072
BEHIND = 2  # a path this many times slower than dense is not timed at higher activity
# Where a call may wait for Python: up to 4 tokens, up to 512, and more take different kernels.
FLOOR_TOKENS = 1, 2, 4, 8, 512, 2048


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
    out: str | Path | None = None,
    tokens: Sequence[int] = CALIBRATION_TOKENS,
) -> Calibration:
    """Time the kernels' dense path and each sparse path, by which "auto" chooses.

    The layer is in bf16, or with `quantized` in FP8, its activity skewed, from one neuron per token
    to all; `out` is the JSON file to write, if any. Calls that may wait for Python are also timed
    eager and compiled, without a CUDA graph. About two minutes on an H100. `crossover` measures
    training. Raises as `ffn` does, and FileNotFoundError where the folder of `out` does not exist. Ours.
    """
    gpu = runner.Gpu()
    check_sizes(tokens, hidden_size, intermediate_size)
    if out and (not Path(out).parent.is_dir() or Path(out).is_dir()):
        raise FileNotFoundError(f"{out} cannot be written: name a file in a folder that exists")
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

    def case(self, num_tokens: int, active: float) -> Case:
        inputs = synthetic_layer(num_tokens, *self.size, active=active, device=self.gpu.device)
        sets = WEIGHT_SETS if default_mode(num_tokens) == "graph" else 1
        return Case.of("skewed", inputs, sets, gated=self.gated)

    def provider(self, path: str) -> Provider:
        """Return the layer by a path of the kernels."""
        return Provider("triton", path, precision=self.precision)

    def times(self, num_tokens: int) -> list[dict]:
        """Return rows of tokens, active, union, path and p50 for each level of activity."""
        rows, behind = [], set()
        for active in calibration_levels(self.size[1]):
            case = self.case(num_tokens, active)
            paths = {self.provider(path): path for path in case.paths() if path not in behind}
            layers = LayerBench(self.gpu, case, default_mode(num_tokens))
            measured = bench(layers, paths, "calibration")
            times = {paths[provider]: columns["p50"] for provider, columns in measured.items()}
            behind |= {path for path, ms in times.items() if ms > BEHIND * times["dense"]}
            columns = {name: case.columns[name] for name in ("tokens", "active", "union")}
            rows += [columns | {"path": path, "p50": p50} for path, p50 in times.items()]
            _say(case, "", times)
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
            _say(case, situation, times)
            yield Floor(situation, num_tokens, times)
        torch.compiler.reset()  # compiled anew for each path, up to a limit


def _say(case: Case, situation: str, times: dict[str, float]) -> None:
    shown = "  ".join(f"{path} {ms:.4f}" for path, ms in times.items())
    print(f"{case}  {situation:<8}  {shown}", flush=True)
