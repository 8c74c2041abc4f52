"""Training of one layer: rows, memory, capacity, and the activity where sparse stops to pay."""

import itertools
import types
import weakref
from functools import partial

import pandas as pd
import pytest
import torch

from tests.factories import measure
from tests.factories.measure import SIZES, FakeGpu, K, N, case, counts_of, layer_step
from twell.measure import step
from twell.measure.case import DenseTraining
from twell.measure.check import TOLERANCE, Exact
from twell.measure.rows import COLUMNS
from twell.measure.step import Step, crossover, ffn_steps
from twell.sparse.layer import SparseFFN

pytest.importorskip("triton")
OPS = step.training_ops()
PATHS = list(OPS.TRAIN_PATHS)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.slow  # tests/kernels has the operators
def test_the_sparse_step_is_correct(path, gated):
    parts = layer_step(20, gated, active=4)  # few entries, generous limit
    x, weights, gradients = parts
    sparse = Step.sparse(path, N, *parts)
    assert Exact.of(x, weights, *gradients).check_step(sparse.tensors(), path)[1] > 0


def test_the_dense_baseline_holds_no_more_than_it_needs():
    """x and three matrices of all neurons: 592 MiB for 16,384 tokens of 2048 x 5632."""
    x, weights, gradients = layer_step(70)
    dense, saved = Step(step.dense, x, weights, gradients), {}
    pack = lambda t: saved.setdefault(t.data_ptr(), t)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        dense.forward()
    given = {t.data_ptr() for t in weights}
    own = [t for pointer, t in saved.items() if pointer not in given]
    assert sum(t.nbytes for t in own) == 2 * 70 * (K + 3 * N)


def test_each_step_has_gradients_of_its_own():
    x, weights, gradients = layer_step(70)
    dense = Step(step.dense, x, weights, gradients)
    first, second = dense.tensors(), dense.tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not first["dx"].eq(0).all()
    assert all(leaf.grad is None for leaf in dense.leaves.values())
    assert all(not tensor.requires_grad for tensor in (x, *weights))
    dense()
    dense()
    assert torch.equal(dense.leaves["w_up"].grad, first["dw_up"])


def test_held_bytes_are_those_between_the_passes():
    gpu, log = FakeGpu(), []
    gpu.bytes = iter([10**6, 10**7, 10**8])

    def dense(*tensors):
        log.append("forward")
        return step.dense(*tensors)

    timed = Step(dense, *layer_step(70))
    memory = timed.memory(gpu)
    outputs = 2 * 70 * K + 4 * 70
    assert memory == {"held": 9 * 10**6 - outputs + 2 * 70 * K, "peak": 10**8 - 10**6}
    assert log == ["forward"] and all(leaf.grad is None for leaf in timed.leaves.values())


def test_the_capacity_is_that_of_training(monkeypatch):
    given, asked = case(64, active=30), []

    def train(needs, path, capacity, *_):
        asked.append(capacity)
        return types.SimpleNamespace(needed=torch.tensor(needs))

    given.columns["active"] = 30.0
    for needs, expected, tries in ((30, 48, 1), (48, 48, 1), (50, 96, 2), (96, 96, 2)):
        asked.clear()
        monkeypatch.setattr(OPS, "train", partial(train, needs))
        assert step.training_capacity("union", given) == expected and len(asked) == tries
    monkeypatch.setattr(OPS, "train", partial(train, 97))
    message = "triton union at .* needs 97 entries a token, of 96 neurons"
    with pytest.raises(ArithmeticError, match=message):
        step.training_capacity("union", given)


# --- rows -------------------------------------------------------------------------------------


def test_rows_say_what_was_measured(dense_kernels, tmp_path):
    dense_kernels.shown = lambda call: call() and [("nvjet", 0.5)] * 3
    options = SIZES | {"kernels": True, "energy": True, "out": tmp_path}
    rows = ffn_steps([70, 130], [20], ["even", "skewed"], **options)
    assert all(list(row) == COLUMNS["training"] for row in rows)
    table = pd.read_csv(tmp_path / "training.csv")
    providers = ["dense eager", "dense torch.compile", *(f"triton {path}" for path in PATHS)]
    assert list(table["provider"]) == 4 * providers and len(table) == len(rows)
    assert list(table["path"]) == 4 * ["dense", "dense", *PATHS]
    assert set(table["mode"]) == {"stream"}
    sparse = table["path"] != "dense"
    assert (table["capacity"].notna() == sparse).all() and (table["capacity"][sparse] >= 32).all()
    assert (table["relative_rms"] < TOLERANCE["layer"]).all()
    assert set(table["worst"]) <= {"y", "dx", "dw_gate", "dw_up", "dw_down"}
    dense = table.query("provider == 'dense eager' and tokens == 130").iloc[0]
    assert dense["flops"] == 18 * 130 * N * K
    assert (table["held"] == 500_000 - 4 * table["tokens"]).all()
    assert (table["peak"] == 1_000_000).all() and table["date"].nunique() == 1
    assert (table[["p50", "forward"]] == 1.0).all(axis=None)
    assert table["energy"].notna().all() and table["watts"].notna().all()
    parts = pd.read_csv(tmp_path / "training_kernels.csv")
    assert list(parts["provider"]) == list(table["provider"]) and set(parts["ms"]) == {1.5}
    assert pd.read_csv(tmp_path / "ceilings.csv")["value"].tolist() == [4000.0, 800.0]


@pytest.mark.parametrize("wrong", ["dw_gate", "l1"])
def test_nothing_is_timed_before_all_is_checked_and_rows_are_kept(
    dense_kernels, tmp_path, monkeypatch, wrong
):
    def train(path, capacity, x, w_gate, w_up, w_down):
        busy = float(counts_of(x.detach(), w_gate.detach()).double().mean()) > 15
        if wrong == "dw_gate" and busy and w_gate.requires_grad:
            w_gate = w_gate.view_as(w_gate)
            w_gate.register_hook(lambda gradient: 0.98 * gradient)
        result = measure.train(path, capacity, x, w_gate, w_up, w_down)
        return result._replace(l1=(1.02 if wrong == "l1" and busy else 1) * result.l1)

    monkeypatch.setattr(OPS, "TRAIN_PATHS", {"union": None})
    monkeypatch.setattr(OPS, "train", train)
    message = f"^{wrong} of triton union at .* 70 tokens  skewed .* is wrong"
    with pytest.raises(ArithmeticError, match=message):
        ffn_steps([70], [9, 20, 30], **SIZES, out=tmp_path)
    table = pd.read_csv(tmp_path / "training.csv")
    assert list(table["provider"]) == ["dense eager", "dense torch.compile", "triton union"]
    assert len(dense_kernels.timed) == 2 * 2 * 3  # rounds, and forward passes too
    dense_kernels.timed.clear()
    monkeypatch.setattr(step, "CROSSOVER_SHARES", [0.3])
    with pytest.raises(ArithmeticError, match=message):
        crossover(K, N, tokens=70)
    assert not dense_kernels.timed


# --- back to back -----------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
def test_steps_back_to_back_are_also_those_of_the_layer(dense_kernels, monkeypatch, gated):
    """Whose own Python counts, as in any training loop."""
    compiled, passes, forward = [], [], SparseFFN.forward

    def slow(layer, x):
        dense_kernels.spend(2.0)
        passes.append((layer.train_path, layer.capacity, layer.outbox.watch_capacity))
        return forward(layer, x)

    monkeypatch.setattr(SparseFFN, "forward", slow)
    monkeypatch.setattr(dense_kernels, "stream_times", lambda *_: pytest.fail("emptied the cache"))
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f) or f)
    rows = ffn_steps([70], [26], **SIZES, gated=gated, mode="eager")
    dense = ["dense eager", "dense torch.compile"]
    assert [row["provider"] for row in rows] == [*dense, "triton", "triton union", "triton hybrid"]
    assert [row["path"] for row in rows] == ["dense", "dense", "union", *PATHS]
    assert {row["mode"] for row in rows} == {"eager"}
    assert isinstance(compiled[-1], DenseTraining)  # a module, as SparseFFN is
    times = {row["provider"]: (row["p50"], row["forward"]) for row in rows}
    assert times.pop("triton") == (2.0, 2.0) and set(times.values()) == {(1.0, 1.0)}
    # 1.5 times what it needs, which SparseTraining knows after a first step.
    assert passes[0] == ("union", 32, True) and set(passes[1:]) == {("union", 48, True)}
    assert [row["capacity"] for row in rows[2:]] == [48] * 3


@pytest.mark.parametrize("wrong", ["y", "dx"])
def test_the_layer_is_checked_before_anything_is_timed(dense_kernels, monkeypatch, wrong):
    forward = SparseFFN.forward

    def scaled(layer, x):
        y = forward(layer, x)
        return 1.02 * y - (0.02 * y.detach() if wrong == "dx" else 0)

    monkeypatch.setattr(SparseFFN, "forward", scaled)
    with pytest.raises(ArithmeticError, match=f"^{wrong} of triton at .* 70 tokens .* is wrong"):
        ffn_steps([70], [20], **SIZES, mode="eager")
    assert not dense_kernels.timed


def test_a_step_of_the_layer_ends_with_its_graph(dense_kernels):
    """The layer keeps its L1 term until the next pass, and held memory would be counted twice."""
    given = case(70)
    own = step.sparse_layer_step(given, step.output_gradients(given.x))
    y, l1 = own()
    last = weakref.ref(l1)
    del y, l1
    assert last() is None and own.path == "union"
    own.attempts.close()
    y, l1 = own.forward()
    assert not y.isnan().any() and own.leaves["w_up"].grad is not None


# --- the crossover ----------------------------------------------------------------------------

LEVELS = 0.02, 0.1, 0.3, 0.6  # of 96 neurons


@pytest.fixture
def timed(dense_kernels, monkeypatch):
    """Steps take the ms of a formula; the list has the activity of each sparse one.

    `timed.pays`: the active neurons at which both providers take as long.
    """
    log = type("Log", (list,), {"pays": 17.0})()

    def train(path, capacity, x, w_gate, w_up, w_down):
        if x.requires_grad:
            first = (w_up if w_gate is None else w_gate).detach()
            log.append(float(counts_of(x.detach(), first).double().mean()))
            dense_kernels.spend((log[-1] / log.pays) ** 0.5)
        return measure.train(path, capacity, x, w_gate, w_up, w_down)

    monkeypatch.setattr(OPS, "train", train)
    monkeypatch.setattr(step, "CROSSOVER_SHARES", LEVELS)
    return log


@pytest.mark.parametrize("gated", [True, False])
def test_at_the_crossover_both_take_as_long(timed, gated, capsys):
    result = crossover(K, N, tokens=70, gated=gated)
    assert result == pytest.approx(17.0, rel=5e-3)  # p50 has four digits
    active = [level for level, _ in itertools.groupby(timed)]
    # No level after the first slower one.
    assert active == sorted(active) and len(active) == 3 and active[1] < 17 < active[2]
    output = capsys.readouterr().out
    for level in active:
        assert f"{(17 / level) ** 0.5:.2f} times as fast" in output
    assert output.endswith(
        f"training is faster sparsely up to {result:g} active neurons per token\n"
    )


def test_steps_that_are_slower_or_faster_at_every_level(timed, monkeypatch):
    monkeypatch.setattr(step, "CROSSOVER_SHARES", LEVELS[:2])
    timed.pays = 0.5
    assert crossover(K, N, tokens=70) == 0 and len(set(timed)) == 1
    timed.pays = 1e3
    assert crossover(K, N, tokens=70) == pytest.approx(timed[-1], abs=0.01)
