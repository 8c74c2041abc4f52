"""Configurations: the files that are kept load, and mistakes are named."""

import dataclasses
import math
import subprocess
import sys

import pytest

from twell import results
from twell.config import CONFIGS, TrainConfig, l1_schedule


def test_configurations_load(tmp_path):
    for file in CONFIGS.glob("*.yaml"):
        assert TrainConfig.load(file.stem).steps > 0
    config = TrainConfig.load("quick", ["l1_coefficient=3e-4", "tokens=1e6", "valid_source=null"])
    assert config.l1_coefficient == 3e-4 and config.tokens == 1_000_000
    assert config.hidden_size == 128
    (tmp_path / "child.yaml").write_text(f"base: {CONFIGS / 'quick.yaml'}\nseed: 9\n")
    expected = dataclasses.replace(TrainConfig.load("quick"), seed=9)
    assert TrainConfig.load(tmp_path / "child.yaml") == expected
    assert TrainConfig.load("quick", ["micro_batch=null"]).micro_batch is None
    config = TrainConfig.load("quick", ["micro_batch=1", "max_grad_norm=.inf"])
    assert config.max_grad_norm == math.inf  # no clipping
    message = "no configuration nothere: it is no file and none of .*quick"
    with pytest.raises(FileNotFoundError, match=message):
        TrainConfig.load("nothere")


@pytest.mark.parametrize(
    ("override", "words"),
    [
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
    ],
)
def test_mistakes_are_named(override, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig.load("quick", override.split())


def test_every_configuration_that_is_kept_still_loads():
    kept = [*CONFIGS.glob("*.yaml"), *(results.root() / "data" / "runs").glob("*/config.yaml")]
    assert len(kept) > 50
    for file in kept:
        config = TrainConfig.load(file)
        assert l1_schedule(config.steps, config.l1_zero_steps, config.l1_warmup_steps) > 0, file


def test_the_paper_configuration_is_table_2():
    table = results.paper(source="Table 2", model="all (gated)").set_index("metric").value
    paper = TrainConfig.load("paper")
    names = (
        "hidden_size intermediate_size num_heads vocab_size learning_rate warmup_steps "
        "weight_decay max_grad_norm rope_theta adam_beta1 adam_beta2"
    )
    for name in names.split():
        assert getattr(paper, name) == table[name], name
    assert paper.context == table["max_seq_len"] and paper.batch_tokens == table["tokens_per_step"]
    assert paper.adam_epsilon == table["adam_eps"]
    assert paper.l1_coefficient == 2e-5 and paper.num_layers == 28
    sizes = {"0.5b": 10_000, "1b": 20_000, "1.5b": 30_000, "2b": 40_000}
    assert {size: TrainConfig.load(size).steps for size in sizes} == sizes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tokens": 512, "warmup_steps": 1},
            r"warmup_steps is 1 and the run has 1 step \(tokens 512, batch_tokens 512\): .* "
            "nothing would be trained; set warmup_steps to 0 or raise tokens",
        ),
        (
            {"tokens": 1, "warmup_steps": 600},
            r"warmup_steps is 600 and the run has 1 step \(tokens 1, ",
        ),
        (
            {"tokens": 2048, "l1_zero_steps": 4},
            r"l1_zero_steps is 4 and the run has 4 steps \(tokens 2048, batch_tokens 512\): "
            r"l1_coefficient 0\.01 would never act; "
            "lower l1_zero_steps, raise tokens or set l1_coefficient to 0",
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
    ("changes", "lines"),
    [
        ({}, []),
        ({"warmup_steps": 15, "l1_warmup_steps": 16, "reinit": 0.1, "balance_every": 16}, []),
        ({"l1_zero_steps": 600, "l1_warmup_steps": 5, "l1_coefficient": 0.0}, []),
        (
            {"warmup_steps": 16, "learning_rate": 1e-3},
            [
                "the run ends within the warm-up of the learning rate (warmup_steps 16, 16 steps): "
                "it reaches 94% of 0.001"
            ],
        ),
        (
            {"l1_zero_steps": 6, "l1_warmup_steps": 20},
            [
                "the run ends within the warm-up of the L1 term "
                "(l1_zero_steps 6, l1_warmup_steps 20, 16 steps): it reaches 50% of l1_coefficient"
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


def test_command_line_reports_one_line(tmp_path):
    command = [sys.executable, "-m", "twell", "train", "quick", "l1_coefficient=-3"]
    command += ["--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    message = "l1_coefficient is -3.0; it has to be a finite number, 0 or more"
    assert done.stderr == f"twell train: {message}\n"
    assert not (tmp_path / "run").exists()


def test_a_configuration_that_is_its_own_base_is_refused(tmp_path):
    for name, base in (("a", tmp_path / "b.yaml"), ("b", tmp_path / "a.yaml"), ("c", 3)):
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}\nseed: 1\n")
    with pytest.raises(ValueError, match=r"a\.yaml is its own base"):
        TrainConfig.load(tmp_path / "a.yaml")
    message = "base is 3; expected the name of a configuration or of a file"
    with pytest.raises(ValueError, match=message):
        TrainConfig.load(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").write_text("1: 2\n")
    with pytest.raises(ValueError, match="unknown field 1 in the configuration"):
        TrainConfig.load(tmp_path / "d.yaml")
