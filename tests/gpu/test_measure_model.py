"""Whole models on a GPU: every measurement of a small one, with real kernels, compiled layers and CUDA graphs."""

import pytest
import torch

pytest.importorskip("triton")

from twell import imposed, measure_model, measure_training
from twell.__main__ import main

SMALL = "num_layers=3 hidden_size=512 intermediate_size=1408 num_heads=8 vocab_size=4096".split()


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    for name, value in {"TURN": 30, "SETTLE": 1, "LAYER_ROUND": 5, "GENERATION": 8}.items():
        monkeypatch.setattr(measure_model, name, value)
    yield
    torch.compiler.reset()


def test_a_model_is_measured_in_every_way(tmp_path):
    kept = measure_model.model(
        "0.5b",
        SMALL,
        shapes=[(16, 512), (2, 200)],
        active=[10, 300],
        layers=True,
        parts=True,
        decode=[1, 8, 70],
        decode_context=50,
        energy=True,
        out=tmp_path,
    )
    assert {name: len(rows) for name, rows in kept.items()} == {
        "model": 2 * 2 * 6,
        "model_layers": 2 * 2 * 3,
        "model_parts": 2 * 2 * (1 + 3) * len(measure_model.PARTS),
        "decode": 2 * 3 * 6,
    }
    assert {row["mode"] for row in kept["model"] if row["batch"] == 2} == {"graph"}
    assert all(row["p50"] > 0 and row["peak"] > 1e6 for row in kept["model"])
    for row in kept["model"] + kept["decode"]:
        expected = (
            "dense"
            if row["provider"].startswith("dense")
            else "decode"
            if row["tokens"] <= 64
            else "union"
        )
        assert row["provider"].startswith("auto") or row["path"] == f"{expected} 3"
    assert all(row["same"] > 0.9 for row in kept["decode"])
    named = [part for part in measure_model.PARTS if part != "between kernels"]
    assert all(row["ms"] > 0 for row in kept["model_parts"] if row["part"] in named)


def test_decoding_with_tuned_layers():
    rows = measure_model.model(
        "0.5b",
        SMALL,
        shapes=[],
        active=[10],
        decode=[1],
        decode_context=50,
        compiled=True,
        tuned=True,
    )
    assert [row["provider"] for row in rows["decode"]] == measure_model.providers(True, tuned=True)
    assert all(row["same"] > 0.9 and row["p50"] > 0 for row in rows["decode"])


def test_all_layers_share_the_compiled_code():
    model, _ = measure_model.random_model("0.5b", SMALL, 64, torch.device("cuda"))
    ids = imposed.draw_tokens(4096, 4, 64, device="cuda")
    sides = measure_model.Sides(model)
    sides.become("triton torch.compile")
    with torch.no_grad():
        base = model.model
        hidden = base.embed_tokens(ids)
        rotary = base.rotary_emb(hidden, torch.arange(64, device="cuda")[None])
        hidden = base.layers[0](hidden, position_embeddings=rotary)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for layer in base.layers[1:]:
                hidden = layer(hidden, position_embeddings=rotary)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_steps_are_measured(tmp_path, checkpointed):
    sizes = [*SMALL, "context=256", "micro_batch=4", f"checkpoint_activations={checkpointed}"]
    rows = measure_training.train_step(
        "0.5b", sizes, active=20, profile="paper", compiled=True, out=tmp_path
    )
    assert [row["provider"] for row in rows] == [
        "dense torch.compile",
        "triton union torch.compile",
    ]
    assert all(row["peak"] > 1e6 and row["p50"] > 0 for row in rows)


def test_the_command_line(tmp_path):
    words = f"measure model --size 0.5b --tokens 1x256 --active 20 --compile --out {tmp_path}"
    assert main(words.split()) == 0
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == ["model.csv", "model_layers.csv"]
