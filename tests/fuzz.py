"""Random cases of the sparse layer against fp64: python -m tests.fuzz --cases 300 --seed 1 [--training]

A case draws path, sizes, dtype, biases, layout of x, and a pattern of activity; it is given by one number
alone. Values are of two kinds:

  normal    y may differ from the exact one by a relative RMS of 5e-3 in bf16 (6e-4 in fp16), and by no more
            than a quarter above what the dense layer in the same type has. Where few entries are active, one
            last bit decides, and y is compared with the rounded result within two units instead.
  integer   small integers, whose sums are exact in fp32 in any order: y has to equal, bit for bit, the layer
            in fp64 that rounds g, h (row-wise does not round h) and y to the storage type.

Every case is computed twice and has to give the same bits, with --training with two capacities.

With --training the gradients of every tensor and of the L1 term are checked too, with u, du and dg (and in the path by
unions dh, of a gated layer) rounded where values are integers. Errors are relative to the RMS that the result has, or would have if no sum
cancelled, whichever is larger.

Without a GPU set TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from twell.sparse import reference

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
PATTERNS = "even", "skewed", "empty", "full", "edges", "heavy", "tile"
# Below so many active entries a rounding error or two decide the relative RMS, and only exact comparison says
# anything.
FEW = 400
# With fewer outputs the two errors are too noisy for their ratio to mean much: one in some thousand cases is above 1.25.
MANY = 8192


@dataclass(frozen=True)
class Case:
    path: str
    num_tokens: int
    intermediate_size: int
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    gated: bool = True
    biases: bool = False
    pattern: str = "even"
    values: str = "normal"
    compression: int = 1
    layout: str = "contiguous"
    nonfinite: str = ""
    seed: int = 0


def draw(seed: int, *, large: bool) -> Case:
    """The case of a number; `large` is for a GPU."""
    r = random.Random(seed)
    path = r.choice(["rowwise", "union", "decode"])
    if large:
        num_tokens = r.choice([1, 2, 3, 16, 17, 63, 64, 65, 100, 128, 200, 256, 257, 384, 1000])
        intermediate_size = r.choice(
            [1, 15, 64, 255, 256, 257, 300, 512, 700, 1024, 1408, 2816, r.randint(1, 3000)]
        )
        hidden_size = 16 * r.choice([1, 2, 3, 4, 5, 8, 16, 20, 32, 48, 64, r.randint(1, 80)])
    else:
        # The row-wise path takes a program for each token, which the interpreter runs one after the other.
        num_tokens = r.choice([1, 3, 17] if path == "rowwise" else [1, 3, 17, 64, 70, 130])
        intermediate_size = r.choice([1, 70, 256, 257, 300, 520])
        hidden_size = r.choice([16, 48, 80, 128])
    return Case(
        path,
        num_tokens,
        intermediate_size,
        hidden_size,
        dtype=r.choice([torch.bfloat16, torch.float16]),
        gated=r.random() < 0.7,
        biases=r.random() < 0.4,
        pattern=r.choice(PATTERNS),
        values=r.choice(["normal", "integer"]),
        compression=r.choice([1, 1, 1, 2, 4, 8, 16]),
        layout=r.choice(["contiguous", "contiguous", "transposed", "offset"]),
        nonfinite=r.choice(["", "", "", "nan", "inf"]),
        seed=seed,
    )


def layer(case: Case, device: torch.device | str) -> dict[str, Tensor | None]:
    """Arguments of the operators for a case.

    Column 0 of x is 1 and column 0 of the gate's weights a threshold for each neuron; column 1 of x marks
    heavy tokens.
    """
    m, n, k = case.num_tokens, case.intermediate_size, case.hidden_size
    g = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, device=device)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(-limit, limit + 1, shape, generator=g, device=device).float()

    integer = case.values == "integer"
    if integer:
        x = integers(1, m, k) * (uniform(m, k) < 12 / k)
        w_gate, w_up, w_down = integers(2, n, k), integers(2, n, k), integers(2, n, k)
        biases = [integers(2, n), integers(2, n), integers(2, k)]
        spread = 6.0
    else:
        x = normal(m, k)
        w_gate, w_up, w_down = normal(n, k) / k**0.5, normal(n, k) / k**0.5, normal(n, k) / n**0.5
        biases = [0.1 * normal(n), normal(n), normal(k)]
        spread = 1.0
    first = w_gate if case.gated else w_up

    threshold = torch.full((n,), 1.7 * spread, device=device)
    heavy = torch.zeros(n, device=device)
    if case.pattern == "skewed":
        threshold += (0.6 * spread * normal(n)).round() if integer else 0.6 * normal(n)
    elif case.pattern == "empty":
        threshold += 200
    elif case.pattern == "full":
        threshold -= 40
    elif case.pattern == "edges":
        threshold += 200
        threshold[0] = threshold[-1] = -40
    elif case.pattern == "heavy":
        heavy += 40
    elif case.pattern == "tile":
        heavy[-(-n // 512) * 256 - 256 :][:256] = 40
    x[:, 0] = 1
    x[:, 1] = (uniform(m) < 0.1) if m > 1 else 1
    first[:, 0] = -threshold.round() if integer else -threshold
    first[:, 1] = heavy

    if case.nonfinite:
        x[m // 2, k // 2] = float(case.nonfinite)
    x = x.to(case.dtype)
    if case.layout == "transposed":
        x = x.t().contiguous().t()
    elif case.layout == "offset":
        x = torch.cat([x.new_zeros(3), x.flatten()])[3:].view(m, k)
    return {
        "x": x,
        "w_gate": w_gate.to(case.dtype) if case.gated else None,
        "w_up": w_up.to(case.dtype),
        "w_down": w_down.to(case.dtype).t(),
        "b_gate": biases[0].to(case.dtype) if case.biases and case.gated else None,
        "b_up": biases[1].to(case.dtype) if case.biases else None,
        "b_down": biases[2].to(case.dtype) if case.biases else None,
    }


def exact(
    tensors: dict[str, Tensor | None], round_g: torch.dtype | None, round_h: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """g [M, N] and y [M, K] in fp64, with the roundings asked for; u does not count where g is 0."""
    t = {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}

    def linear(name: str) -> Tensor:
        return torch.nn.functional.linear(t["x"], t[f"w_{name}"], t[f"b_{name}"])

    g = torch.relu(linear("up" if t["w_gate"] is None else "gate"))
    if round_g is not None:
        g = g.to(round_g).double()
    h = g if t["w_gate"] is None else torch.where(g != 0, g * linear("up"), 0)
    if round_h is not None:
        h = h.to(round_h).double()
    return g, torch.nn.functional.linear(h, t["w_down"], t["b_down"])


def relative_rms(y: Tensor, expected: Tensor) -> float:
    """Relative RMS error over the entries whose expected value is finite; the others have to be equal."""
    y = y.double()
    finite = expected.isfinite()
    assert torch.equal(y.isnan(), expected.isnan()), "NaN in other places than expected"
    assert torch.equal(y[expected.isinf()], expected[expected.isinf()]), (
        "inf in other places than expected"
    )
    norm = expected[finite].norm()
    error = (y[finite] - expected[finite]).norm()
    return float(error / norm) if norm > 0 else float(error)


def run(case: Case, tensors: dict[str, Tensor | None]) -> Tensor:
    """y of a case by its path."""
    from twell.kernels.ops import PATHS

    options = {"compression": case.compression} if case.path == "rowwise" else {}
    return PATHS[case.path](**tensors, **options)


def check(case: Case, device: torch.device | str) -> float:
    """Relative RMS error of a case (integer values: 0); AssertionError if it is wrong."""
    tensors = layer(case, device)
    y = run(case, tensors)
    assert y.shape == tensors["x"].shape and y.dtype == case.dtype and y.is_contiguous()
    if y.is_cuda:  # the interpreter runs programs one after the other
        assert torch.equal(y.view(torch.int16), run(case, tensors).view(torch.int16)), (
            "two calls, two results"
        )
    g, expected = exact(tensors, None, None)
    num_active = int(((g > 0) & expected.isfinite().all(1, keepdim=True)).sum())
    if case.values == "integer" or num_active < FEW:
        # fp32 sums of normal values are not exact: a last bit of g may differ, hence one unit of y.
        slack = (
            0 if case.values == "integer" else 2.0**-6 if case.dtype == torch.bfloat16 else 2.0**-9
        )
        _, expected = exact(tensors, case.dtype, None if case.path == "rowwise" else case.dtype)
        expected = expected.to(case.dtype).double()
        error = relative_rms(y, expected)
        assert error <= slack, f"{error} from the rounded result, expected at most {slack}"
        return 0.0
    error = relative_rms(y, expected)
    assert error <= TOLERANCE[case.dtype], (
        f"relative RMS {error:.2e} is above {TOLERANCE[case.dtype]}"
    )
    if expected.isfinite().sum() < MANY:
        return error
    dense = relative_rms_of_dense(tensors, expected)
    assert error <= 1.25 * dense, (
        f"relative RMS {error:.2e} is above 1.25 times that of the dense layer, {dense:.2e}"
    )
    return error


# Integers above this are not exact in fp32.
LARGEST = 2.0**24
# Sums in fp32 are exact to this share of the sum of their terms' absolute values.
EDGE = 2.0**-20


def exact_training(
    tensors: dict[str, Tensor | None],
    dy: Tensor,
    dl1: Tensor,
    dtype: torch.dtype | None = None,
    round_dh: bool = False,
    edge: float = 0.0,
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """y, l1 and the gradient of each tensor in fp64, g rounded to x.dtype deciding what is active.

    Each with the sums of the absolute values of its terms, and with the roots of those of their squares. With `dtype` all
    roundings of the kernels, to this type. Active is what is above `edge` times the sum of the gate's absolute terms.
    """

    def rounded(value: Tensor) -> Tensor:
        return value if dtype is None else value.to(dtype).double()

    t = {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}
    gated = t["w_gate"] is not None

    def linear(name: str) -> Tensor:
        return torch.nn.functional.linear(t["x"], t[f"w_{name}"], t[f"b_{name}"])

    pre = linear("gate" if gated else "up")
    active = torch.relu(pre).to(tensors["x"].dtype) != 0
    if edge:
        active = ~(pre <= edge * (t["x"].abs() @ t["w_gate" if gated else "w_up"].abs().t()))
    zero = torch.zeros((), dtype=torch.float64, device=dy.device)
    g = torch.where(active, rounded(pre), zero)
    u = rounded(linear("up"))
    h = torch.where(active, rounded(g * u), zero) if gated else g
    dy, dl1 = dy.double(), dl1.double()
    dh = dy @ t["w_down"]
    dh = torch.where(
        active, (rounded(dh) if round_dh and gated else dh) + h.sign() * dl1[:, None], zero
    )
    du = torch.where(active, rounded(dh * g), zero) if gated else rounded(dh)
    dg = torch.where(active, rounded(dh * u), zero)

    def product(
        *pairs: tuple[Tensor, Tensor], add: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        value = sum(a @ b for a, b in pairs)
        squares = sum((a * a) @ (b * b) for a, b in pairs)
        return (
            value if add is None else value + add,
            sum(a.abs() @ b.abs() for a, b in pairs),
            squares.sqrt(),
        )

    found = {
        "y": product((h, t["w_down"].t()), add=t["b_down"]),
        "l1": (h.abs().sum(1), h.abs().sum(1), h.abs().sum(1)),
        "x": product((du, t["w_up"]), *([(dg, t["w_gate"])] if gated else [])),
        "w_up": product((du.t(), t["x"])),
        "w_down": product((dy.t(), h)),
    }
    if gated:
        found["w_gate"] = product((dg.t(), t["x"]))
    for name, part in (("b_gate", dg), ("b_up", du), ("b_down", dy)):
        if tensors[name] is not None:
            found[name] = part.sum(0), part.abs().sum(0), part.square().sum(0).sqrt()
    return found


def check_training(
    case: Case, device: torch.device | str, path: str, capacity: int | None = None
) -> float:
    """Largest relative RMS error of y, l1 and the gradients of a case (integer values: 0); AssertionError if one is wrong."""
    from twell.kernels import ops

    tensors = layer(case, device)
    leaves = {
        name: None if t is None else t.detach().requires_grad_() for name, t in tensors.items()
    }
    given = {name: t for name, t in leaves.items() if t is not None}
    g = torch.Generator(device).manual_seed(case.seed + 1)
    dy = torch.randn(case.num_tokens, case.hidden_size, generator=g, device=device)
    dl1 = 0.1 * torch.randn(
        case.num_tokens, generator=g, device=device
    )  # more would cancel in sums over tokens
    if case.values == "integer":
        dy, dl1 = dy.round(), (10 * dl1).round()
    dy = dy.to(case.dtype)
    mask = torch.rand(case.num_tokens, generator=g, device=device) < 0.7

    def step(capacity: int) -> tuple[ops.Trained, tuple[Tensor, ...]]:
        trained = ops.train(path, capacity, **leaves, token_mask=mask)
        return trained, torch.autograd.grad(
            [trained.y, trained.l1], list(given.values()), [dy, dl1]
        )

    found, gradients = step(capacity or case.intermediate_size)
    if dy.is_cuda:  # the interpreter runs programs one after the other
        again, gradients_again = step(max(int(found.needed), 1))
        for a, b in zip((*found, *gradients), (*again, *gradients_again), strict=True):
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
            assert torch.equal(a.view(bits), b.view(bits)), (
                "two calls with different capacities, two results"
            )
    got = {
        "y": found.y.detach(),
        "l1": found.l1.detach(),
        **dict(zip(given, gradients, strict=True)),
    }
    for name, gradient in zip(given, gradients, strict=True):
        assert gradient.shape == given[name].shape and gradient.dtype == case.dtype, name
    expected = exact_training(tensors, dy, dl1)
    # A gate within the rounding of fp32 sums from zero may be active or not; either is right.
    fewest, most = (exact_training(tensors, dy, dl1, edge=edge) for edge in (EDGE, -EDGE))
    pre = torch.nn.functional.linear(
        *(t.double() for t in (tensors["x"], tensors["w_gate" if case.gated else "w_up"])),
        None if (b := tensors["b_gate" if case.gated else "b_up"]) is None else b.double(),
    )
    active = torch.relu(pre).to(case.dtype) != 0
    if case.values == "integer":
        assert torch.equal(found.token_counts, active.sum(1).int())
        assert torch.equal(found.neuron_counts, (active & mask[:, None]).sum(0).int())
    assert int(found.token_counts.sum()) <= int(found.needed) * case.num_tokens or path != "union"
    finite_rows = tensors["x"].isfinite().all(1)
    if case.nonfinite:  # as in a dense layer it may reach all weights' gradients; y and dx it reaches in its own row only
        assert torch.equal(got["y"].isnan().any(1), expected["y"][0].isnan().any(1))
        got = {name: got[name][finite_rows] for name in ("y", "x")}
    num_active = int(active[finite_rows].sum())
    strict = exact_training(tensors, dy, dl1, case.dtype, path == "union")
    worst = 0.0
    for name, value in got.items():
        rows = finite_rows if case.nonfinite else slice(None)
        wanted, bound, _ = (part[rows] for part in strict[name])
        wanted = wanted if name == "l1" else wanted.to(case.dtype).double()
        if case.values == "integer":
            known = bound <= LARGEST
            assert torch.equal(value.double()[known], wanted[known]), (
                f"{name} differs from the rounded result"
            )
            continue
        limit = TOLERANCE[case.dtype]
        few = num_active < FEW or int((wanted != 0).sum()) < FEW
        if few:
            limit = 2.0**-6 if case.dtype == torch.bfloat16 else 2.0**-9
        else:
            wanted = expected[name][0][rows]
        fits = wanted.to(value.dtype).isfinite()  # fp16 overflows
        scale = max(
            float(part[rows][fits].norm()) for part in (expected[name][0], expected[name][2])
        )
        slack = float((most[name][0] - fewest[name][0])[rows][fits].norm())
        error = max(float((value.double() - wanted)[fits].norm()) - slack, 0.0) / (scale or 1.0)
        assert error <= limit, f"{name}: relative RMS {error:.2e} is above {limit:.2e}"  # so is NaN
        worst = max(worst, 0.0 if few else error)
    return worst


def relative_rms_of_dense(tensors: dict[str, Tensor | None], expected: Tensor) -> float:
    """Relative RMS error of the dense layer in the storage type, over entries finite in both."""
    y = reference.ffn(**tensors).double()
    finite = expected.isfinite() & y.isfinite()
    return float((y[finite] - expected[finite]).norm() / expected[finite].norm())


def main() -> None:
    from twell.kernels import ops, training

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--small", action="store_true", help="the small sizes of the interpreter on a GPU too"
    )
    parser.add_argument(
        "--training", action="store_true", help="gradients too, on the paths of training"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    worst: dict[tuple[str, torch.dtype], float] = {}
    failed = 0
    begin = time.monotonic()
    for seed in range(options.seed, options.seed + options.cases):
        case = draw(seed, large=device == "cuda" and not options.small)
        if options.training:
            case = replace(case, path=random.Random(seed).choice(sorted(ops.TRAIN_PATHS)))
            training.DENSE_FROM = random.Random(seed).choice(
                [1, 16, 64]
            )  # else few tokens would hardly leave any list
        try:
            error = (
                check_training(case, device, case.path) if options.training else check(case, device)
            )
        except Exception as problem:  # one bad case must not hide the others
            failed += 1
            print(f"FAILED {asdict(case)}: {type(problem).__name__}: {problem}", flush=True)
            continue
        key = case.path, case.dtype
        worst[key] = max(worst.get(key, 0.0), error)
    seconds = time.monotonic() - begin
    print(
        f"{options.cases} cases from {options.seed} on {device}: {failed} failed, {seconds:.0f} s"
    )
    for (path, dtype), error in sorted(worst.items(), key=str):
        print(f"worst relative RMS  {path:8} {dtype!s:15} {error:.2e}")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
