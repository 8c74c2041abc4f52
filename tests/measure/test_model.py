"""Whole models: rows of every file, checks before times, checkpoints, mistakes."""

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories import measure
from tests.factories.measure import TINY, active_entries
from tests.factories.ops import as_sparse_ffn
from twell.measure import imposed, model, sides
from twell.measure.decode import Decoder
from twell.measure.model import FILES, language_model
from twell.measure.providers import FP8, FP8_ALL, Provider, model_providers
from twell.measure.rows import COLUMNS
from twell.models import order
from twell.sparse.float8 import FLOAT8
from twell.sparse.plan import Chooser

ops = pytest.importorskip("twell.sparse.ops")


def names(*arguments, **options):
    return [provider.name for provider in model_providers(*arguments, **options)]


def test_rows_of_passes_decoding_and_layers(dense_kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "GRAPH_TOKENS", 100)
    options = {"shapes": [(2, 64), (1, 64)], "active": [10, 40], "layers": True}
    options |= {"decode": [1, 3], "decode_context": 20, "tuned": True, "energy": True}
    rows, tables = language_model("quick", TINY, **options, out=tmp_path), {}
    for name in FILES:
        tables[name] = pd.read_csv(tmp_path / f"{name}.csv")
        assert all(list(row) == COLUMNS[name] for row in rows[name]), name
        assert len(tables[name]) == len(rows[name]) and tables[name]["date"].nunique() == 1
    table = tables["model"]
    assert list(table["provider"]) == 4 * names(None)
    assert list(table["batch"]) == 2 * (6 * [2] + 6 * [1])
    assert (table["mode"] == np.where(table["tokens"] > 100, "stream", "graph")).all()
    assert (table["tokens_per_ms"] == table["tokens"]).all() and (table["idle"] == 20).all()
    paths = {"triton": ["decode 3", "decode 3"], "dense eager": ["dense 3", "dense 3"]}
    for name, expected in paths.items():
        assert list(table["path"][table["provider"] == name]) == 2 * expected
    assert table["relative_rms"].between(1e-4, 0.05).all()
    assert table["layer_rms"].between(1e-4, 5e-3).all()
    assert (table["profile"] == "paper").all() and (table["hidden_size"] == 32).all()
    weights = 2 * table["parameters"]
    # The weights once, what a pass takes, and the frequencies of rotary embeddings.
    assert (table["peak"] == weights + 500_000 + 64).all()

    table = tables["decode"]
    assert list(table["provider"]) == 4 * names(None, tuned=True)
    assert list(table["batch"]) == 2 * (9 * [1] + 9 * [3])
    assert (table["tokens"] == table["batch"]).all() and (table["context"] == 20).all()
    assert table["layer_rms"].between(1e-4, 1e-2).all()
    assert (table["same"] == 1).all() and (table["steps"] == 3).all()
    assert (table["mode"] == "graph").all()
    speed = 1e3 * table["batch"] / table["p50"]
    assert np.allclose(table["tokens_per_second"], speed, rtol=1e-3)
    assert np.allclose(table["p50"], 1 / 3, rtol=1e-3)  # a generation of three steps takes 1 ms

    layers = tables["model_layers"]
    assert list(layers["layer"]) == 4 * [0, 1, 2] and layers["level"].nunique() == 4
    timed, times = layers["batch"] == 2, layers[["dense", "sparse", "auto"]]
    assert (times[timed] == 1.0).all(axis=None) and times[~timed].isna().all(axis=None)
    for mean, rows in zip((10, 40), (layers[:6], layers[6:]), strict=True):
        assert rows["wanted"][:3].mean() == pytest.approx(mean, abs=0.01)
        assert rows["level"].iloc[0] == pytest.approx(rows["active"][:3].mean(), abs=0.01)
        assert (rows["active"] < rows["p99"]).all() and (rows["p99"] <= rows["active_max"]).all()
        assert (rows["union"] > rows["active"]).all()
        assert np.allclose(rows["active"], rows["wanted"], rtol=0.6)


def test_without_graphs_nothing_is_captured(dense_kernels, monkeypatch):
    monkeypatch.setattr(dense_kernels, "capture", lambda calls: pytest.fail("captured"))
    paths = {"eager": "decode", "compiled": "dense", "graph": "decode"}
    monkeypatch.setattr(Chooser, "path", lambda self, size, situation="eager": paths[situation])
    options = {"shapes": [(1, 64)], "active": [10], "decode": [2], "decode_context": 20}
    rows = language_model("quick", TINY, **options, graphs=False)
    for name in ("model", "decode"):
        table = pd.DataFrame(rows[name]).set_index("provider")
        assert (table["mode"] == "stream").all()
        assert table.loc["auto", "path"] == "decode 3"
        assert table.loc["auto torch.compile", "path"] == "dense 3"


def test_the_activity_of_a_checkpoint_is_its_own(dense_kernels, tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 96}
    given = measure.model(**sizes, num_hidden_layers=2, num_attention_heads=2)
    ids = imposed.draw_tokens(640, 4, 64, seed=3)
    imposed.impose(given, [7.0, 30.0], ids)
    checkpoint = ("tiny", given, ids.flatten().tolist())
    options = {"checkpoint": checkpoint, "shapes": [(4, 64)], "compiled": True}
    rows = language_model(**options, out=tmp_path)
    means = [float(layer.double().sum(1).mean()) for layer in active_entries(given, ids)]
    layers = rows["model_layers"]
    assert [row["active"] for row in layers] == [round(mean, 2) for mean in means]
    about = {(row["model"], row["profile"], row["wanted"]) for row in layers}
    assert about == {("tiny", "checkpoint", None)}
    assert [row["provider"] for row in rows["model"]] == names(True)
    assert {row["energy"] for row in rows["model"]} == {None}
    assert not rows["decode"]
    files = sorted(path.name for path in tmp_path.glob("[!.]*"))
    assert files == ["model.csv", "model_layers.csv"]
    # Random weights get these means.
    beside = language_model(**options, alike=True, decode=[2], decode_context=32)
    layers = [row for row in beside["model_layers"] if row["profile"] == "imposed"]
    assert [row["wanted"] for row in layers] == [round(mean, 2) for mean in means]
    for row in layers:
        assert row["active"] == pytest.approx(row["wanted"], rel=0.2)
    for file in ("model", "decode"):
        profiles = [row["profile"] for row in beside[file]]
        half = len(profiles) // 2
        assert profiles == ["checkpoint"] * half + ["imposed"] * half and half
    # In another order of the tokens: checked against the same results.
    monkeypatch.setattr(order, "MIN_TOKENS", 100)
    rows = language_model(**options, ordered=True)
    assert {row["profile"] for row in rows["model"]} == {model.ORDERED}
    assert all(len(ffn.token_order.order) == 4 * 64 for ffn in given.ffns)


def test_layers_in_fp8_join_passes_and_decoding(dense_kernels, monkeypatch):
    monkeypatch.setattr(model.float8, "why_not", lambda device: None)
    monkeypatch.setattr(model, "GRAPH_TOKENS", 100)
    options = {"shapes": [(2, 64)], "active": [10], "decode": [2], "decode_context": 20}
    rows = language_model("quick", TINY, **options, compiled=True, fp8=True)
    dense, *others = [row["provider"] for row in rows["model"]]
    assert [dense, *others] == names(True, precisions=(None, FP8, FP8_ALL))
    assert [row["provider"] for row in rows["decode"]] == names(True, precisions=(None, FP8))
    assert [Provider.parse(name).name for name in others] == others
    table = pd.DataFrame(rows["model"]).set_index("provider")
    in_fp8 = table.index.str.contains("FP8")
    # Weights in FP8 take less memory; the outputs of layers are those of these weights.
    assert (table.loc[in_fp8, "peak"] < table["peak"].iloc[0]).all()
    assert table.loc[in_fp8, "layer_rms"].between(1e-4, 5e-2).all()
    order = [dense, "dense FP8 torch.compile", "dense FP8 all torch.compile"]
    assert table.loc[order, "relative_rms"].is_monotonic_increasing
    assert table["relative_rms"].max() < 0.1


def test_a_wrong_layer_in_fp8_is_found(dense_kernels, monkeypatch):
    monkeypatch.setattr(model.float8, "why_not", lambda device: None)

    def wrong(path, x, *tensors, **_):
        return measure.run(path, x, *tensors) * (1.05 if tensors[1].dtype == FLOAT8 else 1.0)

    monkeypatch.setattr(ops, "sparse_ffn", as_sparse_ffn(wrong))
    with pytest.raises(ArithmeticError, match="^layer 0 of triton FP8 of quick"):
        language_model("quick", TINY, shapes=[(2, 32)], active=[20], compiled=True, fp8=True)


DECODING = r"decoding 2 x 1 behind 20 tokens .*"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("layer", "^layer 0 of triton of quick  2 x 32 tokens .* is wrong"),
        ("pass", r"^hidden states \(quick .*\) of auto are wrong"),
        ("replay", r"^hidden states \(quick .*\) of dense eager are wrong"),
        ("layer of a step", f"^layer 0 of triton of quick  {DECODING} is wrong"),
        ("step", rf"^logits \(quick  {DECODING}\) of triton are wrong"),
        ("layer alone", "^triton decode at .* layer 0 .* is wrong"),
    ],
)
def test_nothing_is_timed_before_all_is_checked(
    dense_kernels, tmp_path, monkeypatch, wrong, message
):
    forward, step, capture = sides.forward, Decoder.step, dense_kernels.capture

    def bad_forward(model, ids):
        hidden, logits = forward(model, ids)
        return hidden * (1.1 if model.ffns[0].backend == "auto" else 1.0), logits

    def bad_step(decoder, *kind):
        return step(decoder, *kind) * (1.1 if decoder.model.ffns[0].backend == "triton" else 1.0)

    def bad_capture(calls):
        replay, outputs = capture(calls)
        return lambda: replay() or outputs[0][0].mul_(1.1), outputs

    def alone(subject, ids, _):
        return [], activity_of(subject.model, ids)

    activity_of, layers = imposed.activity_of, wrong == "layer alone"
    patches = {
        "pass": (model, "forward", bad_forward),
        "step": (Decoder, "step", bad_step),
        "replay": (dense_kernels, "capture", bad_capture),
    }
    run = (ops, "sparse_ffn", as_sparse_ffn(lambda *tensors, **_: 1.01 * measure.run(*tensors)))
    monkeypatch.setattr(*patches.get(wrong, run))
    if layers:
        monkeypatch.setattr(model, "measure_forward", alone)
    shapes, documents = ([], [2]) if wrong.endswith("step") else ([(2, 32)], [])
    options = {"shapes": shapes, "decode": documents, "decode_context": 20, "active": [20]}
    with pytest.raises(ArithmeticError, match=message):
        language_model("quick", TINY, **options, compiled=False, layers=layers, out=tmp_path)
    assert not dense_kernels.timed and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, options, message",  # of the model, of the arguments
    [
        ({"dtype": torch.float32}, {}, "x is in torch.float32; load it in torch.bfloat16"),
        ({"mlp_bias": True}, {}, "biases"),
        ({"hidden_act": "silu"}, {}, "x has the activation 'silu'"),
        ({"hidden_size": 40}, {}, "hidden_size is 40; the kernels need"),
        ({}, {}, "the text has 1 tokens; 2 x 32 need 64"),
        ({}, {"shapes": [(1, 300)]}, "x is for 256 tokens; 300 were asked for"),
    ],
)
def test_checkpoints_that_are_not_measured(dense_kernels, changes, options, message):
    given = measure.model(num_hidden_layers=1, **changes)
    options = {"checkpoint": ("x", given, [1]), "shapes": [(2, 32)]} | options
    with pytest.raises(ValueError, match=message):
        language_model(**options)
    assert not dense_kernels.timed
