"""Measurements of whole models on a GPU: forward passes, decoding, each layer, and where a layer's time goes.

As in measure.py, no speed is recorded unless the same call found the result right: a sample of the last hidden states (in
decoding: of the logits) is compared with fp32, all of them with the dense model's, and each feed-forward layer with fp64.
Both sides are one model with the same weights, attention, norms and head; only the feed-forward layers compute differently.
Providers are timed in turns, and energy is counted over the same turns.

A forward pass is that of a language model up to the logits of each sequence's last token. The paper does not say which
logits its passes compute, but it cannot be all: its times for 64 x 2048 tokens (Table 1) rise by 39.1 ms a layer from 8 to
38 layers, and without layers 7 ms would be left, where all logits would take as long as 1.8 layers.

A compiled model has each decoder layer and the last norm compiled, not the whole: transformers writes the causal mask out
where a whole model without a cache is compiled, and attention with a mask takes another kernel, which computes what is
masked too. All layers share the compiled code.

In decoding the queries, keys and values of a layer are one product, on all sides (joined_projections).

Without a checkpoint the weights are random and the activity is imposed (imposed.py), with a profile over layers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from twell import imposed, measure, results
from twell.model import SparseLlamaForCausalLM
from twell.sparse.layer import SparseFFN
from twell.sparse.plan import Calibration
from twell.train import TrainConfig

ROUNDS, TURN = (
    9,
    800,
)  # each provider is timed in so many turns, of so many ms: clocks change within seconds
SETTLE = 300  # ms before a turn that do not count: power takes a while to settle
PROFILED = 8  # calls that are profiled
LAYER_ROUND = 60  # ms that one way to compute a layer takes in a turn
GENERATION = 64  # tokens that a sequence is continued by, in decoding
SAMPLE = 4096  # tokens of the batch that are compared with fp32, and rows of each layer with fp64
# Relative RMS of last hidden states against fp32. Rounding adds up over layers: bf16 comes to 0.5% with 4 layers and to 1.5%
# with 38. Another way to compute the same may be as far off as dense and a quarter more, and from dense by both errors. (That
# each layer is right is checked apart: of random weights a layer adds too little for its error to show at the end.)
TOLERANCE, AS_DENSE, FROM_DENSE = 5e-2, 1.25, 2.0
# A feed-forward layer's relative RMS against fp64 is at most measure.TOLERANCE, or AS_DENSE times that of plain products where
# that is more, as where the terms of a trained layer cancel; never more than this.
LAYER_TOLERANCE = 2e-2

DENSE, COMPILED = "dense eager", "dense torch.compile"
# How a provider's layers are compiled, by what follows its side: torch.compile's options. Tuned, the products of a single row
# become code of Inductor's own, which tries ways to cut it, and a step of one document is faster, densely too.
KINDS = {"torch.compile": None, "torch.compile tuned": {"coordinate_descent_tuning": True}}
MODEL = "model parameters num_layers hidden_size intermediate_size num_heads vocab_size gated dtype".split()
CASE = [*MODEL, "profile", "sdpa", "batch", "context", "tokens", "active", "active_max", "union"]
SPEED = ["p20", "p50", "p80"]
ENERGY = ["energy", "watts", "idle"]
COLUMNS = {
    "model": [
        *CASE,
        "mode",
        "provider",
        "path",
        "relative_rms",
        "layer_rms",
        *SPEED,
        "tokens_per_ms",
        "peak",
        *ENERGY,
    ],
    "model_layers": [
        *MODEL,
        "profile",
        "sdpa",
        "batch",
        "context",
        "tokens",
        "level",
        "layer",
        "wanted",
        "active",
    ]
    + ["p99", "active_max", "union", "dense", "sparse", "auto", "auto_path", "relative_rms"],
    "model_parts": [*CASE, "layer", "provider", "part", "ms"],
    "decode": [
        *CASE,
        "steps",
        "provider",
        "path",
        "relative_rms",
        "layer_rms",
        "same",
        *SPEED,
        "tokens_per_second",
    ]
    + ENERGY,
}


# --- a model that changes sides ---------------------------------------------------------------------------------------


def hidden_states(model: SparseLlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the last hidden states [B, S, K] of `ids` [B, S], normed: the model's own, without its mask and checks."""
    base = model.model
    hidden = base.embed_tokens(ids)
    rotary = base.rotary_emb(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in base.layers:
        hidden = layer(hidden, position_embeddings=rotary)
    return base.norm(hidden)


def forward(model: SparseLlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last hidden states [B, S, K] of `ids` [B, S] and the logits [B, V] of the last tokens."""
    hidden = hidden_states(model, ids)
    return hidden, model.lm_head(hidden[:, -1])


def exact_hidden_states(model: SparseLlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return `hidden_states` in fp32, densely; one layer at a time is copied in fp32."""
    base = model.model
    hidden = base.embed_tokens(ids).float()
    rotary = base.rotary_emb(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in base.layers:
        wide = copy.deepcopy(layer).float()
        wide.mlp.backend = "dense"
        hidden = wide(hidden, position_embeddings=rotary)
    return copy.deepcopy(base.norm).float()(hidden)


class Sides:
    """A model that computes its feed-forward layers as one provider and then as another.

    Providers are "dense eager" and "dense torch.compile", whose down projections are stored as nn.Linear does, and
    "triton" and "auto", alone and followed by " torch.compile"; " tuned" may follow too (KINDS).
    """

    def __init__(self, model: SparseLlamaForCausalLM, calibration: Calibration | None = None):
        self.model, self.calibration = model, calibration
        for ffn in model.ffns:
            ffn.calibration = calibration
        self.take_weights()
        parts = [*model.model.layers, model.model.norm]
        self.compiled = {kind: measure.Compiled(parts, options) for kind, options in KINDS.items()}
        # Each layer's code is made for each provider, shape and path, and kept with that of the other layers.
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), 256))

    def take_weights(self) -> None:
        """Take up the down projections as they are now, in both ways to store them."""
        self.down = [ffn.down_proj.weight for ffn in self.model.ffns]
        self.plain = [weight.detach().contiguous() for weight in self.down]
        self.by_neuron = [weight.t().contiguous().t() for weight in self.plain]

    def become(self, provider: str) -> None:
        """Compute as `provider` from now on."""
        side, _, wanted = provider.partition(" ")
        for compiled in self.compiled.values():
            compiled(False)
        if wanted in KINDS:
            self.compiled[wanted](True)
        for weight, plain, by_neuron in zip(self.down, self.plain, self.by_neuron, strict=True):
            weight.data = plain if side == "dense" else by_neuron
        self.model.set_ffn_backend(side)

    def observe(self, activity: Sequence[dict], tokens: int) -> None:
        """Tell "auto" each layer's activity, in unions of so many tokens."""
        for ffn, found in zip(self.model.ffns, activity, strict=True):
            ffn.observe(found["mean"], found["union"], tokens)

    def paths(self, provider: str, tokens: int) -> str:
        """How many layers compute so many tokens by which path: "union 38"."""
        from twell.kernels import ops

        side = provider.split()[0]
        taken = {"dense": "dense", "triton": ops.choose(tokens)}
        paths = Counter(taken.get(side) or ffn.chooser.path(tokens) for ffn in self.model.ffns)
        return ", ".join(f"{path} {number}" for path, number in sorted(paths.items()))


def providers(compiled: bool | None, tuned: bool = False) -> list[str]:
    """Names of all providers: compiled ones, eager ones, or (None) both, and also tuned ones; the first is dense."""
    plain, tuning = list(KINDS)
    kinds = {None: ["", plain], True: [plain], False: [""]}[compiled] + [tuning] * tuned
    names = [f"{side} {kind}".strip() for kind in kinds for side in ("dense", "triton", "auto")]
    return [DENSE if name == "dense" else name for name in names]


# --- whether a result is right ----------------------------------------------------------------------------------------


def relative(found: Tensor, right: Tensor) -> float:
    """Return the relative RMS error of `found`; sums are in fp32, 2^24 numbers at a time."""
    parts = zip(found.reshape(-1).split(2**24), right.reshape(-1).split(2**24), strict=True)
    pairs = [((a.float() - b.float()).square().sum(), b.float().square().sum()) for a, b in parts]
    wrong, size = (sum(float(part) for part in column) for column in zip(*pairs, strict=True))
    return math.sqrt(wrong / size) if size else math.sqrt(wrong)


class Judge:
    """Compares what providers find, the first of which is dense, with `exact`, in fp32, and with the first one's.

    `cut` takes the part of a result for which there is an exact one.
    """

    def __init__(self, what: str, exact: Tensor, cut: Callable[[Tensor], Tensor]):
        self.what, self.exact, self.cut = what, exact, cut
        self.first: Tensor | None = None
        self.error = math.nan

    def check(self, name: str, found: Tensor) -> float:
        """Return the relative RMS against fp32; raises ArithmeticError where it, or that against dense, is too large."""
        error = relative(self.cut(found), self.exact)
        limit = TOLERANCE if self.first is None else AS_DENSE * self.error
        if not error <= limit:
            raise ArithmeticError(
                f"{self.what} of {name} are wrong: relative RMS {error:.2e}, allowed {limit:.2e}"
            )
        if self.first is None:
            self.first, self.error = found, error
        elif not (distance := relative(found, self.first)) <= FROM_DENSE * self.error:
            limit = FROM_DENSE * self.error
            raise ArithmeticError(
                f"{self.what} of {name} differ from dense ones: relative RMS {distance:.2e}, allowed {limit:.2e}"
            )
        return error


def _allowed(exact: measure.Exact, rows: Tensor, weights: measure.Weights) -> float:
    """The relative RMS that plain products allow a layer (LAYER_TOLERANCE)."""
    return min(AS_DENSE * relative(measure._dense(rows, *weights), exact.y), LAYER_TOLERANCE)


def check_layers(sides: Sides, run: Callable[[], object], what: str) -> float:
    """Return the worst relative RMS against fp64 of a feed-forward layer's output, on SAMPLE tokens of a pass, `run`.

    Each layer computes all tokens, by the present provider, not compiled. Raises ArithmeticError where it is above what
    LAYER_TOLERANCE says.
    """
    worst = 0.0

    def compare(place: int) -> Callable:
        def hook(ffn: SparseFFN, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            nonlocal worst
            rows, outputs = inputs[0].flatten(0, -2), y.flatten(0, -2)
            blocks = torch.arange(0, len(rows), max(1, len(rows) // SAMPLE), device=rows.device)
            weights = (
                ffn.gate_proj and ffn.gate_proj.weight,
                ffn.up_proj.weight,
                ffn.down_proj.weight,
            )
            exact = measure.Exact.of(rows[blocks], weights)
            allowed = _allowed(exact, rows[blocks], weights)
            worst = max(worst, exact.check(outputs[blocks], f"layer {place} of {what}", allowed))

        return hook

    hooks = [
        ffn.register_forward_hook(compare(place)) for place, ffn in enumerate(sides.model.ffns)
    ]
    try:
        run()
    finally:
        for handle in hooks:
            handle.remove()
    return worst


# --- timing -----------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Times of a call over its turns, and its energy: `spent` mJ and `seconds` for `calls` calls.

    A call may count as several: the steps of a generation.
    """

    call: Callable[[], object]
    meter: Callable[[], int] | None
    per_call: int = 1
    times: list[np.ndarray] = field(default_factory=list)
    trial: float = 0.0  # ms
    spent: float = 0.0
    seconds: float = 0.0
    calls: int = 0

    def turn(self) -> None:
        """Run for TURN ms, at least twice, after SETTLE ms that are not counted."""
        if not self.times:
            self.trial = float(measure._between_replays(self.call, 1, lead=1)[0])
        for _ in range(min(math.ceil(SETTLE / self.trial), 1000)):
            self.call()
        number = min(max(round(TURN / self.trial), 2), 2000)
        torch.cuda.synchronize()
        before, start = (self.meter() if self.meter else 0), time.perf_counter()
        self.times.append(measure._between_replays(self.call, number, lead=0) / self.per_call)
        self.seconds += time.perf_counter() - start
        self.spent += (self.meter() if self.meter else 0) - before
        self.calls += number * self.per_call

    def row(self, idle: float | None) -> dict:
        """Columns SPEED and ENERGY."""
        found = measure._quantiles(np.concatenate(self.times))
        if self.meter is None:
            return found | dict.fromkeys(ENERGY)
        watts = round(self.spent / 1e3 / self.seconds, 1)
        return found | {
            "energy": float(f"{self.spent / self.calls:.5g}"),
            "watts": watts,
            "idle": idle,
        }


def idle_watts(meter: Callable[[], int]) -> float:
    """Return the mean power in W over two seconds in which nothing runs, after a second's wait."""
    torch.cuda.synchronize()
    time.sleep(1.0)
    before, start = meter(), time.perf_counter()
    time.sleep(2.0)
    return round((meter() - before) / 1e3 / (time.perf_counter() - start), 1)


@dataclass(frozen=True)
class Bench:
    """What all measurements of one command share."""

    sides: Sides
    columns: dict  # of the model
    compiled: bool | None
    tuned: bool  # also, in decoding
    meter: Callable[[], int] | None
    idle: float | None

    @property
    def model(self) -> SparseLlamaForCausalLM:
        return self.sides.model


def _case(bench: Bench, ids: Tensor, activity: Sequence[dict]) -> dict:
    """Columns CASE: means over layers, and the most that a token has active in any."""
    batch, context = ids.shape
    return bench.columns | {
        "batch": batch,
        "context": context,
        "tokens": batch * context,
        "active": round(float(np.mean([layer["mean"] for layer in activity])), 2),
        "active_max": int(max(layer["max"] for layer in activity)),
        "union": round(float(np.mean([layer["union"] for layer in activity])), 1),
    }


def _measure_forward(bench: Bench, ids: Tensor) -> tuple[list[dict], list[dict[str, float]]]:
    """Rows of model.csv for a batch [B, S], and the activity of each layer."""
    sides, model = bench.sides, bench.model
    batch, context = ids.shape
    names = providers(bench.compiled)
    sides.become(DENSE)
    activity = imposed.activity_of(model, ids)
    case = _case(bench, ids, activity)
    sides.observe(activity, min(ids.numel(), measure.BLOCK))
    said = f"{case['model']}  {batch} x {context} tokens  {case['active']:.4g} active"

    sequences = max(1, min(batch, SAMPLE // context))
    exact = exact_hidden_states(model, ids[:sequences])
    judge = Judge(f"hidden states ({said})", exact, lambda hidden: hidden[:sequences])
    errors, worst, peaks, calls = {}, {}, {}, {}
    run = functools.partial(forward, model, ids)
    for name in names:
        side = name.split()[0]
        if side not in worst:
            sides.become(DENSE if side == "dense" else side)
            worst[side] = check_layers(sides, run, f"{side} of {said}")
        sides.become(name)
        errors[name] = judge.check(name, run()[0])
    del judge, exact
    graph = ids.numel() <= measure.GRAPH_TOKENS
    for name in names:
        sides.become(name)
        peaks[name] = _peak(model, run)
        calls[name] = measure._capture([run])[0].replay if graph else run
    clocks = {name: Clock(calls[name], bench.meter) for name in names}
    for _ in range(ROUNDS):
        for name, clock in clocks.items():
            sides.become(name)
            clock.turn()
    rows = []
    for name, clock in clocks.items():
        side = name.split()[0]
        row = case | {"mode": "graph" if graph else "stream", "provider": name}
        row |= {"path": sides.paths(name, ids.numel())}
        row |= {
            "relative_rms": float(f"{errors[name]:.3g}"),
            "layer_rms": float(f"{worst[side]:.3g}"),
        }
        timed = clock.row(bench.idle)
        row |= {column: timed[column] for column in SPEED}
        row |= {"tokens_per_ms": float(f"{ids.numel() / timed['p50']:.5g}"), "peak": peaks[name]}
        row |= {column: timed[column] for column in ENERGY}
        rows.append(row)
        energy = "" if row["energy"] is None else f"  {row['energy'] / ids.numel():.4g} mJ a token"
        print(
            f"{said}  {name:<20} {row['tokens_per_ms']:8.1f} tokens/ms{energy}  {row['path']}",
            flush=True,
        )
    return rows, activity


def _peak(model: nn.Module, run: Callable[[], object]) -> int:
    """The most bytes that a pass allocates, with one copy of the weights."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return weights + torch.cuda.max_memory_allocated() - before


# --- layer by layer ---------------------------------------------------------------------------------------------------


def _layer_rows(
    bench: Bench,
    ids: Tensor,
    wanted: Sequence[float] | None,
    activity: Sequence[dict],
    times: Sequence[dict] | None,
) -> list[dict]:
    """Rows of model_layers.csv; without `times` these cells are empty."""
    case = _case(bench, ids, activity)
    where = {
        column: case[column]
        for column in COLUMNS["model_layers"]
        if column in case and column != "active"
    }
    where |= {"level": case["active"]}
    empty = dict.fromkeys(COLUMNS["model_layers"][-5:])
    rows = []
    for layer, found in enumerate(activity):
        row = where | {
            "layer": layer,
            "wanted": None if wanted is None else round(wanted[layer], 2),
        }
        row |= {"active": round(found["mean"], 2), "p99": found["p99"], "active_max": found["max"]}
        row |= {"union": round(found["union"], 1)} | (empty if times is None else times[layer])
        rows.append({column: row[column] for column in COLUMNS["model_layers"]})
    return rows


def _measure_layers(bench: Bench, ids: Tensor) -> list[dict]:
    """Times in ms of each feed-forward layer alone, on its input in a dense pass over `ids`: dense (compiled), sparse, auto.

    Each is checked against fp64 before it is timed, in turns with the others, the cache emptied between calls.
    """
    from twell.kernels import ops

    bench.sides.become(DENSE)
    compiled = torch.compile(measure._dense, fullgraph=True, dynamic=False)
    found = []

    def visit(place: int, ffn: SparseFFN, x: Tensor) -> None:
        first = (ffn.gate_proj or ffn.up_proj).weight
        inputs = (x.flatten(0, -2), first, ffn.up_proj.weight, bench.sides.by_neuron[place])
        case = measure._Case.of(bench.columns["profile"], inputs, ffn.gated, 1)
        (auto,) = case.auto_layers(bench.sides.calibration)
        path = ops.choose(len(case.x))
        calls = {"dense": case.calls(compiled, plain=True)[0], "sparse": case.path_calls(path)[0]}
        calls["auto"] = functools.partial(auto, case.x)
        allowed = _allowed(case.exact, case.x, case.sets[0])
        errors = {
            name: case.exact.check(call(), f"layer {place}, {name},", allowed)
            for name, call in calls.items()
        }
        turns: dict[str, list[np.ndarray]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                turns[name].append(measure._stream_times(call, LAYER_ROUND))
        times = {
            name: measure._quantiles(np.concatenate(taken))["p50"] for name, taken in turns.items()
        }
        times |= {
            "auto_path": auto.chooser.path(len(case.x)),
            "relative_rms": float(f"{errors['sparse']:.3g}"),
        }
        found.append(times)
        said = "  ".join(f"{name} {times[name]:.3f}" for name in calls)
        print(f"layer {place:>2}  {case.columns['active']:>7} active  {said} ms", flush=True)

    with imposed.before_ffn(bench.model, visit):
        hidden_states(bench.model, ids)
    return found


# --- where a layer's time goes ----------------------------------------------------------------------------------------

PARTS_OF = COMPILED, "triton torch.compile"
PARTS = (
    "attention",
    "projections",
    "norms, rotary, residuals",
    "gate",
    "up and down",
    "between kernels",
)


def split_kernels(kernels: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the time of each of PARTS but the last from one decoder layer's kernels (name, ms), in the order they ran.

    Products are told apart by their place: before attention come q, k and v, behind it the output's, then those of the
    feed-forward layer, the first of which is the gate's (without a gate: up's; in decoding, the kernel that computes the gate
    and what is active of up). A large batch is computed in chunks, each with its gate. Elementwise work between two of these is
    the layer's own. Raises ValueError for kernels without attention among them.
    """
    found = dict.fromkeys(PARTS[:-1], 0.0)
    seen_attention, products = False, 0
    waiting = 0.0  # elementwise work since the last product, which belongs to the layer if another product follows
    for name, ms in kernels:
        short = measure.kernel_name(name)
        # Inductor names what it fuses after what the result is for, attention too.
        if re.search(r"sdpa|flash|fmha|attention|cudnn", name) and short != "elementwise":
            found["attention"] += ms
            seen_attention = True
        elif short == "cublas matmul" and re.search(
            "reduce", name
        ):  # the end of a product that was split
            found[
                "projections" if products <= 1 else "gate" if products == 2 else "up and down"
            ] += ms
        elif short == "cublas matmul" and not seen_attention:
            found["projections"] += ms
        elif short == "cublas matmul":
            products += 1
            found[
                "projections" if products == 1 else "gate" if products == 2 else "up and down"
            ] += ms
            found["up and down" if products > 2 else "norms, rotary, residuals"] += waiting
            waiting = 0.0
        elif short in ("elementwise", "copy") or not short.endswith("_kernel"):
            if products >= 2:
                waiting += ms
            else:
                found["norms, rotary, residuals"] += ms
        else:
            found["gate" if short.startswith("gate") or products < 2 else "up and down"] += ms
            products = max(products, 2)
    found["norms, rotary, residuals"] += waiting
    if not seen_attention:
        raise ValueError(f"no kernel of attention among {', '.join(name for name, _ in kernels)}")
    return found


def _profiled(call: Callable[[], object], calls: int, lead: int) -> list[tuple[str, float]]:
    """Kernels (name, ms) of so many calls in the order they ran, behind `lead` more, that clocks are those of steady work."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # the first profile of a process pays for its start; the second one is kept
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(lead + calls):
                call()
            torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = [
        e
        for e in profiler.events()
        if e.device_type == cuda and not getattr(e, "is_user_annotation", 0)
    ]
    events.sort(key=lambda event: event.time_range.start)
    kernels = [(event.name, event.time_range.elapsed_us() / 1e3) for event in events]
    return [kernel for one in _equal(kernels, lead + calls)[lead:] for kernel in one]


def _equal(kernels: Sequence[tuple[str, float]], number: int) -> list[Sequence[tuple[str, float]]]:
    """Cut into so many parts, which have to have the same kernels in the same order; else raises RuntimeError."""
    each, left = divmod(len(kernels), number)
    cut = [kernels[start : start + each] for start in range(0, len(kernels), each or 1)]
    if (
        left
        or not each
        or any([name for name, _ in one] != [name for name, _ in cut[0]] for one in cut)
    ):
        raise RuntimeError(
            f"{len(kernels)} kernels ran in {number} equal passes, and not the same in each"
        )
    return cut


def _measure_parts(bench: Bench, ids: Tensor, activity: Sequence[dict]) -> list[dict]:
    """Rows of model_parts.csv: where the time of the compiled layer goes whose activity is nearest to the mean."""
    sides, base = bench.sides, bench.model.model
    means = np.array([layer["mean"] for layer in activity])
    place = int(np.abs(means - means.mean()).argmin())
    sides.become(DENSE)
    hidden = base.embed_tokens(ids)
    rotary = base.rotary_emb(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in base.layers[:place]:
        hidden = layer(hidden, position_embeddings=rotary)
    sides.observe(activity, min(ids.numel(), measure.BLOCK))
    run = functools.partial(base.layers[place], hidden, position_embeddings=rotary)
    return _part_rows(
        sides, _case(bench, ids, activity) | {"layer": place}, dict.fromkeys(PARTS_OF, run)
    )


def _part_rows(
    sides: Sides, case: dict, calls: dict[str, Callable[[], object]], layers: int = 1
) -> list[dict]:
    """Rows of model_parts.csv from a call for each of PARTS_OF, in which so many layers run one after the other."""
    times: dict[str, list[np.ndarray]] = {name: [] for name in calls}
    for _ in range(measure.ROUNDS):
        for name, call in calls.items():
            sides.become(name)
            times[name].append(measure._between_replays(call, 20) / layers)
    rows = []
    for name, call in calls.items():
        sides.become(name)
        total = measure._quantiles(np.concatenate(times[name]))["p50"]
        lead = min(math.ceil(SETTLE / (total * layers)), 20)
        parts = [
            split_kernels(one) for one in _equal(_profiled(call, PROFILED, lead), PROFILED * layers)
        ]
        spent = {part: float(np.median([one[part] for one in parts])) for part in PARTS[:-1]}
        spent[PARTS[-1]] = total - sum(
            spent.values()
        )  # negative where kernels take longer under the profiler
        rows += [
            case | {"provider": name, "part": part, "ms": float(f"{ms:.4g}")}
            for part, ms in spent.items()
        ]
        said = "  ".join(f"{part} {ms:.4f}" for part, ms in spent.items())
        print(
            f"layer of {case['batch']} x {case['context']}  {name:<20} {total:.4f} ms: {said}",
            flush=True,
        )
    return rows


# --- decoding ---------------------------------------------------------------------------------------------------------


class LayerCache:
    """Keys and values [B, H, slots, D] of one layer, at places that do not move: what a decoder layer takes for a cache.

    A pass over several tokens fills it from the start, one over a single token writes the slot `position` [1] and sees all
    slots, for a mask to choose from.
    """

    def __init__(self, shape: tuple[int, ...], position: Tensor, dtype: torch.dtype):
        self.keys, self.values = (
            torch.zeros(shape, dtype=dtype, device=position.device) for _ in range(2)
        )
        self.position = position

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        if keys.shape[2] > 1:
            self.keys[:, :, : keys.shape[2]] = keys
            self.values[:, :, : keys.shape[2]] = values
            return keys, values
        self.keys.index_copy_(2, self.position, keys)
        self.values.index_copy_(2, self.position, values)
        return self.keys, self.values


class Joined(nn.Module):
    """Queries, keys and values as one product: stands in for all three projections, which attention calls in this order."""

    def __init__(self, parts: Sequence[nn.Linear]):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        biases = [
            self.weight.new_zeros(part.out_features) if part.bias is None else part.bias
            for part in parts
        ]
        self.bias = (
            None
            if all(part.bias is None for part in parts)
            else nn.Parameter(torch.cat(biases), False)
        )
        self.sizes = [part.out_features for part in parts]
        self.waiting: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.waiting:
            self.waiting.extend(
                nn.functional.linear(x, self.weight, self.bias).split(self.sizes, -1)
            )
        return self.waiting.pop(0)


@contextlib.contextmanager
def joined_projections(model: SparseLlamaForCausalLM) -> Iterator[None]:
    """Let all layers have Joined projections meanwhile; three products of few rows take longer, on all sides alike."""
    with contextlib.ExitStack() as undo:
        for layer in model.model.layers:
            parts = {
                name: getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")
            }
            joined = Joined(list(parts.values()))
            for name, part in parts.items():
                undo.callback(setattr, layer.self_attn, name, part)
                setattr(layer.self_attn, name, joined)
        yield


class Decoder:
    """Continues documents token by token, with a static cache: nothing depends on the host, so that a graph holds a step.

    `script` [B, context + steps]: the first `context` tokens are read by `read`, and each step is given the next one: what a
    model of random weights would write has another activity than a text. The token that it would have chosen is kept in
    `picked`, of the script's shape.
    """

    def __init__(self, model: SparseLlamaForCausalLM, script: Tensor, context: int):
        self.model, self.script, self.context = model, script, context
        config, device = model.config, script.device
        self.steps = script.shape[1] - context
        self.position = torch.full((1,), context, device=device)
        slots = (
            math.ceil(script.shape[1] / 16) * 16
        )  # attention wants masks of a multiple of 16 bytes
        self.places = torch.arange(slots, device=device)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        shape = len(script), heads, slots, head_dim
        dtype = model.model.embed_tokens.weight.dtype
        self.caches = [LayerCache(shape, self.position, dtype) for _ in model.model.layers]
        self.picked = torch.zeros_like(script)
        around = self._begin, self._end
        self.around = {"": around}  # what surrounds the layers, by kind
        for kind, options in KINDS.items():
            self.around[kind] = [
                torch.compile(part, fullgraph=True, dynamic=False, options=options)
                for part in around
            ]

    def read(self) -> None:
        """Fill the cache with the first `context` tokens."""
        base, ids = self.model.model, self.script[:, : self.context]
        hidden = base.embed_tokens(ids)
        rotary = base.rotary_emb(hidden, torch.arange(self.context, device=ids.device)[None])
        for layer, cache in zip(base.layers, self.caches, strict=True):
            hidden = layer(hidden, position_embeddings=rotary, past_key_values=cache)

    def restart(self) -> None:
        """Go back to the end of what was read."""
        self.position.fill_(self.context)

    def through(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """What all decoder layers make of `hidden` [B, 1, K], at the present position."""
        for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
            hidden = layer(
                hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=cache
            )
        return hidden

    def _begin(self, place: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        base = self.model.model
        hidden = base.embed_tokens(self.script.index_select(1, place))
        mask = torch.where(self.places <= place, 0.0, float("-inf")).to(hidden.dtype)
        return hidden, base.rotary_emb(hidden, place[None]), mask[None, None, None]

    def _end(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.lm_head(hidden[:, -1])
        return logits, logits.argmax(-1, keepdim=True)

    def step(self, kind: str = "") -> Tensor:
        """Read one token of each document; returns the logits [B, V] for the next. `kind`: how what surrounds the layers is compiled."""
        begin, end = self.around[kind]
        logits, token = end(self.model.model.norm(self.through(*begin(self.position))))
        self.picked.index_copy_(1, self.position, token)
        self.position.add_(1)
        return logits

    def generate(self, step: Callable[[], Tensor]) -> Tensor:
        """Restart and return the logits [steps, B, V] of all steps."""
        self.restart()
        return torch.stack([step().clone() for _ in range(self.steps)])


def _measure_decode(bench: Bench, script: Tensor, context: int) -> tuple[list[dict], Decoder]:
    """Rows of decode.csv for documents [B, context + steps], and what decoded them."""
    sides, model, batch = bench.sides, bench.model, len(script)
    sides.become(DENSE)
    decoder = Decoder(model, script, context)
    decoder.read()
    inputs: list[list[Tensor]] = [[] for _ in model.ffns]

    def keep(place: int, _: SparseFFN, x: Tensor) -> None:
        inputs[place].append(x.flatten(0, -2))

    with imposed.before_ffn(model, keep):
        logits = decoder.generate(decoder.step)
    block = min(batch, measure.BLOCK)
    pairs = zip(model.ffns, inputs, strict=True)
    activity = [imposed.layer_activity(ffn, torch.cat(rows), block) for ffn, rows in pairs]
    inputs.clear()
    sides.observe(activity, block)
    case = _case(bench, script[:, :1], activity) | {"context": context}
    said = f"{case['model']}  decoding {batch} x 1 behind {context} tokens  {case['active']:.4g} active"

    few = max(1, min(batch, SAMPLE // script.shape[1]))
    exact = exact_hidden_states(model, script[:few])[:, context:].transpose(0, 1)
    exact = exact @ model.lm_head.weight.float().t()
    judge = Judge(f"logits ({said})", exact, lambda found: found[:, :few])
    judge.check(DENSE, logits)
    first = decoder.picked[:, context:].clone()
    errors, worst, same, graphs = {}, {}, {}, {}
    for name in providers(bench.compiled, bench.tuned):
        side, _, kind = name.partition(" ")
        if side not in worst:
            sides.become(DENSE if side == "dense" else side)
            decoder.restart()
            worst[side] = check_layers(sides, decoder.step, f"{side} of {said}")
        sides.become(name)
        step = functools.partial(decoder.step, kind if kind in KINDS else "")
        decoder.restart()
        graphs[name], (output,) = measure._capture([step])

        def replay(graph=graphs[name], output=output) -> Tensor:
            graph.replay()
            return output

        errors[name] = judge.check(name, decoder.generate(replay))
        same[name] = float((decoder.picked[:, context:] == first).double().mean())
    del judge, exact, logits

    def generation(graph: torch.cuda.CUDAGraph) -> None:
        decoder.restart()
        for _ in range(decoder.steps):
            graph.replay()

    clocks = {
        name: Clock(functools.partial(generation, graph), bench.meter, decoder.steps)
        for name, graph in graphs.items()
    }
    for _ in range(ROUNDS):
        for clock in clocks.values():
            clock.turn()
    rows = []
    for name, clock in clocks.items():
        timed = clock.row(bench.idle)
        row = case | {"steps": decoder.steps, "provider": name, "path": sides.paths(name, batch)}
        layer_rms = float(f"{worst[name.split()[0]]:.3g}")
        row |= {
            "relative_rms": float(f"{errors[name]:.3g}"),
            "layer_rms": layer_rms,
            "same": round(same[name], 4),
        }
        row |= {column: timed[column] for column in SPEED}
        row |= {"tokens_per_second": float(f"{1e3 * batch / timed['p50']:.5g}")}
        row |= {column: timed[column] for column in ENERGY}
        rows.append(row)
        print(
            f"{said}  {name:<20} {row['tokens_per_second']:9.1f} tokens/s  {row['path']}",
            flush=True,
        )
    return rows, decoder


def _decode_parts(bench: Bench, decoder: Decoder, row: dict) -> list[dict]:
    """Rows of model_parts.csv for the case of a row of decode.csv: where a layer's time goes in a step, the median over layers."""
    decoder.restart()
    bench.sides.become(DENSE)
    run = functools.partial(decoder.through, *decoder._begin(decoder.position))
    calls = {}
    for name in PARTS_OF:
        bench.sides.become(name)
        calls[name] = measure._capture([run])[0].replay
    case = {column: row[column] for column in CASE} | {"layer": None}
    return _part_rows(bench.sides, case, calls, len(decoder.caches))


# --- all of it --------------------------------------------------------------------------------------------------------


def random_model(
    size: str, overrides: Sequence[str], context: int, device: torch.device
) -> tuple[SparseLlamaForCausalLM, TrainConfig]:
    """Return a model in bf16 for up to `context` tokens, with weights by `imposed.draw_weights`, and its configuration.

    `size` and `overrides` as `TrainConfig.load` takes them. Raises ValueError for a model that the kernels do not take.
    """
    config = TrainConfig.load(size, overrides)
    if config.activation != "relu":
        raise ValueError(f"activation is {config.activation!r}; sparse layers need 'relu'")
    measure._check_sizes([context], config.hidden_size, config.intermediate_size)
    sizes = config.model_config()
    sizes.max_position_embeddings = context
    with device:
        made = AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16)
    imposed.draw_weights(made.requires_grad_(False), config.seed)
    return made.eval(), config


@torch.no_grad()
def model(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    checkpoint: tuple[str, SparseLlamaForCausalLM, Sequence[int]] | None = None,
    shapes: Sequence[tuple[int, int]] = ((64, 2048),),
    profile: str = "paper",
    active: Sequence[float] | None = None,
    layers: bool = False,
    parts: bool = False,
    decode: Sequence[int] = (),
    decode_context: int = 512,
    compiled: bool | None = None,
    tuned: bool = False,
    calibration: Calibration | None = None,
    energy: bool = False,
    out: str | Path | None = None,
) -> dict[str, list[dict]]:
    """Time a language model in bf16, densely, sparsely and by "auto", eager and with compiled layers.

    Args:
        size: a configuration of the package or a YAML file (`TrainConfig.load`), for random weights.
        overrides: fields of it to change, as key=value.
        checkpoint: instead of these its name, the model in bf16 and the tokens of a text; the activity is the text's.
        shapes: batches (sequences, tokens of each) whose forward pass is timed.
        profile: how the activity is spread over layers, see `imposed.profile`.
        active: means over layers, each of which is imposed and measured in turn; default: the paper's for this size.
        layers: also time each feed-forward layer alone, on the first of the batches.
        parts: also say where the time of a layer goes, on the first of the batches and in decoding.
        decode: numbers of documents that are continued by GENERATION tokens.
        decode_context: the tokens that stand before these.
        compiled: True: only with compiled layers; False: only eager; None: both.
        tuned: also time decoding with layers that Inductor tunes (KINDS).
        calibration: what "auto" goes by; it knows the activity. None: what is assumed without one.
        energy: also measure energy; the turns are the same.
        out: the folder of model.csv, model_layers.csv, model_parts.csv and decode.csv, to which rows are appended.

    Up to 4,096 tokens a pass is timed in a CUDA graph, and decoding always. Returns the rows by file without their
    provenance, COLUMNS; data/README.md says what they mean. Raises ValueError for arguments that do not fit,
    ArithmeticError when a result is wrong, RuntimeError without a GPU. Paper: section 4.1, Table 1, Figs 4, 6, 10, 11.
    """
    device = measure._gpu()
    for name, numbers in (
        ("shapes", [n for shape in shapes for n in shape]),
        ("decode", [*decode, decode_context]),
    ):
        if numbers and min(numbers) < 1:
            raise ValueError(f"{name} holds {min(numbers)}; it has to be at least 1")
    if checkpoint is not None and active is not None:
        raise ValueError("active is imposed on random weights; a checkpoint has its own activity")
    if checkpoint is None and active is None and size not in imposed.PAPER_ACTIVE:
        raise ValueError(
            f"active: the paper has no model {size!r}; say how many neurons are to be active"
        )
    if (layers and not shapes) or (parts and not shapes and not decode):
        raise ValueError(
            f"{'layers' if layers else 'parts'}: measured on the first of the batches, and there is none"
        )
    if tuned and (compiled is False or not decode):
        lacking = "decode has no number of documents" if not decode else "compiled is False"
        raise ValueError(f"tuned: decoding is timed so with compiled layers, and {lacking}")
    measure._check_files(out, COLUMNS)
    longest = max(
        [context for _, context in shapes] + [decode_context + GENERATION] * bool(decode), default=1
    )
    if checkpoint is None:
        subject, config = random_model(size, overrides, longest, device)
        levels = [imposed.PAPER_ACTIVE[size]] if active is None else list(active)
        heights = [imposed.profile(profile, config.num_layers, level) for level in levels]
        draw = functools.partial(imposed.draw_tokens, config.vocab_size, device=device)
        calibrating = draw(64, min(128, longest), seed=1)
        name = size
    else:
        name, subject, text = checkpoint
        _check_checkpoint(name, subject, longest)
        subject = subject.to(device).requires_grad_(False).eval()
        heights, profile = [None], "checkpoint"
        draw = functools.partial(_cut, torch.as_tensor(text, dtype=torch.int64, device=device))
    meter = measure._meter() if energy else None
    idle = idle_watts(meter) if meter else None
    append = functools.partial(measure._append, out, results.provenance())
    kept: dict[str, list[dict]] = {name: [] for name in COLUMNS}

    def save(file: str, rows: list[dict]) -> None:
        append(file, rows)
        kept[file] += rows

    # Recorded files have the column sdpa, attention's kernel, which torch chooses.
    about = _about(name, subject) | {"profile": profile, "sdpa": "default"}
    print(
        f"{name}: {about['parameters'] / 1e6:.0f} M parameters, {about['num_layers']} layers",
        flush=True,
    )
    bench = Bench(Sides(subject, calibration), about, compiled, tuned, meter, idle)
    for wanted in heights:
        bench.sides.become(DENSE)
        if wanted is not None:
            imposed.impose(subject, wanted, calibrating)
            bench.sides.take_weights()
        for place, (batch, context) in enumerate(shapes):
            ids = draw(batch, context)
            rows, activity = _measure_forward(bench, ids)
            save("model", rows)
            if parts and place == 0:
                save("model_parts", _measure_parts(bench, ids, activity))
            times = _measure_layers(bench, ids) if layers and place == 0 else None
            save("model_layers", _layer_rows(bench, ids, wanted, activity, times))
            torch.cuda.empty_cache()
        for batch in decode:
            script = draw(batch, decode_context + GENERATION)
            with joined_projections(subject):
                rows, decoder = _measure_decode(bench, script, decode_context)
                save("decode", rows)
                if parts:
                    save("model_parts", _decode_parts(bench, decoder, rows[0]))
            del decoder
            torch.cuda.empty_cache()
    return kept


def _about(name: str, subject: SparseLlamaForCausalLM) -> dict:
    """Columns MODEL."""
    config = subject.config
    found = {"model": name, "parameters": sum(p.numel() for p in subject.parameters())}
    found |= {"num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
    found |= {
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
    }
    return found | {"vocab_size": config.vocab_size, "gated": config.gated_mlp, "dtype": "bfloat16"}


def _check_checkpoint(name: str, subject: SparseLlamaForCausalLM, longest: int) -> None:
    config = subject.config
    if config.hidden_act != "relu":
        raise ValueError(
            f"{name} has the activation {config.hidden_act!r}; sparse layers need 'relu'"
        )
    if subject.dtype != torch.bfloat16:
        raise ValueError(f"{name} is in {subject.dtype}; load it in torch.bfloat16")
    if config.mlp_bias:
        raise ValueError(f"{name} has feed-forward layers with biases, which are not measured")
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"{name} is for {config.max_position_embeddings} tokens; {longest} were asked for"
        )
    measure._check_sizes([longest], config.hidden_size, config.intermediate_size)


def _cut(text: Tensor, batch: int, context: int) -> Tensor:
    """The first tokens of a text as [batch, context]."""
    if len(text) < batch * context:
        raise ValueError(
            f"the text has {len(text)} tokens; {batch} x {context} need {batch * context}"
        )
    return text[: batch * context].view(batch, context)
