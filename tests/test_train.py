import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from twell import corpus, results
from twell.train import CONFIGS, DeadWindow, TrainConfig, evaluate, train


def series(log, metric, split="train"):
    rows = log[(log.metric == metric) & (log.split == split)]
    return rows.set_index(["step", "layer"]).value


def test_a_run_learns_and_leaves_everything(tiny_run, tiny_config):
    row, log = results.load_run(tiny_run)
    assert row["complete"] and row["command"] and row["commit"] and row["versions"]["torch"] == torch.__version__
    assert {field.name for field in dataclasses.fields(TrainConfig)} <= set(row)
    assert yaml.safe_load((tiny_run / "config.yaml").read_text()) == dataclasses.asdict(tiny_config)
    valid = series(log, "cross_entropy", "valid")
    assert list(valid.index.get_level_values("step")) == [0, 8, 16]
    assert valid.iloc[0] == pytest.approx(np.log(320), rel=0.02)  # nothing is known before the first step
    assert valid.iloc[-1] < valid.iloc[0] - 1.0
    assert list(series(log, "loss").index.get_level_values("step")) == [4, 8, 12, 16]
    assert list(series(log, "dead_fraction").groupby("step").size().index) == [4, 8, 12, 16]  # 2048-token windows
    assert len(series(log, "active_mean")) == 8 and len(series(log, "active_mean", "valid")) == 6
    loss, parts = series(log, "loss"), series(log, "cross_entropy") + 1e-2 * series(log, "l1")
    np.testing.assert_allclose(loss, parts, rtol=1e-5)
    learning_rates = series(log, "lr").to_numpy()
    assert learning_rates[0] > learning_rates[-1] == pytest.approx(0, abs=1e-9)
    assert series(log, "cross_entropy_silenced", "valid").index.get_level_values("step").tolist() == [16]


def test_the_saved_model_has_the_logged_loss_and_activity(tiny_run, tiny_config):
    _, log = results.load_run(tiny_run)
    model = AutoModelForCausalLM.from_pretrained(tiny_run / "model")
    _, _, blocks = tiny_config.prepare_text()
    found = evaluate(model, blocks)
    assert found["cross_entropy"] == pytest.approx(series(log, "cross_entropy", "valid").iloc[-1], rel=1e-4)
    logged = series(log, "active_mean", "valid").loc[16].to_numpy()
    np.testing.assert_allclose([layer["mean"] for layer in found["layers"]], logged, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "model")
    prompt = tokenizer("ba de", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0])
    assert text.startswith("ba de") and len(text) > len("ba de")


def test_evaluate_is_the_mean_over_all_tokens(tiny_run, tiny_config):
    model = AutoModelForCausalLM.from_pretrained(tiny_run / "model").eval()
    _, _, blocks = tiny_config.prepare_text()
    losses = []
    for number in range(len(blocks)):
        x = blocks.draw([number])
        logits = model(input_ids=x).logits[0, :-1].detach()
        losses += torch.nn.functional.cross_entropy(logits, x[0, 1:], reduction="none").tolist()
    for batch in (1, 3, 64):
        assert evaluate(model, blocks, batch)["cross_entropy"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert not model.training and not model.recording


def test_same_seed_same_run_other_seed_other_run(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=4 * 512)
    runs = [
        train(dataclasses.replace(short, seed=seed), tmp_path / name, quiet=True)
        for seed, name in ((3, "a"), (3, "b"), (4, "c"))
    ]
    states = [AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_micro_batches_change_nothing(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=4 * 512)
    one = results.load_run(train(short, tmp_path / "one", quiet=True))[1]
    many = results.load_run(train(dataclasses.replace(short, micro_batch=3), tmp_path / "many", quiet=True))[1]
    for metric in ("loss", "cross_entropy", "l1", "grad_norm"):
        np.testing.assert_allclose(series(one, metric), series(many, metric), rtol=2e-4)


def test_l1_reduces_activity(tiny_config, tmp_path):
    active = {}
    for coefficient in (0.0, 0.1):
        run = train(
            dataclasses.replace(tiny_config, l1_coefficient=coefficient), tmp_path / str(coefficient), quiet=True
        )
        active[coefficient] = series(results.load_run(run)[1], "active_mean", "valid").loc[16].mean()
    assert active[0.1] < 0.5 * active[0.0]


@pytest.mark.parametrize("changes", [{"gated": False}, {"activation": "silu"}, {"backend": "reference", "tokens": 512}])
def test_other_layers_train(tiny_config, tmp_path, changes):
    run = train(dataclasses.replace(tiny_config, **{"tokens": 2048} | changes), tmp_path / "run", quiet=True)
    assert results.load_run(run)[0]["complete"]


def test_reference_backend_follows_the_dense_one(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=3 * 512, log_every=1)
    dense = results.load_run(train(short, tmp_path / "dense", quiet=True))[1]
    sparse = results.load_run(train(dataclasses.replace(short, backend="reference"), tmp_path / "sparse", quiet=True))[
        1
    ]
    np.testing.assert_allclose(series(sparse, "loss"), series(dense, "loss"), rtol=1e-4)


def test_dead_window_spans_steps():
    window = DeadWindow(2, 100)
    counts = lambda *layers: [torch.tensor(layer) for layer in layers]  # noqa: E731
    assert window.add(counts([1, 0, 0], [0, 0, 2]), 60) is None
    dead = window.add(counts([0, 3, 0], [0, 0, 1]), 60)
    assert [layer.tolist() for layer in dead] == [[False, False, True], [True, True, False]]
    assert window.add(counts([0, 0, 0], [0, 0, 0]), 99) is None  # the next window starts empty
    assert all(layer.all() for layer in window.add(counts([0, 0, 0], [0, 0, 0]), 1))


def test_overwrite_replaces_runs_and_nothing_else(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=512)
    train(short, tmp_path / "run", quiet=True)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(short, tmp_path / "run", quiet=True)
    train(short, tmp_path / "run", overwrite=True, quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is no run"):
        train(short, tmp_path / "mine", overwrite=True, quiet=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_configurations_load_and_say_what_is_wrong(tmp_path):
    for file in CONFIGS.glob("*.yaml"):
        assert TrainConfig.load(file.stem).steps > 0
    config = TrainConfig.load("quick", ["l1_coefficient=3e-4", "tokens=1e6", "valid_source=null"])
    assert config.l1_coefficient == 3e-4 and config.tokens == 1_000_000 and config.hidden_size == 128
    (tmp_path / "child.yaml").write_text(f"base: {CONFIGS / 'quick.yaml'}\nseed: 9\n")
    assert TrainConfig.load(tmp_path / "child.yaml") == dataclasses.replace(TrainConfig.load("quick"), seed=9)
    for override, words in (
        ("l1_coeficient=1", "unknown field 'l1_coeficient' .* did you mean 'l1_coefficient'"),
        ("l1_coefficient=-1", "l1_coefficient is -1.0; it has to be a finite number, 0 or more"),
        ("tokens=many", "tokens is 'many'; expected int"),
        ("seed=1.5", "seed is 1.5; expected int"),
        ("gated=3", "gated is 3; expected bool"),
        ("batch_tokens=1000", "batch_tokens 1000 is no multiple of context 128"),
        ("precision=fp8", "precision is 'fp8'; use 'fp32' or 'bf16'"),
        ("nonsense", "'nonsense' is no override; write key=value"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainConfig.load("quick", [override])
    with pytest.raises(FileNotFoundError, match="no configuration nothere: it is no file and none of .*quick"):
        TrainConfig.load("nothere")


def test_command_line_reports_one_line(tmp_path):
    command = [sys.executable, "-m", "twell", "train", "quick", "l1_coefficient=-3", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "twell train: l1_coefficient is -3.0; it has to be a finite number, 0 or more\n"
    assert not (tmp_path / "run").exists()


def test_divergence_is_said(tiny_config, tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is (nan|inf) at step"):
        train(dataclasses.replace(tiny_config, learning_rate=1e30, tokens=8192), tmp_path / "run", quiet=True)
    assert not results.load_run(tmp_path / "run")[0]["complete"]


def test_blocks_of_a_run_cover_the_text(tiny_config):
    text, blocks, valid = tiny_config.prepare_text()
    assert isinstance(blocks, corpus.Blocks) and len(valid) == 512 // 32
    assert np.array_equal(np.sort(blocks.draw(range(len(blocks))).flatten()), np.sort(text.train[: len(blocks) * 32]))
