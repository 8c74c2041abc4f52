"""Whole models: rows of every file, checks before times, checkpoints, mistakes."""

from collections import Counter
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from tests.measure import factories
from tests.measure.factories import TINY, active_entries
from twell.measure import clock, decode, imposed, model
from twell.measure.decode import Decoder, Joined
from twell.measure.model import FILES, language_model
from twell.measure.parts import PARTS
from twell.measure.providers import model_providers
from twell.measure.rows import COLUMNS

pytest.importorskip("triton")


@pytest.fixture
def quick(fake_kernels, monkeypatch):
    """Fake kernels, clock and profiler."""
    kernels = [(name, 0.1) for name in ("nvjet", "nvjet", "nvjet", "nvjet", "triton_poi")]
    kernels.insert(1, ("sdpa", 0.2))

    def kernel_sequence(call, calls, lead):
        call()
        layers = 3 if isinstance(getattr(call, "__self__", None), factories.Graph) else 1
        return calls * [kernels * layers]

    monkeypatch.setattr(clock, "kernel_sequence", kernel_sequence)


def names(*arguments, **options):
    return [provider.name for provider in model_providers(*arguments, **options)]


def test_projections_are_joined_in_decoding_alone(quick, monkeypatch):
    joined = Counter()

    def spy(name, measured, bench, *arguments):
        joined[name] = sum(isinstance(part, Joined) for part in bench.model.modules())
        return measured(bench, *arguments)

    functions = "measure_forward", "measure_decode", "decode_parts"
    for name in functions:
        monkeypatch.setattr(model, name, partial(spy, name, getattr(model, name)))
    options = {"shapes": [(1, 64)], "active": [10, 40], "decode": [1], "decode_context": 20}
    language_model("quick", TINY, **options, parts=True)
    assert joined == dict(zip(functions, (0, 3, 3), strict=True))


@pytest.fixture
def tables(quick, tmp_path, monkeypatch):
    """All files of one command."""
    monkeypatch.setattr(clock, "energy_meter", lambda: lambda: 0)
    monkeypatch.setattr(clock, "idle_watts", lambda meter: 70.0)
    monkeypatch.setattr(model, "GRAPH_TOKENS", 100)
    options = {"shapes": [(2, 64), (1, 64)], "active": [10, 40], "layers": True, "parts": True}
    options |= {"decode": [1, 3], "decode_context": 20, "tuned": True, "energy": True}
    rows = language_model("quick", TINY, **options, out=tmp_path)
    tables = {name: pd.read_csv(tmp_path / f"{name}.csv") for name in FILES}
    for name, table in tables.items():
        assert all(list(row) == COLUMNS[name] for row in rows[name]), name
        assert len(table) == len(rows[name]) and table["date"].nunique() == 1
        assert (table["sdpa"] == "default").all()
    return tables


def test_rows_say_what_was_measured(capsys, tables):
    table = tables["model"]
    assert list(table["provider"]) == 4 * names(None)
    assert list(table["batch"]) == 2 * (6 * [2] + 6 * [1])
    assert (table["mode"] == np.where(table["tokens"] > 100, "stream", "graph")).all()
    assert (table["tokens_per_ms"] == table["tokens"]).all() and (table["idle"] == 70).all()
    paths = {"triton": ["union 3", "decode 3"], "dense eager": ["dense 3", "dense 3"]}
    for name, expected in paths.items():
        assert list(table["path"][table["provider"] == name]) == 2 * expected
    assert table["relative_rms"].between(1e-4, 0.05).all()
    assert table["layer_rms"].between(1e-4, 5e-3).all()
    assert (table["profile"] == "paper").all() and (table["hidden_size"] == 32).all()
    output = capsys.readouterr().out.splitlines()
    first = next(line for line in output if "  triton torch.compile" in line)
    active = f"{table['active'].iloc[0]:.4g} active"
    assert first.startswith("quick  2 x 64 tokens  " + active)
    assert first.endswith("128.0 tokens/ms  0 mJ a token  union 3")

    decode = tables["decode"]
    assert list(decode["provider"]) == 4 * names(None, tuned=True)
    assert list(decode["batch"]) == 2 * (9 * [1] + 9 * [3])
    assert (decode["tokens"] == decode["batch"]).all() and (decode["context"] == 20).all()
    assert decode["layer_rms"].between(1e-4, 1e-2).all()
    assert (decode["same"] == 1).all() and (decode["steps"] == 3).all()
    speed = 1e3 * decode["batch"] / decode["p50"]
    assert np.allclose(decode["tokens_per_second"], speed, rtol=1e-3)


def test_rows_of_layers_and_parts(tables):
    layers = tables["model_layers"]
    assert list(layers["layer"]) == 4 * [0, 1, 2] and layers["level"].nunique() == 4
    timed, times = layers["batch"] == 2, layers[["dense", "sparse", "auto"]]
    assert (times[timed] == 1.0).all(axis=None) and times[~timed].isna().all(axis=None)
    for wanted, rows in zip((10, 40), (layers[:6], layers[6:]), strict=True):
        assert rows["wanted"][:3].mean() == pytest.approx(wanted, abs=0.01)
        assert rows["level"].iloc[0] == pytest.approx(rows["active"][:3].mean(), abs=0.01)
        assert (rows["active"] < rows["p99"]).all() and (rows["p99"] <= rows["active_max"]).all()
        assert (rows["union"] > rows["active"]).all()
        assert np.allclose(rows["active"], rows["wanted"], rtol=0.6)
    parts = tables["model_parts"]
    # Of each level two providers in the first batch, then in decoding one document and three.
    assert list(parts["part"]) == 2 * 3 * 2 * list(PARTS)
    assert list(parts["batch"]) == 2 * (12 * [2] + 12 * [1] + 12 * [3])
    assert (parts["layer"].isna() == (parts["context"] == 20)).all()
    for start in range(0, len(parts), 6):
        one = parts[start : start + 6].set_index("part")["ms"]
        assert one["projections"] / one["attention"] == pytest.approx(1.0)
    one = parts[:6].set_index("part")["ms"]
    assert one.sum() == pytest.approx(1.0)
    assert one["projections"] == 0.2 and one["between kernels"] == pytest.approx(0.3)


def test_the_activity_of_a_checkpoint_is_its_own(quick, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 96}
    given = factories.model(**sizes, num_hidden_layers=2, num_attention_heads=2)
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
    assert not rows["decode"] and not rows["model_parts"]
    files = sorted(path.name for path in tmp_path.glob("[!.]*"))
    assert files == ["model.csv", "model_layers.csv"]


DECODING = r"decoding 2 x 1 behind 20 tokens .*"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("layer", "^layer 0 of triton of quick  2 x 32 tokens .* is wrong"),
        ("pass", r"^hidden states \(quick .*\) of auto are wrong"),
        ("layer of a step", f"^layer 0 of triton of quick  {DECODING} is wrong"),
        ("step", rf"^logits \(quick  {DECODING}\) of triton are wrong"),
    ],
)
def test_nothing_is_timed_before_all_is_checked(quick, tmp_path, monkeypatch, wrong, message):
    from twell.kernels import ops

    monkeypatch.setattr(clock.Clock, "turn", lambda self: pytest.fail("timed"))
    forward, step = model.forward, Decoder.step

    def bad_forward(model, ids):
        hidden, logits = forward(model, ids)
        return hidden * (1.1 if model.ffns[0].backend == "auto" else 1.0), logits

    def bad_step(decoder, *kind):
        return step(decoder, *kind) * (1.1 if decoder.model.ffns[0].backend == "triton" else 1.0)

    if wrong.startswith("layer"):
        monkeypatch.setattr(ops, "run", lambda *tensors, **_: 1.01 * factories.run(*tensors))
    if wrong == "pass":
        monkeypatch.setattr(model, "forward", bad_forward)
    if wrong == "step":
        monkeypatch.setattr(Decoder, "step", bad_step)
    shapes, documents = ([], [2]) if wrong.endswith("step") else ([(2, 32)], [])
    options = {"shapes": shapes, "decode": documents, "decode_context": 20, "active": [20]}
    with pytest.raises(ArithmeticError, match=message):
        language_model("quick", TINY, **options, compiled=False, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_peak_counts_the_weights_once(monkeypatch):
    linear, log = torch.nn.Linear(10, 5, bias=False), []
    monkeypatch.setattr(clock, "peak_bytes", lambda run: run() or (5000, 7500))
    assert model._peak(linear, lambda: log.append("run")) == 200 + 2500
    assert log == 2 * ["run"]  # the first run allocates what later ones reuse


MISTAKES = [
    ({"active": None}, "active: the paper has no model 'quick'; say how many neurons"),
    ({"active": [96]}, "each of 3 layers can have more than 0 and less than 96 active neurons"),
    ({"profile": "hump"}, "profile 'hump' is unknown; use one of paper, flat"),
    ({"shapes": [(4, 0)]}, "shapes holds 0; it has to be at least 1"),
    ({"decode": [4, -1]}, "decode holds -1; it has to be at least 1"),
    ({"shapes": [], "layers": True}, "layers: measured on the first of the batches, and there is"),
    ({"shapes": [], "parts": True}, "parts: measured on the first of the batches, and there is"),
    ({"tuned": True}, "tuned: decoding is timed so with compiled layers, and decode has no number"),
    ({"tuned": True, "compiled": False, "decode": [1]}, "compiled layers, and compiled is False"),
    ({"overrides": [*TINY, "activation=silu"]}, "activation is 'silu'; sparse layers need 'relu'"),
    (
        {"overrides": [*TINY[2:], TINY[0], "hidden_size=40"]},
        "hidden_size is 40; the kernels need a multiple of 16",
    ),
]
CHECKPOINTS = [  # changes of the model, of the arguments, and the message
    ({}, {"active": [20]}, "active is imposed on random weights; a checkpoint has its own"),
    ({"dtype": torch.float32}, {}, "x is in torch.float32; load it in torch.bfloat16"),
    ({"mlp_bias": True}, {}, "x has feed-forward layers with biases"),
    ({"hidden_act": "silu"}, {}, "x has the activation 'silu'"),
    ({"hidden_size": 40}, {}, "hidden_size is 40; the kernels need"),
    ({}, {}, "the text has 1 tokens; 2 x 32 need 64"),
    ({}, {"shapes": [(1, 300)]}, "x is for 256 tokens; 300 were asked for"),
]


@pytest.fixture
def mistaken(quick, monkeypatch):
    for module, name in ((model, "measure_forward"), (decode, "Decoder")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("measured something"))


@pytest.mark.parametrize("options, message", MISTAKES)
def test_mistakes_are_found_before_anything_is_measured(mistaken, options, message):
    given = {"overrides": TINY, "shapes": [(2, 32)], "active": [20]}
    with pytest.raises(ValueError, match=message):
        language_model("quick", **(given | options))


@pytest.mark.parametrize("changes, options, message", CHECKPOINTS)
def test_checkpoints_that_are_not_measured(mistaken, changes, options, message):
    given = factories.model(num_hidden_layers=1, **changes)
    options = {"checkpoint": ("x", given, [1]), "shapes": [(2, 32)]} | options
    with pytest.raises(ValueError, match=message):
        language_model(**options)


def test_unfit_files_and_unknown_models_are_refused(mistaken, tmp_path):
    (tmp_path / "decode.csv").write_text("tokens,active\n1,2\n")
    with pytest.raises(ValueError, match=r"decode.csv has the columns \['tokens', 'active'\]"):
        language_model("quick", TINY, active=[20], out=tmp_path)
    with pytest.raises(FileNotFoundError, match="no configuration no"):
        language_model("no", active=[20])
