"""Random cases of the layer against fp64: python -m tests.fuzz --cases 300 [--training]

A case is a path, sizes, dtype, biases, layout of x, activation, a pattern of activity, and the seed
of its values. Hypothesis draws it. Values are of two kinds:

  normal    y may differ from fp64 by a relative RMS of 5e-3 in bf16 (6e-4 in fp16; half as much
            again where g is squared, so that its error counts twice), and by at most
            a quarter more than the dense layer of the same type. With few active entries one last
            bit decides: y is then compared with the rounded result, within two units.
  integer   small integers, whose sums are exact in fp32 in any order: y has to equal, bit for bit,
            the layer in fp64 that rounds g, h (not by rows) and y to the storage type.

In FP8 x, gate and up are quantised first, and everything is compared with the layer of the
quantised tensors; the short sums of a GPU's tensor cores may add an error. Integers are then
rounded to FP8, and scales are powers of two.

A GPU computes every case twice, with two capacities in training, and has to give the same bits.
--training also checks gradients: fuzz_training.py. Without a GPU set TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import time
from dataclasses import dataclass, replace
from math import hypot, nan
from pathlib import Path

import hypothesis
import pandas as pd
import torch
from hypothesis import strategies
from torch import Tensor

from tests.factories import memory
from twell import results
from twell.measure.check import FP8_SUM, FP8_SUM_OF_FEW
from twell.sparse import float8, ops, reference
from twell.sparse.activations import RELU, Activation, get_activation

Tensors = dict[str, Tensor | None]
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
TWO_UNITS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
SMALL = "even", "skewed", "empty"  # patterns whose values are of about 1
PATTERNS = *SMALL, "full", "edges", "heavy", "tile"
# Below so many active entries a rounding error or two decide the relative RMS, so y is compared
# with the rounded result.
FEW = 400
# Sums in fp32 are exact to this share of the sum of their terms' absolute values.
FP32_SUM = 2.0**-20
# With fewer outputs the two errors are too noisy for their ratio to mean much: one in some
# thousand cases is above 1.25.
MANY = 8192
# Integers above this are not exact in fp32.
LARGEST = 2.0**24


@dataclass(frozen=True)
class Case:
    """`path` is one of twell.sparse.ops.PATHS, or "twell", the only path with a compression."""

    path: str
    num_tokens: int
    intermediate_size: int
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    gated: bool = True
    biases: bool = False
    pattern: str = "even"
    values: str = "normal"
    compression: int = 8
    layout: str = "contiguous"
    nonfinite: str = ""
    fp8: bool = False
    activation: str = "relu"
    threshold: float = 0.0
    seed: int = 0

    @property
    def act(self) -> Activation:
        return get_activation(self.activation, self.threshold, gated=self.gated)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype] * (1.5 if self.act.squared else 1)


@strategies.composite
def cases(draw, *, large: bool = False) -> Case:
    """Any case; `large` is for a GPU."""

    def one_of(*choices):
        return draw(strategies.sampled_from(choices))

    path = one_of("rowwise", "union", "decode", "twell")
    if large:
        tokens = one_of(1, 2, 3, 16, 17, 63, 64, 65, 100, 128, 200, 256, 257, 384, 1000)
        sizes = 1, 15, 64, 255, 256, 257, 300, 512, 700, 1024, 1408, 2816
        neurons = one_of(*sizes, draw(strategies.integers(1, 3000)))
        blocks = one_of(1, 2, 3, 4, 5, 8, 16, 20, 32, 48, 64, draw(strategies.integers(1, 80)))
    else:
        # The interpreter runs one program for each token of these paths, in turn.
        few = path in ("rowwise", "twell")
        tokens = one_of(1, 3, 17) if few else one_of(1, 3, 17, 64, 70, 130)
        neurons, blocks = one_of(1, 70, 256, 257, 300, 520), one_of(1, 3, 5, 8)
    options = dict(
        dtype=one_of(torch.bfloat16, torch.float16),
        gated=one_of(True, True, False),
        biases=one_of(False, True),
        pattern=one_of(*PATTERNS),
        values=one_of("normal", "integer"),
        layout=one_of("contiguous", "contiguous", "transposed", "offset"),
        nonfinite=one_of("", "", "", "nan", "inf"),
        seed=draw(strategies.integers(0, 2**32)),
    )
    if path == "twell":
        options["compression"] = one_of(2, 4, 8, 16)
    else:
        kinds = ("relu", "relu2", "drelu") if options["gated"] else ("relu", "relu2")
        options["activation"], options["threshold"] = one_of(*kinds), one_of(0.0, 0.0, 1.25, 0.3)
        options["fp8"] = one_of(False, False, False, True)
        # Squares of integers and of very active neurons soon leave the range of fp16.
        big = options["values"] == "integer" or options["pattern"] not in SMALL
        if options["fp8"] or (options["activation"] == "relu2" and big):
            options["dtype"] = torch.bfloat16
    return Case(path, tokens, neurons, 16 * blocks, **options)


def _values(case: Case, given: dict) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x, the weights gate, up and down_t, and the biases, before any threshold."""
    m, n, k = case.num_tokens, case.intermediate_size, case.hidden_size
    if case.values == "integer":

        def integers(limit: int, *shape: int) -> Tensor:
            return torch.randint(-limit, limit + 1, shape, **given).float()

        x = integers(1, m, k) * (torch.rand(m, k, **given) < 12 / k)
        return x, [integers(2, n, k) for _ in range(3)], [integers(2, size) for size in (n, n, k)]
    x = torch.randn(m, k, **given)
    weights = [torch.randn(n, k, **given) / size**0.5 for size in (k, k, n)]
    biases = [torch.randn(size, **given) for size in (n, n, k)]
    return x, weights, [0.1 * biases[0], *biases[1:]]


def _thresholds(case: Case, given: dict) -> tuple[Tensor, Tensor]:
    """What each neuron has to exceed to be active, and how much heavy tokens add to it."""
    n, integer = case.intermediate_size, case.values == "integer"
    spread = 6.0 if integer else 1.0
    threshold = torch.full((n,), 1.7 * spread, device=given["device"])
    heavy = torch.zeros_like(threshold)
    match case.pattern:
        case "skewed":
            noise = 0.6 * spread * torch.randn(n, **given)
            threshold += noise.round() if integer else noise
        case "empty":
            threshold += 200
        case "full":
            threshold -= 40
        case "edges":
            threshold += 200
            threshold[0] = threshold[-1] = -40
        case "heavy":
            heavy += 40
        case "tile":
            heavy[-(-n // 512) * 256 - 256 :][:256] = 40
    return threshold.round() if integer else threshold, heavy


def layer(case: Case, device: torch.device | str) -> Tensors:
    """Arguments of the operators for a case.

    Column 0 of x is 1 and column 0 of the gate's weights a threshold for each neuron; column 1 of x
    marks heavy tokens.
    """
    m, k = case.num_tokens, case.hidden_size
    given = dict(device=device, generator=torch.Generator(device).manual_seed(case.seed))
    x, (w_gate, w_up, w_down_t), (b_gate, b_up, b_down) = _values(case, given)
    threshold, heavy = _thresholds(case, given)
    x[:, 0] = 1
    x[:, 1] = (torch.rand(m, **given) < 0.1) if m > 1 else 1
    first = w_gate if case.gated else w_up
    first[:, 0], first[:, 1] = -threshold, heavy
    if case.nonfinite:
        x[m // 2, k // 2] = float(case.nonfinite)
    x = x.to(case.dtype)
    if case.layout == "transposed":
        x = x.t().contiguous().t()
    elif case.layout == "offset":
        x = torch.cat([x.new_zeros(3), x.flatten()])[3:].view(m, k)
    tensors = {
        "w_gate": w_gate if case.gated else None,
        "w_up": w_up,
        "w_down": w_down_t,
        "b_gate": b_gate if case.biases and case.gated else None,
        "b_up": b_up if case.biases else None,
        "b_down": b_down if case.biases else None,
    }
    tensors = {name: None if t is None else t.to(case.dtype) for name, t in tensors.items()}
    return {"x": x, **tensors, "w_down": tensors["w_down"].t()}


def doubles(tensors: Tensors) -> Tensors:
    """The same tensors in fp64."""
    return {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}


def round_to(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value if dtype is None else value.to(dtype).double()


def projection(tensors: Tensors, name: str) -> Tensor:
    """x w^T + b of "gate" or "up"."""
    return torch.nn.functional.linear(tensors["x"], tensors[f"w_{name}"], tensors[f"b_{name}"])


def exact_hidden(
    tensors: Tensors,
    round_g: torch.dtype | None = None,
    round_h: torch.dtype | None = None,
    round_u: torch.dtype | None = None,
    dense: bool = False,
    act: Activation = RELU,
) -> tuple[Tensor, Tensor]:
    """g and h [M, N] in fp64, with the roundings given.

    u is ignored where g is 0, so an infinite u has no effect there, unless the layer is `dense`.
    With a threshold the rounded result of the gate always decides.
    """
    t = doubles(tensors)
    gated = t["w_gate"] is not None
    a = projection(t, "gate" if gated else "up")
    g = act.gate(round_to(a, round_g))
    if act.threshold:
        g = torch.where(act.gate(a.to(tensors["w_down"].dtype)) != 0, round_to(a, round_g), 0)
    h = round_to(act.of_gate(g), round_g)
    if gated:
        h = h * act.of_up(round_to(projection(t, "up"), round_u))
        h = h if dense else torch.where(g != 0, h, 0)
    return g, round_to(h, round_h)


def exact(tensors: Tensors, *roundings, **options) -> tuple[Tensor, Tensor]:
    """g [M, N] and y [M, K] in fp64; arguments as of `exact_hidden`."""
    g, h = exact_hidden(tensors, *roundings, **options)
    t = doubles(tensors)
    return g, torch.nn.functional.linear(h, t["w_down"], t["b_down"])


def quantized(case: Case, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors of a case in FP8 for the operators, and in fp64 for `exact`."""
    powers = torch.Generator().manual_seed(case.seed)
    packed, wide = dict(tensors), dict(tensors)
    for name, scale_name in (("x", "x_scale"), ("w_gate", "s_gate"), ("w_up", "s_up")):
        rows = tensors[name]
        if rows is None:
            continue
        values, scale = float8.quantize(rows)
        if case.values == "integer":
            values = torch.where(scale.isnan()[:, None], 0, rows).to(float8.FLOAT8)
            # Squares of fractions would soon need more bits than fp32 has.
            least = 0 if case.act.squared else -3
            power = 2.0 ** torch.randint(least, 3, (len(rows),), generator=powers)
            scale = torch.where(scale.isnan(), scale, power.to(scale.device))
        packed[name], packed[scale_name] = values, scale
        wide[name] = values.double() * scale.double()[:, None]
    return packed, wide


def relative_rms(y: Tensor, expected: Tensor) -> float:
    """Relative RMS error where `expected` is finite; elsewhere y has to be equal."""
    y = y.double()
    finite = expected.isfinite()
    assert torch.equal(y.isnan(), expected.isnan()), "NaN in other places than expected"
    assert torch.equal(y[expected.isinf()], expected[expected.isinf()]), "inf in other places"
    norm, error = expected[finite].norm(), (y - expected)[finite].norm()
    return float(error / norm) if norm > 0 else float(error)


def relative_rms_of_dense(tensors: Tensors, expected: Tensor, act: Activation = RELU) -> float:
    """Relative RMS error of the dense layer in the storage type, over entries finite in both."""
    if "x_scale" in tensors:
        x, *rest = (tensors.get(name) for name in ops.TENSORS)
        weights, x_scale = ops.weights_of(act.name, act.threshold, *rest)
        y = float8.dense(x, weights, x_scale).double()
    else:
        y = reference.ffn(**tensors, act=act).double()
    finite = expected.isfinite() & y.isfinite()
    return float((y[finite] - expected[finite]).norm() / expected[finite].norm())


def of_sums(case: Case, tensors: Tensors, expected: Tensor, share: float) -> float:
    """The relative RMS that inexact sums may add: FP8 ones, and fp32 ones beside a threshold.

    Each sum errs by a share of its terms' absolute values: FP8 sums on tensor cores by `share`, see
    twell.measure.check.FP8_SUM, others by FP32_SUM. A neuron beside its threshold may be active.
    """
    if not (case.fp8 and expected.is_cuda):
        share = FP32_SUM
        if not case.threshold:
            return 0.0
    rows = (expected.isfinite() & tensors["x"].isfinite()).all(1)  # both are [M, K]
    t = doubles(tensors)
    t["x"] = t["x"][rows]
    names = ("gate", "up") if case.gated else ("up",)
    sums = [projection(t, name) for name in names]
    errors = [share * (t["x"].abs() @ t[f"w_{name}"].abs().t()) for name in names]
    u, act = (sums[1] if case.gated else torch.ones_like(sums[0])), case.act

    def h(a: Tensor, u: Tensor) -> Tensor:
        g = act.gate(a.to(case.dtype)) if act.threshold else act.gate(a)  # rounded sums decide
        return torch.where(g != 0, act.of_gate(a) * act.of_up(u), 0)  # u may be infinite elsewhere

    same = h(sums[0], u)
    changed = (h(sums[0] + sign * errors[0], u) - same for sign in (1, -1))
    square = torch.maximum(*(change.square() for change in changed))
    if case.gated:
        square += (h(sums[0], u + errors[1]) - same).square()
    change = float((square @ t["w_down"].square().sum(0)).sum().sqrt())
    return change / (float(expected[rows].norm()) or 1.0)


def run(case: Case, tensors: Tensors) -> Tensor:
    """y of a case by its path."""
    from twell.sparse.ops import operator
    from twell.sparse.paper import ffn_twell

    if case.path == "twell":
        return ffn_twell(**tensors, compression=case.compression)
    options = {"activation": case.activation, "threshold": case.threshold}
    return operator(**tensors, **options, path=case.path)


def assert_same_bits(results, repeated, message: str) -> None:
    for a, b in zip(results, repeated, strict=True):
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        assert torch.equal(a.view(bits), b.view(bits)), message


def check(case: Case, device: torch.device | str) -> float:
    """Relative RMS error of a case (integer values: 0); AssertionError if it is wrong."""
    given = tensors = layer(case, device)
    if case.fp8:
        given, tensors = quantized(case, tensors)
    y = run(case, given)
    assert y.shape == tensors["x"].shape and y.dtype == case.dtype and y.is_contiguous()
    if case.fp8 and case.values == "normal":
        x = {"x": layer(case, device)["x"], "x_scale": None}
        assert_same_bits([y], [run(case, given | x)], "x is quantised in another way by the path")
    if y.is_cuda:  # the interpreter runs programs one after the other
        assert_same_bits([y], [run(case, given)], "two calls, two results")
    options = {"act": case.act, "dense": case.path == "dense"}
    g, expected = exact(tensors, **options)
    num_active = int(((g > 0) & expected.isfinite().all(1, keepdim=True)).sum())
    if case.values == "integer" or num_active < FEW:
        # fp32 sums of normal values are not exact: a last bit of g may differ, hence a unit of y.
        slack = 0 if case.values == "integer" else TWO_UNITS[case.dtype]
        round_h = None if case.path in ("rowwise", "twell") else case.dtype
        roundings = case.dtype, round_h, case.dtype if case.path == "dense" else None
        _, h = exact_hidden(tensors, *roundings, **options)
        _, expected = exact(tensors, *roundings, **options)
        if case.values == "integer":  # sums of larger integers are not exact
            large = h.abs() @ tensors["w_down"].double().abs().t() > LARGEST
            y, expected = y.masked_fill(large, 0), expected.masked_fill(large, 0)
        else:
            slack = hypot(slack, of_sums(case, tensors, expected, FP8_SUM_OF_FEW))
        error = relative_rms(y, expected.to(case.dtype).double())
        assert error <= slack, f"{error} from the rounded result, expected at most {slack}"
        return 0.0
    error = relative_rms(y, expected)
    limit = hypot(case.tolerance, of_sums(case, tensors, expected, FP8_SUM))
    assert error <= limit, f"relative RMS {error:.2e} is above {limit}"
    if expected.isfinite().sum() >= MANY:
        dense = relative_rms_of_dense(given, expected, case.act)
        # torch's dense FP8 adds partial sums in fp32, so its error may be smaller.
        allowed = hypot(1.25 * dense, of_sums(case, tensors, expected, FP8_SUM))
        assert error <= allowed, f"relative RMS {error:.2e} is above 1.25 of dense, {dense:.2e}"
    return error


def check_cases(seed: int, number: int, train: bool) -> list[tuple[str, str, float]]:
    """Path, type and error of random cases; NaN where a case failed, which is printed."""
    from tests.fuzz_training import check_training
    from twell.kernels import options, training

    device, checked = "cuda" if torch.cuda.is_available() else "cpu", []
    if device == "cpu":
        memory.check_accesses()
    health = list(hypothesis.HealthCheck)
    limits = dict(database=None, deadline=None, suppress_health_check=health)

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=number, phases=[hypothesis.Phase.generate], **limits)
    @hypothesis.given(cases(large=device == "cuda"), strategies.data())
    def compute(case, data):
        # These layers are too small for the gate on Hopper: force it in half of the cases.
        options.HOPPER_TILES = data.draw(strategies.sampled_from([0, 2]))
        if train:  # dense rows only from 64 tokens on would hardly be met
            training.DENSE_FROM = data.draw(strategies.sampled_from([1, 16, 64]))
            path = data.draw(strategies.sampled_from(["union", "hybrid"]))
            case = replace(case, path=path, fp8=False)
        try:
            error = check_training(case, device, case.path, True) if train else check(case, device)
        except Exception as problem:  # one bad case must not hide the others
            print(f"FAILED {case}: {type(problem).__name__}: {problem}", flush=True)
            error = nan
        dtype = str(float8.FLOAT8 if case.fp8 else case.dtype).removeprefix("torch.")
        checked.append((case.path, dtype, error))

    compute()
    return checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", type=int, default=300)
    add("--seed", type=int, default=0, help="of all cases")
    add("--training", action="store_true", help="gradients too, on the paths of training")
    add("--jobs", type=int, default=1, help="processes, which share the GPU")
    add("--out", help="the folder of fuzz.csv")
    options = parser.parse_args()
    begin, jobs = time.monotonic(), options.jobs
    sizes = [len(range(job, options.cases, jobs)) for job in range(jobs)]
    parts = [(options.seed + job, n, options.training) for job, n in enumerate(sizes) if n]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        checked = sum(pool.starmap(check_cases, parts, chunksize=1), [])
    table = pd.DataFrame(checked, columns=["path", "dtype", "worst_relative_rms"])
    failed = int(table.worst_relative_rms.isna().sum())
    done = f"{len(table)} cases of seed {options.seed} on {results.device_name()}"
    print(f"{done}: {failed} failed, {time.monotonic() - begin:.0f} s")
    worst = table.dropna().groupby(["path", "dtype"], as_index=False).max()
    worst.insert(2, "cases", len(table))
    worst.insert(3, "failed", failed)
    print(worst.to_string(index=False))
    if options.out:
        command = shlex.join(["python", "-m", "tests.fuzz", *sys.argv[1:]])
        worst.path = "training " * options.training + worst.path
        rows = worst.round({"worst_relative_rms": 6}).to_dict("records")
        results.append_rows(Path(options.out) / "fuzz.csv", rows, results.provenance(command))
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
