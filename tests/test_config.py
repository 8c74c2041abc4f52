"""Configurations: the files that are kept load, and mistakes are named."""

import dataclasses
import math

import pytest

from twell import results
from twell.config import CONFIGS, TrainConfig, l1_schedule


def test_configurations_load(tmp_path):
    overrides = ["l1_coefficient=3e-4", "tokens=1e6", "valid_source=null", "seed='7'"]
    config = TrainConfig.load("quick", overrides)
    assert (config.l1_coefficient, config.tokens, config.seed) == (3e-4, 1_000_000, 7)
    assert config.hidden_size == 128 and config.valid_source is None
    (tmp_path / "child.yaml").write_text(f"base: {CONFIGS / 'quick.yaml'}\nseed: 9\n")
    expected = dataclasses.replace(TrainConfig.load("quick"), seed=9)
    assert TrainConfig.load(tmp_path / "child.yaml") == expected
    assert TrainConfig.load("quick", ["max_grad_norm=.inf"]).max_grad_norm == math.inf


def test_every_configuration_that_is_kept_still_loads():
    kept = [*CONFIGS.glob("*.yaml"), *(results.root() / "data" / "runs").glob("*/config.yaml")]
    assert len(kept) > 50
    for file in kept:
        config = TrainConfig.load(file)
        assert l1_schedule(config.steps, config.l1_zero_steps, config.l1_warmup_steps) > 0, file


def test_the_paper_configuration_is_table_2():
    table = results.paper().query("source == 'Table 2' and model == 'all (gated)'")
    table = table.set_index("metric")["value"]
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


# Overrides, and what the error names.
MISTAKES = r"""
l1_coeficient=1 | 'l1_coeficient'; .*l1_coefficient
l1_coefficient=-1 | l1_coefficient is -1.0
tokens=many | tokens is 'many'
gated=3 | gated is 3
rope_theta=.nan | rope_theta is nan
precision=fp8 | precision is 'fp8'
source='' | source is ''
balance_every=5 gated=false activation=silu | balance_every is 5; .* silu
active_share=0.1 l1_coefficient=0 | active_share is 0.1, and l1_coefficient 0
active_share=0.1 l1_coefficient=0 threshold=1 compile=true backend=auto | 'auto'
hidden_weight=1 | hidden_weight is 1.0
decay_at=soon | decay_at is 'soon'; .* '6e7,1.2e8'
decay_at=1e9 | decay_at is '1e9'; .* below the
decay_at=.inf | decay_at is 'inf'; give numbers
decay_at=1 | decay_at is '1'; .* after the warm-up
source=hf:a valid_source=b | valid_source is b
batch_tokens=1000 | batch_tokens 1000 .* context 128
num_heads=3 | hidden_size 128 .* num_heads 3
l1_coefficient=1 l1_zero_steps=480 | l1_zero_steps is 480
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_mistakes_are_named(line):
    overrides, words = line.split(" | ")
    with pytest.raises(ValueError, match=words):
        TrainConfig.load("quick", overrides.split())


@pytest.mark.parametrize("text", ["base: {folder}/a.yaml", "1: 2", "[1, 2]", "seed: ["])
def test_mistakes_of_a_file_are_named(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text.format(folder=tmp_path))
    with pytest.raises(ValueError, match=r"a\.yaml|field 1"):
        TrainConfig.load(tmp_path / "a.yaml")
