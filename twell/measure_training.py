"""Measurements of training on a GPU: one layer forward and backward, and one whole optimiser step of a model.

As in measure.py, no speed is recorded unless the same call found the result right. A layer's output, L1 term and
gradients are compared with fp64 before it is timed; a model's sparse steps have to lead to the loss of its dense ones.
All sides have the same loss, the gradient of the L1 term included, and providers are timed in turns.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from twell import imposed, measure, results
from twell.model import SparseLlamaForCausalLM, l1_by_layer
from twell.sparse.training import CAPACITY_MARGIN, SparseTraining, rooms
from twell.train import TrainConfig

ROUND = (
    100  # ms of steps that a layer's provider takes in a turn, and half as many of forward passes
)
TURN = 2000  # ms of optimiser steps that a model's provider takes in a turn, 2 to 20 steps
CHECKED_STEPS = 3  # optimiser steps before losses are compared
LOSS_TOLERANCE, NORM_TOLERANCE = (
    1e-2,
    3e-2,
)  # relative; of the loss after these steps and the first gradient's norm
L1_COEFFICIENT = 2e-5  # of the models
ACTIVE = 29.0  # of a size that the paper does not have
LOSS_CHUNK = 4096  # tokens whose logits exist at a time
# Gradients that reach the layer: of y at random, of the L1 term about a tenth of what a neuron gets from y, so that the
# check would not miss its absence. It is a power of two: another constant is rounded alike in every entry, on all sides,
# which does not average.
DY, DL1 = 1e-5, 2.0**-20
# Sums in fp32 err by about this share of the sum of their terms' absolute values; a gate that is nearer to zero than this
# is active or not by chance, and has its full gradient at the gate if it is.
EDGE = 2.0**-21
# As measure.TOLERANCE_OF_FEW, of six roundings one after the other: g, u, dh, its L1 part, dg, dx.
TOLERANCE_OF_FEW = (1 + 2**-9) ** 6 - 1

SIZES = "num_layers hidden_size intermediate_size num_heads vocab_size gated context micro_batch".split()
COLUMNS = {
    "training": measure.CASE_COLUMNS
    + "active_max union provider path capacity relative_rms worst p20 p50 p80 forward held peak".split()
    + "flops bytes roofline energy watts".split(),
    "training_kernels": [*measure.CASE_COLUMNS, "union", "provider", "kernel", "launches", "ms"],
    "train_step": [
        "model",
        "parameters",
        *SIZES,
        "precision",
        "checkpoint_activations",
        "profile",
        "active",
        "active_max",
    ]
    + "provider path capacity loss grad_norm p20 p50 p80 tokens_per_second peak energy watts".split()
    + ["largest", "largest_tokens_per_second"],
    "ceilings": measure.COLUMNS["ceilings"],
}

DENSE, COMPILED = "dense eager", "dense torch.compile"


# --- what is exact, and what a step needs at least --------------------------------------------------------------------


@dataclass(frozen=True)
class ExactStep:
    """A layer's step in fp64: y [M, K], l1 [M], dx [M, K], dw_gate, dw_up [N, K] and dw_down [K, N], by these names.

    A layer without a gate has no dw_gate. entries: active neurons, summed over tokens. either: by name the norm of what
    gates contribute that are so near to zero that sums in fp32 may come out on either side of it.
    """

    tensors: dict[str, Tensor]
    entries: int
    either: dict[str, float]

    @classmethod
    def of(cls, x: Tensor, weights: measure.Weights, dy: Tensor, dl1: Tensor) -> ExactStep:
        """Compute it for the gradients dy [M, K] and dl1 [M], 4,096 tokens at a time; g is active as rounded to x's type."""
        w_gate, w_up, w_down = (None if weight is None else weight.double() for weight in weights)
        first = w_up if w_gate is None else w_gate
        sums = {"dw_up": torch.zeros_like(w_up), "dw_down": torch.zeros_like(w_down)}
        if w_gate is not None:
            sums["dw_gate"] = torch.zeros_like(w_gate)
        rows: dict[str, list[Tensor]] = {"y": [], "l1": [], "dx": []}
        entries, edge_dw, edge_dx = 0, torch.zeros_like(first), 0.0
        for part, d, d_l1 in zip(x.split(4096), dy.split(4096), dl1.split(4096), strict=True):
            part, d = part.double(), d.double()
            pre = part @ first.t()
            g = torch.relu(pre)
            active = g.to(x.dtype) != 0
            entries += int(active.sum())
            u = None if w_gate is None else part @ w_up.t()
            h = g if u is None else g * u
            dh = d @ w_down + d_l1.double()[:, None] * (1.0 if u is None else u.sign())
            edge = (
                dh
                * (pre.abs() <= EDGE * (part.abs() @ first.abs().t()))
                * (1.0 if u is None else u)
            )
            edge_dw += edge.t() @ part
            edge_dx += float((edge @ first).square().sum())
            dh = dh * active
            sums["dw_down"] += d.t() @ h
            du = dh if u is None else dh * g
            sums["dw_up"] += du.t() @ part
            dx = du @ w_up
            if u is not None:
                dg = dh * u
                sums["dw_gate"] += dg.t() @ part
                dx += dg @ w_gate
            for name, value in (("y", h @ w_down.t()), ("l1", h.abs().sum(1)), ("dx", dx)):
                rows[name].append(value)
        either = {
            "dx": math.sqrt(edge_dx),
            "dw_up" if w_gate is None else "dw_gate": float(edge_dw.norm()),
        }
        return cls({name: torch.cat(parts) for name, parts in rows.items()} | sums, entries, either)

    def check(self, found: dict[str, Tensor], what: str) -> tuple[str, float]:
        """Return the name and relative RMS error of the worst tensor; raises ArithmeticError for one that is too far off."""
        allowed = measure.TOLERANCE if self.entries >= measure.FEW else TOLERANCE_OF_FEW
        errors = {}
        for name, exact in self.tensors.items():
            scale = float(exact.norm()) or 1.0  # nothing active: all are zero
            errors[name] = float((found[name].double() - exact).norm()) / scale
            limit = math.hypot(allowed, self.either.get(name, 0.0) / scale)
            if not errors[name] <= limit:
                raise ArithmeticError(
                    f"{name} of {what} is wrong: relative RMS {errors[name]:.2e}, allowed {limit:.2e}"
                )
        return max(errors.items(), key=lambda item: item[1])


def work(
    path: str,
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    gated: bool,
    entries: int,
    touched: int,
) -> tuple[int, int]:
    """Return the operations and the bytes of device memory that a step needs at least, in a type of 2 bytes.

    `entries` are the active neurons summed over tokens, `touched` the neurons that any token has active. With P = 3
    products (non-gated: 2)

        dense    6 P M N K operations
        sparse   2 M N K + 2 (3 P - 1) entries K operations

    since a sparse step does the first product whole, and at the active entries the P - 1 others, dh, P gradients of weights
    and P - 1 products for dx. Bytes: those of the forward pass (`measure.work`), and in the backward pass x and dy read, dx
    written, each weight that counts read (dense P N K, sparse P touched K values) and P N K values of gradients written.
    What is kept between the passes counts for nothing, as what passes between kernels.
    """
    products = 3 if gated else 2
    flops, num_bytes = measure.work(
        path, num_tokens, hidden_size, intermediate_size, gated, entries, touched
    )
    if path == "dense":
        entries, touched = num_tokens * intermediate_size, intermediate_size
    flops += 2 * 2 * products * entries * hidden_size
    return flops, num_bytes + 2 * hidden_size * (
        products * (touched + intermediate_size) + 3 * num_tokens
    )


# --- one layer --------------------------------------------------------------------------------------------------------


def _dense(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
    h = F.relu(F.linear(x, w_up if w_gate is None else w_gate))
    h = h if w_gate is None else h * F.linear(x, w_up)
    return F.linear(h, w_down), h.abs().sum(-1, dtype=torch.float32)


@dataclass(frozen=True)
class _Step:
    """A provider's pass forward and backward, and the tensors that get gradients."""

    function: Callable[..., tuple[Tensor, Tensor]]
    leaves: dict[str, Tensor | None]
    dy: Tensor
    dl1: Tensor

    @classmethod
    def of(
        cls, function: Callable, x: Tensor, weights: measure.Weights, dy: Tensor, dl1: Tensor
    ) -> _Step:
        tensors = dict(zip(("x", "w_gate", "w_up", "w_down"), (x, *weights), strict=True))
        leaves = {
            name: t if t is None else t.detach().requires_grad_() for name, t in tensors.items()
        }
        return cls(function, leaves, dy, dl1)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.function(*self.leaves.values())

    def clear(self) -> None:
        for leaf in self.leaves.values():
            if leaf is not None:
                leaf.grad = None

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.clear()
        y, l1 = self.forward()
        torch.autograd.backward((y, l1), (self.dy, self.dl1))
        return y, l1

    def found(self) -> dict[str, Tensor]:
        """What a step leaves, named as in ExactStep."""
        y, l1 = self()
        gradients = {
            f"d{name}": leaf.grad for name, leaf in self.leaves.items() if leaf is not None
        }
        self.clear()
        return {"y": y.detach(), "l1": l1.detach()} | gradients

    def memory(self) -> dict[str, int]:
        """Bytes held between the passes, and the most that a step takes beyond what was there.

        held: x, and what the forward pass allocates and keeps without y and l1, which go on to what follows the layer. x
        counts although the caller holds it here: in a model the layer is what keeps it.
        """
        self.clear()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y, l1 = self.forward()
        held = (
            torch.cuda.memory_allocated() - before - y.nbytes - l1.nbytes + self.leaves["x"].nbytes
        )
        torch.autograd.backward((y, l1), (self.dy, self.dl1))
        peak = torch.cuda.max_memory_allocated() - before
        self.clear()
        return {"held": held, "peak": peak}


def _sparse(path: str, capacity: int) -> Callable[..., tuple[Tensor, Tensor]]:
    from twell.kernels import ops

    def function(x, w_gate, w_up, w_down):
        trained = ops.train(path, capacity, x, w_gate, w_up, w_down)
        return trained.y, trained.l1

    return function


def _capacity(path: str, case: measure._Case) -> int:
    """Entries per token that SparseTraining would give this case."""
    from twell.kernels import ops

    allowed = rooms(case.columns["intermediate_size"])
    needed = math.ceil(case.columns["active"])
    while True:
        capacity = next((room for room in allowed if room >= CAPACITY_MARGIN * needed), allowed[-1])
        with torch.no_grad():
            needed = int(ops.train(path, capacity, case.x, *case.sets[0]).needed)
        if needed <= capacity:
            return capacity
        if capacity == allowed[-1]:
            raise ArithmeticError(
                f"triton {path} at {case} needs {needed} entries a token, of {capacity} neurons"
            )


def _providers(
    case: measure._Case,
    compiled: Callable[..., tuple[Tensor, Tensor]],
    dy: Tensor,
    dl1: Tensor,
    paths: Sequence[str],
) -> dict[str, tuple[str, int | None, _Step]]:
    """Name -> path, capacity and step: dense ones, and the sparse `paths`."""
    w_gate, w_up, w_down = case.sets[0]
    plain = w_gate, w_up, w_down.contiguous()  # as nn.Linear stores it
    found: dict[str, tuple[str, int | None, _Step]] = {
        DENSE: ("dense", None, _Step.of(_dense, case.x, plain, dy, dl1)),
        COMPILED: ("dense", None, _Step.of(compiled, case.x, plain, dy, dl1)),
    }
    for path in paths:
        capacity = _capacity(path, case)
        step = _Step.of(_sparse(path, capacity), case.x, case.sets[0], dy, dl1)
        found[f"triton {path}"] = path, capacity, step
    return found


def ffn(
    tokens: Sequence[int],
    active: Sequence[float] = (29,),
    patterns: Sequence[str] = ("skewed",),
    *,
    hidden_size: int | None = None,
    intermediate_size: int = 5632,
    gated: bool = True,
    masks: dict[str, np.ndarray] | None = None,
    energy: bool = False,
    kernels: bool = False,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer in bf16 forward and backward: densely (eager and compiled) and by each sparse path of training.

    Arguments as in `measure.ffn`; `out` is the folder of training.csv, training_kernels.csv and ceilings.csv. x and the
    weights get gradients for dy, a random one, and the gradient of the L1 term, the same for each token; steps come one after
    the other, the cache emptied between. Returns the rows of training.csv without their provenance, COLUMNS["training"];
    data/README.md says what they mean. Raises ValueError for arguments that do not fit, ArithmeticError, with its name, for
    a tensor that is wrong, RuntimeError without a GPU. Ours.
    """
    device = measure._gpu()
    for pattern in patterns:
        if pattern not in measure.PATTERNS:
            raise ValueError(
                f"pattern {pattern!r} is unknown; use one of {', '.join(measure.PATTERNS)}"
            )
    measure._check_sizes(tokens, 16 if hidden_size is None else hidden_size, intermediate_size)
    if kernels and out is None:
        raise ValueError("the rows of kernels go to a file; say in which folder (out)")
    measure._check_files(
        out, {name: COLUMNS[name] for name in ("training", "training_kernels", "ceilings")}
    )
    save = functools.partial(measure._append, out, results.provenance())
    meter = measure._meter() if energy else None
    peaks = measure.ceilings()
    save("ceilings", peaks)

    rows = []
    for num_tokens in tokens:
        compiled = torch.compile(_dense, fullgraph=True, dynamic=False)
        for pattern in patterns:
            for name, inputs in measure._inputs(
                pattern, num_tokens, active, hidden_size, intermediate_size, masks, device
            ):
                found, parts = _measure(
                    measure._Case.of(name, inputs, gated, 1), compiled, peaks, meter, kernels
                )
                save("training", found)
                save("training_kernels", parts)
                rows += found
                del inputs
                torch.cuda.empty_cache()
        torch.compiler.reset()  # each number of tokens is a compilation of its own, and their number is limited
    return rows


def _checked(
    case: measure._Case, compiled: Callable[..., tuple[Tensor, Tensor]], paths: Sequence[str]
) -> tuple[dict[str, tuple[str, int | None, _Step]], dict[str, tuple[str, float]]]:
    """`_providers`, and by name the worst tensor of each and its relative RMS error."""
    g = torch.Generator(case.x.device).manual_seed(1)
    dy = (DY * torch.randn(case.x.shape, generator=g, device=case.x.device)).to(case.x.dtype)
    dl1 = torch.full(case.x.shape[:1], DL1, device=case.x.device)
    providers = _providers(case, compiled, dy, dl1, paths)
    exact = ExactStep.of(
        case.x, case.sets[0], dy, dl1
    )  # 3 GB of 65,536 tokens: gone before steps are timed
    return providers, {
        name: exact.check(step.found(), f"{name} at {case}")
        for name, (*_, step) in providers.items()
    }


def _measure(
    case: measure._Case,
    compiled: Callable[..., tuple[Tensor, Tensor]],
    peaks: Sequence[dict],
    meter: Callable[[], int] | None,
    kernels: bool,
) -> tuple[list[dict], list[dict]]:
    """Rows of training.csv and of training_kernels.csv for one case."""
    from twell.kernels import ops

    providers, checked = _checked(case, compiled, ops.TRAIN_PATHS)
    taken: dict[str, tuple[list, list]] = {name: ([], []) for name in providers}
    for _ in range(measure.ROUNDS):
        for name, (*_, step) in providers.items():
            taken[name][0].append(measure._stream_times(step, ROUND))
            step.clear()
            taken[name][1].append(measure._stream_times(step.forward, ROUND / 2))

    rows, parts = [], []
    c = case.columns
    shape = (
        c["tokens"],
        c["hidden_size"],
        c["intermediate_size"],
        c["gated"],
        case.exact.entries,
        case.exact.touched,
    )
    for name, (path, capacity, step) in providers.items():
        worst, error = checked[name]
        both, forward = (measure._quantiles(np.concatenate(turns)) for turns in taken[name])
        flops, num_bytes = work(path, *shape)
        row = c | {
            "provider": name,
            "path": path,
            "capacity": capacity,
            "relative_rms": float(f"{error:.3g}"),
        }
        row |= {"worst": worst} | both | {"forward": forward["p50"]} | step.memory()
        row |= {
            "flops": flops,
            "bytes": num_bytes,
            "roofline": measure.roofline(flops, num_bytes, both["p50"], peaks),
        }
        row |= (
            measure._energy(step, 1, both["p50"], meter)
            if meter
            else {"energy": None, "watts": None}
        )
        rows.append(row)
        said = f"{both['p50']:.4f} ms ({forward['p50']:.4f} forward)  held {row['held'] / 2**20:.0f} MiB"
        print(f"{case}  {name:<20} {said}", flush=True)
        if kernels:
            for kernel, (launches, spent) in measure._kernel_times([step]).items():
                part = {
                    column: row[column] for column in (*measure.CASE_COLUMNS, "union", "provider")
                }
                parts.append(
                    part
                    | {
                        "kernel": kernel,
                        "launches": round(launches, 2),
                        "ms": float(f"{spent:.4g}"),
                    }
                )
        step.clear()
    return rows, parts


# --- where training sparsely stops to pay -----------------------------------------------------------------------------

CROSSOVER_TOKENS = 16384
CROSSOVER_SHARES = 0.005, 0.02, 0.05, 0.1, 0.2  # mean active neurons per token, of all


def crossover(
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    gated: bool = True,
    tokens: int = CROSSOVER_TOKENS,
) -> float:
    """Return up to how many active neurons per token a sparse step of a layer is faster than dense: `Calibration.training`.

    The step is that of `ffn`, by the path "union" and by dense torch.compile, at `tokens` tokens. Activity is skewed and
    rises from 0.5% to 20% of the neurons until sparse is slower; each level is printed. 0: sparse is slower at the lowest.
    Raises ValueError for sizes that the kernels do not take, ArithmeticError, with its name, for a tensor that is wrong,
    RuntimeError without a GPU. Ours.
    """
    device = measure._gpu()
    measure._check_sizes([tokens], hidden_size, intermediate_size)
    compiled = torch.compile(_dense, fullgraph=True, dynamic=False)
    levels: list[tuple[float, float]] = []
    for wanted in sorted({max(share * intermediate_size, 1.0) for share in CROSSOVER_SHARES}):
        inputs = measure.synthetic_layer(
            tokens, hidden_size, intermediate_size, active=wanted, device=device
        )
        case = measure._Case.of("skewed", inputs, gated, 1)
        levels.append((case.columns["active"], _speedup(case, compiled)))
        if levels[-1][1] < 1:
            break
    torch.compiler.reset()
    found = _crossing(levels)
    print(f"training is faster sparsely up to {found:g} active neurons per token", flush=True)
    return found


def _speedup(case: measure._Case, compiled: Callable[..., tuple[Tensor, Tensor]]) -> float:
    """How much faster than dense torch.compile the path "union" is in a step, after both were checked."""
    providers, _ = _checked(case, compiled, ["union"])
    steps = {name: step for name, (*_, step) in providers.items() if name != DENSE}
    taken: dict[str, list[np.ndarray]] = {name: [] for name in steps}
    for _ in range(measure.ROUNDS):
        for name, step in steps.items():
            taken[name].append(measure._stream_times(step, ROUND))
            step.clear()
    times = {
        name: measure._quantiles(np.concatenate(turns))["p50"] for name, turns in taken.items()
    }
    speedup = times[COMPILED] / times["triton union"]
    said = "  ".join(f"{name} {p50:.4f} ms" for name, p50 in times.items())
    print(f"{case}  forward and backward: {said}  {speedup:.2f} times as fast", flush=True)
    return speedup


def _crossing(levels: Sequence[tuple[float, float]]) -> float:
    """Active neurons where the speed-up falls below 1, from pairs (active, speed-up) of rising activity.

    As `analysis.training_crossover` has it for one case: linear in the logarithms of both, 0 where the first is slower,
    and the most measured where none is.
    """
    (active, gain), *rest = levels
    if gain < 1:
        return 0.0
    for higher, lower_gain in rest:
        if lower_gain < 1:
            return float(
                f"{active * (higher / active) ** (math.log(gain) / math.log(gain / lower_gain)):.4g}"
            )
        active, gain = higher, lower_gain
    return active


# --- one optimiser step of a model ------------------------------------------------------------------------------------


def _chunk_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int = LOSS_CHUNK,
    loss: Callable = _chunk_loss,
) -> Tensor:
    """Return the mean cross-entropy in nats, with the logits of `chunk` tokens at a time; backward computes them again.

    hidden [T, K], weight [V, K] of the head, labels [T] int64, -100 where there is nothing to predict. `loss` is the sum over
    a chunk, compiled or not. Of 32,768 tokens and a vocabulary of 49,152 all logits in fp32 would be 6.4 GB, and their
    gradient as much.
    """
    parts = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    sums = [checkpoint(loss, part, weight, wanted, use_reentrant=False) for part, wanted in parts]
    return torch.stack(sums).sum() / (labels != -100).sum()


class _Trainer:
    """A model that takes optimiser steps on one batch, as one provider and then as another.

    Statistics are not counted: the dense layers would need passes of their own for them.
    """

    def __init__(self, config: TrainConfig, active: float, profile: str, device: torch.device):
        self.config, self.device = config, device
        with device:
            self.model = SparseLlamaForCausalLM(config.model_config())
        imposed.draw_weights(self.model, config.seed)
        self.draw(config.micro_batch)
        with self.autocast():
            wanted = imposed.profile(profile, config.num_layers, active)
            sample = imposed.draw_tokens(
                config.vocab_size, 64, min(config.context, 128), device=device, seed=1
            )
            imposed.impose(self.model, wanted, sample)
            self.active = [layer["mean"] for layer in imposed.activity_of(self.model, self.tokens)]
        self.start = {
            name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()
        }
        self.sparse: SparseTraining | None = None
        self.sparse_state: dict | None = None
        self.compiled = measure.Compiled([*self.model.model.layers, self.model.model.norm])
        if config.checkpoint_activations:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            # Around a compiled layer: within it, it could not keep its L1 term.
            self.compiled.around = functools.partial(checkpoint, use_reentrant=False)
        self.losses = {
            False: _chunk_loss,
            True: torch.compile(_chunk_loss, fullgraph=True, dynamic=False),
        }
        SparseTraining(self.model).allow_recompiling()

    def draw(self, sequences: int) -> None:
        """Take a batch of so many documents from now on; each predicts its own next tokens."""
        size = self.config.vocab_size, sequences, self.config.context
        self.tokens = imposed.draw_tokens(*size, device=self.device)
        self.labels = F.pad(self.tokens[:, 1:], (0, 1), value=-100).flatten()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def become(self, provider: str, learning_rate: float) -> None:
        """Take the first weights, a fresh optimiser, and the provider's ways."""
        self.leave()
        self.optimizer = None  # before the next one: two would not fit
        self.model.zero_grad()
        compiled = provider.endswith("torch.compile")
        self.compiled(compiled)
        self.loss = self.losses[compiled]
        for layer in self.model.model.layers:
            layer.gradient_checkpointing = self.config.checkpoint_activations and not compiled
        self.model.set_ffn_backend("dense")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                # Plain strides for the dense side; the optimiser's state takes those of the weights.
                parameter.data = self.start[name].to(self.device, copy=True)
        if provider.startswith("triton"):
            self.model.set_ffn_backend("triton")
            self.sparse = SparseTraining(self.model)
            if self.sparse_state is not None:  # no need to find the room again
                self.sparse.restore(self.sparse_state)
        self.model.train()
        groups = [
            [p for p in self.model.parameters() if (p.dim() >= 2) == decays]
            for decays in (True, False)
        ]
        c = self.config
        self.optimizer = torch.optim.AdamW(
            [
                {"params": groups[0], "weight_decay": c.weight_decay},
                {"params": groups[1], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=(c.adam_beta1, c.adam_beta2),
            eps=c.adam_epsilon,
            fused=self.device.type == "cuda",  # one pass over weights and moments
        )

    def leave(self) -> None:
        if self.sparse is not None:
            self.sparse_state = self.sparse.state()
            self.sparse.close()
            self.sparse = None

    @property
    def capacity(self) -> int | None:
        return None if self.sparse is None else self.sparse.summary()["capacity"]

    def all_sparse(self) -> bool:
        """Whether the kernels took every layer in the last step; SparseFFN computes the others densely."""
        from twell.kernels import ops

        rows = torch.empty(0, self.config.hidden_size, dtype=torch.bfloat16, device=self.device)
        taken = ops.takes(rows, self.config.intermediate_size)
        room = max(ffn.capacity for ffn in self.model.ffns) * self.tokens.numel()
        return taken and room < ops.MAX_ENTRIES and all(self.sparse.sparse)

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """One optimiser step; returns the loss before it, and the norms of its gradient, whole and of feed-forward weights."""
        for _ in range(1) if self.sparse is None else self.sparse.attempts():
            self.optimizer.zero_grad()
            with self.autocast():
                # Past SparseLlamaForCausalLM's own forward, which counts statistics and computes all logits at once.
                hidden = self.model.model(
                    input_ids=self.tokens, use_cache=False
                ).last_hidden_state.flatten(0, 1)
                loss = chunked_cross_entropy(
                    hidden, self.model.lm_head.weight, self.labels, loss=self.loss
                )
                loss = loss + self.config.l1_coefficient * l1_by_layer(self.model).mean()
            loss.backward()
        own = nn.utils.get_total_norm([p.grad for ffn in self.model.ffns for p in ffn.parameters()])
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        return loss.detach(), norm.detach(), own

    def steps(self) -> tuple[float, float, float]:
        """The loss after CHECKED_STEPS steps, and the norms of the first gradient."""
        found = [torch.stack(self.step()) for _ in range(CHECKED_STEPS + 1)]
        return float(found[-1][0]), float(found[0][1]), float(found[0][2])

    def peak(self) -> int:
        """The most bytes allocated in a step, weights and optimiser included."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def fits(self, sequences: int) -> bool:
        """Whether steps of so many documents fit into the device's memory; they are the batch from then on."""
        self.draw(sequences)
        try:
            for _ in range(2):
                self.step()
            torch.cuda.synchronize()
            return True
        except torch.OutOfMemoryError:
            pass
        self.optimizer.zero_grad()
        for ffn in self.model.ffns:
            ffn.l1 = None  # with it goes what the pass that failed had kept for its gradient
        gc.collect()
        torch.cuda.empty_cache()
        return False

    def largest(self, limit: int) -> int:
        """The most documents of a step that fit into `limit` bytes, within 3%; 0: none do. They are the batch from then on.

        The peak is a straight line in their number; the first guess is where it meets the limit.
        """
        few = max(self.config.micro_batch // 2, 1)
        peaks: list[int] = []
        for sequences in (few, 2 * few):
            if not self.fits(sequences):
                break
            peaks.append(self.peak())
        guess = few * (len(peaks) + 1) - 1
        if len(peaks) == 2:
            guess = 2 * few + int((limit - peaks[1]) / max((peaks[1] - peaks[0]) / few, 1))
        while guess > 0 and not self.fits(guess):
            guess -= max(guess // 32, 1)
        return guess


def train_step(
    model: str = "171m",
    overrides: Sequence[str] = (),
    *,
    active: float | None = None,
    profile: str = "flat",
    compiled: bool | None = None,
    largest: bool = False,
    energy: bool = False,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one optimiser step of a language model on random tokens, dense and by unions, eager and with compiled layers.

    Args:
        model: a configuration of the package or a YAML file (`TrainConfig.load`); its text is not read.
        overrides: fields of it to change, as key=value.
        active: mean active neurons per token over layers, imposed (`imposed.impose`); None: the paper's for this size, else 29.
        profile: how it is spread over layers, see `imposed.profile`.
        compiled: True: only with each decoder layer compiled; False: only eager; None: both.
        largest: also find the largest micro-batch that fits into memory, and the speed with it.
        energy: also measure the energy of a step, more than a second for each row.
        out: the folder of train_step.csv, to which the rows are appended.

    A step is a forward and backward pass of one micro-batch under bf16 autocast, clipping and AdamW on fp32 weights, with
    the L1 term at 2e-5 and the cross-entropy in chunks. Each provider takes 3 steps from the same weights at the configuration's
    learning rate; its loss then and the norms of its first gradient, of all weights and of the feed-forward ones, have to be
    those of dense. Steps that are timed have the learning rate 0, so that the
    activity stays. Returns the rows without their provenance, COLUMNS["train_step"]; data/README.md says what they mean.
    Raises ValueError for arguments that do not fit, ArithmeticError when a provider learns something else, RuntimeError
    without a GPU. Ours.
    """
    device = measure._gpu()
    config = _model_config(model, overrides)
    active = imposed.PAPER_ACTIVE.get(model, ACTIVE) if active is None else active
    if not 0 < active < config.intermediate_size:
        raise ValueError(
            f"active is {active:g}; it has to be above 0 and below {config.intermediate_size}, the neurons"
        )
    imposed.profile(profile, config.num_layers, active)
    measure._check_files(out, {"train_step": COLUMNS["train_step"]})
    save = functools.partial(measure._append, out, results.provenance())
    meter = measure._meter() if energy else None
    kinds = {None: ("", " torch.compile"), True: (" torch.compile",), False: ("",)}[compiled]
    providers = [f"{side}{kind}" for kind in kinds for side in ("dense", "triton union")]
    providers = [DENSE if name == "dense" else name for name in providers]

    trainer = _Trainer(config, active, profile, device)
    common = {"model": model, "parameters": sum(p.numel() for p in trainer.model.parameters())}
    common |= {size: getattr(config, size) for size in SIZES}
    common |= {"precision": "bf16", "checkpoint_activations": config.checkpoint_activations}
    common |= {"profile": profile}
    common |= {
        "active": round(float(np.mean(trainer.active)), 2),
        "active_max": round(max(trainer.active), 2),
    }
    tokens = config.micro_batch * config.context
    said = (
        f"{common['parameters'] / 1e6:.0f} M parameters, {tokens} tokens, {common['active']} active"
    )
    print(f"{model}: {said} (at most {common['active_max']} in a layer)", flush=True)
    checked = {}
    for name in providers:
        trainer.become(name, config.learning_rate)
        checked[name] = trainer.steps()
        _check_steps(model, checked, name)
        if trainer.sparse is not None and not trainer.all_sparse():
            raise ArithmeticError(f"{name} of {model} computed a layer densely")
    # Training changed the activity, and with it the room; what is timed has the first weights.
    trainer.leave()
    trainer.sparse_state = None
    taken: dict[str, list[np.ndarray]] = {name: [] for name in providers}
    numbers, rows = {}, []
    for turn in range(measure.ROUNDS):
        for name in providers:
            trainer.become(name, 0.0)
            if name not in numbers:
                trial = measure._between_replays(trainer.step, 1)[0]
                numbers[name] = int(min(max(TURN / trial, 2), 20))
            taken[name].append(measure._between_replays(trainer.step, numbers[name]))
            if turn < measure.ROUNDS - 1:
                continue
            times = measure._quantiles(np.concatenate(taken[name]))
            loss, norm, _ = checked[name]
            row = common | {
                "provider": name,
                "path": "dense" if trainer.sparse is None else "union",
            }
            row |= {
                "capacity": trainer.capacity,
                "loss": float(f"{loss:.6g}"),
                "grad_norm": float(f"{norm:.4g}"),
            }
            row |= times | {
                "tokens_per_second": round(1e3 * tokens / times["p50"]),
                "peak": trainer.peak(),
            }
            row |= (
                measure._energy(trainer.step, 1, times["p50"], meter)
                if meter
                else {"energy": None, "watts": None}
            )
            rows.append(row | {"largest": None, "largest_tokens_per_second": None})
            said = f"{times['p50']:.1f} ms, {row['tokens_per_second']} tokens/s, {row['peak'] / 1e9:.1f} GB"
            print(f"{model}  {name:<27} {said}", flush=True)
    for row in rows if largest else []:
        trainer.become(row["provider"], 0.0)
        row["largest"] = trainer.largest(
            torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        )
        if row["largest"]:
            times = measure._quantiles(measure._between_replays(trainer.step, 5, lead=1))
            row["largest_tokens_per_second"] = round(
                1e3 * row["largest"] * config.context / times["p50"]
            )
        said = f"{row['largest']} x {config.context} tokens fit, {row['largest_tokens_per_second']} tokens/s"
        print(f"{model}  {row['provider']:<27} {said}", flush=True)
        trainer.draw(config.micro_batch)
    trainer.leave()
    save("train_step", rows)
    return rows


def _model_config(model: str, overrides: Sequence[str]) -> TrainConfig:
    """The configuration of a model to be timed: one micro-batch a step."""
    given = TrainConfig.load(model, [*overrides, "l1_coefficient=" + str(L1_COEFFICIENT)])
    if given.precision != "bf16":
        raise ValueError(
            f"precision is {given.precision!r}; the sparse path of training needs 'bf16'"
        )
    if given.activation != "relu":
        raise ValueError(f"activation is {given.activation!r}; sparse layers need 'relu'")
    given.micro_batch = given.micro_batch or given.batch_tokens // given.context
    measure._check_sizes([given.context], given.hidden_size, given.intermediate_size)
    if given.micro_batch < 1:
        raise ValueError(f"micro_batch is {given.micro_batch}; it has to be at least 1")
    return given


def _check_steps(model: str, checked: dict[str, tuple[float, float, float]], name: str) -> None:
    """Compare a provider's loss and norms with those of the first one, which is dense."""
    first, *_ = checked
    for what, found, wanted, allowed in zip(
        (
            f"the loss after {CHECKED_STEPS} steps",
            "the norm of the first gradient",
            "the norm of the first gradient of feed-forward weights",
        ),
        checked[name],
        checked[first],
        (LOSS_TOLERANCE, NORM_TOLERANCE, NORM_TOLERANCE),
        strict=True,
    ):
        if not abs(found - wanted) <= allowed * abs(wanted):
            raise ArithmeticError(
                f"{name} of {model} is wrong: {what} is {found:.5g}, of {first} {wanted:.5g}"
            )
