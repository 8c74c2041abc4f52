"""Inference of one layer: rows, checks before times, the choice of "auto", and calibrations."""

import itertools
import re

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories import SEED
from tests.factories.measure import SIZES, FakeGpu, K, N, case, counts_of, fresh_mask, relative
from tests.factories.measure import run as by_reference
from twell import cli
from twell.measure import calibration as calibrations
from twell.measure import case as cases
from twell.measure import grid, layer, weight_only
from twell.measure.calibration import BEHIND, Layers, calibrate
from twell.measure.check import TOLERANCE
from twell.measure.costs import kernel_formulas, roofline, work
from twell.measure.layer import ffn
from twell.measure.rows import COLUMNS
from twell.measure.step import ffn_steps
from twell.sparse.calibration import DEPENDS_ON, Calibration, Point
from twell.sparse.layer import SparseFFN
from twell.sparse.observe import Result

ops = pytest.importorskip("twell.kernels.ops")
INT8, INT4 = (f"dense int{bits} weights torch.compile" for bits in (8, 4))
PROVIDERS = ["dense eager", "dense torch.compile", "dense"]
PROVIDERS += ["triton rowwise", "triton union", "triton decode", "auto"]


def test_rows_say_what_was_measured(dense_kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "GRAPH_TOKENS", 20)
    monkeypatch.setattr(layer, "WEIGHT_SETS", 3)
    dense_kernels.shown = lambda call: call() is not None and [("nvjet", 0.5)] * 3 + [("other", 1)]
    rows = ffn([5, 24], [9], ["even", "skewed"], **SIZES, kernels=True, energy=True, out=tmp_path)
    assert all(list(row) == COLUMNS["ffn"] for row in rows)
    table = pd.read_csv(tmp_path / "ffn.csv")
    few = [*PROVIDERS[:-1], INT8, "auto"]  # int4 has groups of 128 weights
    assert list(table["provider"]) == 2 * few + 2 * PROVIDERS and len(rows) == len(table)
    assert table["date"].nunique() == 1  # one command, one date
    few = table["tokens"] == 5
    assert (table["mode"] == few.map({True: "graph", False: "stream"})).all()
    assert (table["weight_sets"] == few.map({True: 3, False: 1})).all()
    assert (table["p50"] == few.map({True: 0.3333, False: 1.0})).all()
    assert (table["pattern"].value_counts() == len(rows) // 2).all()
    dense = table.query("provider == 'dense' and tokens == 24").iloc[0]
    assert (dense["flops"], dense["bytes"]) == (6 * 24 * N * K, 2 * (3 * N * K + 2 * 24 * K))
    assert table["energy"].notna().all() and table["gated"].all()
    assert set(table["dtype"]) == {"bfloat16"}
    assert (table["relative_rms"] < TOLERANCE["layer"]).all()
    parts = pd.read_csv(tmp_path / "kernels.csv")
    assert set(parts["provider"]) == {"dense", "triton rowwise", "triton union", "triton decode"}
    assert parts.query("kernel == 'other'")["flops"].isna().all()
    query = "kernel == 'cublas matmul' and provider == 'dense' and tokens == 5"
    product = parts.query(query).iloc[0]
    assert (product["flops"], product["launches"], product["ms"]) == (6 * 5 * N * K, 3.0, 1.5)
    assert pd.read_csv(tmp_path / "ceilings.csv")["value"].tolist() == [4000.0, 800.0]


@pytest.mark.parametrize("kind, error", [(weight_only.Int8, 0.01), (weight_only.Int4, 0.13)])
@pytest.mark.parametrize("gated", [True, False])
def test_integer_weights_are_those_of_the_layer(gpu, kind, error, gated):
    g = torch.Generator().manual_seed(SEED)
    inputs = [torch.randn(*shape, generator=g).bfloat16() for shape in ((5, 128), (256, 128))]
    inputs += [torch.randn(256, 128, generator=g).bfloat16() for _ in range(2)]
    x, gate, up, down = inputs
    several = cases.Case.of("even", (x, gate, up, down.t()), gated)
    assert set(weight_only.providers(several).values()) == {weight_only.Int8, weight_only.Int4}
    calls, (exact, allowed) = weight_only.calls(several, kind)
    assert exact.check(calls[0](), "integers", allowed) > 1e-4
    for weight in (gate, down):
        wide = kind.of(weight).wide()
        assert error / 5 < relative(wide, weight) < error
        assert wide.shape == weight.shape


@pytest.mark.slow
def test_the_kernels_themselves_are_measured(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "stream_times", lambda *_: np.ones(3))  # they were called once
    rows = ffn([3], [4], hidden_size=16, intermediate_size=32, mode="stream")
    assert [row["provider"] for row in rows] == PROVIDERS
    assert all(row["energy"] is None and row["relative_rms"] < 0.01 for row in rows)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_calls_back_to_back(mode, dense_kernels, monkeypatch):
    monkeypatch.setattr(layer, "WEIGHT_SETS", 3)
    compiled = []
    compile_ = lambda function, **_: compiled.append(function) or function  # noqa: E731
    monkeypatch.setattr(torch, "compile", compile_)
    rows = ffn([24], [9], **SIZES, mode=mode)
    assert [row["provider"] for row in rows] == PROVIDERS
    assert {(row["mode"], row["weight_sets"], row["p50"]) for row in rows} == {(mode, 3, 0.3333)}
    # Dense as a function, and its layers; four paths of the kernels; the layers of "auto".
    assert len(compiled) == 1 + 3 + (4 + 3 if mode == "compiled" else 0)
    with pytest.raises(ValueError, match="'fast' is unknown; use one of stream, graph, eager, com"):
        ffn([24], **SIZES, mode="fast")


@pytest.mark.slow
def test_other_activations_and_biases_join_the_pattern(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "stream_times", lambda *_: np.ones(3))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for activation, gated, bias in (("relu2", False, True), ("drelu", True, False)):
        options = {"activation": activation, "gated": gated, "bias": bias, "mode": "stream"}
        rows = ffn([70], [9], **SIZES, **options)
        assert [row["provider"] for row in rows] == PROVIDERS
        assert {row["pattern"] for row in rows} == {f"skewed {activation}{' biases' * bias}"}
        assert all(1e-4 < row["relative_rms"] < 1.5 * TOLERANCE["layer"] for row in rows)
    with pytest.raises(ValueError, match="'drelu' needs a gate"):
        ffn([70], activation="drelu", gated=False)


def test_merged_weights_are_halves_of_one(dense_kernels, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    products, linear = [], torch.nn.functional.linear

    def count(x, weight, *bias):
        products.append(tuple(weight.shape))
        return linear(x, weight, *bias)

    monkeypatch.setattr(torch.nn.functional, "linear", count)
    rows = ffn([24], [9], **SIZES, merged=True)
    assert [row["provider"] for row in rows] == PROVIDERS
    assert {row["pattern"] for row in rows} == {"skewed merged"}
    merged = 2 * SIZES["intermediate_size"], SIZES["hidden_size"]
    assert merged in products  # the dense layer's one product of gate and up
    with pytest.raises(ValueError, match="merged: of gated layers without biases"):
        ffn([24], gated=False, merged=True)
    with pytest.raises(ValueError, match="merged: its baseline is timed in the modes stream and g"):
        ffn([24], mode="eager", merged=True)


@pytest.mark.slow
def test_layers_in_fp8_are_measured_beside_the_others(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "stream_times", lambda *_: np.ones(3))
    monkeypatch.setattr(layer.float8, "why_not", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    rows = ffn([70], [9], **SIZES, mode="stream")
    dense = ["dense FP8 torch.compile", "dense FP8 by tensors torch.compile"]
    paths = [f"triton {path} FP8" for path in ("dense", "rowwise", "union", "decode")]
    assert [row["provider"] for row in rows] == PROVIDERS[:-1] + dense + paths + [
        "auto",
        "auto FP8",
    ]
    errors = {row["provider"]: row["relative_rms"] for row in rows}
    assert all(errors[path] < TOLERANCE["layer"] for path in paths)
    assert 0.005 < errors[dense[0]] < 0.05  # h is quantised too
    assert all(row["roofline"] is None for row in rows if "FP8" in row["provider"])
    assert {row["path"] for row in rows if row["provider"] == "auto FP8"} <= set(DEPENDS_ON)


def test_recorded_rows_have_the_activity_of_their_masks(dense_kernels):
    masks = {"a": fresh_mask(20, 40), "b": fresh_mask(10, 30)}
    options = {"patterns": ["recorded"], "gated": False, "masks": masks}
    for measured, hidden_size in ((ffn, 16), (ffn_steps, 32)):
        rows = measured([25], hidden_size=hidden_size, **options)
        assert {row["pattern"] for row in rows} == {"recorded a", "recorded b"}
        for name, mask in masks.items():
            length = min(len(mask), hidden_size)  # as many tokens as the hidden size allows
            mask = mask[np.arange(25) % length]
            own = [row for row in rows if row["pattern"] == f"recorded {name}"]
            assert not any(row["gated"] for row in own)
            assert {row["intermediate_size"] for row in own} == {mask.shape[1]}
            activity = round(mask.sum() / 25, 2), mask.sum(1).max(), mask.any(0).sum()
            assert {(row["active"], row["active_max"], row["union"]) for row in own} == {activity}


def test_paths_that_would_take_too_long_are_left_out(dense_kernels, monkeypatch):
    monkeypatch.setattr(cases, "DECODE_TOKENS", 20)
    monkeypatch.setattr(cases, "ROWWISE_ENTRIES", 70 * 4)
    rows = ffn([20, 70], [9], ["even"], **SIZES, mode="stream")
    few, many = (
        {row["path"] for row in rows if row["tokens"] == tokens and row["provider"] != "auto"}
        for tokens in (20, 70)
    )
    assert few == {"dense", "rowwise", "union", "decode"} and many == {"dense", "union"}


@pytest.mark.parametrize("mode", ["stream", "graph"])
def test_nothing_is_timed_before_all_is_checked_and_rows_are_kept(
    dense_kernels, tmp_path, monkeypatch, mode
):
    def wrong(path, x, w_gate, *weights, **_):
        bad = path == "decode" and float(counts_of(x, w_gate).double().mean()) > 6
        # In a graph each output is checked: one of them is wrong.
        if mode == "graph":
            bad &= sum(w_gate[0].tolist()) == pytest.approx(last)
        return by_reference(path, x, w_gate, *weights) * (2 if bad else 1)

    *_, (w_gate, *_) = Layers(FakeGpu(), K, N, True).case(70, 20.0).sets
    last = sum(w_gate[0].tolist())
    monkeypatch.setattr(ops, "run", wrong)
    message = "^triton decode at .* 70 tokens  skewed .* is wrong"
    with pytest.raises(ArithmeticError, match=message):
        ffn([70], [4, 20], **SIZES, mode=mode, out=tmp_path)
    table = pd.read_csv(tmp_path / "ffn.csv")
    assert list(table["provider"]) == PROVIDERS and table["active"].nunique() == 1
    times_of_a_provider = {"stream": 1, "graph": 2}[mode]
    assert len(dense_kernels.timed) == 2 * times_of_a_provider * len(PROVIDERS)


@pytest.mark.parametrize("active, path", [(1.0, "union"), (90.0, "dense")])
def test_auto_knows_the_activity_and_its_path_is_recorded(dense_kernels, active, path):
    points = tuple(Point(70, 1, u, {"dense": 1.0, "union": u / 50}) for u in (1, 96))
    calibration = Calibration("x", K, N, True, "bfloat16", "", "", points)
    rows = ffn([70], [active], **SIZES, mode="stream", calibration=calibration)
    assert [row["path"] for row in rows if row["provider"] == "auto"] == [path]
    for auto in case(70, active=active).auto_layers(calibration):  # before any input
        assert auto.chooser.path(70) == path


# --- calibrations -----------------------------------------------------------------------------


@pytest.fixture
def timed(dense_kernels, monkeypatch):
    """Paths take the ms of a formula; the dict has them by (tokens, entries, path)."""
    log = {}

    def run(path, x, w_gate, *weights, **_):
        active = torch.relu(x.double() @ w_gate.double().t()) != 0
        m, union = (
            len(x),
            float(torch.stack([b.any(0).sum() for b in active.split(64)]).float().mean()),
        )
        ms = {
            "dense": 0.02 + 0.02 * m,
            "rowwise": float(active.sum()) / 200 or 0.001,
            "union": 0.02 + union * m / 4000,
            "decode": 0.01 + union * m / 2000,
        }[path]
        dense_kernels.spend(ms)
        log[m, int(active.sum()), path] = ms
        return by_reference(path, x, w_gate, *weights)

    def compiled(function, **_):
        if isinstance(function, torch.nn.Module):  # a layer, which takes its own path
            return function
        return lambda *tensors: run("dense", *tensors)

    def dense(layer, rows, *_):
        return Result(run("dense", *layer._tensors(rows)))

    monkeypatch.setattr(ops, "run", run)
    monkeypatch.setattr(SparseFFN, "_dense", dense)
    monkeypatch.setattr(SparseFFN, "_is_quick", lambda *_: False)  # which calls no `_dense`
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(calibrations, "FLOOR_TOKENS", (1, 8, 32))
    monkeypatch.setattr(calibrations, "CHECKED_TOKENS", (4, 20))
    monkeypatch.setattr(calibrations, "CHECKED_CALLS", (4,))
    monkeypatch.setattr(calibrations, "GRAPH_TOKENS", 8)
    return log


def test_a_calibration_holds_its_times_and_is_checked(timed, tmp_path, capsys):
    result = calibrate(32, 64, out=tmp_path / "c.json", tokens=(1, 8, 16))
    again = Calibration.load(tmp_path / "c.json")
    shape = again.hidden_size, again.intermediate_size, again.gated
    assert again.times == result.times and shape == (32, 64, True)
    points = {(p.tokens, round(p.tokens * p.active)): p.ms for p in result.times}
    for (m, entries), times in points.items():
        for path, ms in times.items():
            assert ms == pytest.approx(timed[m, entries, path], rel=1e-3)
    # Least times of calls: of layers with one active neuron a token; 32 tokens are too many.
    assert again.floors == result.floors
    cases = [(floor.situation, floor.tokens) for floor in result.floors]
    assert cases == [(s, m) for m in (1, 8) for s in ("eager", "compiled")]
    for floor in result.floors:
        entries = min(entries for m, entries, _ in timed if m == floor.tokens and entries)
        least = {path: timed[floor.tokens, entries, path] for path in DEPENDS_ON}
        assert floor.ms == pytest.approx(least, rel=1e-3)
    # The busiest layer of each number of tokens is timed densely; a path far behind is dropped.
    for m in (1, 8, 16):
        curve = [points[key] for key in sorted(points) if key[0] == m]
        assert max(key for key in points if key[0] == m) == (m, m * 64) and "dense" in curve[-1]
        for path in set(DEPENDS_ON) - {"dense"}:
            ratios = [ms[path] / ms["dense"] for ms in curve if path in ms]
            assert all(ratio <= BEHIND for ratio in ratios[:-1])
            assert len(ratios) == len(curve) or ratios[-1] > BEHIND
            assert path != "rowwise" or m == 1 or len(ratios) < len(curve)
    output = capsys.readouterr().out
    ratios = re.findall(r"alike .* ([0-9.]+) of the time of torch.compile", output)
    assert len(ratios) == 4  # two numbers of tokens; 20 active and all
    worst = max(map(float, ratios))
    summary = f"dense torch.compile: {worst:.2f} of its time with the activity known"
    assert worst <= 1 and summary in output and "auto took union" in output
    calls = re.findall(r"(eager|compiled) +auto took \w+ +([0-9.]+) of the time", output)
    assert [situation for situation, _ in calls] == ["eager", "compiled"]
    for situation, ratio in calls:
        assert f"{ratio} in {situation}" in output.splitlines()[-1]


def test_floors_are_of_dense_calls_as_auto_makes_them(timed, dense_kernels, monkeypatch):
    made = set()

    def milliseconds(_, case, name, calls, exact, situation, quantile):
        layer = calls[0].func
        made.add((situation, layer.path, layer.backend))
        return 1.0

    monkeypatch.setattr(Layers, "milliseconds", milliseconds)
    monkeypatch.setattr(calibrations, "WAITING", 4)
    layers = Layers(dense_kernels, 32, 64, True)
    for num_tokens, eager in ((4, "dense"), (8, "triton")):
        made.clear()
        layers.floors(num_tokens)
        dense = {(situation, backend) for situation, path, backend in made if path == "dense"}
        assert dense == {("eager", eager), ("compiled", "dense")}
        assert {backend for _, path, backend in made if path != "dense"} == {"triton"}


def test_the_worst_of_each_kind_is_reported(timed, dense_kernels, monkeypatch):
    # Planned for 29 active neurons layers go by rows: m * 64 / 200 ms with all 64 neurons active.
    points = tuple(
        Point(m, active, active, {"dense": 0.02 + 0.02 * m, "rowwise": ms})
        for m in (4, 20)
        for active, ms in {1: 0.001, 40: 0.001, 64: 10.0}.items()
    )
    calibration = Calibration("x", 32, 64, True, "bfloat16", "", "", points)
    monkeypatch.setattr(calibrations, "CHECKED_ACTIVE", (5,))
    layers = Layers(dense_kernels, 32, 64, True)
    worst = layers.check_choices(calibration)
    expected = max(m * 64 / 200 / (0.02 + 0.02 * m) for m in (4, 20))
    assert worst["busier"] == pytest.approx(expected, rel=1e-3)
    few = {key: ms for key, ms in timed.items() if key[2] == "rowwise" and key[1] < 20 * key[0]}
    alike = [ms / (0.02 + 0.02 * m) for (m, *_), ms in few.items()]
    assert len(alike) == 2 and worst["alike"] == pytest.approx(max(1.0, *alike), rel=1e-3)
    assert 1 < worst["even"] < expected


# --- operations and bytes ---------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
def test_operations_and_bytes_are_those_of_a_count(gated):
    r = np.random.default_rng(SEED)
    m, k, n = (int(size) for size in r.integers(1, 12, 3))
    mask = r.random((m, n)) < 0.3
    first, *others = ("gate", "up", "down") if gated else ("up", "down")
    for path in ("dense", "rowwise", "union", "decode"):
        flops, backward_flops, forward, backward = 0, 0, set(), set()
        for token, neuron in itertools.product(range(m), range(n)):
            flops += 2 * k
            forward.add((first, neuron))
            if path == "dense" or mask[token, neuron]:
                flops += 2 * k * len(others)
                # dh, each weight's gradient, and dx from all but down
                backward_flops += 2 * k * (1 + len(others) + 1 + len(others))
                forward |= {(other, neuron) for other in others}
                backward |= {(weight, neuron) for weight in (first, *others)}
        num_bytes = 2 * k * (len(forward) + 2 * m)
        shape = m, k, n, gated, int(mask.sum()), int(mask.any(0).sum())
        assert work(path, *shape) == (flops, num_bytes)
        gradients = (1 + len(others)) * n
        num_bytes += 2 * k * (len(backward) + gradients + 3 * m)
        assert work(path, *shape, backward=True) == (flops + backward_flops, num_bytes)


def test_every_kernel_has_a_formula_or_is_known_to_have_none():
    from twell.kernels import decode, dense, few, gate, gate_hopper, rowwise, union

    # One only counts activity, the other belongs to training.
    none = {("rowwise", "count_activity_kernel"), ("union", "union_product_kernel")}
    given = case(5)
    formulas = set(kernel_formulas(given.columns, given.exact))
    modules = {"dense": [dense], "rowwise": [rowwise], "union": [union], "decode": [decode, few]}
    for path, files in modules.items():
        names = {name for file in files for name in vars(file) if name.endswith("_kernel")}
        own = {(path, name) for name in names}
        gates = {**vars(gate), **vars(gate_hopper)}
        shared = {(path, name) for name in gates if name.endswith("_kernel")}
        library = {("dense", "cublas matmul"), ("dense", "elementwise")}
        assert own <= formulas | none, "a kernel is new: say what it needs"
        named = {key for key in formulas | none if key[0] == path}
        assert named <= own | shared | library, "a kernel is gone"


@pytest.mark.parametrize("gated", [True, False])
def test_the_kernels_of_a_path_add_up_to_its_operations(gated):
    """By unions and in decoding also to those on inactive entries, which `work` does not count."""
    given = case(int(np.random.default_rng(SEED).integers(1, 200)), gated, active=7)
    formulas = kernel_formulas(given.columns, given.exact)
    first = given.sets[0][0 if gated else 1]
    active = torch.relu(given.x.double() @ first.double().t()) != 0
    m, entries, touched = len(active), int(active.sum()), int(active.any(0).sum())

    def extra(path, *kernels):
        needed, _ = work(path, m, K, N, gated, entries, touched)
        return sum(formulas[path, kernel][0] for kernel in kernels) - needed

    assert extra("dense", "cublas matmul") == 0
    assert extra("rowwise", "gate_bits_kernel", "token_lists_kernel", "rowwise_kernel") == 0
    in_unions = sum(min(m, 64) * int(block.any(0).sum()) for block in active.split(64))
    products = 2 * K * (2 if gated else 1)
    kernels = "gate_bits_kernel", "union_lists_kernel", "union_up_kernel", "union_down_kernel"
    assert extra("union", *kernels) == products * (in_unions - entries)
    kernels = "few_gate_kernel", "few_up_kernel", "few_down_kernel"
    assert extra("decode", *kernels) == products * (in_unions - entries)
    decoding = extra("decode", "decode_up_kernel", "decode_down_kernel")
    assert decoding == products * (m * touched - entries)


def test_the_roofline_is_the_slower_of_both_ceilings():
    peaks = [{"metric": "copy bandwidth", "value": 4000.0}, {"metric": "matmul", "value": 800.0}]
    assert roofline(8e12, 4e9, 20.0, peaks) == 0.5  # 10 ms of operations, 1 ms of bytes
    assert roofline(8e10, 4e9, 4.0, peaks) == 0.25  # 0.1 ms and 1 ms


def test_a_small_grid_is_measured_by_commands(gpu, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(grid.subprocess, "run", lambda words, check: commands.append(words))
    assert grid.small_grid(tmp_path) == tmp_path
    layers, training = (cli.parse(words[3:])[1] for words in commands)
    assert layers["kernels"] and training["backward"] and not layers["backward"]
    assert layers["out"] == training["out"] == tmp_path
