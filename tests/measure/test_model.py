"""Whole models by each provider, decoding, rows of every file, checks before times, mistakes."""

from collections import Counter
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories import SEED, measure
from tests.factories.measure import TINY, active_entries
from tests.factories.ops import as_sparse_ffn
from tests.factories.sparse import relative
from twell.measure import imposed, model, sides
from twell.measure.check import TOLERANCE
from twell.measure.decode import Decoder
from twell.measure.model import FILES, language_model
from twell.measure.providers import DENSE_EAGER, FP8, FP8_ALL, TRITON, model_providers
from twell.measure.rows import COLUMNS
from twell.measure.sides import Subject, exact_hidden_states, forward

ops = pytest.importorskip("twell.sparse.ops")


def test_the_pass_is_the_models_own():
    model, ids = measure.model(), imposed.draw_tokens(640, 3, 40, seed=SEED)
    imposed.impose(model, [20.0] * 4, ids)
    with torch.no_grad():
        hidden, logits = forward(model, ids)
        own = model(input_ids=ids, use_cache=False, logits_to_keep=1)
        assert torch.equal(hidden, model.model(input_ids=ids, use_cache=False).last_hidden_state)
        assert torch.equal(logits, own.logits[:, 0])
        exact = exact_hidden_states(model, ids)
        wide = model.float().model(input_ids=ids, use_cache=False).last_hidden_state
    assert exact.dtype == torch.float32 and relative(exact, wide) < 1e-6
    assert 1e-4 < relative(hidden, exact) < TOLERANCE["hidden states"]


def test_providers_differ_in_nothing_but_the_feed_forward_layers(dense_kernels, monkeypatch):
    asked = []

    def run(path, *tensors, **_):
        asked.append(path)
        return measure.run(path, *tensors)

    def compile_(self, *, fullgraph, dynamic, options):
        assert fullgraph and not dynamic
        self._compiled_call_impl = partial(self._call_impl)  # another one for each way

    monkeypatch.setattr(ops, "sparse_ffn", as_sparse_ffn(run))
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    model, ids = measure.model(), imposed.draw_tokens(640, 2, 50)
    imposed.impose(model, [20.0] * 4, imposed.draw_tokens(640, 8, 64))
    subject = Subject("tiny", model, "flat", dense_kernels)
    values = {name: weight.clone() for name, weight in model.named_parameters()}
    subject.observe(ids, [{"mean": 20.0, "union": 90.0, "max": 30}] * 4)
    results = {}
    for provider in [*model_providers(None, tuned=True), DENSE_EAGER]:
        subject.become(provider)
        assert all(torch.equal(weight, values[key]) for key, weight in model.named_parameters())
        strides = {ffn.down_proj.weight.stride() for ffn in model.ffns}
        assert strides == {(192, 1) if provider.backend == "dense" else (1, 64)}
        parts = [*model.model.layers, model.model.norm]
        assert {part._compiled_call_impl is not None for part in parts} == {provider.compiled}
        with torch.no_grad():
            forward(model, ids)  # "auto" also loads what a graph would launch
            asked.clear()
            hidden, _ = forward(model, ids)
        paths = ", ".join(f"{path} {number}" for path, number in Counter(asked).items())
        assert subject.paths(provider, 100) == (paths or "dense 4")
        assert bool(paths) == (provider.backend == "triton")  # "auto" is dense, by the projections
        assert torch.equal(results.setdefault(provider, hidden), hidden)
    assert subject.paths(TRITON, 64) == "decode 4"
    assert {ffn.chooser.observed for ffn in model.ffns} == {(20.0, 90.0)}  # calls did not count


def test_decoding_gives_the_logits_of_a_pass_over_the_whole_text():
    model = measure.model(torch.float32, num_key_value_heads=2)
    script = imposed.draw_tokens(640, 3, 29, seed=SEED)
    imposed.impose(model, [20.0] * 4, script)
    decoder = Decoder(model, script, 17)
    with torch.no_grad():
        decoder.read()
        logits = decoder.generate(decoder.step)
        whole = model(input_ids=script, use_cache=False).logits[:, 17:]
        assert logits.shape == (3, 12, 640) and relative(logits, whole) < 1e-5
        assert torch.equal(decoder.picked[:, 17:], logits.argmax(-1))
        assert not decoder.picked[:, :17].any() and int(decoder.position) == 29
        addresses = [cache.keys.data_ptr() for cache in decoder.caches]
        assert torch.equal(decoder.generate(decoder.step), logits)  # again from the first step
        assert addresses == [cache.keys.data_ptr() for cache in decoder.caches]


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
        assert len(tables[name]) == len(rows[name])
    table = tables["model"]
    assert list(table["provider"]) == 4 * names(None)
    assert (table["mode"] == np.where(table["tokens"] > 100, "stream", "graph")).all()
    assert (table["tokens_per_ms"] == table["tokens"]).all()
    paths = {"triton": ["decode 3", "decode 3"], "dense eager": ["dense 3", "dense 3"]}
    for name, expected in paths.items():
        assert list(table["path"][table["provider"] == name]) == 2 * expected
    assert table["relative_rms"].between(1e-4, 0.05).all()
    assert table["layer_rms"].between(1e-4, 5e-3).all()
    assert (table["profile"] == "paper").all() and (table["hidden_size"] == 32).all()
    # The weights once, what a pass takes, and the frequencies of rotary embeddings.
    assert (table["peak"] == 2 * table["parameters"] + 500_000 + 64).all()

    table = tables["decode"]
    assert list(table["provider"]) == 4 * names(None, tuned=True)
    assert (table["tokens"] == table["batch"]).all() and (table["context"] == 20).all()
    assert table["layer_rms"].between(1e-4, 1e-2).all() and (table["active"] < 60).all()
    assert (table["same"] == 1).all() and (table["steps"] == 3).all()
    speed = 1e3 * table["batch"] / table["p50"]
    assert np.allclose(table["tokens_per_second"], speed, rtol=1e-3)
    assert np.allclose(table["p50"], 1 / 3, rtol=1e-3)  # a generation of three steps takes 1 ms

    layers = tables["model_layers"]
    times = layers[["dense", "sparse", "auto", "auto_path", "relative_rms"]]
    assert len(layers) == 2 * 3 and times.notna().all(axis=None)
    assert (layers["batch"] == 2).all()  # the first batch
    for mean, rows in zip((10, 40), (layers[:3], layers[3:]), strict=True):
        assert rows["level"].iloc[0] == pytest.approx(rows["active"].mean(), abs=0.01)
        assert rows["level"].iloc[0] == pytest.approx(mean, rel=0.5)
        assert (rows["active"] < rows["p99"]).all() and (rows["p99"] <= rows["active_max"]).all()


def test_the_activity_of_a_checkpoint_is_its_own(dense_kernels, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 96}
    given = measure.model(**sizes, num_hidden_layers=2, num_attention_heads=2)
    ids = imposed.draw_tokens(640, 4, 64, seed=3)
    imposed.impose(given, [7.0, 30.0], ids)
    checkpoint = ("tiny", given, ids.flatten().tolist())
    options = {"checkpoint": checkpoint, "shapes": [(4, 64)], "compiled": True, "layers": True}
    means = [float(layer.double().sum(1).mean()) for layer in active_entries(given, ids)]
    # Random weights get these means.
    rows = language_model(**options, out=tmp_path, alike=True, decode=[2], decode_context=32)
    layers = rows["model_layers"]
    assert [row["active"] for row in layers[:2]] == [round(mean, 2) for mean in means]
    assert [row["active"] for row in layers[2:]] == pytest.approx(means, rel=0.2)
    for file in ("model", "decode"):
        profiles = [row["profile"] for row in rows[file]]
        half = len(profiles) // 2
        assert profiles == ["checkpoint"] * half + ["imposed"] * half and half


def test_third_parties_and_layers_in_fp8_join_passes_and_decoding(dense_kernels, monkeypatch):
    monkeypatch.setattr(model.float8, "why_not", lambda device: None)
    monkeypatch.setattr(model, "GRAPH_TOKENS", 100)
    foreign = [f"tests.factories.measure:{name}" for name in ("plain", "wrong")]
    options = {"shapes": [(2, 64)], "active": [10], "decode": [2], "decode_context": 20}
    options |= {"compiled": True, "fp8": True, "providers": foreign}
    rows = language_model("quick", TINY, **options)
    table = pd.DataFrame(rows["model"]).set_index("provider")
    own = names(True, precisions=(None, FP8, FP8_ALL))
    assert list(table.index[: len(own)]) == own and len(table) == len(own) + 2
    assert [row["provider"] for row in rows["decode"]] == names(True, precisions=(None, FP8))
    in_fp8 = table.index.str.contains("FP8")
    # Weights in FP8 take less memory; the outputs of layers are those of these weights.
    assert (table.loc[in_fp8, "peak"] < table["peak"].iloc[0]).all()
    assert table.loc[in_fp8, "layer_rms"].between(1e-4, 5e-2).all()
    plain, wrong = (table.filter(regex=name, axis=0) for name in foreign)
    assert (plain["layer_rms"] < 5e-3).all() and (plain["relative_rms"] < 0.05).all()
    assert wrong["layer_rms"].to_numpy() == pytest.approx(0.4, abs=0.01)
    rest = table.drop(index=wrong.index)["relative_rms"]
    assert rest.max() < 0.1 and (wrong["relative_rms"] > rest.max()).all()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("layer", "^layer 0 of triton bf16 of quick  2 x 32 tokens .* is wrong"),
        ("pass", r"^hidden states \(quick .*\) of auto are wrong"),
        ("replay", r"^hidden states \(quick .*\) of dense eager are wrong"),
        ("step", r"^logits \(quick  decoding 2 x 1 behind 20 tokens .*\) of triton are wrong"),
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

    def bad_layer(path, x, *tensors, **_):
        return measure.run(path, x, *tensors) * 1.01

    patches = {
        "layer": (ops, "sparse_ffn", as_sparse_ffn(bad_layer)),
        "pass": (model, "forward", bad_forward),
        "step": (Decoder, "step", bad_step),
        "replay": (dense_kernels, "capture", bad_capture),
    }
    monkeypatch.setattr(*patches[wrong])
    shapes, documents = ([], [2]) if wrong == "step" else ([(2, 32)], [])
    options = {"shapes": shapes, "decode": documents, "decode_context": 20, "active": [20]}
    with pytest.raises(ArithmeticError, match=message):
        language_model("quick", TINY, **options, compiled=False, out=tmp_path)
    assert not dense_kernels.timed and not list(tmp_path.iterdir())
