"""A run learns, writes what happened, and follows the recipe."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.train.runs import series, stream_config
from twell import corpus, results
from twell.config import TrainConfig, l1_schedule
from twell.model import SparseLlamaForCausalLM, load
from twell.train import train
from twell.train.loop import Run
from twell.train.validation import evaluate


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


def test_remarks_are_said_at_the_start_of_a_run(tiny_config, tmp_path, capsys):
    config = dataclasses.replace(tiny_config, tokens=1024, warmup_steps=600)
    train(config, tmp_path / "run")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (
        first.startswith(str(tmp_path / "run") + ": ") and second == f"run  {config.remarks()[0]}"
    )
    train(config, tmp_path / "quiet", quiet=True)
    assert capsys.readouterr().out == ""


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


def test_blocks_of_a_run_cover_the_text(tiny_config):
    _, blocks, valid = tiny_config.prepare_text()
    assert isinstance(blocks, corpus.Blocks) and len(valid) == 512 // 32
    drawn = blocks.draw(range(len(blocks))).flatten()
    assert np.array_equal(np.sort(drawn), np.sort(blocks.tokens[: len(blocks) * 32]))


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


def test_bf16_autocast_trains_close_to_fp32(tiny_config, tmp_path):
    run = train(dataclasses.replace(tiny_config, precision="bf16"), tmp_path / "run", quiet=True)
    exact = train(tiny_config, tmp_path / "exact", quiet=True)
    loss, expected = (series(results.load_run(path)[1], "cross_entropy") for path in (run, exact))
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    assert not np.allclose(loss, expected, rtol=1e-6)  # it did compute in bf16
    assert load(run)[0].dtype == torch.float32  # weights stay fp32


def test_a_log_that_is_deleted_ends_the_training(tiny_config, tmp_path, monkeypatch):
    record = Run.record

    def delete_and_record(self, step, means):
        if step == 8:
            (self.folder / "log.csv").unlink()
        record(self, step, means)

    monkeypatch.setattr(Run, "record", delete_and_record)
    with pytest.raises(OSError, match=r"log\.csv could not be written: No such file"):
        train(tiny_config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "log.csv").exists()


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
