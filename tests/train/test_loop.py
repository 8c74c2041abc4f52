"""A run learns, writes what happened, and follows the recipe."""

import dataclasses

import numpy as np
import pytest
import torch
import yaml
from accelerate.utils import set_seed
from transformers import Trainer, TrainingArguments

from tests.factories import train as factory
from tests.factories.train import assert_same_numbers, log_of, series, train_changed, write_config
from tests.kills import differences
from twell import results
from twell.config import TrainConfig, l1_schedule
from twell.models import SparseLlamaForCausalLM, load
from twell.train import loop
from twell.train.dead import DeadWindow, balance, reinitialize


@pytest.fixture
def adamw_step(monkeypatch):
    """Return a function that replaces AdamW's step by a function of (optimizer, step)."""
    step = torch.optim.AdamW.step

    def replace(function):
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *_: function(self, step))

    return replace


def test_a_run_learns_and_leaves_everything(tiny_run, tiny_config):
    row, log = results.load_run(tiny_run)
    assert row["complete"] and row["command"] and row["commit"]
    assert row["versions"]["torch"] == torch.__version__
    assert {field.name for field in dataclasses.fields(TrainConfig)} <= set(row)
    assert yaml.safe_load((tiny_run / "config.yaml").read_text()) == dataclasses.asdict(tiny_config)
    valid = series(log, "cross_entropy", "valid")
    assert list(valid.index.get_level_values("step")) == [0, 8, 16]
    # Before the first step all tokens are equally likely.
    assert valid.iloc[0] == pytest.approx(np.log(320), rel=0.02)
    assert valid.iloc[-1] < valid.iloc[0] - 1.0
    assert list(series(log, "loss").index.get_level_values("step")) == [4, 8, 12, 16]
    windows = series(log, "dead_fraction").groupby("step").size()  # of 2048 tokens
    assert list(windows.index) == [4, 8, 12, 16]
    assert len(series(log, "active_mean")) == 8 and len(series(log, "active_mean", "valid")) == 6
    loss, parts = series(log, "loss"), series(log, "cross_entropy") + 1e-2 * series(log, "l1")
    np.testing.assert_allclose(loss, parts, rtol=1e-5)
    silenced = series(log, "cross_entropy_silenced", "valid")
    assert silenced.index.get_level_values("step").tolist() == [16]


def test_the_schedules_of_learning_rate_and_l1(tiny_config, tmp_path, adamw_step):
    assert [l1_schedule(step, 2, 4) for step in range(1, 9)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert [l1_schedule(step, 2, 0) for step in range(1, 5)] == [0, 0, 1, 1]
    assert l1_schedule(1, 0, 0) == 1
    used = []

    def noting(optimizer, step):
        used.append(optimizer.param_groups[0]["lr"])
        return step(optimizer)

    adamw_step(noting)
    warm = {"warmup_steps": 3, "l1_zero_steps": 2, "l1_warmup_steps": 4}
    log = log_of(tiny_config, tmp_path / "run", tokens=8 * 512, log_every=1, **warm)
    np.testing.assert_allclose(series(log, "lr"), used, rtol=1e-5)  # the one that the step used
    assert used[0] == 0 and max(used) == used[3] == 5e-3 and used[-1] > 0
    share = (series(log, "loss") - series(log, "cross_entropy")) / (1e-2 * series(log, "l1"))
    np.testing.assert_allclose(share, [0, 0, 0.25, 0.5, 0.75, 1, 1, 1], atol=2e-3)


def test_a_last_row_has_the_mean_of_fewer_steps(tiny_config, tmp_path):
    log = log_of(tiny_config, tmp_path / "run", tokens=1024, warmup_steps=600, gated=False)
    valid = series(log, "cross_entropy", "valid")
    assert valid.iloc[-1] != valid.iloc[0]
    assert series(log, "cross_entropy").iloc[-1] == pytest.approx(valid.iloc[-1], rel=0.2)


def test_other_backends_and_precisions_follow_the_dense_one(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=3 * 512, log_every=1)
    dense = log_of(short, tmp_path / "dense")
    run = train_changed(short, tmp_path / "reference", backend="reference")
    config, reference = results.load_run(run)
    np.testing.assert_allclose(series(reference, "loss"), series(dense, "loss"), rtol=1e-4)
    # The run keeps its backend; its model runs anywhere.
    assert config["backend"] == "reference" and load(run)[0].config.ffn_backend == "dense"
    run = train_changed(short, tmp_path / "bf16", precision="bf16")
    loss, expected = series(results.load_run(run)[1], "loss"), series(dense, "loss")
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    assert not np.allclose(loss, expected, rtol=1e-6)  # it did compute in bf16
    assert load(run)[0].dtype == torch.float32  # weights stay fp32


def test_divergence_is_said(tiny_config, tmp_path, adamw_step):
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        train_changed(tiny_config, tmp_path / "run", learning_rate=1e30, tokens=8192)
    assert not results.load_run(tmp_path / "run")[0]["complete"]

    def diverge(optimizer, step):
        step(optimizer)
        torch.nn.init.constant_(optimizer.param_groups[0]["params"][0], torch.nan)

    adamw_step(diverge)
    with pytest.raises(FloatingPointError, match="the validation loss is nan at step 1"):
        train_changed(tiny_config, tmp_path / "last", **factory.SHORT)
    assert not results.load_run(tmp_path / "last")[0]["complete"]


def test_transformers_trainer_has_the_same_loss_curve(tiny_config, tmp_path):
    config = dataclasses.replace(tiny_config, log_every=1, tokens=8 * 512)
    ours = log_of(config, tmp_path / "ours")
    _, blocks, _ = config.prepare_text()
    drawn = [{"input_ids": row, "labels": row} for row in blocks.draw(range(config.steps * 16))]

    same = "learning_rate warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon "
    same += "max_grad_norm"
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=config.steps,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{name: getattr(config, name) for name in same.split()},
    )
    set_seed(config.seed)
    model = SparseLlamaForCausalLM(config.model_config(bos_token_id=0, eos_token_id=0))
    trainer = Trainer(model=model, args=arguments, train_dataset=drawn)
    trainer.train()
    theirs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    np.testing.assert_allclose(theirs, series(ours, "loss"), rtol=2e-3)


@pytest.fixture
def model(request, tiny_config):
    config = dataclasses.replace(tiny_config, **request.param)
    return SparseLlamaForCausalLM(config.model_config())


def test_a_window_spans_steps():
    window = DeadWindow(100)
    counts = lambda *layers: [torch.tensor(layer) for layer in layers]  # noqa: E731
    assert window.add(counts([1, 0, 0], [0, 0, 2]), 60) is None
    again = DeadWindow(100)
    again.restore(window.state(), torch.device("cpu"))
    dead = again.add(counts([0, 3, 0], [0, 0, 1]), 60)
    assert [layer.tolist() for layer in dead] == [[False, False, True], [True, True, False]]
    assert again.add(counts([0, 0, 0], [0, 0, 0]), 99) is None  # the next window starts empty
    assert all(layer.all() for layer in again.add(counts([0, 0, 0], [0, 0, 0]), 1))
    assert again.number == 2


@pytest.mark.parametrize("model", [{"gated": True}, {"gated": False}], indirect=True)
def test_reinitialisation_mixes_noise_into_dead_rows_alone(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    dead = [torch.rand(96) < 0.3 for _ in model.ffns]
    part = "gate_proj" if model.config.gated_mlp else "up_proj"

    def changed(seed):
        model.load_state_dict(before, strict=False)  # without the tied head
        reinitialize(model, dead, 0.25, seed)
        return {name: p.clone() for name, p in model.named_parameters()}

    after, again, other = changed([5, 1]), changed([5, 1]), changed([5, 2])
    for name, old in before.items():
        assert torch.equal(after[name], again[name])  # the same on every process
        if part not in name:
            assert torch.equal(after[name], old), name
    for layer, rows in enumerate(dead):
        name = f"model.layers.{layer}.mlp.{part}.weight"
        new, old = after[name], before[name]
        assert torch.equal(new[~rows], old[~rows]) and not torch.equal(new, other[name])
        noise = (new[rows] - 0.75 * old[rows]) / 0.25
        assert noise.std().item() == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("model", [{"gated": False}, {"activation": "silu"}], indirect=True)
def test_balance_gives_columns_one_length_and_leaves_the_outputs(model):
    model = model.double().train()
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
    assert abs(after.l1 / before.l1 - 1) > 0.1
    for ffn, counts in zip(model.ffns, counted, strict=True):
        assert torch.equal(ffn.stats.take()[0], counts)
        lengths = ffn.down_proj.weight.norm(dim=0)
        expected = torch.full_like(lengths, 0.02 * 32**0.5).index_fill(0, torch.tensor(5), 0.0)
        torch.testing.assert_close(lengths, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("changes", [{"compile": True}, {"micro_batch": 5}])
def test_other_ways_to_compute_change_nothing(tiny_config, tmp_path, monkeypatch, eager, changes):
    passes, plain = [], loop.checkpoint

    def counted(function, *args, **kwargs):
        def forward(*args, **kwargs):
            passes.append(torch.is_grad_enabled())
            return function(*args, **kwargs)

        return plain(forward, *args, **kwargs)

    monkeypatch.setattr(loop, "checkpoint", counted)
    settings = {"tokens": 3 * 512, "log_every": 1, "dead_window_tokens": 512, "reinit": 0.1}
    short = dataclasses.replace(tiny_config, **settings)
    with torch._dynamo.config.patch(optimize_ddp=True):  # put back
        other = log_of(short, tmp_path / "other", checkpoint_activations=True, **changes)
    torch.compiler.reset()
    assert_same_numbers(log_of(short, tmp_path / "one"), other, 2e-4)
    # With gradients: both layers, forward and again, in three steps of one or four passes.
    assert sum(passes) == 2 * 2 * 3 * (1 if "compile" in changes else 4)


# In the same two processes: a run that does not stop, and one that stops at step 4.
STOPPED = """
from tests.factories.train import stop_training
out = sys.argv[4]
config = TrainConfig.load(sys.argv[2])
train(config, out + "-expected", quiet=True)
stop_training(config, out, 4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_resume_exactly_and_give_the_losses_of_one(tiny_config, tmp_path, kind):
    settings = {"tokens": 8 * 512, "micro_batch": 3, "checkpoint_every": 4, "learning_rate": 1e-2}
    settings |= {"reinit": 0.3, "balance_every": 3, "decay_at": "3072"}
    config = dataclasses.replace(tiny_config, **settings)
    write_config(config, tmp_path / "config.yaml")
    one = log_of(config, tmp_path / "one")
    two, model = factory.launch(tmp_path, "two", kind, "--resume", prelude=STOPPED)
    assert differences(tmp_path / "two", tmp_path / "two-expected") == []
    assert_same_numbers(two, one, 3e-4)
    copy = load(tmp_path / "two" / "model-at-3072")[0]
    for found, of in ((model, "model"), (copy, "model-at-3072")):
        expected = load(tmp_path / "one" / of)[0].state_dict()
        torch.testing.assert_close(found.state_dict(), expected, rtol=0, atol=2e-4)
