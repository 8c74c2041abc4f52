"""What is measured of training: exact gradients, what a step needs and holds, rows, and steps of whole models."""

import itertools
import random
import types
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

from tests.test_measure import PEAKS, fresh_mask
from twell import imposed, measure, measure_training
from twell.__main__ import main
from twell.train import TrainConfig

pytest.importorskip("triton")
from twell.kernels import common, ops  # noqa: E402

K, N = 32, 96
DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # of real kernels; what stands in for them computes on the CPU
PATHS = list(ops.TRAIN_PATHS)


@pytest.fixture
def seed():
    """Another one in each run; pytest shows it when a test fails."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return seed


def parts_of(num_tokens, gated, seed, active=9.0, device="cpu"):
    """x, weights, dy and dl1 of a layer in bf16."""
    x, w_gate, w_up, w_down = measure.synthetic_layer(
        num_tokens, K, N, active=active, device=device, seed=seed
    )
    g = torch.Generator(device).manual_seed(seed)
    dy = (1e-5 * torch.randn(x.shape, generator=g, device=device)).bfloat16()
    dl1 = torch.full((num_tokens,), measure_training.DL1, device=device)
    return x, (w_gate, w_up, w_down) if gated else (None, w_gate, w_down), dy, dl1


def by_autograd(x, weights, dy, dl1, dtype=torch.float64):
    """y, l1 and gradients as torch finds them."""
    names = ["x", "w_gate", "w_up", "w_down"]
    leaves = {
        n: t.to(dtype).requires_grad_()
        for n, t in zip(names, (x, *weights), strict=True)
        if t is not None
    }
    g = F.relu(leaves["x"] @ leaves.get("w_gate", leaves["w_up"]).t())
    h = g * (leaves["x"] @ leaves["w_up"].t()) if "w_gate" in leaves else g
    y, l1 = h @ leaves["w_down"].t(), h.abs().sum(1)
    ((y * dy).sum() + (l1 * dl1).sum()).backward()
    return {"y": y.detach(), "l1": l1.detach()} | {
        f"d{name}": leaf.grad for name, leaf in leaves.items()
    }


# --- what is exact, and what a step needs at least ----------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 70, 4096 + 70])
def test_exact_gradients_are_those_of_autograd(num_tokens, gated, seed):
    mask = fresh_mask(
        np.random.default_rng(seed), min(num_tokens, 16), 40
    )  # with an empty row and a full one
    x, w_gate, w_up, w_down = measure.imposed_layer(mask, num_tokens, 16, device="cpu", seed=seed)
    weights = (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)
    dy, dl1 = torch.randn(num_tokens, 16).bfloat16(), torch.rand(num_tokens)
    exact = measure_training.ExactStep.of(x, weights, dy, dl1)
    expected = by_autograd(x, weights, dy, dl1)
    assert set(exact.tensors) == set(expected) and ("dw_gate" in expected) == gated
    for name, tensor in expected.items():
        torch.testing.assert_close(exact.tensors[name], tensor, msg=name)
    assert exact.entries == int(mask[np.arange(num_tokens) % len(mask)].sum())


def test_what_rounds_to_zero_is_not_active():
    x, w_gate = (
        torch.full((1, 16), 2.0**-14, dtype=torch.float16),
        torch.full((2, 16), 2.0**-16, dtype=torch.float16),
    )
    w_gate[1] = 1.0
    w_up, w_down = torch.ones(2, 16, dtype=torch.float16), torch.ones(16, 2, dtype=torch.float16)
    exact = measure_training.ExactStep.of(
        x, (w_gate, w_up, w_down), torch.ones_like(x), torch.ones(1)
    )
    assert exact.entries == 1  # 2^-26 is nothing in fp16
    assert (exact.tensors["dw_gate"][0] == 0).all() and (exact.tensors["dw_gate"][1] != 0).all()


@pytest.mark.parametrize("gated", [True, False])
def test_a_wrong_tensor_is_named_and_rounding_is_not_wrong(gated, seed):
    x, weights, dy, dl1 = parts_of(
        1000, gated, seed
    )  # of 150, rounding is more than 5e-3 in one of some hundred draws
    exact = measure_training.ExactStep.of(x, weights, dy, dl1)
    found = measure_training._Step.of(measure_training._dense, x, weights, dy, dl1).found()
    worst, error = exact.check(found, "dense")
    assert error > 1e-3
    others = {
        name: float((found[name].double() - t).norm() / t.norm())
        for name, t in exact.tensors.items()
    }
    assert error == max(others.values()) == others[worst]
    for name in exact.tensors:
        for wrong in (1.05 * found[name], found[name] * float("nan")):
            with pytest.raises(
                ArithmeticError, match=f"^{name} of union at case is wrong: relative RMS .* allowed"
            ):
                exact.check(found | {name: wrong}, "union at case")


@pytest.mark.parametrize("gated", [True, False])
def test_a_step_without_the_gradient_of_l1_is_refused(gated, seed):
    x, weights, dy, _ = parts_of(150, gated, seed)
    dy = (measure_training.DY * torch.randn(x.shape)).bfloat16()
    dl1 = torch.full((150,), measure_training.DL1)
    exact = measure_training.ExactStep.of(x, weights, dy, dl1)
    step = measure_training._Step.of(measure_training._dense, x, weights, dy, torch.zeros(150))
    with pytest.raises(ArithmeticError, match="^d.* is wrong"):
        exact.check(step.found(), "dense")


def test_where_nothing_is_active_only_zero_is_right(seed):
    x, weights, dy, dl1 = parts_of(3, True, seed, active=0)
    exact = measure_training.ExactStep.of(x, weights, dy, dl1)
    found = {name: torch.zeros_like(tensor) for name, tensor in exact.tensors.items()}
    assert exact.check(found, "dense")[1] == 0
    with pytest.raises(ArithmeticError, match="dx of dense"):
        exact.check(found | {"dx": torch.full((3, K), 1e-2)}, "dense")


@pytest.mark.parametrize("gated", [True, False])
def test_operations_and_bytes_are_those_that_a_count_finds(gated, seed):
    r = np.random.default_rng(seed)
    m, k, n = (int(size) for size in r.integers(1, 12, 3))
    mask = r.random((m, n)) < 0.3
    first, *others = ("gate", "up", "down") if gated else ("up", "down")
    for path in ("dense", "union"):
        flops, forward, backward = 0, set(), set()
        for token, neuron in itertools.product(range(m), range(n)):
            flops += 2 * k  # the first product
            forward.add((first, neuron))
            if path == "dense" or mask[token, neuron]:
                flops += 2 * k * len(others)
                flops += (
                    2 * k * (1 + len(others) + 1 + len(others))
                )  # dh; each weight's gradient; dx from all but down
                forward |= {(other, neuron) for other in others}
                backward |= {(weight, neuron) for weight in (first, *others)}
        gradients = (1 + len(others)) * n
        num_bytes = 2 * k * (len(forward) + 2 * m + len(backward) + gradients + 3 * m)
        shape = m, k, n, gated, int(mask.sum()), int(mask.any(0).sum())
        assert measure_training.work(path, *shape) == (flops, num_bytes)


# --- one layer ----------------------------------------------------------------------------------------------------


def fake_train(
    path, capacity, x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, *, token_mask=None
):
    """ops.train by dense products; NaN where the capacity does not suffice."""
    g = F.relu(F.linear(x, w_up, b_up) if w_gate is None else F.linear(x, w_gate, b_gate))
    h = g if w_gate is None else g * F.linear(x, w_up, b_up)
    needed = (g.detach() != 0).sum().add(len(x) - 1) // len(x)
    y = F.linear(h, w_down, b_down) * torch.where(needed > capacity, float("nan"), 1.0).to(x.dtype)
    l1 = h.abs().sum(-1, dtype=torch.float32)
    return ops.Trained(y, l1, (g != 0).sum(1).int(), (g != 0).sum(0).int(), needed)


@pytest.fixture
def quick(monkeypatch):
    """The sparse paths by dense products on the CPU, also where there is a GPU; and no compiler or clock."""
    allocated = itertools.count(1000, 500_000)

    def times(call, *_):
        call()
        return np.array([0.9, 1.0, 1.1])

    monkeypatch.setattr(ops, "train", fake_train)
    monkeypatch.setattr(ops, "takes", lambda x, _: x.dtype in common.DTYPES)
    monkeypatch.setattr(measure, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(measure, "ceilings", lambda: [dict(row) for row in PEAKS])
    monkeypatch.setattr(measure, "_stream_times", times)
    monkeypatch.setattr(
        measure,
        "_between_replays",
        lambda step, number, **_: np.array([times(step)[1] for _ in range(number)]),
    )
    monkeypatch.setattr(measure, "ROUNDS", 2)
    monkeypatch.setattr(measure_training, "TURN", 2)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: next(allocated))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_the_sparse_step_is_right(path, gated, seed):
    x, weights, dy, dl1 = parts_of(
        70, gated, seed, active=4, device=DEVICE
    )  # few entries, generous limit
    exact = measure_training.ExactStep.of(x, weights, dy, dl1)
    step = measure_training._Step.of(measure_training._sparse(path, N), x, weights, dy, dl1)
    assert exact.check(step.found(), path)[1] > 0


def test_the_dense_baseline_holds_no_more_than_it_needs(seed):
    """x and three matrices of all neurons: 592 MiB for 16,384 tokens of 2048 x 5632."""
    x, weights, dy, dl1 = parts_of(70, True, seed)
    step = measure_training._Step.of(measure_training._dense, x, weights, dy, dl1)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t
    ):
        step.forward()
    given = {t.data_ptr() for t in weights}
    assert sum(t.nbytes for place, t in kept.items() if place not in given) == 2 * 70 * (K + 3 * N)


def test_each_step_has_gradients_of_its_own(seed):
    x, weights, dy, dl1 = parts_of(70, True, seed)
    step = measure_training._Step.of(measure_training._dense, x, weights, dy, dl1)
    first, second = step.found(), step.found()
    assert (
        all(torch.equal(first[name], second[name]) for name in first)
        and not first["dx"].eq(0).all()
    )
    assert all(leaf.grad is None for leaf in step.leaves.values())
    assert all(not tensor.requires_grad for tensor in (x, *weights))
    step()
    step()
    assert torch.equal(step.leaves["w_up"].grad, first["dw_up"])


def test_held_is_what_lies_between_the_passes(monkeypatch, seed):
    x, weights, dy, dl1 = parts_of(70, True, seed)
    log = []

    def dense(*tensors):
        log.append("forward")
        return measure_training._dense(*tensors)

    step = measure_training._Step.of(dense, x, weights, dy, dl1)
    step()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: log.append("reset"))
    monkeypatch.setattr(
        torch.cuda,
        "memory_allocated",
        lambda: log.append("now") or (10**6, 10**7)["forward" in log[1:]],
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: log.append("peak") or 10**8)
    log.clear()
    log.append("begin")
    found = step.memory()
    assert log == ["begin", "synchronize", "now", "reset", "forward", "now", "peak"]
    assert found == {"held": 9 * 10**6 - 2 * 70 * K - 4 * 70 + 2 * 70 * K, "peak": 10**8 - 10**6}
    assert all(leaf.grad is None for leaf in step.leaves.values())


def test_capacity_is_what_training_would_take(monkeypatch):
    inputs = measure.synthetic_layer(64, K, N, active=30, device="cpu")
    case = measure._Case.of("even", inputs, True, 1)
    asked = []

    def train(needs):
        def run(path, capacity, *_):
            asked.append(capacity)
            return types.SimpleNamespace(needed=torch.tensor(needs))

        return run

    for needs, expected, tries in ((30, 48, 1), (48, 48, 1), (50, 96, 2), (96, 96, 2)):
        asked.clear()
        monkeypatch.setattr(ops, "train", train(needs))
        assert measure_training._capacity("union", case) == expected and len(asked) == tries
    monkeypatch.setattr(ops, "train", train(97))
    with pytest.raises(
        ArithmeticError, match="triton union at .* needs 97 entries a token, of 96 neurons"
    ):
        measure_training._capacity("union", case)


def test_rows_say_what_was_measured(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure, "_kernel_times", lambda calls: calls[0]() and {"cublas matmul": (3.0, 0.5)}
    )
    monkeypatch.setattr(measure, "_energy_meter", lambda: lambda: 0)
    monkeypatch.setattr(
        measure, "_energy", lambda run, calls, ms, meter: {"energy": 500.0 * calls, "watts": 9.0}
    )
    options = dict(hidden_size=K, intermediate_size=N, kernels=True, energy=True, out=tmp_path)
    rows = measure_training.ffn([70, 130], [20], ["even", "skewed"], **options)
    assert all(list(row) == measure_training.COLUMNS["training"] for row in rows)
    table = pd.read_csv(tmp_path / "training.csv")
    providers = ["dense eager", "dense torch.compile", *(f"triton {path}" for path in PATHS)]
    assert list(table["provider"]) == 4 * providers and len(table) == len(rows)
    sparse = table["provider"].str.startswith("triton")
    assert (
        table["path"] == table["provider"].str.removeprefix("triton ").where(sparse, "dense")
    ).all()
    assert (table["capacity"].notna() == sparse).all() and (table["capacity"][sparse] >= 32).all()
    assert (table["relative_rms"] < measure.TOLERANCE).all() and table["worst"].isin(
        ["y", "dx", "dw_gate", "dw_up", "dw_down"]
    ).all()
    dense = table.query("provider == 'dense eager' and tokens == 130").iloc[0]
    assert dense["flops"] == 18 * 130 * N * K
    assert (table["held"] == 500_000 - 4 * table["tokens"]).all() and (
        table["peak"] == 1_000_000
    ).all()
    assert (table[["p50", "forward", "energy", "watts"]] == [1.0, 1.0, 500.0, 9.0]).all(axis=None)
    assert table["date"].nunique() == 1
    parts = pd.read_csv(tmp_path / "training_kernels.csv")
    assert (
        list(parts.columns)[: len(measure_training.COLUMNS["training_kernels"])]
        == measure_training.COLUMNS["training_kernels"]
    )
    assert list(parts["provider"]) == list(table["provider"]) and set(parts["ms"]) == {0.5}
    assert pd.read_csv(tmp_path / "ceilings.csv")["value"].tolist() == [4000.0, 800.0]


def test_recorded_activity_of_a_layer_without_gate(quick, seed):
    mask = fresh_mask(np.random.default_rng(seed), 20, 40)
    rows = measure_training.ffn(
        [50], patterns=["recorded"], hidden_size=32, gated=False, masks={"a": mask}
    )
    assert {row["pattern"] for row in rows} == {"recorded a"} and not any(
        row["gated"] for row in rows
    )
    assert {row["active"] for row in rows} == {round(mask[np.arange(50) % 20].sum() / 50, 2)}


def test_what_was_measured_is_kept_when_a_later_case_fails(quick, tmp_path, monkeypatch):
    calls = []

    def train(path, capacity, x, w_gate, w_up, w_down):
        calls.append(capacity)
        w_gate = w_gate.view_as(w_gate)
        if len(calls) > 3 and w_gate.requires_grad:  # in the second case
            w_gate.register_hook(lambda gradient: 0.98 * gradient)
        return fake_train(path, capacity, x, w_gate, w_up, w_down)

    monkeypatch.setattr(ops, "TRAIN_PATHS", {"union": None})
    monkeypatch.setattr(ops, "train", train)
    monkeypatch.setattr(
        measure, "_stream_times", lambda call, *_: np.ones(3)
    )  # no calls but those of checks and memory
    with pytest.raises(
        ArithmeticError, match="^dw_gate of triton union at .* 70 tokens  skewed .* is wrong"
    ):
        measure_training.ffn([70], [9, 20, 30], hidden_size=K, intermediate_size=N, out=tmp_path)
    table = pd.read_csv(tmp_path / "training.csv")
    assert list(table["provider"]) == ["dense eager", "dense torch.compile", "triton union"]


def test_nothing_is_timed_before_all_is_checked(quick, monkeypatch):
    monkeypatch.setattr(measure, "_stream_times", lambda *_: pytest.fail("timed"))

    def train(path, capacity, x, *weights):
        found = fake_train(path, capacity, x, *weights)
        return found._replace(l1=found.l1 * 1.02)

    monkeypatch.setattr(ops, "train", train)
    with pytest.raises(ArithmeticError, match="^l1 of triton union"):
        measure_training.ffn([70], [9], hidden_size=K, intermediate_size=N)


def test_energy_that_cannot_be_measured_is_said_and_left_empty(quick, monkeypatch, capsys):
    def meter():
        raise RuntimeError("no such counter")

    monkeypatch.setattr(measure, "_energy_meter", meter)
    rows = measure_training.ffn([70], [9], hidden_size=K, intermediate_size=N, energy=True)
    assert {row["energy"] for row in rows} == {None}
    assert "energy is not measured: no such counter" in capsys.readouterr().out


def test_mistakes_are_found_before_anything_is_measured(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ceilings", lambda: pytest.fail("measured something"))
    monkeypatch.setattr(measure_training, "_Trainer", lambda *_: pytest.fail("built something"))
    (tmp_path / "old").mkdir()
    for name in ("training", "train_step"):
        (tmp_path / "old" / f"{name}.csv").write_text("tokens,active,device\n1,2,x\n")
    (tmp_path / "file").write_text("")
    for options, kind, words in (
        (
            {"patterns": ["evn"]},
            ValueError,
            "pattern 'evn' is unknown; use one of even, skewed, recorded",
        ),
        ({"tokens": [4, 0]}, ValueError, "tokens holds 0; it has to be at least 1"),
        ({"hidden_size": 40}, ValueError, "hidden_size is 40; the kernels need a multiple of 16"),
        ({"kernels": True}, ValueError, "say in which folder"),
        (
            {"out": tmp_path / "old"},
            ValueError,
            r"training.csv has the columns \['tokens', 'active', 'device'\]",
        ),
        (
            {"out": tmp_path / "file"},
            NotADirectoryError,
            "file is a file; out is a folder, for training.csv",
        ),
    ):
        with pytest.raises(kind, match=words):
            measure_training.ffn(**({"tokens": [4]} | options))
    for options, kind, words in (
        ({"model": "no"}, FileNotFoundError, "no configuration no"),
        ({"overrides": ["num_layers=0"]}, ValueError, "num_layers is 0; it has to be more than 0"),
        (
            {"overrides": ["num_heads=7"]},
            ValueError,
            "hidden_size 1024 is no multiple of num_heads 7",
        ),
        (
            {"overrides": ["hidden_size=72", "num_heads=2"]},
            ValueError,
            "hidden_size is 72; the kernels need a multiple",
        ),
        (
            {"overrides": ["micro_batch=-1"]},
            ValueError,
            "micro_batch is -1; it has to be at least 1",
        ),
        (
            {"overrides": ["precision=fp32"]},
            ValueError,
            "precision is 'fp32'; the sparse path of training needs 'bf16'",
        ),
        (
            {"overrides": ["activation=silu"]},
            ValueError,
            "activation is 'silu'; sparse layers need 'relu'",
        ),
        ({"active": 0}, ValueError, "active is 0; it has to be above 0 and below 2816"),
        ({"active": 2816}, ValueError, "active is 2816; it has to be above 0 and below 2816"),
        ({"profile": "hump"}, ValueError, "profile 'hump' is unknown; use one of paper, flat"),
        ({"out": tmp_path / "old"}, ValueError, r"train_step.csv has the columns"),
        ({"out": tmp_path / "file"}, NotADirectoryError, "out is a folder, for train_step.csv"),
    ):
        with pytest.raises(kind, match=words):
            measure_training.train_step(**options)


# --- one optimiser step of a model --------------------------------------------------------------------------------

TINY = "num_layers=3 hidden_size=32 intermediate_size=96 num_heads=2 vocab_size=320 context=32 micro_batch=4".split()
TINY += ["valid_tokens=512", "precision=bf16"]


@pytest.fixture
def trainer(quick):
    """A small model as `train_step` has it, 20 neurons of 96 active."""

    def build(*overrides):
        config = measure_training._model_config("quick", [*TINY, *overrides])
        return measure_training._Trainer(config, 20.0, "flat", torch.device("cpu"))

    return build


@pytest.mark.parametrize("num_tokens, chunk", [(1, 1), (7, 3), (9, 3), (10, 64)])
def test_the_cross_entropy_in_chunks_is_that_of_the_whole(num_tokens, chunk, seed):
    torch.manual_seed(seed)
    hidden, weight = (
        torch.randn(num_tokens, 5, dtype=torch.float64),
        torch.randn(11, 5, dtype=torch.float64),
    )
    labels = torch.randint(11, (num_tokens,))
    labels[1 : num_tokens // 2] = -100
    found, largest = [], []

    def loss(hidden, weight, labels):
        largest.append(len(hidden))
        return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")

    for whole in (False, True):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        if whole:
            value = F.cross_entropy(leaves[0] @ leaves[1].t(), labels)
        else:
            value = measure_training.chunked_cross_entropy(*leaves, labels, chunk=chunk, loss=loss)
            assert len(largest) == -(-num_tokens // chunk)  # and again in the backward pass
        value.backward()
        found.append([value, *(t.grad for t in leaves)])
    assert max(largest) == min(chunk, num_tokens) and sum(largest) == 2 * num_tokens
    torch.testing.assert_close(*found)
    value = measure_training.chunked_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(
        value,
        F.cross_entropy(hidden.float() @ weight.float().t(), labels).double(),
        check_dtype=False,
    )


def test_providers_take_the_same_steps_from_the_same_weights(trainer, monkeypatch):
    trainer, found, sparse = trainer(), {}, []
    monkeypatch.setattr(
        ops, "train", lambda path, *t, **o: sparse.append(path) or fake_train(path, *t, **o)
    )
    for name in (
        "dense eager",
        "triton union",
        "dense torch.compile",
        "triton union torch.compile",
        "dense eager",
    ):
        trainer.become(name, 1e-3)
        weight = trainer.model.ffns[0].down_proj.weight
        assert torch.equal(weight, trainer.start["model.layers.0.mlp.down_proj.weight"])
        assert weight.stride() == ((1, 32) if name.startswith("triton") else (96, 1))
        compiled = [layer._compiled_call_impl is not None for layer in trainer.model.model.layers]
        assert compiled == 3 * [name.endswith("compile")]
        sparse.clear()
        steps = trainer.steps()
        assert set(sparse) == ({"union"} if name.startswith("triton") else set())
        assert found.setdefault(name, steps) == steps  # the second time dense comes out as at first
        assert not torch.equal(weight, trainer.start["model.layers.0.mlp.down_proj.weight"])
        moments = trainer.optimizer.state[weight]
        assert moments["exp_avg"].stride() == weight.stride() and moments["step"] == 4
        assert trainer.model.ffns[0].stats.histogram is None  # no statistics, on no side
    losses, *norms = zip(*found.values(), strict=True)
    assert np.allclose(losses, losses[0], rtol=1e-3)
    assert all(np.allclose(norm, norm[0], rtol=1e-2) for norm in norms)
    first, *_ = trainer.step()
    trainer.become("dense eager", 0.0)
    assert trainer.steps()[0] == pytest.approx(
        float(trainer.step()[0])
    )  # nothing is learnt at the rate 0
    assert trainer.steps()[0] > 1.001 * float(first)


def test_a_step_is_that_of_the_model_itself(trainer):
    """Loss with the L1 term and clipped gradients: the same as by the model's own forward."""
    trainer = trainer("max_grad_norm=0.1")
    trainer.config.l1_coefficient = trainer.model.config.l1_coefficient = 0.01
    trainer.become("dense eager", 1e-3)
    loss, norm, inner = trainer.step()
    own = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.become("dense eager", 1e-3)
    with trainer.autocast():
        output = trainer.model(input_ids=trainer.tokens, labels=trainer.tokens, use_cache=False)
    output.loss.backward()
    assert float(loss) == pytest.approx(output.loss.item()) and output.l1 > 0.1
    of_ffns = torch.cat([p.grad.flatten() for ffn in trainer.model.ffns for p in ffn.parameters()])
    assert float(inner) == pytest.approx(float(of_ffns.norm()), rel=1e-4)
    whole = float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1))
    assert float(norm) == pytest.approx(whole, rel=1e-4) and 0.02 < inner < norm
    trainer.optimizer.step()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), own[name], msg=name)


def test_rows_of_steps(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_energy_meter", lambda: lambda: 0)
    monkeypatch.setattr(
        measure, "_energy", lambda run, calls, ms, meter: {"energy": 64.0, "watts": 9.0}
    )
    seen = []
    step = measure_training._Trainer.step
    monkeypatch.setattr(
        measure_training._Trainer,
        "step",
        lambda self: (
            seen.append((self.sparse is not None, self.optimizer.param_groups[0]["lr"]))
            or step(self)
        ),
    )
    options = ["checkpoint_activations=true"]
    rows = measure_training.train_step(
        "quick", TINY + options, active=20, energy=True, out=tmp_path
    )
    assert all(list(row) == measure_training.COLUMNS["train_step"] for row in rows)
    table = pd.read_csv(tmp_path / "train_step.csv")
    providers = ["dense eager", "triton union", "dense torch.compile", "triton union torch.compile"]
    assert list(table["provider"]) == providers and list(table["path"]) == 2 * ["dense", "union"]
    assert table["capacity"].isna().tolist() == 2 * [True, False]
    assert (table["tokens_per_second"] == 128_000).all() and (table["energy"] == 64).all()
    assert table["checkpoint_activations"].all() and table["gated"].all()
    assert table["active"].between(15, 25).all() and (table["active_max"] >= table["active"]).all()
    assert (table[["context", "micro_batch", "num_layers", "vocab_size"]] == [32, 4, 3, 320]).all(
        axis=None
    )
    rates = [rate for _, rate in seen]
    checks = 4 * (measure_training.CHECKED_STEPS + 1)
    assert set(rates[:checks]) == {TrainConfig.load("quick").learning_rate} and set(
        rates[checks:]
    ) == {0.0}  # timed steps leave activity as it is
    timed = [side for side, _ in seen[checks:]]
    assert sum(timed[: len(timed) // 2]) == len(timed) // 4  # in turns


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_layers_compute_again(trainer, compiled):
    found, calls = {}, {False: [], True: []}
    for checkpointed, counts in calls.items():
        made = trainer(f"checkpoint_activations={checkpointed}")
        made.become("dense torch.compile" if compiled else "dense eager", 0.0)
        for ffn in made.model.ffns:
            ffn.register_forward_pre_hook(lambda *_, counts=counts: counts.append(1))
        found[checkpointed] = torch.stack(made.step())
    assert {name: len(counts) for name, counts in calls.items()} == {False: 3, True: 6}
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=0)


@pytest.mark.parametrize("curve", [0, 0.02])
@pytest.mark.parametrize("limit", [100, 131, 159, 160, 219, 220, 221, 1000, 9000])
def test_the_largest_micro_batch_is_found(trainer, monkeypatch, limit, curve):
    trainer, tried = trainer(), []

    def needs(sequences):
        return 100 + 30 * sequences + curve * sequences**2

    def step():
        tried.append(len(trainer.tokens))
        if needs(tried[-1]) > limit:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(trainer, "step", step)
    monkeypatch.setattr(trainer, "peak", lambda: needs(len(trainer.tokens)))
    trainer.become("dense eager", 0.0)
    most = next(n for n in range(1000) if needs(n + 1) > limit)
    found = trainer.largest(limit)
    assert 0.96 * most <= found <= most and (curve or found == most)
    if found:
        assert len(trainer.tokens) == found and trainer.labels.shape == (found * 32,)
    assert len(set(tried)) <= 12


@pytest.mark.parametrize("model, active", [("0.5b", 39), ("quick", 29)])
def test_activity_is_the_papers_for_its_sizes(quick, monkeypatch, model, active):
    asked = []
    monkeypatch.setattr(
        imposed, "profile", lambda name, layers, mean: asked.append(mean) or [mean] * layers
    )
    measure_training.train_step(model, TINY, compiled=True, profile="paper")
    assert set(asked) == {active}


def test_what_is_timed_finds_its_own_room(quick, monkeypatch):
    steps = measure_training._Trainer.steps

    def with_much_room(trainer):  # as after a training that turned all neurons on
        found = steps(trainer)
        if trainer.sparse is not None:
            trainer.sparse.capacity = trainer.sparse.rooms[-1]
        return found

    monkeypatch.setattr(measure_training._Trainer, "steps", with_much_room)
    dense, sparse = measure_training.train_step("quick", TINY, active=4, compiled=True)
    assert dense["capacity"] is None and sparse["capacity"] < 96


def test_a_pass_that_found_no_room_leaves_nothing_in_memory(trainer, monkeypatch):
    trainer, kept = trainer(), []
    trainer.become("dense eager", 0.0)

    def step():
        trainer.model.model(input_ids=trainer.tokens)
        kept.extend(weakref.ref(ffn.l1) for ffn in trainer.model.ffns)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(trainer, "step", step)
    assert not trainer.fits(2)
    assert len(kept) == len(trainer.model.ffns) and not any(one() is not None for one in kept)


def test_the_largest_micro_batch_is_timed(quick, monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * 10**8)
    largest = lambda self, limit: limits.append(limit) or self.draw(7) or 7  # noqa: E731
    monkeypatch.setattr(measure_training._Trainer, "largest", largest)
    rows = measure_training.train_step(
        "quick", TINY, active=20, compiled=True, largest=True, profile="paper"
    )
    assert [(row["micro_batch"], row["largest"]) for row in rows] == [(4, 7)] * 2
    assert [row["largest_tokens_per_second"] for row in rows] == [7 * 32 * 1000] * 2
    assert limits == [15 * 10**8] * 2  # what is free or held to be used again
    assert {row["profile"] for row in rows} == {"paper"} and rows[0]["active_max"] > 1.3 * rows[0][
        "active"
    ]


@pytest.mark.parametrize("compiled, kinds", [(True, [" torch.compile"]), (False, [""])])
def test_compiled_or_eager_alone(quick, compiled, kinds):
    rows = measure_training.train_step("quick", TINY, active=20, compiled=compiled)
    dense = "dense torch.compile" if compiled else "dense eager"
    assert [row["provider"] for row in rows] == [dense, f"triton union{kinds[0]}"]
    assert {row["energy"] for row in rows} == {None}


def test_a_layer_that_was_dense_all_the_same_is_noticed(quick, monkeypatch):
    monkeypatch.setattr(ops, "takes", lambda *_: False)
    with pytest.raises(ArithmeticError, match="triton union of quick computed a layer densely"):
        measure_training.train_step("quick", TINY, active=20, compiled=False)


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_model_that_learns_something_else_is_refused(quick, tmp_path, monkeypatch, what):
    def train(path, capacity, x, *tensors, **options):
        found = fake_train(path, capacity, x, *tensors, **options)
        y = 0.5 * found.y + 0.5 * found.y.detach() if what == "gradient" else 3 * found.y + 1
        return found._replace(y=y)

    monkeypatch.setattr(ops, "train", train)
    monkeypatch.setattr(measure, "_between_replays", lambda *_: pytest.fail("timed"))
    words = {
        "gradient": "the norm of the first gradient of feed-forward weights",
        "loss": "the (loss after 3 steps|norm of the first gradient.*)",
    }
    with pytest.raises(
        ArithmeticError,
        match=f"^triton union of quick is wrong: {words[what]} is .* of dense eager",
    ):
        measure_training.train_step("quick", TINY, active=20, out=tmp_path)
    assert not list(tmp_path.iterdir())


# --- the command line ---------------------------------------------------------------------------------------------


def test_the_command_line_passes_everything_on(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(measure_training, "ffn", lambda *a, **o: seen.append((a, o)))
    monkeypatch.setattr(measure_training, "train_step", lambda *a, **o: seen.append((a, o)))
    words = "measure ffn --backward --tokens 64,128 --active 2.5 --pattern even --hidden 64 --intermediate 128 --non-gated"
    assert main([*words.split(), "--energy", "--kernels", "--out", str(tmp_path)]) == 0
    sizes = {"hidden_size": 64, "intermediate_size": 128, "gated": False, "masks": None}
    assert seen.pop() == (
        ([64, 128], [2.5], ["even"]),
        sizes | {"energy": True, "kernels": True, "out": tmp_path},
    )
    assert main(["measure", "ffn", "--backward"]) == 0
    assert seen.pop()[0] == ([65536, 16384], [29.0], ["skewed"])
    words = "measure train-step --model quick --layers 3 --hidden 64 --intermediate 128 --heads 4 --vocab 300 --context 16"
    words += " --micro-batch 5 --non-gated --active 9 --checkpoint-activations --no-compile --energy --out x"
    words += " --profile paper --largest"
    assert main(words.split()) == 0
    fields = "num_layers=3 hidden_size=64 intermediate_size=128 num_heads=4 vocab_size=300 context=16 micro_batch=5"
    overrides = [*fields.split(), "gated=false", "checkpoint_activations=true"]
    options = {"active": 9.0, "compiled": False, "energy": True, "out": Path("x")}
    options |= {"profile": "paper", "largest": True}
    assert seen.pop() == (("quick", overrides), options)
    assert main(["measure", "train-step"]) == 0
    options = {"active": None, "compiled": None, "energy": False, "out": Path("build/bench")}
    options |= {"profile": "flat", "largest": False}
    assert seen.pop() == (("171m", []), options)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            "ffn --backward --mode graph",
            "--mode graph is for forward passes; with --backward calls come one after the other",
        ),
        (
            "ffn --backward --calibration x.json",
            "--calibration is for auto, which --backward does not time",
        ),
        ("ffn --backward", "measuring needs a GPU, and torch sees none"),
        ("train-step", "measuring needs a GPU, and torch sees none"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(
    arguments, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["measure", *arguments.split(), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"twell measure: {words}\n"
    assert not list(tmp_path.iterdir())
