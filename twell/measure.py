"""Measurements on a GPU: check the result first, then time it, and keep the row with where it came from.

No speed is recorded unless the same call found the result right: every path is compared with the fp64 result of the
same inputs before it is timed, and a path that is wrong ends the measurement.

A case is one layer with inputs of a known activity. It is timed in one of two modes. "stream" is what a user sees who
calls the layer: launches one after the other, a cache that other work has emptied. "graph" is the GPU alone: a CUDA
graph of eight calls, each with weights of its own, so that they come from memory as in a model of many layers.
"""

from __future__ import annotations

import functools
import math
import re
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twell import results
from twell.sparse.layer import SparseFFN
from twell.sparse.plan import Calibration

# Relative RMS against fp64 that a bf16 layer has to keep; the dense one is at 3e-3 to 4e-3.
TOLERANCE = 5e-3
# Below so many active entries errors do not average: each of g, u, h and y may be off by half a unit in the last place.
FEW, TOLERANCE_OF_FEW = 400, (1 + 2**-9) ** 4 - 1
BLOCK = 64  # tokens whose unions are counted
WEIGHT_SETS = 8  # eight sets of 2048 x 5632 are 550 MB, eleven times the cache of an H200
ROUNDS, ROUND = 4, 60  # each provider is timed in so many turns, of so many ms
GRAPH_TOKENS = 4096  # up to so many tokens the default is "graph"
DECODE_TOKENS = 1024
# Row-wise takes half a second for so many entries, and is then far behind every other path.
ROWWISE_ENTRIES = 100_000_000
PATTERNS = "even", "skewed", "recorded"
# Of skewed activity: how far neurons differ in popularity and tokens in activity, and the share of their variance that
# tokens of one document have in common; each token has a variance of 1.
POPULARITY, LIVELINESS, SHARED = 0.6, 0.4, 0.3

CASE_COLUMNS = "tokens hidden_size intermediate_size gated dtype pattern active".split()
COLUMNS = {
    "ffn": CASE_COLUMNS
    + "active_max union mode weight_sets provider path relative_rms p20 p50 p80 flops bytes roofline".split()
    + ["energy", "watts"],
    "kernels": CASE_COLUMNS + "union provider kernel launches ms flops bytes roofline".split(),
    "ceilings": ["metric", "value", "unit"],
}

Weights = tuple[Tensor | None, Tensor, Tensor]


# --- layers of a known activity ---------------------------------------------------------------------------------------


def synthetic_layer(
    num_tokens: int,
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    active: float = 29,
    skewed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs of a gated layer that is active as often as wanted, and as unevenly as in trained models.

    x [M, K], w_gate and w_up [N, K] and w_down [K, N] (strides (1, K)), with a mean of `active` neurons per token, from
    0 to N.
    Even: neurons are independent and equally likely. Skewed: neurons differ in popularity, tokens in activity, and tokens
    of the same 2,048 share some of their variance (POPULARITY, LIVELINESS, SHARED). Raises ValueError for an `active` that
    the layer cannot have. Ours.
    """
    if not 0 <= active <= intermediate_size:
        raise ValueError(
            f"active is {active:g}; a layer of {intermediate_size} neurons can have 0 to all of them"
        )
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    popularity, activity, shared = (POPULARITY, LIVELINESS, SHARED) if skewed else (0.0, 0.0, 0.0)
    documents = normal(-(-num_tokens // 2048), hidden_size).repeat_interleave(2048, 0)[:num_tokens]
    x = math.sqrt(1 - shared) * normal(num_tokens, hidden_size) + math.sqrt(shared) * documents
    x[:, 0] = 1
    x[:, 1] = normal(num_tokens)
    w_gate, w_up = (
        normal(intermediate_size, hidden_size) / math.sqrt(hidden_size) for _ in range(2)
    )
    w_down_t = normal(intermediate_size, hidden_size) / math.sqrt(intermediate_size)

    # Column 0 is the threshold: bisect for the one that gives the mean wanted. Column 1 is the token's activity: of few
    # tokens each counts as it is, of many their distribution.
    spread = popularity * normal(intermediate_size)
    known = activity * x[:, 1:2] if num_tokens <= 2048 else x.new_zeros(1, 1)
    variance = 1.0 if num_tokens <= 2048 else 1 + activity**2
    low, high = -10.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        likely = 0.5 * torch.erfc((middle + spread - known) / math.sqrt(2 * variance))
        low, high = (middle, high) if likely.sum() > active * len(known) else (low, middle)
    w_gate[:, 0] = -(low + spread)
    w_gate[:, 1] = activity
    return x.to(dtype), w_gate.to(dtype), w_up.to(dtype), w_down_t.to(dtype).t()


def imposed_layer(
    mask: np.ndarray,
    num_tokens: int,
    hidden_size: int = 1024,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs of a gated layer that is active exactly where `mask` is: a recorded activity, with other values.

    `mask` [T, N] bool, T at most K. x [M, K], w_gate and w_up [N, K] and w_down [K, N] (strides (1, K)); token t has
    the activity of mask[t % T]. The rows of x are orthogonal, so that any matrix G [T, N] is x w_gate^T for
    w_gate = G^T x / K; G has the signs of the mask and keeps a distance from 0 that rounding cannot cross.
    Raises ValueError for a mask that does not fit, ArithmeticError should the pattern come out otherwise. Ours.
    """
    mask = torch.as_tensor(mask, dtype=torch.bool, device=device)
    if mask.dim() != 2 or not 1 <= mask.shape[0] <= hidden_size:
        raise ValueError(
            f"the mask has shape {tuple(mask.shape)}, expected [1 to {hidden_size} (hidden_size), neurons]"
        )
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    length, intermediate_size = mask.shape
    x = math.sqrt(hidden_size) * torch.linalg.qr(normal(hidden_size, length)).Q.t()
    # Rounding to bf16 moves g by 2e-3 (standard deviation), so a distance of 0.1 is safe.
    values = normal(length, intermediate_size).abs() + 0.1
    w_gate = torch.where(mask, values, -values).t() @ x / hidden_size
    w_up = normal(intermediate_size, hidden_size) / math.sqrt(hidden_size)
    w_down_t = normal(intermediate_size, hidden_size) / math.sqrt(intermediate_size)
    x, w_gate = x.to(dtype), w_gate.to(dtype)
    wrong = int(((x.double() @ w_gate.double().t() > 0) != mask).sum())
    if wrong:
        raise ArithmeticError(
            f"{wrong} of {mask.numel()} entries differ from the mask after rounding to {dtype}"
        )
    x = x.repeat(-(-num_tokens // length), 1)[:num_tokens]
    return x, w_gate, w_up.to(dtype), w_down_t.to(dtype).t()


def recorded_masks(path: str | Path | None = None) -> dict[str, np.ndarray]:
    """Return the recorded activity in a file of masks, by default data/traces/masks.npz: name -> [T, N] bool.

    Raises FileNotFoundError when there is none, ValueError when the file is something else.
    """
    path = Path(path or results.root() / "data" / "traces" / "masks.npz")
    try:
        with np.load(path) as file:
            size = int(file["intermediate_size"])
            return {
                name: np.unpackbits(file[name], axis=1, count=size).astype(bool)
                for name in file.files
                if name != "intermediate_size"
            }
    except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no file of masks: {error}") from None


def permuted(weights: Weights, seed: int) -> Weights:
    """Return the same layer with its neurons in another order: other memory, the same work, the same result.

    `weights` are w_gate [N, K] or None, w_up [N, K] and w_down [K, N] with strides (1, K), and so is what is returned.
    """
    w_gate, w_up, w_down = weights
    g = torch.Generator(w_up.device).manual_seed(seed)
    order = torch.randperm(len(w_up), generator=g, device=w_up.device)
    return None if w_gate is None else w_gate[order], w_up[order], w_down.t()[order].t()


@dataclass(frozen=True)
class Exact:
    """A layer's result in fp64 and its activity, in the type of its inputs.

    y [M, K] float64; counts [M] int64, active neurons of each token; unions int64, one for each block of 64 consecutive
    tokens: the neurons that any of them has active; touched: the neurons that any token has active.
    """

    y: Tensor
    counts: Tensor
    unions: Tensor
    touched: int

    @classmethod
    def of(cls, x: Tensor, weights: Weights) -> Exact:
        """Compute it, 4,096 tokens at a time."""
        wide = [None if weight is None else weight.double() for weight in weights]
        parts, counts, unions = [], [], []
        touched = torch.zeros(len(weights[1]), dtype=torch.bool, device=x.device)
        for rows in x.split(4096):
            first = wide[1] if wide[0] is None else wide[0]
            g = torch.relu(rows.double() @ first.t())
            active = g.to(x.dtype) != 0
            parts.append(
                (g if wide[0] is None else g * (rows.double() @ wide[1].t())) @ wide[2].t()
            )
            counts.append(active.sum(1))
            unions += [block.any(0).sum() for block in active.split(BLOCK)]
            touched |= active.any(0)
        return cls(torch.cat(parts), torch.cat(counts), torch.stack(unions), int(touched.sum()))

    @property
    def entries(self) -> int:
        return int(self.counts.sum())

    def check(self, y: Tensor, what: str, allowed: float = 0.0) -> float:
        """Return the relative RMS error of y; raises ArithmeticError above TOLERANCE, or `allowed` where that is more."""
        scale = float(self.y.norm())
        error = float((y.double() - self.y).norm()) / (
            scale or 1.0
        )  # where nothing is active y is zero
        allowed = max(TOLERANCE if self.entries >= FEW else TOLERANCE_OF_FEW, allowed)
        if not error <= allowed:
            raise ArithmeticError(
                f"{what} is wrong: relative RMS {error:.2e}, allowed {allowed:.2e}"
            )
        return error


# --- what a case needs at least ---------------------------------------------------------------------------------------


def work(
    path: str,
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    gated: bool,
    entries: int,
    touched: int,
) -> tuple[int, int]:
    """Return the operations and the bytes of device memory that a path needs at least, in a type of 2 bytes.

    `entries` are the active neurons summed over tokens, `touched` the neurons that any token has active. With P = 3
    products (non-gated: 2)

        dense    2 P M N K operations                         2 (P N K + 2 M K) bytes
        sparse   2 M N K + 2 (P - 1) entries K operations     2 (N K + (P - 1) touched K + 2 M K) bytes

    since a sparse path does the first product whole and the others at the active entries, and each weight that counts
    and x are read once and y is written once. What passes between kernels counts for nothing, and neither do entries
    that a path computes in vain.
    """
    products = 3 if gated else 2
    if path == "dense":
        entries, touched = num_tokens * intermediate_size, intermediate_size
    flops = 2 * hidden_size * (num_tokens * intermediate_size + (products - 1) * entries)
    return flops, 2 * hidden_size * (intermediate_size + (products - 1) * touched + 2 * num_tokens)


def ceilings() -> list[dict]:
    """Measure what the GPU can do: rows of metric, value and unit.

    "copy bandwidth": a copy of 2 GiB, read and written, in GB/s. "matmul": 8192 x 8192 x 8192 in bf16 on random
    numbers, in TFLOP/s (zeros would be faster, as they take less power). Both from p20: a ceiling is what it can do.
    """
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = _quantiles(_stream_times(lambda: target.copy_(source), 100))["p20"]
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = _quantiles(_stream_times(lambda: a @ b, 100))["p20"]
    return [
        {"metric": "copy bandwidth", "value": round(2 * 2**31 / copy / 1e6, 1), "unit": "GB/s"},
        {"metric": "matmul", "value": round(2 * 8192**3 / product / 1e9, 1), "unit": "TFLOP/s"},
    ]


def roofline(flops: float, num_bytes: float, milliseconds: float, peaks: Sequence[dict]) -> float:
    """Return the share of the roofline: the least time that the ceilings allow over the time taken."""
    peak = {row["metric"]: row["value"] for row in peaks}
    least = max(flops / (peak["matmul"] * 1e12), num_bytes / (peak["copy bandwidth"] * 1e9))
    return float(f"{1e3 * least / milliseconds:.3g}")


# --- timing -----------------------------------------------------------------------------------------------------------


def _stream_times(call: Callable[[], object], budget: float) -> np.ndarray:
    """Times in ms of single calls, the cache emptied before each; about `budget` ms of them."""
    from triton.testing import do_bench

    return np.array(
        do_bench(call, warmup=max(1, int(budget / 4)), rep=int(budget), return_mode="all")
    )


def _quantiles(times: np.ndarray) -> dict[str, float]:
    found = np.quantile(times, [0.2, 0.5, 0.8])
    return dict(zip(("p20", "p50", "p80"), (float(f"{time:.4g}") for time in found), strict=True))


def _capture(calls: Sequence[Callable[[], Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of all calls, one after the other, and the outputs that a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(
            2
        ):  # what is compiled, allocated or looked up at a first call must not be captured
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    return graph, outputs


def _graph_times(replay: Callable[[], None], calls: int, budget: float) -> np.ndarray:
    """Times in ms of one of the `calls` in a replay; about `budget` ms of replays, 5 to 1,000 of them."""
    trial = _between_replays(replay, 5)
    times = _between_replays(replay, int(min(max(budget / trial[2:].mean(), 5), 1000)))
    return times / calls


def _between_replays(replay: Callable[[], object], number: int, lead: int = 3) -> np.ndarray:
    """Times in ms of each of so many replays, which follow one another without a gap.

    The first replays, `lead` more, find the queue empty and wait for the host; they are not counted.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    for _ in range(lead):
        replay()
    for event in events[:-1]:
        event.record()
        replay()
    events[-1].record()
    events[-1].synchronize()
    return np.array(
        [start.elapsed_time(end) for start, end in zip(events, events[1:], strict=False)]
    )


def _energy_meter() -> Callable[[], int]:
    """A function that reads the GPU's energy counter in mJ. Raises RuntimeError with the reason where there is none."""
    try:
        import pynvml
    except ImportError:
        raise RuntimeError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        # NVML counts all GPUs, torch those of CUDA_VISIBLE_DEVICES.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        meter = functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        meter()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML says: {error}") from None
    return meter


def _meter() -> Callable[[], int] | None:
    """What reads the energy counter; None, with the reason printed, where there is none."""
    try:
        return _energy_meter()
    except RuntimeError as error:
        print(f"energy is not measured: {error}", flush=True)
        return None


def _energy(
    run: Callable[[], object], calls: int, milliseconds: float, meter: Callable[[], int]
) -> dict[str, float]:
    """Energy of a call in mJ and mean power in W over a second of runs of `calls` calls; idle power is part of it."""

    def repeat(seconds: float) -> int:
        number = math.ceil(1e3 * seconds / (milliseconds * calls))
        for _ in range(number):
            run()
        torch.cuda.synchronize()
        return number * calls

    repeat(0.3)  # power takes a while to settle
    before, start = meter(), time.perf_counter()
    done = repeat(1.0)
    seconds, used = time.perf_counter() - start, meter() - before
    return {"energy": float(f"{used / done:.4g}"), "watts": round(used / 1e3 / seconds, 1)}


def kernel_name(name: str) -> str:
    """Return a GPU kernel's short name: "cublas matmul", "elementwise", "copy", or its own up to arguments."""
    if re.search(r"nvjet|gemm|gemv|cutlass|cublas|splitK", name):
        return "cublas matmul"
    if re.match(r"Memcpy|Memset", name):
        return "copy"
    if re.search(r"^triton_|elementwise|at::native", name):
        return "elementwise"
    return re.split(r"[(<]", name.removeprefix("void "))[0]


def _kernel_times(calls: Sequence[Callable[[], Tensor]]) -> dict[str, tuple[float, float]]:
    """Launches and ms in one call of each kernel by short name, means over 8 calls or more."""
    from torch.profiler import ProfilerActivity, profile

    rounds = -(-8 // len(calls))
    for _ in range(2):  # the first profile of a process pays for its start; the second one is kept
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(rounds):
                for call in calls:
                    call()
            torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total:
            launches, spent = found.get(kernel_name(event.key), (0.0, 0.0))
            found[kernel_name(event.key)] = (
                launches + event.count,
                spent + event.self_device_time_total / 1e3,
            )
    number = rounds * len(calls)
    return {name: (launches / number, spent / number) for name, (launches, spent) in found.items()}


class Compiled:
    """Modules that are compiled, each by itself, or not: call it with whether they are to be from now on.

    Whole (fullgraph) and for each shape anew (not dynamic), as a measurement wants it, with torch.compile's `options`.
    `around`, where it is set, takes the compiled module and its arguments and calls it. torch has no public way to take
    back what nn.Module.compile did.
    """

    def __init__(self, modules: Iterable[nn.Module], options: dict | None = None):
        self.modules, self.options = list(modules), options
        self.around: Callable | None = None
        self.calls: list[Callable] | None = None  # kept, so that nothing is compiled twice

    def __call__(self, wanted: bool) -> None:
        if wanted and self.calls is None:
            for module in self.modules:
                module.compile(fullgraph=True, dynamic=False, options=self.options)
            self.calls = [module._compiled_call_impl for module in self.modules]
            if self.around is not None:
                self.calls = [functools.partial(self.around, call) for call in self.calls]
        for place, module in enumerate(self.modules):
            module._compiled_call_impl = self.calls[place] if wanted else None


# --- the layer --------------------------------------------------------------------------------------------------------


def _dense(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Tensor:
    h = F.relu(F.linear(x, w_up if w_gate is None else w_gate))
    return F.linear(h if w_gate is None else h * F.linear(x, w_up), w_down)


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise RuntimeError("measuring needs a GPU, and torch sees none")
    return torch.device("cuda")


def _check_sizes(tokens: Sequence[int], hidden_size: int, intermediate_size: int) -> None:
    if min(tokens) < 1:
        raise ValueError(f"tokens holds {min(tokens)}; it has to be at least 1")
    if hidden_size < 16 or hidden_size % 16:
        raise ValueError(f"hidden_size is {hidden_size}; the kernels need a multiple of 16")
    if intermediate_size < 1:
        raise ValueError(f"intermediate_size is {intermediate_size}; it has to be at least 1")


@dataclass(frozen=True)
class _Case:
    """x and sets of weights with the same activity, what is exact for them, and the columns that name the case."""

    x: Tensor
    sets: list[Weights]
    exact: Exact
    columns: dict

    @classmethod
    def of(cls, pattern: str, inputs: tuple[Tensor, ...], gated: bool, weight_sets: int) -> _Case:
        x, w_gate, w_up, w_down = inputs
        weights = (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)
        exact = Exact.of(x, weights)
        columns = {
            "tokens": len(x),
            "hidden_size": x.shape[1],
            "intermediate_size": len(w_up),
            "gated": gated,
            "dtype": str(x.dtype).removeprefix("torch."),
            "pattern": pattern,
            "active": round(float(exact.counts.double().mean()), 2),
            "active_max": int(exact.counts.max()),
            "union": round(float(exact.unions.double().mean()), 1),
        }
        return cls(
            x,
            [weights, *(permuted(weights, seed) for seed in range(1, weight_sets))],
            exact,
            columns,
        )

    def __str__(self) -> str:
        c = self.columns
        return f"{c['tokens']:>6} tokens  {c['pattern']:<8} {c['active']:>7} active"

    def work(self, path: str) -> tuple[int, int]:
        c = self.columns
        shape = c["tokens"], c["hidden_size"], c["intermediate_size"], c["gated"]
        return work(path, *shape, self.exact.entries, self.exact.touched)

    def calls(
        self, function: Callable[..., Tensor], *, plain: bool = False
    ) -> list[Callable[[], Tensor]]:
        """A call for each set of weights; `plain`: with w_down as nn.Linear stores it."""
        sets = [
            (w_gate, w_up, w_down.contiguous() if plain else w_down)
            for w_gate, w_up, w_down in self.sets
        ]
        return [functools.partial(function, self.x, *weights) for weights in sets]

    def path_calls(self, path: str) -> list[Callable[[], Tensor]]:
        """The calls of one of our own paths."""
        from twell.kernels import ops

        return self.calls(lambda *tensors: ops.run(path, *tensors, None, None, None))

    def paths(self) -> list[str]:
        """Our paths, without those that would take too long."""
        slow = {
            "rowwise": self.exact.entries > ROWWISE_ENTRIES,
            "decode": len(self.x) > DECODE_TOKENS,
        }
        return [path for path in ("dense", "rowwise", "union", "decode") if not slow.get(path)]

    def auto_layers(self, calibration: Calibration | None = None) -> list[SparseFFN]:
        """Layers of backend "auto" with these weights that know the activity of these inputs."""
        c = self.columns
        layers = []
        for weights in self.sets:
            layer = SparseFFN(
                c["hidden_size"],
                c["intermediate_size"],
                gated=c["gated"],
                backend="auto",
                device="meta",
            )
            for part, weight in zip(
                (layer.gate_proj, layer.up_proj, layer.down_proj), weights, strict=True
            ):
                if part is not None:
                    part.weight = nn.Parameter(weight, requires_grad=False)
            layer.calibration = calibration
            layer.observe(c["active"], c["union"], min(c["tokens"], BLOCK))
            layers.append(layer.eval())
        return layers

    def providers(
        self, compiled: Callable[..., Tensor], calibration: Calibration | None
    ) -> dict[str, tuple[Callable[[], str], list[Callable]]]:
        """Name -> what tells its path, and the calls, one for each set of weights."""
        found = {
            "dense eager": (lambda: "dense", self.calls(_dense, plain=True)),
            "dense torch.compile": (lambda: "dense", self.calls(compiled, plain=True)),
        }
        for path in self.paths():
            found[path if path == "dense" else f"triton {path}"] = (
                lambda path=path: path,
                self.path_calls(path),
            )
        layers = self.auto_layers(calibration)
        found["auto"] = (
            lambda: layers[0].chooser.path(
                len(self.x)
            ),  # it looks again while it runs: ask when it has run
            [functools.partial(layer, self.x) for layer in layers],
        )
        return found


def _inputs(
    pattern: str,
    num_tokens: int,
    active: Sequence[float],
    hidden_size: int | None,
    intermediate_size: int,
    masks: dict[str, np.ndarray] | None,
    device: torch.device,
) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Pattern as in the rows, and x, w_gate, w_up and w_down, for each level of activity or each mask."""
    if pattern == "recorded":
        hidden_size = 1024 if hidden_size is None else hidden_size
        for name, mask in (masks or recorded_masks()).items():
            yield (
                f"recorded {name}",
                imposed_layer(mask[:hidden_size], num_tokens, hidden_size, device=device),
            )
    else:
        size = (num_tokens, 2048 if hidden_size is None else hidden_size, intermediate_size)
        for wanted in active:
            yield (
                pattern,
                synthetic_layer(*size, active=wanted, skewed=pattern == "skewed", device=device),
            )


@torch.no_grad()
def ffn(
    tokens: Sequence[int],
    active: Sequence[float] = (29,),
    patterns: Sequence[str] = ("skewed",),
    *,
    hidden_size: int | None = None,
    intermediate_size: int = 5632,
    gated: bool = True,
    mode: str | None = None,
    masks: dict[str, np.ndarray] | None = None,
    energy: bool = False,
    kernels: bool = False,
    calibration: Calibration | None = None,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer in bf16: densely (eager, compiled, and our own dense path), by each sparse path, and by "auto".

    Args:
        tokens: numbers of tokens.
        active: mean active neurons per token; not for recorded patterns.
        patterns: "even" and "skewed" as in `synthetic_layer`; "recorded" for each of `masks` as in `imposed_layer`.
        hidden_size: default 2048, for recorded patterns 1024; so many tokens of a mask are used.
        intermediate_size: of even and skewed layers; a recorded one has that of its mask.
        gated: whether the layer has a gate.
        mode: "stream" or "graph", which has 8 sets of weights (see the module); default: graph up to 1,024 tokens.
        masks: name -> [T, N] bool; default: those of `recorded_masks()`.
        energy: also measure the energy of each call, which takes more than a second for each row.
        kernels: also measure each kernel of our paths; needs `out`.
        out: the folder of ffn.csv, kernels.csv and ceilings.csv, to which rows are appended after each case.

    Returns the rows of ffn.csv without their provenance, COLUMNS["ffn"]; data/README.md says what they mean. The dense
    baselines have w_down as nn.Linear stores it; "auto" knows the activity, and goes by `calibration` or by what is
    assumed without one. Decoding is timed up to 1,024 tokens, row-wise up to 10^8 active entries. Raises ValueError for arguments that do not fit,
    ArithmeticError when a result is wrong, RuntimeError without a GPU. Ours.
    """
    device = _gpu()
    for pattern in patterns:
        if pattern not in PATTERNS:
            raise ValueError(f"pattern {pattern!r} is unknown; use one of {', '.join(PATTERNS)}")
    if mode not in (None, "stream", "graph"):
        raise ValueError(f"mode {mode!r} is unknown; use 'stream' or 'graph'")
    _check_sizes(tokens, 16 if hidden_size is None else hidden_size, intermediate_size)
    if kernels and out is None:
        raise ValueError("the rows of kernels go to a file; say in which folder (out)")
    origin = results.provenance()
    save = functools.partial(_append, out, origin)
    _check_files(out, COLUMNS)
    meter = _meter() if energy else None
    peaks = ceilings()
    save("ceilings", peaks)
    for row in peaks:
        print(f"{row['metric']}: {row['value']} {row['unit']}", flush=True)

    rows = []
    for num_tokens in tokens:
        how = mode or ("graph" if num_tokens <= GRAPH_TOKENS else "stream")
        sets = WEIGHT_SETS if how == "graph" else 1
        compiled = torch.compile(_dense, fullgraph=True, dynamic=False)
        for pattern in patterns:
            for name, inputs in _inputs(
                pattern, num_tokens, active, hidden_size, intermediate_size, masks, device
            ):
                case = _Case.of(name, inputs, gated, sets)
                found, parts = _measure(
                    case, case.providers(compiled, calibration), how, peaks, meter, kernels
                )
                save("ffn", found)
                save("kernels", parts)
                rows += found
                del case, inputs
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        torch.compiler.reset()  # each number of tokens is a compilation of its own, and their number is limited
    return rows


def _measure(
    case: _Case,
    providers: dict[str, tuple[Callable[[], str], list[Callable[[], Tensor]]]],
    mode: str,
    peaks: Sequence[dict],
    meter: Callable[[], int] | None,
    kernels: bool,
) -> tuple[list[dict], list[dict]]:
    """Rows of ffn.csv and of kernels.csv for one case."""
    rows, parts = [], []
    checked = {
        provider: _checked(case, provider, calls, mode)
        for provider, (_, calls) in providers.items()
    }
    # In turns: a GPU's clock falls while it works, and whoever came first would look fastest.
    taken = [
        {provider: times(ROUND) for provider, (_, times, _) in checked.items()}
        for _ in range(ROUNDS)
    ]
    for provider, (path_of, calls) in providers.items():
        error, _, run = checked[provider]
        times = _quantiles(np.concatenate([turn[provider] for turn in taken]))
        path = path_of()
        flops, num_bytes = case.work(path)
        row = case.columns | {
            "mode": mode,
            "weight_sets": len(calls),
            "provider": provider,
            "path": path,
        }
        row |= (
            {"relative_rms": float(f"{error:.3g}")} | times | {"flops": flops, "bytes": num_bytes}
        )
        row["roofline"] = roofline(flops, num_bytes, times["p50"], peaks)
        row |= (
            _energy(run, len(calls), times["p50"], meter)
            if meter
            else {"energy": None, "watts": None}
        )
        rows.append(row)
        said = f"  {row['energy']} mJ" if meter else ""
        print(
            f"{case}  {provider:<20} {times['p50']:.4f} ms  {row['roofline']:.0%} of the roofline{said}",
            flush=True,
        )
        if kernels and (provider == "dense" or provider.startswith("triton")):
            for name, (launches, spent) in _kernel_times(calls).items():
                part = {column: row[column] for column in (*CASE_COLUMNS, "union", "provider")}
                part |= {
                    "kernel": name,
                    "launches": round(launches, 2),
                    "ms": float(f"{spent:.4g}"),
                }
                parts.append(part | _kernel_work(case, path, name, part["ms"], peaks))
    return rows, parts


def _checked(
    case: _Case, provider: str, calls: list[Callable[[], Tensor]], mode: str
) -> tuple[float, Callable[[float], np.ndarray], Callable[[], object]]:
    """Relative RMS error, what takes times of one call, and what it runs for them: in graph mode all calls at once."""
    if mode == "stream":
        error = case.exact.check(calls[0](), f"{provider} at {case}")
        return error, functools.partial(_stream_times, calls[0]), calls[0]
    graph, outputs = _capture(calls)
    graph.replay()
    error = max(case.exact.check(y, f"{provider} at {case}") for y in outputs)
    return error, functools.partial(_graph_times, graph.replay, len(calls)), graph.replay


def _kernel_work(
    case: _Case, path: str, kernel: str, milliseconds: float, peaks: Sequence[dict]
) -> dict:
    """Columns flops, bytes and roofline of a kernel; empty where no formula is known."""
    flops, num_bytes = kernel_formulas(case.columns, case.exact).get((path, kernel), (None, None))
    share = None if flops is None else roofline(flops, num_bytes, milliseconds, peaks)
    return {"flops": flops, "bytes": num_bytes, "roofline": share}


def kernel_formulas(columns: dict, exact: Exact) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (path, kernel) -> the operations and bytes that the kernel's method needs on a case.

    Operations are those of the method: in a union each of the block's tokens has each of its neurons, active or not
    (blocks of 64; where the kernel takes larger ones, the more that it does counts against it). Bytes: weights of
    touched neurons once, inputs and outputs once, 2 bytes a value, 4 an active entry (value and index), a bit a flag.
    """
    m, k, n = (columns[name] for name in ("tokens", "hidden_size", "intermediate_size"))
    entries, touched, unions = exact.entries, exact.touched, int(exact.unions.sum())
    in_unions = min(m, BLOCK) * unions  # values of g, and of h
    up = 1 if columns["gated"] else 0
    gate = 2 * (m * k + n * k + m * n) + m * n // 8
    gate_and_up = 2 * m * k * (n + up * touched), 2 * k * (m + n + up * touched) + 2 * m * touched
    decode_down = 2 * m * touched * k, 2 * k * touched + 2 * m * touched
    return {
        ("dense", "cublas matmul"): (
            2 * (2 + up) * m * n * k,
            2 * (2 + up) * (m * k + n * k + m * n),
        ),
        ("dense", "relu_times_kernel"): (2 * m * n, 2 * 3 * m * n),
        ("dense", "elementwise"): (m * n, 2 * 2 * m * n),
        ("rowwise", "gate_bits_kernel"): (2 * m * n * k, gate),
        ("rowwise", "gate_words_kernel"): (2 * m * n * k, 2 * (m * k + n * k) + 4 * entries),
        ("rowwise", "lists_kernel"): (0, m * n // 8 + 2 * entries + 4 * entries),
        ("rowwise", "up_down_kernel"): (
            2 * (1 + up) * entries * k,
            2 * k * (2 * m + (1 + up) * touched) + 4 * entries,
        ),
        ("union", "gate_bits_kernel"): (2 * m * n * k, gate),
        ("union", "lists_kernel"): (0, m * n // 8 + 4 * unions),
        ("union", "up_kernel"): (
            2 * up * in_unions * k,
            2 * up * k * (m + touched) + 2 * 2 * in_unions,
        ),
        ("union", "down_kernel"): (2 * in_unions * k, 2 * k * (m + touched) + 2 * in_unions),
        ("decode", "few_up_kernel"): gate_and_up,
        ("decode", "up_kernel"): gate_and_up,
        ("decode", "few_down_kernel"): decode_down,
        ("decode", "down_kernel"): decode_down,
    }


# --- calibration ------------------------------------------------------------------------------------------------------

CALIBRATION_TOKENS = 1, 4, 16, 64, 256, 1024, 2048, 4096, 16384, 131072
BUDGET = 30  # ms for each time
BEHIND = 2  # a path that takes so many times what dense takes is not followed to higher activity
CHECKED_TOKENS = 8, 512, 8192
CHECKED_ACTIVE = 20, 200


def calibration_levels(intermediate_size: int) -> list[int]:
    """Return the mean active neurons at which paths are timed: 1 to 1,000 in steps of three, N / 2 and N."""
    half = intermediate_size // 2
    return sorted(
        {level for level in (1, 10, 30, 100, 300, 1000) if level < half}
        | {max(half, 1), intermediate_size}
    )


def _calibration_rows(
    hidden_size: int,
    intermediate_size: int,
    gated: bool,
    tokens: Sequence[int],
    device: torch.device,
) -> list[dict]:
    """Times of each path over a grid: rows of tokens, active, union, path and p50."""
    rows = []
    for num_tokens in tokens:
        behind = set()
        for wanted in calibration_levels(intermediate_size):
            size = (num_tokens, hidden_size, intermediate_size)
            sets = WEIGHT_SETS if num_tokens <= GRAPH_TOKENS else 1
            case = _Case.of(
                "skewed", synthetic_layer(*size, active=wanted, device=device), gated, sets
            )
            times = {}
            for path in case.paths():  # dense comes first
                if path not in behind:
                    times[path] = _calibration_time(case, path, case.path_calls(path))
                    if times[path] > BEHIND * times["dense"]:
                        behind.add(path)
            where = {column: case.columns[column] for column in ("tokens", "active", "union")}
            rows += [where | {"path": path, "p50": p50} for path, p50 in times.items()]
            print(
                f"{case}  " + "  ".join(f"{path} {p50:.4f}" for path, p50 in times.items()),
                flush=True,
            )
    return rows


def _calibration_time(case: _Case, what: str, calls: list[Callable[[], Tensor]]) -> float:
    """p50 in ms of the calls: in a graph, with weights from memory, up to GRAPH_TOKENS as `ffn` does."""
    _, times, _ = _checked(case, what, calls, "graph" if len(case.x) <= GRAPH_TOKENS else "stream")
    return _quantiles(times(BUDGET))["p50"]


@torch.no_grad()
def calibrate(
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    gated: bool = True,
    out: str | Path,
    tokens: Sequence[int] = CALIBRATION_TOKENS,
) -> Calibration:
    """Time our dense path and each sparse one over tokens and activity on this GPU, and save what "auto" chooses by.

    The layer is in bf16, its activity skewed, from one neuron per token to all; `out` is the JSON file to write. Then
    "auto" is compared with dense torch.compile at sizes between those measured, and on inputs that are unlike what was
    observed before; the worst of each is printed. About a minute on an H200. Training is left out, and so dense: see
    `measure_training.crossover`. Raises as `ffn` does, and FileNotFoundError where the folder of `out` does not exist. Ours.
    """
    device = _gpu()
    _check_sizes(tokens, hidden_size, intermediate_size)
    out = Path(out)
    if not out.parent.is_dir() or out.is_dir():
        raise FileNotFoundError(f"{out} cannot be written: name a file in a folder that exists")
    rows = _calibration_rows(hidden_size, intermediate_size, gated, tokens, device)
    origin = results.provenance()
    calibration = Calibration.fit(
        rows,
        device=origin["device"],
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        gated=gated,
        dtype="bfloat16",
        versions="; ".join(f"{name} {version}" for name, version in origin["versions"].items()),
        date=origin["date"],
    )
    calibration.save(out)
    print(f"{out}: {len(rows)} times", flush=True)
    _check_choices(calibration, device)
    return calibration


def _check_choices(calibration: Calibration, device: torch.device) -> dict[str, float]:
    """Time "auto" where nothing was calibrated; print and return the worst ratios to dense torch.compile.

    "alike": the layer knows the activity of its inputs. "even": it does, and they are even, where skewed ones were
    calibrated. "busier": it was planned for 29 active neurons and all are active, before it can take notice.
    """
    n, k, gated = calibration.intermediate_size, calibration.hidden_size, calibration.gated
    compiled = torch.compile(_dense, fullgraph=True, dynamic=False)
    worst: dict[str, float] = {}
    for num_tokens in CHECKED_TOKENS:

        def case_of(wanted: float, skewed: bool, num_tokens: int = num_tokens) -> _Case:
            inputs = synthetic_layer(num_tokens, k, n, active=wanted, skewed=skewed, device=device)
            sets = WEIGHT_SETS if num_tokens <= GRAPH_TOKENS else 1
            return _Case.of("skewed" if skewed else "even", inputs, gated, sets)

        usual = case_of(min(29, n), True).auto_layers(calibration)[0].chooser.path(num_tokens)
        full = case_of(n, True)
        checks = [("alike", case_of(wanted, True), None) for wanted in CHECKED_ACTIVE if wanted < n]
        checks += [
            ("alike", full, None),
            ("even", case_of(min(29, n), False), None),
            ("busier", full, usual),
        ]
        for kind, case, path in checks:
            if path is None:
                layers = case.auto_layers(calibration)
                path, calls = (
                    layers[0].chooser.path(num_tokens),
                    [functools.partial(layer, case.x) for layer in layers],
                )
            else:
                calls = case.path_calls(path)
            dense = _calibration_time(case, "dense torch.compile", case.calls(compiled, plain=True))
            ratio = _calibration_time(case, f"auto ({path})", calls) / dense
            worst[kind] = max(ratio, worst.get(kind, 0.0))
            print(
                f"{case}  {kind:<6} auto took {path:<7} {ratio:.2f} of the time of torch.compile",
                flush=True,
            )
    torch.compiler.reset()
    print(
        f"worst against dense torch.compile: {worst['alike']:.2f} of its time with the activity known, "
        f"{worst['even']:.2f} with even activity, {worst['busier']:.2f} planned for 29 active neurons with all active",
        flush=True,
    )
    return worst


# --- files ------------------------------------------------------------------------------------------------------------


def _check_files(folder: str | Path | None, files: Mapping[str, Sequence[str]]) -> None:
    """Refuse before anything is measured what could not be saved after it: `files` are names and columns."""
    if folder is None:
        return
    if Path(folder).is_file():
        raise NotADirectoryError(
            f"{folder} is a file; out is a folder, for {', '.join(f'{n}.csv' for n in files)}"
        )
    for name, columns in files.items():
        path = Path(folder) / f"{name}.csv"
        if path.is_file() and (found := list(pd.read_csv(path, nrows=0)))[: len(columns)] != list(
            columns
        ):
            raise ValueError(
                f"{path} has the columns {found}; the rows to add have {columns}: move it away first"
            )


def _append(folder: str | Path | None, origin: dict, name: str, rows: list[dict]) -> None:
    if folder is not None and rows:
        results.append_rows(Path(folder) / f"{name}.csv", rows, origin)
