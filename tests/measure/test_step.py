"""Training of one layer: rows, memory, capacity, and the activity where sparse stops to pay."""

import itertools
import types

import numpy as np
import pandas as pd
import pytest
import torch

from tests.measure import factories
from tests.measure.factories import DEVICE, K, N, case, counts_of, fresh_mask, layer_step
from tests.measure.test_layer import MISTAKES
from twell import analysis
from twell.measure import clock, layer, step
from twell.measure.check import TOLERANCE, Exact
from twell.measure.rows import COLUMNS
from twell.measure.step import Step, crossing, crossover, ffn_steps

pytest.importorskip("triton")
OPS = step.training_ops()
PATHS = list(OPS.TRAIN_PATHS)
SIZES = {"hidden_size": K, "intermediate_size": N}


# --- a step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_the_sparse_step_is_correct(path, gated, seed):
    parts = layer_step(70, gated, seed, active=4, device=DEVICE)  # few entries, generous limit
    sparse = Step.of(step.sparse(path, N), *parts)
    assert Exact.of(*parts).check_step(sparse.tensors(), path)[1] > 0


def test_the_dense_baseline_holds_no_more_than_it_needs(seed):
    """x and three matrices of all neurons: 592 MiB for 16,384 tokens of 2048 x 5632."""
    x, weights, dy, dl1 = layer_step(70, True, seed)
    dense, saved = Step.of(step.dense, x, weights, dy, dl1), {}
    pack = lambda t: saved.setdefault(t.data_ptr(), t)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        dense.forward()
    given = {t.data_ptr() for t in weights}
    own = [t for pointer, t in saved.items() if pointer not in given]
    assert sum(t.nbytes for t in own) == 2 * 70 * (K + 3 * N)


def test_each_step_has_gradients_of_its_own(seed):
    x, weights, dy, dl1 = layer_step(70, True, seed)
    dense = Step.of(step.dense, x, weights, dy, dl1)
    first, second = dense.tensors(), dense.tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not first["dx"].eq(0).all()
    assert all(leaf.grad is None for leaf in dense.leaves.values())
    assert all(not tensor.requires_grad for tensor in (x, *weights))
    dense()
    dense()
    assert torch.equal(dense.leaves["w_up"].grad, first["dw_up"])


def test_held_bytes_are_those_between_the_passes(monkeypatch, seed):
    x, weights, dy, dl1 = layer_step(70, True, seed)
    log = []

    def dense(*tensors):
        log.append("forward")
        return step.dense(*tensors)

    def allocated():
        log.append("now")
        return 10**7 if "forward" in log else 10**6

    timed = Step.of(dense, x, weights, dy, dl1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: log.append("peak") or 10**8)
    memory = timed.memory()
    assert log == "synchronize now reset forward now synchronize peak".split()
    outputs = 2 * 70 * K + 4 * 70
    assert memory == {"held": 9 * 10**6 - outputs + 2 * 70 * K, "peak": 10**8 - 10**6}
    assert all(leaf.grad is None for leaf in timed.leaves.values())


def test_the_capacity_is_that_of_training(monkeypatch):
    given, asked = case(64, active=30), []

    def train(needs):
        def run(path, capacity, *_):
            asked.append(capacity)
            return types.SimpleNamespace(needed=torch.tensor(needs))

        return run

    given.columns["active"] = 30.0
    for needs, expected, tries in ((30, 48, 1), (48, 48, 1), (50, 96, 2), (96, 96, 2)):
        asked.clear()
        monkeypatch.setattr(OPS, "train", train(needs))
        assert step.training_capacity("union", given) == expected and len(asked) == tries
    monkeypatch.setattr(OPS, "train", train(97))
    message = "triton union at .* needs 97 entries a token, of 96 neurons"
    with pytest.raises(ArithmeticError, match=message):
        step.training_capacity("union", given)


# --- rows -------------------------------------------------------------------------------------


def test_rows_say_what_was_measured(fake_kernels, tmp_path, monkeypatch):
    def kernel_times(calls):
        calls[0]()
        return {"cublas matmul": (3.0, 0.5)}

    def energy(run, calls, ms, meter):
        return {"energy": 500.0 * calls, "watts": 9.0}

    monkeypatch.setattr(clock, "kernel_times", kernel_times)
    monkeypatch.setattr(clock, "energy_meter", lambda: lambda: 0)
    monkeypatch.setattr(clock, "energy", energy)
    options = SIZES | {"kernels": True, "energy": True, "out": tmp_path}
    rows = ffn_steps([70, 130], [20], ["even", "skewed"], **options)
    assert all(list(row) == COLUMNS["training"] for row in rows)
    table = pd.read_csv(tmp_path / "training.csv")
    providers = ["dense eager", "dense torch.compile", *(f"triton {path}" for path in PATHS)]
    assert list(table["provider"]) == 4 * providers and len(table) == len(rows)
    assert list(table["path"]) == 4 * ["dense", "dense", *PATHS]
    sparse = table["path"] != "dense"
    assert (table["capacity"].notna() == sparse).all() and (table["capacity"][sparse] >= 32).all()
    assert (table["relative_rms"] < TOLERANCE["layer"]).all()
    assert set(table["worst"]) <= {"y", "dx", "dw_gate", "dw_up", "dw_down"}
    dense = table.query("provider == 'dense eager' and tokens == 130").iloc[0]
    assert dense["flops"] == 18 * 130 * N * K
    assert (table["held"] == 500_000 - 4 * table["tokens"]).all()
    assert (table["peak"] == 1_000_000).all() and table["date"].nunique() == 1
    columns = ["p50", "forward", "energy", "watts"]
    assert (table[columns] == [1.0, 1.0, 500.0, 9.0]).all(axis=None)
    parts = pd.read_csv(tmp_path / "training_kernels.csv")
    assert list(parts["provider"]) == list(table["provider"]) and set(parts["ms"]) == {0.5}
    assert pd.read_csv(tmp_path / "ceilings.csv")["value"].tolist() == [4000.0, 800.0]


def test_recorded_activity_of_a_layer_without_gate(fake_kernels, seed):
    mask = fresh_mask(np.random.default_rng(seed), 20, 40)
    options = {"patterns": ["recorded"], "hidden_size": 32, "gated": False}
    rows = ffn_steps([50], **options, masks={"a": mask})
    assert {row["pattern"] for row in rows} == {"recorded a"}
    assert not any(row["gated"] for row in rows)
    assert {row["active"] for row in rows} == {round(mask[np.arange(50) % 20].sum() / 50, 2)}


def test_rows_are_kept_when_a_later_case_fails(fake_kernels, tmp_path, monkeypatch):
    calls = []

    def train(path, capacity, x, w_gate, w_up, w_down):
        calls.append(capacity)
        w_gate = w_gate.view_as(w_gate)
        if len(calls) > 3 and w_gate.requires_grad:  # in the second case
            w_gate.register_hook(lambda gradient: 0.98 * gradient)
        return factories.train(path, capacity, x, w_gate, w_up, w_down)

    monkeypatch.setattr(OPS, "TRAIN_PATHS", {"union": None})
    monkeypatch.setattr(OPS, "train", train)
    monkeypatch.setattr(clock, "stream_times", lambda *_: np.ones(3))  # no further calls
    message = "^dw_gate of triton union at .* 70 tokens  skewed .* is wrong"
    with pytest.raises(ArithmeticError, match=message):
        ffn_steps([70], [9, 20, 30], **SIZES, out=tmp_path)
    table = pd.read_csv(tmp_path / "training.csv")
    assert list(table["provider"]) == ["dense eager", "dense torch.compile", "triton union"]


def wrong_l1(*arguments):
    result = factories.train(*arguments)
    return result._replace(l1=1.02 * result.l1)


@pytest.mark.parametrize("measured", [lambda: ffn_steps([70], [9], **SIZES), lambda: at_70()])
def test_nothing_is_timed_before_all_is_checked(fake_kernels, monkeypatch, measured):
    monkeypatch.setattr(clock, "stream_times", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(OPS, "train", wrong_l1)
    message = "^l1 of triton union at .* 70 tokens  skewed .* is wrong"
    with pytest.raises(ArithmeticError, match=message):
        measured()


def test_energy_without_a_counter_is_left_empty(fake_kernels, monkeypatch):
    monkeypatch.setattr(clock, "optional_meter", lambda wanted: None)
    rows = ffn_steps([70], [9], **SIZES, energy=True)
    assert {row["energy"] for row in rows} == {None}


@pytest.mark.parametrize("options, message", MISTAKES)
def test_mistakes_are_found_before_anything_is_measured(
    fake_kernels, monkeypatch, options, message
):
    monkeypatch.setattr(layer, "ceilings", lambda: pytest.fail("measured something"))
    with pytest.raises(ValueError, match=message):
        ffn_steps(**({"tokens": [4]} | options))


def test_unfit_files_are_found_before_anything_is_measured(fake_kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "ceilings", lambda: pytest.fail("measured something"))
    (tmp_path / "training.csv").write_text("tokens,active,device\n1,2,x\n")
    with pytest.raises(ValueError, match="training.csv has the columns"):
        ffn_steps([4], out=tmp_path)


# --- the crossover ----------------------------------------------------------------------------

LEVELS = 0.02, 0.1, 0.3, 0.6  # of 96 neurons


def at_70(**options):
    return crossover(K, N, tokens=70, **options)


@pytest.fixture
def timed(fake_kernels, monkeypatch):
    """Times of steps by a formula of their activity; the list has (tokens, active, sparse).

    `timed.pays`: the active neurons at which both providers take as long.
    """

    class Log(list):
        pays = 17.0

    log = Log()

    def times(call, budget):
        assert budget == clock.STEP_TURN
        leaves = call.leaves
        first = leaves["w_up"] if leaves["w_gate"] is None else leaves["w_gate"]
        active = float(counts_of(leaves["x"], first).double().mean())
        sparse = call.path != "dense"
        log.append((len(leaves["x"]), active, sparse))
        return np.full(3, (active / log.pays) ** 0.5 if sparse else 1.0)

    monkeypatch.setattr(clock, "stream_times", times)
    monkeypatch.setattr(clock, "LAYER_ROUNDS", 1)
    monkeypatch.setattr(step, "CROSSOVER_SHARES", LEVELS)
    return log


@pytest.mark.parametrize("gated", [True, False])
def test_at_the_crossover_both_take_as_long(timed, gated, capsys):
    result = at_70(gated=gated)
    assert result == pytest.approx(17.0, rel=5e-3)  # p50 has four digits
    assert {tokens for tokens, *_ in timed} == {70}
    # No level after the first slower one.
    assert [sparse for *_, sparse in timed] == [False, True] * 3
    active = [active for _, active, sparse in timed if sparse]
    assert active == sorted(active) and active[1] < 17 < active[2]
    output = capsys.readouterr().out
    for level in active:
        assert f" {level:.2f}".rstrip("0").rstrip(".") in output
        assert f"{(17 / level) ** 0.5:.2f} times as fast" in output
    assert output.endswith(
        f"training is faster sparsely up to {result:g} active neurons per token\n"
    )


def test_steps_that_are_slower_or_faster_at_every_level(timed, monkeypatch):
    monkeypatch.setattr(step, "CROSSOVER_SHARES", LEVELS[:2])
    timed.pays = 0.5
    assert at_70() == 0 and len(timed) == 2
    timed.clear()
    timed.pays = 1e3
    result = at_70()
    assert len(timed) == 4 and result == pytest.approx(timed[-1][1], abs=0.01)


def test_the_crossover_is_that_of_the_tables(seed):
    r = np.random.default_rng(seed)
    for _ in range(50):
        active, gains = np.cumsum(r.uniform(1, 90, 5)), r.uniform(0.7, 1.6, 5)
        levels = [(float(a), float(g)) for a, g in zip(active, gains, strict=True)]
        faster = list(itertools.takewhile(lambda level: level[1] >= 1, levels))
        levels = levels[: len(faster) + 1]  # where a measurement ends
        rows = [
            {"provider": "triton union", "tokens": 64, "active": a, "speedup": g} for a, g in levels
        ]
        expected = analysis.training_crossover(pd.DataFrame(rows))
        assert crossing(levels) == pytest.approx(expected, rel=1e-3)


def test_a_layer_that_the_kernels_do_not_take_has_no_crossover(timed):
    with pytest.raises(ValueError, match="hidden_size is 33; the kernels need a multiple of 16"):
        crossover(33, N)
    with pytest.raises(ValueError, match="tokens holds 0"):
        crossover(K, N, tokens=0)
