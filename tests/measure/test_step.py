"""Training of one layer: rows, memory, capacity, and the activity where sparse stops to pay."""

import itertools

import pandas as pd
import pytest
import torch

from tests.factories import measure
from tests.factories.measure import SIZES, FakeGpu, K, N, case, counts_of, dense_step
from tests.factories.ops import as_sparse_train
from twell.measure import step
from twell.measure.check import TOLERANCE, Exact
from twell.measure.rows import COLUMNS
from twell.measure.step import Step, crossover, ffn_steps

training_ops = pytest.importorskip("twell.sparse.training_ops")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", training_ops.TRAIN_PATHS)
@pytest.mark.slow  # tests/kernels has the operators
def test_the_sparse_step_is_correct(path, gated):
    given = case(20, gated, active=4)  # few entries, generous limit
    gradients = step.output_gradients(given.x)
    sparse = Step.sparse(given, path, gradients)
    assert sparse.path == path
    exact = Exact.of(given.x, given.sets[0], *gradients)
    assert exact.check_step(sparse.tensors(), path)[1] > 0


def test_the_dense_baseline_holds_no_more_than_it_needs():
    """x and three matrices of all neurons: 592 MiB for 16,384 tokens of 2048 x 5632."""
    dense, saved = dense_step(70), {}
    pack = lambda t: saved.setdefault(t.data_ptr(), t)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        dense.forward()
    given = {leaf.data_ptr() for name, leaf in dense.leaves.items() if name != "x"}
    own = [t for pointer, t in saved.items() if pointer not in given]
    assert sum(t.nbytes for t in own) == 2 * 70 * (K + 3 * N)


def test_each_step_has_gradients_of_its_own():
    dense = dense_step(70)
    first, second = dense.tensors(), dense.tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not first["dx"].eq(0).all()
    assert all(leaf.grad is None for leaf in dense.leaves.values())
    dense()
    dense()
    assert torch.equal(dense.leaves["w_up"].grad, first["dw_up"])


def test_held_bytes_are_those_between_the_passes():
    gpu = FakeGpu()
    gpu.bytes = iter([10**6, 10**7, 10**8])
    memory = dense_step(70).memory(gpu)
    outputs = 2 * 70 * K + 4 * 70
    assert memory == {"held": 9 * 10**6 - outputs + 2 * 70 * K, "peak": 10**8 - 10**6}


@pytest.mark.parametrize("mode", ["stream", "eager"])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_say_what_was_measured(dense_kernels, tmp_path, mode, gated):
    dense_kernels.shown = lambda call: call() and [("nvjet", 0.5)] * 3
    options = SIZES | {"kernels": True, "energy": True, "out": tmp_path, "mode": mode}
    rows = ffn_steps([70, 130], [20], ["even", "skewed"], **options, gated=gated)
    assert all(list(row) == COLUMNS["training"] for row in rows)
    table = pd.read_csv(tmp_path / "training.csv")
    sparse = {"stream": ["triton union", "triton hybrid"], "eager": ["triton"]}[mode]
    providers = ["dense eager", "dense torch.compile", *sparse]
    assert list(table["provider"]) == 4 * providers and len(table) == len(rows)
    paths = {"stream": training_ops.TRAIN_PATHS, "eager": ["union"]}[mode]
    assert list(table["path"]) == 4 * ["dense", "dense", *paths] and set(table["mode"]) == {mode}
    # 1.5 times what it needs, which SparseTraining knows after a first step.
    assert (table["capacity"].notna() == (table["path"] != "dense")).all()
    assert table["capacity"].dropna().between(1.4 * table["active"].min(), 96).all()
    assert (table["relative_rms"] < TOLERANCE["layer"]).all()
    assert set(table["worst"]) <= {"y", "dx", "dw_gate", "dw_up", "dw_down"}
    assert (table["held"] == 500_000 - 4 * table["tokens"]).all()
    assert (table[["p50", "forward"]] == 1.0).all(axis=None)
    assert table["energy"].notna().all() and table["watts"].notna().all()
    parts = pd.read_csv(tmp_path / "training_kernels.csv")
    assert list(parts["provider"]) == list(table["provider"]) and set(parts["ms"]) == {1.5}


@pytest.mark.parametrize("wrong", ["dw_gate", "l1"])
def test_nothing_is_timed_before_all_is_checked_and_rows_are_kept(
    dense_kernels, tmp_path, monkeypatch, wrong
):
    def train(path, capacity, x, w_gate, *tensors, **options):
        busy = float(counts_of(x.detach(), w_gate.detach()).double().mean()) > 15
        if wrong == "dw_gate" and busy and w_gate.requires_grad:
            w_gate = w_gate.view_as(w_gate)
            w_gate.register_hook(lambda gradient: 0.98 * gradient)
        result = measure.train(path, capacity, x, w_gate, *tensors, **options)
        return result._replace(l1=(1.02 if wrong == "l1" and busy else 1) * result.l1)

    monkeypatch.setattr(training_ops, "sparse_train", as_sparse_train(train))
    message = f"^{wrong} of triton union at .* 70 tokens  skewed .* is wrong"
    with pytest.raises(ArithmeticError, match=message):
        ffn_steps([70], [9, 20, 30], **SIZES, out=tmp_path)
    assert len(pd.read_csv(tmp_path / "training.csv")) == 4  # of the first level
    dense_kernels.timed.clear()
    monkeypatch.setattr(step, "CROSSOVER_SHARES", [0.3])
    with pytest.raises(ArithmeticError, match=message):
        crossover(K, N, tokens=70)
    assert not dense_kernels.timed


# --- the crossover ----------------------------------------------------------------------------


@pytest.fixture
def timed(dense_kernels, monkeypatch):
    """Sparse steps take the ms of a formula; the list has the activity of each.

    `timed.pays`: the active neurons at which both providers take as long.
    """
    log = type("Log", (list,), {"pays": 17.0})()

    def train(path, capacity, x, w_gate, w_up, *tensors, **options):
        first = (w_up if w_gate is None else w_gate).detach()
        log.append(float(counts_of(x.detach(), first).double().mean()))
        dense_kernels.spend((log[-1] / log.pays) ** 0.5)
        return measure.train(path, capacity, x, w_gate, w_up, *tensors, **options)

    monkeypatch.setattr(training_ops, "sparse_train", as_sparse_train(train))
    monkeypatch.setattr(step, "CROSSOVER_SHARES", (0.02, 0.1, 0.3, 0.6))  # of 96 neurons
    return log


@pytest.mark.parametrize("gated", [True, False])
def test_at_the_crossover_both_take_as_long(timed, gated):
    result = crossover(K, N, tokens=70, gated=gated)
    assert result == pytest.approx(17.0, rel=5e-3)  # p50 has four digits
    active = [level for level, _ in itertools.groupby(timed)]
    # No level after the first slower one.
    assert active == sorted(active) and len(active) == 3 and active[1] < 17 < active[2]


def test_steps_that_are_slower_or_faster_at_every_level(timed):
    timed.pays = 0.5
    assert crossover(K, N, tokens=70) == 0 and len(set(timed)) == 1
    timed.pays = 1e3
    assert crossover(K, N, tokens=70) == pytest.approx(timed[-1], abs=0.01)
