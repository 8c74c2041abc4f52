import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kills import differences, kill_rounds
from twell import corpus, lock, results
from twell import train as train_module
from twell.model import SparseLlamaForCausalLM, load
from twell.train import (
    CONFIGS,
    DeadWindow,
    TrainConfig,
    balance,
    evaluate,
    l1_schedule,
    reinitialize,
    train,
)


def series(log, metric, split="train"):
    rows = log[(log.metric == metric) & (log.split == split)]
    return rows.set_index(["step", "layer"]).value


def test_a_run_learns_and_leaves_everything(tiny_run, tiny_config):
    row, log = results.load_run(tiny_run)
    assert (
        row["complete"]
        and row["command"]
        and row["commit"]
        and row["versions"]["torch"] == torch.__version__
    )
    assert {field.name for field in dataclasses.fields(TrainConfig)} <= set(row)
    assert yaml.safe_load((tiny_run / "config.yaml").read_text()) == dataclasses.asdict(tiny_config)
    valid = series(log, "cross_entropy", "valid")
    assert list(valid.index.get_level_values("step")) == [0, 8, 16]
    assert valid.iloc[0] == pytest.approx(
        np.log(320), rel=0.02
    )  # nothing is known before the first step
    assert valid.iloc[-1] < valid.iloc[0] - 1.0
    assert list(series(log, "loss").index.get_level_values("step")) == [4, 8, 12, 16]
    assert list(series(log, "dead_fraction").groupby("step").size().index) == [
        4,
        8,
        12,
        16,
    ]  # 2048-token windows
    assert len(series(log, "active_mean")) == 8 and len(series(log, "active_mean", "valid")) == 6
    loss, parts = series(log, "loss"), series(log, "cross_entropy") + 1e-2 * series(log, "l1")
    np.testing.assert_allclose(loss, parts, rtol=1e-5)
    # two steps of warm-up, then half a cosine over the other 14; each row has the rate of its own step
    cosine = [5e-3 * (1 + np.cos(np.pi * (step - 3) / 14)) / 2 for step in (4, 8, 12, 16)]
    np.testing.assert_allclose(series(log, "lr"), cosine, rtol=1e-5)
    assert series(log, "cross_entropy_silenced", "valid").index.get_level_values(
        "step"
    ).tolist() == [16]
    assert ("peak_memory" in set(log.metric)) == torch.cuda.is_available()  # of a GPU alone


def test_the_saved_model_has_the_logged_loss_and_activity(tiny_run, tiny_config):
    _, log = results.load_run(tiny_run)
    model = AutoModelForCausalLM.from_pretrained(tiny_run / "model")
    _, _, blocks = tiny_config.prepare_text()
    found = evaluate(model, blocks)
    assert found["cross_entropy"] == pytest.approx(
        series(log, "cross_entropy", "valid").iloc[-1], rel=1e-4
    )
    logged = series(log, "active_mean", "valid").loc[16].to_numpy()
    np.testing.assert_allclose([layer["mean"] for layer in found["layers"]], logged, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "model")
    prompt = tokenizer("ba de", return_tensors="pt").input_ids
    text = tokenizer.decode(
        model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    )
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
        assert evaluate(model, blocks, batch)["cross_entropy"] == pytest.approx(
            np.mean(losses), rel=1e-6
        )
    assert not model.training and not model.recording


def test_the_logged_learning_rate_is_the_one_that_the_step_used(tiny_config, tmp_path, monkeypatch):
    used, step = [], torch.optim.AdamW.step

    def noting(self, *args, **kwargs):
        used.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    config = dataclasses.replace(tiny_config, tokens=7 * 512, log_every=1, warmup_steps=3)
    _, log = results.load_run(train(config, tmp_path / "run", quiet=True))
    np.testing.assert_allclose(series(log, "lr"), used, rtol=1e-5)
    assert used[0] == 0 and max(used) == used[3] == 5e-3 and used[-1] > 0


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
    many = results.load_run(
        train(dataclasses.replace(short, micro_batch=3), tmp_path / "many", quiet=True)
    )[1]
    for metric in ("loss", "cross_entropy", "l1", "grad_norm"):
        np.testing.assert_allclose(series(one, metric), series(many, metric), rtol=2e-4)


def test_l1_reduces_activity(tiny_config, tmp_path):
    active = {}
    for coefficient in (0.0, 0.1):
        run = train(
            dataclasses.replace(tiny_config, l1_coefficient=coefficient),
            tmp_path / str(coefficient),
            quiet=True,
        )
        active[coefficient] = (
            series(results.load_run(run)[1], "active_mean", "valid").loc[16].mean()
        )
    assert active[0.1] < 0.5 * active[0.0]


@pytest.mark.parametrize(
    "changes", [{"gated": False}, {"activation": "silu"}, {"backend": "reference", "tokens": 1024}]
)
def test_other_layers_train(tiny_config, tmp_path, changes):
    run = train(
        dataclasses.replace(tiny_config, **{"tokens": 2048} | changes), tmp_path / "run", quiet=True
    )
    assert results.load_run(run)[0]["complete"]


def test_reference_backend_follows_the_dense_one(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=3 * 512, log_every=1)
    dense = results.load_run(train(short, tmp_path / "dense", quiet=True))[1]
    run = train(dataclasses.replace(short, backend="reference"), tmp_path / "sparse", quiet=True)
    config, sparse = results.load_run(run)
    np.testing.assert_allclose(series(sparse, "loss"), series(dense, "loss"), rtol=1e-4)
    # How it was computed stays with the run; the model that it leaves can be computed anywhere.
    assert config["backend"] == "reference" and load(run)[0].config.ffn_backend == "dense"


def test_dead_window_spans_steps():
    window = DeadWindow(2, 100)
    counts = lambda *layers: [torch.tensor(layer) for layer in layers]  # noqa: E731
    assert window.add(counts([1, 0, 0], [0, 0, 2]), 60) is None
    dead = window.add(counts([0, 3, 0], [0, 0, 1]), 60)
    assert [layer.tolist() for layer in dead] == [[False, False, True], [True, True, False]]
    assert window.add(counts([0, 0, 0], [0, 0, 0]), 99) is None  # the next window starts empty
    assert all(layer.all() for layer in window.add(counts([0, 0, 0], [0, 0, 0]), 1))


def test_overwrite_replaces_runs_and_nothing_else(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    train(short, tmp_path / "run", quiet=True)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(short, tmp_path / "run", quiet=True)
    train(short, tmp_path / "run", overwrite=True, quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is no run"):
        train(short, tmp_path / "mine", overwrite=True, quiet=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


MINE = {
    ".env": "SECRET=1",
    ".gitignore": "*",
    "notes.txt": "keep",
    "model/notes.txt": "keep",
    ".config.yaml.original": "keep",
}


def put_mine(folder):
    for name, text in MINE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def assert_mine(folder):
    assert {name: (folder / name).read_text() for name in MINE if (folder / name).is_file()} == MINE


def test_nothing_of_the_users_is_deleted(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=2 * 512)
    (tmp_path / "run").mkdir()
    for name in (".env", ".gitignore"):
        (tmp_path / "run" / name).write_text(MINE[name])
    train(short, tmp_path / "run", quiet=True)
    put_mine(tmp_path / "run")
    (tmp_path / "run" / ".log.csv.a1b2c3d4.part").write_text("left by a kill")
    train(dataclasses.replace(short, seed=1), tmp_path / "run", overwrite=True, quiet=True)
    assert_mine(tmp_path / "run")
    assert results.load_run(tmp_path / "run")[0]["seed"] == 1
    assert not (tmp_path / "run" / ".log.csv.a1b2c3d4.part").exists()


def test_a_run_is_known_by_all_of_its_files(tiny_config, tiny_run, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    for name in ("config.yaml", "provenance.json", "log.csv"):
        folder = shutil.copytree(tiny_run, tmp_path / f"without-{name}")
        (folder / name).unlink()
        before = {path.name for path in folder.rglob("*")}
        for options in ({"overwrite": True}, {"resume": True}, {}):
            with pytest.raises(
                FileExistsError, match=rf"is no run \(it has no {name}\), so it is left alone"
            ):
                train(short, folder, quiet=True, **options)
        assert {path.name for path in folder.rglob("*")} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("base: quick  # written by hand\n")
    with pytest.raises(FileExistsError, match="is no run"):
        train(short, tmp_path / "mine", overwrite=True, quiet=True)


def test_a_start_that_fails_leaves_the_run_that_it_was_to_replace(tiny_config, tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FileNotFoundError, match="no text at"):
        train(
            dataclasses.replace(tiny_config, source=str(tmp_path / "nothing.txt")),
            folder,
            overwrite=True,
        )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    with pytest.raises(FileNotFoundError, match="no text at"):
        train(
            dataclasses.replace(tiny_config, source=str(tmp_path / "nothing.txt")), tmp_path / "new"
        )
    assert not (tmp_path / "new").exists()


def test_configurations_load_and_say_what_is_wrong(tmp_path):
    for file in CONFIGS.glob("*.yaml"):
        assert TrainConfig.load(file.stem).steps > 0
    config = TrainConfig.load("quick", ["l1_coefficient=3e-4", "tokens=1e6", "valid_source=null"])
    assert (
        config.l1_coefficient == 3e-4 and config.tokens == 1_000_000 and config.hidden_size == 128
    )
    (tmp_path / "child.yaml").write_text(f"base: {CONFIGS / 'quick.yaml'}\nseed: 9\n")
    assert TrainConfig.load(tmp_path / "child.yaml") == dataclasses.replace(
        TrainConfig.load("quick"), seed=9
    )
    for override, words in (
        ("l1_coeficient=1", "unknown field 'l1_coeficient' .* did you mean 'l1_coefficient'"),
        ("l1_coefficient=-1", "l1_coefficient is -1.0; it has to be a finite number, 0 or more"),
        ("l1_coefficient=[1e-3,0.2]", r"l1_coefficient is \['1e-3', 0\.2\]; give one number"),
        ("tokens=many", "tokens is 'many'; expected int"),
        ("seed=1.5", "seed is 1.5; expected int"),
        ("gated=3", "gated is 3; expected bool"),
        ("balance_every=-1", "balance_every is -1; it has to be a finite number, 0 or more"),
        (
            "balance_every=5 gated=false activation=silu",
            "balance_every is 5; without a gate it needs the activation",
        ),
        ("batch_tokens=1000", "batch_tokens 1000 is no multiple of context 128"),
        ("precision=fp8", "precision is 'fp8'; use 'fp32' or 'bf16'"),
        (
            "micro_batch=-1",
            "micro_batch is -1; it has to be at least 1, or null for the whole share of the step",
        ),
        ("micro_batch=0", "micro_batch is 0; it has to be at least 1"),
        ("context=1", "context is 1; it has to be at least 2"),
        ("learning_rate=.inf", "learning_rate is inf; it has to be a finite number"),
        ("rope_theta=-1", "rope_theta is -1.0; it has to be more than 0"),
        ("rope_theta=.nan", "rope_theta is nan; it has to be more than 0"),
        ("adam_epsilon=0", "adam_epsilon is 0.0; it has to be more than 0"),
        ("adam_beta1=1", "adam_beta1 is 1.0; it has to be from 0 to less than 1"),
        ("adam_beta2=.nan", "adam_beta2 is nan; it has to be from 0 to less than 1"),
        ("seed=4294967296", r"seed is 4294967296; it has to be below 2\^32"),
        ("source=''", "source is ''; it has to name something"),
        ("nonsense", "'nonsense' is no override; write key=value"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainConfig.load("quick", override.split())
    assert TrainConfig.load("quick", ["micro_batch=null"]).micro_batch is None
    assert (
        TrainConfig.load("quick", ["micro_batch=1", "max_grad_norm=.inf"]).max_grad_norm == np.inf
    )  # no clipping
    with pytest.raises(
        FileNotFoundError, match="no configuration nothere: it is no file and none of .*quick"
    ):
        TrainConfig.load("nothere")


def test_every_configuration_that_is_kept_still_loads():
    kept = [*CONFIGS.glob("*.yaml"), *(results.root() / "data" / "runs").glob("*/config.yaml")]
    assert len(kept) > 50
    for file in kept:
        config = TrainConfig.load(file)
        assert l1_schedule(config.steps, config.l1_zero_steps, config.l1_warmup_steps) > 0, file


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tokens": 512, "warmup_steps": 1},
            r"warmup_steps is 1 and the run has 1 step \(tokens 512, batch_tokens 512\): .* nothing would be trained; "
            "set warmup_steps to 0 or raise tokens",
        ),
        (
            {"tokens": 1, "warmup_steps": 600},
            r"warmup_steps is 600 and the run has 1 step \(tokens 1, ",
        ),
        (
            {"tokens": 2048, "l1_zero_steps": 4},
            r"l1_zero_steps is 4 and the run has 4 steps \(tokens 2048, batch_tokens 512\): l1_coefficient 0\.01 would "
            "never act; lower l1_zero_steps, raise tokens or set l1_coefficient to 0",
        ),
        (
            {"l1_zero_steps": 16, "l1_warmup_steps": 5},
            "l1_zero_steps is 16 and the run has 16 steps",
        ),
    ],
)
def test_a_schedule_that_trains_nothing_is_refused(tiny_config, changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(tiny_config, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 512, "warmup_steps": 0},
        {"tokens": 1024, "warmup_steps": 600},
        {"tokens": 2048, "l1_zero_steps": 3, "l1_warmup_steps": 100},
    ],
)
def test_a_schedule_that_acts_in_one_step_changes_the_weights(tiny_config, tmp_path, changes):
    config = dataclasses.replace(tiny_config, **changes)
    one = train(config, tmp_path / "one", quiet=True)
    valid = series(results.load_run(one)[1], "cross_entropy", "valid")
    assert valid.iloc[-1] != valid.iloc[0]
    if config.l1_zero_steps:
        other = train(
            dataclasses.replace(config, l1_coefficient=0.0), tmp_path / "other", quiet=True
        )
        pairs = zip(load(one)[0].parameters(), load(other)[0].parameters(), strict=True)
        assert not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"warmup_steps": 15, "l1_warmup_steps": 16, "reinit": 0.1, "balance_every": 16}, []),
        ({"l1_zero_steps": 600, "l1_warmup_steps": 5, "l1_coefficient": 0.0}, []),
        (
            {"warmup_steps": 16, "learning_rate": 1e-3},
            [
                "the run ends within the warm-up of the learning rate (warmup_steps 16, 16 steps): it reaches 94% of 0.001"
            ],
        ),
        (
            {"l1_zero_steps": 6, "l1_warmup_steps": 20},
            [
                "the run ends within the warm-up of the L1 term (l1_zero_steps 6, l1_warmup_steps 20, 16 steps): "
                "it reaches 50% of l1_coefficient"
            ],
        ),
        (
            {"reinit": 0.1, "dead_window_tokens": 2**20, "balance_every": 17},
            [
                "reinit 0.1 never acts: the run has 8192 tokens, and dead_window_tokens is 1048576",
                "balance_every 17 never acts: the run has 16 steps",
            ],
        ),
    ],
)
def test_a_schedule_that_the_run_ends_before_is_said(tiny_config, changes, lines):
    assert dataclasses.replace(tiny_config, **changes).remarks() == lines


def test_remarks_are_said_at_the_start_of_a_run(tiny_config, tmp_path, capsys):
    config = dataclasses.replace(tiny_config, tokens=1024, warmup_steps=600)
    train(config, tmp_path / "run")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (
        first.startswith(str(tmp_path / "run") + ": ") and second == f"run  {config.remarks()[0]}"
    )
    train(config, tmp_path / "quiet", quiet=True)
    assert capsys.readouterr().out == ""


def test_command_line_reports_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "twell",
        "train",
        "quick",
        "l1_coefficient=-3",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr
        == "twell train: l1_coefficient is -3.0; it has to be a finite number, 0 or more\n"
    )
    assert not (tmp_path / "run").exists()


def test_divergence_is_said(tiny_config, tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is (nan|inf) at step"):
        train(
            dataclasses.replace(tiny_config, learning_rate=1e30, tokens=8192),
            tmp_path / "run",
            quiet=True,
        )
    assert not results.load_run(tmp_path / "run")[0]["complete"]
    fields = r"l1_coefficient \(now 0\.01\) or weight_decay \(now 1e\+300\)"
    with pytest.raises(
        FloatingPointError, match=rf"lower learning_rate \(now 0\.005\) or {fields}"
    ):
        train(dataclasses.replace(tiny_config, weight_decay=1e300), tmp_path / "other", quiet=True)


def test_divergence_in_the_last_step_is_said(tiny_config, tmp_path, monkeypatch):
    step = torch.optim.AdamW.step

    def diverge(self, *args, **kwargs):
        step(self, *args, **kwargs)
        with torch.no_grad():
            self.param_groups[0]["params"][0].fill_(torch.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", diverge)
    config = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    with pytest.raises(
        FloatingPointError,
        match=r"the validation loss is nan at step 1; lower learning_rate \(now 0\.005\)",
    ):
        train(config, tmp_path / "run", quiet=True)
    assert not results.load_run(tmp_path / "run")[0]["complete"]


def test_a_configuration_that_is_its_own_base_is_refused(tmp_path):
    for name, base in (("a", tmp_path / "b.yaml"), ("b", tmp_path / "a.yaml"), ("c", 3)):
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}\nseed: 1\n")
    with pytest.raises(ValueError, match=r"a\.yaml is its own base"):
        TrainConfig.load(tmp_path / "a.yaml")
    with pytest.raises(
        ValueError, match="base is 3; expected the name of a configuration or of a file"
    ):
        TrainConfig.load(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").write_text("1: 2\n")
    with pytest.raises(ValueError, match="unknown field 1 in the configuration"):
        TrainConfig.load(tmp_path / "d.yaml")


def test_a_step_that_leaves_a_process_without_text_is_refused(tiny_config, tmp_path, monkeypatch):
    class Many(Accelerator):
        num_processes = 17

    monkeypatch.setattr(train_module, "Accelerator", Many)
    words = r"a step has 16 sequences \(batch_tokens 512, context 32\) for 17 processes; each needs at least one"
    with pytest.raises(ValueError, match=words):
        train(tiny_config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("processes", "micro", "allowed"),
    [
        (3, None, True),
        (3, 6, True),
        (3, 5, False),
        (3, 4, True),
        (2, 3, True),
        (5, 1, False),
        (16, 1, True),
    ],
)
def test_sharded_processes_have_equally_many_forward_passes(tiny_config, processes, micro, allowed):
    config = dataclasses.replace(tiny_config, micro_batch=micro)  # 16 sequences
    train_module._check_shares(config, processes, sharded=False)
    passes = {
        len(range(0, len(range(first, 16, processes)), micro or 16)) for first in range(processes)
    }
    assert (len(passes) == 1) == allowed
    if allowed:
        train_module._check_shares(config, processes, sharded=True)
    else:
        with pytest.raises(
            ValueError, match=f"micro_batch {micro} some of them have one forward pass more"
        ):
            train_module._check_shares(config, processes, sharded=True)


def test_blocks_of_a_run_cover_the_text(tiny_config):
    _, blocks, valid = tiny_config.prepare_text()
    assert isinstance(blocks, corpus.Blocks) and len(valid) == 512 // 32
    drawn = blocks.draw(range(len(blocks))).flatten()
    assert np.array_equal(np.sort(drawn), np.sort(blocks.tokens[: len(blocks) * 32]))


# --- remedies, schedules and ways to compute the same


def test_l1_warm_up_grows_from_zero(tiny_config, tmp_path):
    assert [l1_schedule(step, 2, 4) for step in range(1, 9)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert [l1_schedule(step, 2, 0) for step in range(1, 5)] == [0, 0, 1, 1] and l1_schedule(
        1, 0, 0
    ) == 1
    warm = dataclasses.replace(
        tiny_config, tokens=8 * 512, log_every=1, l1_zero_steps=2, l1_warmup_steps=4
    )
    _, log = results.load_run(train(warm, tmp_path / "run", quiet=True))
    share = (series(log, "loss") - series(log, "cross_entropy")) / (1e-2 * series(log, "l1"))
    np.testing.assert_allclose(share, [0, 0, 0.25, 0.5, 0.75, 1, 1, 1], atol=2e-3)


def test_a_validation_between_two_rows_changes_none_of_them(tiny_config, tmp_path):
    rows = {}
    for every in (3, 16):
        config = dataclasses.replace(
            tiny_config, valid_every=every, l1_coefficient=0.3, learning_rate=1e-2, reinit=0.3
        )
        _, log = results.load_run(train(config, tmp_path / str(every), quiet=True))
        keep = (log["split"] == "train") & (log["metric"] != "tokens_per_second")
        rows[every] = log[keep].reset_index(drop=True)
    assert (rows[16]["metric"] == "dead_fraction").sum() == 8
    pd.testing.assert_frame_equal(rows[3], rows[16])


def test_an_evaluation_leaves_counters_as_they_were(tiny_config):
    model = SparseLlamaForCausalLM(tiny_config.model_config())
    _, _, blocks = tiny_config.prepare_text()
    evaluate(model, blocks)
    assert all(
        ffn.stats.histogram is None and ffn.stats.neuron_counts is None for ffn in model.ffns
    )
    model.train()(input_ids=blocks.draw([0]))
    counted = [(ffn.stats.neuron_counts, ffn.stats.histogram) for ffn in model.ffns]
    evaluate(model, blocks)
    assert all(
        a is b
        for ffn, pair in zip(model.ffns, counted, strict=True)
        for a, b in zip((ffn.stats.neuron_counts, ffn.stats.histogram), pair, strict=True)
    )
    assert counted[0][1].sum() == tiny_config.context


@pytest.mark.parametrize("gated", [True, False])
def test_reinitialisation_mixes_noise_into_dead_rows_alone(tiny_config, gated):
    model = SparseLlamaForCausalLM(dataclasses.replace(tiny_config, gated=gated).model_config())
    weights = [(ffn.gate_proj or ffn.up_proj).weight for ffn in model.ffns]
    before = {name: p.clone() for name, p in model.named_parameters()}
    dead = [torch.rand(96) < 0.3 for _ in weights]
    changed = ["gate_proj" if gated else "up_proj"]
    reinitialize(model, dead, 0.25, [5, 1])
    for name, parameter in model.named_parameters():
        if not any(part in name for part in changed):
            assert torch.equal(parameter, before[name]), name
    for layer, (weight, rows) in enumerate(zip(weights, dead, strict=True)):
        old = before[f"model.layers.{layer}.mlp.{changed[0]}.weight"]
        assert torch.equal(weight[~rows], old[~rows])
        noise = (weight[rows] - 0.75 * old[rows]) / 0.25
        assert (
            noise.std().item() == pytest.approx(0.02, rel=0.15) and abs(noise.mean().item()) < 0.002
        )
    again = SparseLlamaForCausalLM(dataclasses.replace(tiny_config, gated=gated).model_config())
    again.load_state_dict(before | {"lm_head.weight": before["model.embed_tokens.weight"]})
    reinitialize(
        again, dead, 0.25, [5, 1]
    )  # the noise follows from the seed alone: the same on every process
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    reinitialize(again, dead, 0.25, [5, 2])
    assert not torch.equal((again.ffns[0].gate_proj or again.ffns[0].up_proj).weight, weights[0])


def test_reinitialisation_revives_neurons_once_a_window(tiny_config, tmp_path):
    killing = dataclasses.replace(
        tiny_config, l1_coefficient=1.0, tokens=64 * 512, learning_rate=1e-2
    )
    dead = {}
    for share in (0.0, 0.5):
        _, log = results.load_run(
            train(dataclasses.replace(killing, reinit=share), tmp_path / str(share), quiet=True)
        )
        dead[share] = series(log, "dead_fraction").groupby("step").mean()
    assert len(dead[0.5]) == 16
    first = dead[0.0][dead[0.0] > 0].index[0]
    assert (
        dead[0.0].loc[:first] == dead[0.5].loc[:first]
    ).all()  # nothing acts before there are dead neurons
    assert dead[0.5].iloc[-1] < dead[0.0].iloc[-1] - 0.05


@pytest.mark.parametrize("kind", ["gated", "not gated", "SiLU"])
def test_balance_gives_columns_one_length_and_leaves_the_outputs(tiny_config, kind):
    changes = {"gated": kind != "not gated", "activation": "silu" if kind == "SiLU" else "relu"}
    model = (
        SparseLlamaForCausalLM(dataclasses.replace(tiny_config, **changes).model_config())
        .double()
        .train()
    )
    for ffn in model.ffns:
        columns = ffn.down_proj.weight
        columns.data *= torch.rand(columns.shape[1]).mul(3).exp()
        columns.data[:, 5] = 0
        ffn.up_proj.bias = torch.nn.Parameter(torch.randn(columns.shape[1], dtype=torch.double))
    tokens = torch.randint(0, 300, (2, 16))
    before = model(input_ids=tokens, labels=tokens)
    counted = [ffn.stats.take()[0] for ffn in model.ffns]
    balance(model)
    after = model(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-9, atol=1e-12)
    assert all(
        torch.equal(ffn.stats.take()[0], counts)
        for ffn, counts in zip(model.ffns, counted, strict=True)
    )
    assert abs(after.l1 / before.l1 - 1) > 0.1
    for ffn in model.ffns:
        lengths = ffn.down_proj.weight.norm(dim=0)
        expected = torch.full_like(lengths, 0.02 * 32**0.5).index_fill(0, torch.tensor(5), 0.0)
        torch.testing.assert_close(lengths, expected, rtol=1e-9, atol=0)


def test_balanced_training_ends_with_columns_of_one_length(tiny_config, tmp_path):
    spread = {}
    for every in (0, 2):
        model, _ = load(
            train(
                dataclasses.replace(tiny_config, balance_every=every),
                tmp_path / str(every),
                quiet=True,
            )
        )
        lengths = torch.stack([ffn.down_proj.weight.detach().norm(dim=0) for ffn in model.ffns])
        spread[every] = float(lengths.max() / lengths.min())
    assert spread[2] < 1 + 1e-5 < spread[0]


def test_compiled_layers_are_computed_again_too(tiny_config, tmp_path, monkeypatch):
    passes, plain = [], train_module.checkpoint

    def counted(function, *args, **kwargs):
        def forward(*args, **kwargs):
            passes.append(torch.is_grad_enabled())
            return function(*args, **kwargs)

        return plain(forward, *args, **kwargs)

    monkeypatch.setattr(train_module, "checkpoint", counted)
    config = dataclasses.replace(
        tiny_config, tokens=3 * 512, compile=True, checkpoint_activations=True
    )
    train(config, tmp_path / "run", quiet=True)
    torch.compiler.reset()
    assert (
        sum(passes) == 2 * 2 * 3
    )  # with gradients: both layers, forward and again, in three steps


@torch._dynamo.config.patch(optimize_ddp=True)
def test_what_ddp_is_told(tiny_config, tmp_path, monkeypatch):
    made, whole = [], []

    def noting(**options):
        made.append(Accelerator(**options))
        return made[-1]

    monkeypatch.setattr(train_module, "Accelerator", noting)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    for compiled in (False, True):
        config = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0, compile=compiled)
        train(config, tmp_path / str(compiled), quiet=True)
        whole.append(torch._dynamo.config.optimize_ddp is False)
    told = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    assert [accelerator.ddp_handler.to_kwargs() for accelerator in made] == [told, told]
    assert whole == [
        False,
        True,
    ]  # compiled layers are not cut into DDP's buckets; else the setting is left alone


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_activations": True},
        {"compile": True},
        {"compile": True, "checkpoint_activations": True},
        {"micro_batch": 5},
    ],
)
def test_other_ways_to_compute_change_nothing(tiny_config, tmp_path, changes):
    short = dataclasses.replace(
        tiny_config, tokens=3 * 512, log_every=1, dead_window_tokens=512, reinit=0.1
    )
    one = results.load_run(train(short, tmp_path / "one", quiet=True))[1]
    other = results.load_run(
        train(dataclasses.replace(short, **changes), tmp_path / "other", quiet=True)
    )[1]
    torch.compiler.reset()
    for split, metrics in (
        ("train", ["loss", "cross_entropy", "l1", "grad_norm", "active_mean", "dead_fraction"]),
        ("valid", ["cross_entropy", "cross_entropy_silenced", "active_mean"]),
    ):
        for metric in metrics:
            np.testing.assert_allclose(
                series(one, metric, split), series(other, metric, split), rtol=2e-4, err_msg=metric
            )


def test_bf16_autocast_trains_close_to_fp32(tiny_config, tmp_path):
    run = train(dataclasses.replace(tiny_config, precision="bf16"), tmp_path / "run", quiet=True)
    exact = train(tiny_config, tmp_path / "exact", quiet=True)
    loss, expected = (series(results.load_run(path)[1], "cross_entropy") for path in (run, exact))
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    assert not np.allclose(loss, expected, rtol=1e-6)  # it did compute in bf16
    assert load(run)[0].dtype == torch.float32  # weights stay fp32


# Accelerate shards on accelerators only; this turns its FSDP2 on for processes on the CPU, and checks that it is.
LAUNCHED = """
import sys
import accelerate
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from twell import train
from twell.__main__ import main

def sharded(**options):
    accelerator = accelerate.Accelerator(**options)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    return accelerator

def run(self, resume, train_run=train._Run.train):
    weight = self.model.ffns[0].gate_proj.weight
    assert self.accelerator.num_processes == 2
    assert not fsdp or weight.to_local().shape[0] * 2 == weight.shape[0]
    assert fsdp or (self.wrapped.gradient_as_bucket_view and not self.wrapped.broadcast_buffers)
    return train_run(self, resume)

fsdp = sys.argv.pop(1) == "fsdp2"
train._Run.train = run
if fsdp:
    train.Accelerator = sharded
PRELUDE
sys.exit(main(sys.argv[1:]))
"""


def launch(tmp_path, name, kind, *arguments, prelude=""):
    """Train by the command line in two processes on the CPU, after `prelude`; returns the run's log and model."""
    (tmp_path / "launched.py").write_text(LAUNCHED.replace("PRELUDE", prelude))
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(results.root()),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [
        str(tmp_path / "launched.py"),
        kind,
        "train",
        str(tmp_path / "config.yaml"),
        "--out",
        str(tmp_path / name),
    ]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return results.load_run(tmp_path / name)[1], load(tmp_path / name)[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_losses_of_one(tiny_config, tmp_path, kind):
    settings = {
        "tokens": 8 * 512,
        "micro_batch": 3,
        "reinit": 0.3,
        "checkpoint_every": 4,
        "learning_rate": 1e-2,
    }
    settings["balance_every"] = 3
    config = dataclasses.replace(tiny_config, **settings)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    one = results.load_run(train(config, tmp_path / "one", quiet=True))[1]
    two, model = launch(tmp_path, "two", kind)
    for split, metrics in (
        ("train", ["loss", "cross_entropy", "l1", "grad_norm", "active_mean", "dead_fraction"]),
        ("valid", ["cross_entropy", "cross_entropy_silenced", "active_mean"]),
    ):
        for metric in metrics:
            np.testing.assert_allclose(
                series(two, metric, split), series(one, metric, split), rtol=3e-4, err_msg=metric
            )
    for (name, a), (_, b) in zip(
        model.state_dict().items(), load(tmp_path / "one")[0].state_dict().items(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4, msg=name)


# --- stopping and going on


def test_kills_and_exact_resumes(tiny_config, tmp_path):
    settings = {
        "checkpoint_every": 2,
        "log_every": 2,
        "tokens": 48 * 512,
        "l1_warmup_steps": 20,
        "reinit": 0.1,
    }
    settings["balance_every"] = 3
    config = dataclasses.replace(tiny_config, **settings)
    config.prepare_text()
    rounds = list(kill_rounds(config, tmp_path, 5))
    assert len(rounds) == 5


def stop_after(monkeypatch, step):
    """Let a training stop, as if killed, right after the checkpoint of a step."""
    save = train_module._Run.save_checkpoint

    def save_and_stop(self, now):
        save(self, now)
        if now == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_module._Run, "save_checkpoint", save_and_stop)


def test_resume_continues_and_rewrites_rows_after_the_checkpoint(
    tiny_config, tmp_path, monkeypatch
):
    config = dataclasses.replace(tiny_config, checkpoint_every=8)
    whole = train(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 8)
        train(config, tmp_path / "run", quiet=True)
    with open(tmp_path / "run" / "log.csv", "a") as log:
        log.write("12,6144,train,,loss,1")  # a row that a kill cut short
    assert train(config, tmp_path / "run", resume=True, quiet=True) == tmp_path / "run"
    assert differences(tmp_path / "run", whole) == []
    stamp = (tmp_path / "run" / "log.csv").stat().st_mtime_ns
    train(config, tmp_path / "run", resume=True, quiet=True)  # complete: left as it is
    assert (tmp_path / "run" / "log.csv").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="run of another configuration: seed was 0 and is 1"):
        train(dataclasses.replace(config, seed=1), tmp_path / "run", resume=True, quiet=True)


def test_only_a_run_is_resumed(tiny_config, tmp_path, capsys):
    short = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(
            FileNotFoundError, match="holds no run to resume: start it without --resume"
        ):
            train(short, folder, resume=True)
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match="--resume goes on with a run and --overwrite deletes it"):
        train(short, tmp_path / "run", resume=True, overwrite=True)
    results.write_run(
        tmp_path / "run", dataclasses.asdict(short), results.provenance()
    )  # and then it was killed
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(short, tmp_path / "run")
    capsys.readouterr()
    train(short, tmp_path / "run", resume=True)
    assert "run has no checkpoint yet: it starts from the beginning\n" in capsys.readouterr().out
    assert results.load_run(tmp_path / "run")[0]["complete"]


def test_ctrl_c_saves_a_checkpoint_between_two_rows(tiny_config, tmp_path, monkeypatch, capfd):
    whole = train(tiny_config, tmp_path / "whole", quiet=True)
    step = train_module._Run.step

    def press(self, now):
        if now == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, now)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(train_module._Run, "step", press)
        train(
            tiny_config, tmp_path / "run"
        )  # rows are written every four steps, and no checkpoint is asked for
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    said = f"interrupted; {checkpoint} has step 6 of 16. To go on, give the same command with --resume, and without --overwrite"
    assert (
        str(stopped.value) == said
        and "stopping after this step with a checkpoint" in capfd.readouterr().err
    )
    assert signal.getsignal(signal.SIGINT) is before and checkpoint.is_file()
    train(tiny_config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "run", whole) == []


def test_a_second_ctrl_c_stops_at_once(tiny_config, tmp_path, monkeypatch):
    def press(self, now):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("still there")

    monkeypatch.setattr(train_module._Run, "step", press)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config, tmp_path / "run", quiet=True)
    assert (
        not list((tmp_path / "run").glob("checkpoint*"))
        and not (tmp_path / "run" / "train.lock").exists()
    )


def test_one_process_trains_in_a_folder(tiny_config, tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    with lock.hold(folder):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(FileExistsError, match=f"run is held by process {os.getpid()} on "):
                train(tiny_config, folder, quiet=True, **options)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_provenance_has_every_start(tiny_config, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_config, checkpoint_every=4)
    for commit, last in (("first", 4), ("second", 12)):
        monkeypatch.setenv("TWELL_COMMIT", commit)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stop_after(patch, last)
            train(config, tmp_path / "run", resume=commit == "second", quiet=True)
        if commit == "first":  # a file of an older version
            path = tmp_path / "run" / "provenance.json"
            path.write_text(
                json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "starts"})
            )
            assert results.load_provenance(tmp_path / "run")["starts"][0]["commit"] == "first"
    monkeypatch.setenv("TWELL_COMMIT", "third")
    train(config, tmp_path / "run", resume=True, quiet=True)
    row = results.load_provenance(tmp_path / "run")
    assert [start["commit"] for start in row["starts"]] == ["first", "second", "third"]
    assert [start.get("step") for start in row["starts"]] == [None, 4, 12] and row[
        "commit"
    ] == "third"
    assert all(
        start["device"] and start["versions"] and start["command"] and start["date"]
        for start in row["starts"]
    )


def test_damaged_checkpoints_are_named(tiny_config, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_config, checkpoint_every=8)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 8)
        train(config, tmp_path / "run", quiet=True)
    checkpoint, log = tmp_path / "run" / "checkpoint.pt", tmp_path / "run" / "log.csv"
    (tmp_path / "run" / "checkpoint-previous.pt").unlink(missing_ok=True)
    whole, rows = checkpoint.read_bytes(), log.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nothing", b""):
        checkpoint.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged or cut short"):
            train(config, tmp_path / "run", resume=True, quiet=True)
        assert checkpoint.read_bytes() == damaged and log.read_bytes() == rows
    checkpoint.write_bytes(whole)
    log.write_bytes(rows[:-100])
    with pytest.raises(ValueError, match=r"log\.csv is shorter than the checkpoint says"):
        train(config, tmp_path / "run", resume=True, quiet=True)
    log.write_bytes(rows.replace(b",train,", b",trial,", 1))
    with pytest.raises(
        ValueError, match=r"log\.csv is damaged: .*put back a copy, or start again with --overwrite"
    ):
        train(config, tmp_path / "run", resume=True, quiet=True)


def test_the_last_good_checkpoint_is_kept_and_used(tiny_config, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(tiny_config, checkpoint_every=4, log_every=2)
    whole = train(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 12)
        train(config, tmp_path / "run", quiet=True)
    last, previous = (tmp_path / "run" / name for name in results.CHECKPOINTS)
    assert len(list((tmp_path / "run").glob("*checkpoint*"))) == 2
    assert [torch.load(path, weights_only=True)["step"] for path in (last, previous)] == [12, 8]
    data = bytearray(last.read_bytes())
    for place in np.random.default_rng(0).integers(0, len(data), 400):
        data[place] ^= 255
    last.write_bytes(data)
    capsys.readouterr()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 12)
        train(config, tmp_path / "run", resume=True)
    said = capsys.readouterr().out
    assert f"{last} is damaged" in said and f": going on from {previous}, step 8\n" in said
    assert [torch.load(path, weights_only=True)["step"] for path in (last, previous)] == [12, 8]
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "run", whole) == []


def test_a_checkpoint_or_provenance_of_something_else_is_named(tiny_config, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_config, checkpoint_every=8)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 8)
        train(config, tmp_path / "run", quiet=True)
    checkpoint, provenance = (
        tmp_path / "run" / "checkpoint.pt",
        tmp_path / "run" / "provenance.json",
    )
    whole = torch.load(checkpoint, weights_only=True)
    del whole["sealed"]  # as older versions wrote it
    for state, words in (
        (whole | {"window": 1, "sparse": 1}, None),
        ([1], "step, model"),
        ({"step": 8}, "model, opti"),
    ):
        if words is None:
            del state["sparse"]
            words = "sparse"
        torch.save(state, checkpoint)
        with pytest.raises(
            ValueError, match=rf"checkpoint\.pt is no checkpoint of a run: it has no {words}"
        ):
            train(config, tmp_path / "run", resume=True, quiet=True)
    for text in ("", "[1]"):
        provenance.write_text(text)
        with pytest.raises(ValueError, match=r"provenance\.json is n"):
            train(config, tmp_path / "run", resume=True, quiet=True)


def test_a_run_goes_on_with_its_configuration_and_text_alone(
    tiny_config, tiny_text, tmp_path, monkeypatch
):
    text = shutil.copy(tiny_text, tmp_path / "text.jsonl")
    config = dataclasses.replace(tiny_config, source=str(text), checkpoint_every=8)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 8)
        train(config, tmp_path / "run", quiet=True)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}

    edited = dataclasses.replace(config, seed=7)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(edited)))
    with pytest.raises(
        ValueError,
        match=r"checkpoint\.pt was written with another configuration: seed was 0 and is 7; ",
    ):
        train(edited, tmp_path / "run", resume=True, quiet=True)
    (tmp_path / "run" / "config.yaml").write_bytes(before[tmp_path / "run" / "config.yaml"])

    text.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    with pytest.raises(
        ValueError,
        match=r"the text of \S*run has changed since .* validation and training tokens differ",
    ):
        train(config, tmp_path / "run", resume=True, quiet=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before

    shutil.copy(tiny_text, text)
    for name in ("provenance.json", "checkpoint.pt"):  # of an older version
        path = tmp_path / "run" / name
        if name == "checkpoint.pt":
            state = torch.load(path, weights_only=True)
            torch.save(
                {name: state[name] for name in state if name not in ("config", "sealed")}, path
            )
        else:
            path.write_text(
                json.dumps(
                    {k: v for k, v in json.loads(path.read_text()).items() if k != "text_sha256"}
                )
            )
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert results.load_run(tmp_path / "run")[0]["complete"]


def test_a_log_that_is_deleted_ends_the_training(tiny_config, tmp_path, monkeypatch):
    record = train_module._Run.record

    def delete_and_record(self, step, means):
        if step == 8:
            (self.folder / "log.csv").unlink()
        record(self, step, means)

    monkeypatch.setattr(train_module._Run, "record", delete_and_record)
    with pytest.raises(OSError, match=r"log\.csv could not be written: No such file"):
        train(tiny_config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "log.csv").exists()


def test_a_model_folder_that_is_a_link_stays_one(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    train(short, tmp_path / "run", quiet=True)
    shutil.move(tmp_path / "run" / "model", tmp_path / "elsewhere")
    (tmp_path / "run" / "model").symlink_to(tmp_path / "elsewhere")
    train(short, tmp_path / "run", overwrite=True, quiet=True)
    assert (tmp_path / "run" / "model").is_symlink() and (
        tmp_path / "elsewhere" / "model.safetensors"
    ).is_file()


def test_a_resume_without_a_log_says_what_to_put_back(tiny_config, tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    (folder / "log.csv").unlink()
    with pytest.raises(
        FileExistsError, match=r"has no log\.csv\), so it is left alone: put back a copy of it"
    ):
        train(tiny_config, folder, resume=True, quiet=True)


@pytest.mark.parametrize(
    "changes", [{"micro_batch": 3}, {"micro_batch": 16, "reinit": 0.3, "balance_every": 3}]
)
def test_resumes_with_micro_batches_are_exact(tiny_config, tmp_path, monkeypatch, changes):
    config = dataclasses.replace(
        tiny_config, checkpoint_every=4, l1_zero_steps=3, l1_warmup_steps=20, **changes
    )
    whole = train(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 12)
        train(config, tmp_path / "run", quiet=True)
    assert differences(train(config, tmp_path / "run", resume=True, quiet=True), whole) == []


def stream_config(tiny_config, tiny_text, folder):
    """The tiny configuration, streaming its text from a folder as from the hub, with a given tokenizer."""
    folder.mkdir()
    (folder / "part.jsonl").write_bytes(tiny_text.read_bytes())
    tiny_config.prepare_text()[0].save_pretrained(folder.parent / "tokenizer")
    given = {"source": f"hf:{folder}", "tokenizer": str(folder.parent / "tokenizer")}
    return dataclasses.replace(tiny_config, checkpoint_every=8, valid_tokens=320, **given)


def test_streamed_training_resumes_exactly(tiny_config, tiny_text, tmp_path, monkeypatch):
    config = stream_config(tiny_config, tiny_text, tmp_path / "hub")
    whole = train(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 8)
        train(config, tmp_path / "run", quiet=True)
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "run", whole) == []


def test_the_papers_setting_starts(tiny_config, tiny_text, tmp_path):
    """Three steps of the profile `paper` with its own schedule, accumulation, precision and streaming, in small."""
    paper = TrainConfig.load("paper")
    table2 = {
        row.metric: row.value
        for row in results.paper(source="Table 2", model="all (gated)").itertuples()
    }
    assert (
        paper.hidden_size == table2["hidden_size"]
        and paper.intermediate_size == table2["intermediate_size"]
    )
    assert paper.num_heads == table2["num_heads"] and paper.vocab_size == table2["vocab_size"]
    assert (
        paper.context == table2["max_seq_len"] and paper.batch_tokens == table2["tokens_per_step"]
    )
    assert (
        paper.learning_rate == table2["learning_rate"]
        and paper.warmup_steps == table2["warmup_steps"]
    )
    assert (paper.adam_beta1, paper.adam_beta2, paper.adam_epsilon) == (
        0.9,
        0.95,
        table2["adam_eps"],
    )
    assert (
        paper.weight_decay == table2["weight_decay"]
        and paper.max_grad_norm == table2["max_grad_norm"]
    )
    assert (
        paper.rope_theta == table2["rope_theta"]
        and paper.l1_coefficient == 2e-5
        and paper.num_layers == 28
    )
    assert [TrainConfig.load(size).steps for size in ("0.5b", "1b", "1.5b", "2b")] == [
        10000,
        20000,
        30000,
        40000,
    ]
    local = stream_config(tiny_config, tiny_text, tmp_path / "hub")
    small = {
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_layers": 2,
        "num_heads": 2,
        "context": 32,
    }
    small |= {
        "batch_tokens": 32 * 64,
        "tokens": 3 * 32 * 64,
        "source": local.source,
        "tokenizer": local.tokenizer,
    }
    small |= {
        "vocab_size": 320,
        "valid_tokens": 320,
        "log_every": 1,
        "checkpoint_every": 0,
        "compile": False,
    }
    run = train(dataclasses.replace(paper, **small), tmp_path / "run", quiet=True)
    _, log = results.load_run(run)
    np.testing.assert_allclose(
        series(log, "lr"), [1e-3 * step / 600 for step in (0, 1, 2)], rtol=1e-5
    )
    assert series(log, "loss").iloc[0] == pytest.approx(np.log(320), rel=0.02)


def test_transformers_trainer_has_the_same_loss_curve(tiny_config, tmp_path):
    from torch.utils.data import Dataset, SequentialSampler
    from transformers import Trainer, TrainingArguments

    config = dataclasses.replace(tiny_config, log_every=1)
    ours = results.load_run(train(config, tmp_path / "ours", quiet=True))[1]
    _, blocks, _ = config.prepare_text()

    class Drawn(Dataset):
        def __len__(self):
            return config.steps * 16

        def __getitem__(self, number):
            tokens = blocks.draw([number])[0]
            return {"input_ids": tokens, "labels": tokens}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=config.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        lr_scheduler_type="cosine",
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    set_seed(config.seed)
    model = SparseLlamaForCausalLM(config.model_config(bos_token_id=0, eos_token_id=0))
    trainer = InOrder(model=model, args=arguments, train_dataset=Drawn())
    trainer.train()
    theirs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    np.testing.assert_allclose(theirs, series(ours, "loss"), rtol=2e-3)
