"""Configurations: the files that are kept load, and mistakes are named."""

import dataclasses
import math
import re

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
    assert TrainConfig.load("quick", ["micro_batch=null"]).micro_batch is None
    config = TrainConfig.load("quick", ["micro_batch=1", "max_grad_norm=.inf"])
    assert config.max_grad_norm == math.inf  # no clipping
    for name, hint in (("nothere", ""), ("quik", r" \(did you mean quick\?\)")):
        message = f"no configuration {name}{hint}: it is no file and none of .*quick"
        with pytest.raises(FileNotFoundError, match=message):
            TrainConfig.load(name)


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


MISTAKES = r"""
l1_coeficient=1 | unknown field 'l1_coeficient' .* did you mean 'l1_coefficient'
l1=3e-3 | unknown field 'l1' .* did you mean 'l1_coefficient'
1=2 | unknown field '1' .* there are vocab_size
l1_coefficient=-1 | l1_coefficient is -1.0; .* 0 or more
l1_coefficient=.inf | l1_coefficient is inf
l1_coefficient=[1e-3,0.2] | l1_coefficient is \['1e-3', 0\.2\]; expected float
tokens=many | tokens is 'many'; expected int
seed=1.5 | seed is 1.5; expected int
seed=true | seed is True; expected int
seed=4294967296 | seed is 4294967296; .* below 2\^32
gated=3 | gated is 3; expected bool
balance_every=5 gated=false activation=silu | balance_every is 5; .* not 'silu'
balance_every=5 gated=false threshold=0.1 | balance_every is 5; .* not 'relu above 0.1'
active_share=1.5 | active_share is 1.5
active_share=0.1 l1_coefficient=0 | active_share is 0.1, and l1_coefficient 0; give
active_share=0.5 l1_coefficient=0 threshold=1 | active_share is 0.5, .* less than half
active_share=0.1 l1_coefficient=0 threshold=1 compile=true backend=auto | not 'auto'
l1_growth=1 | l1_growth is 1.0
l1_growth=.inf | l1_growth is inf
sampled_share=0.95 | sampled_share is 0.95
sampled_share=0.5 | sampled_share is 0.5; only `twell relufy`
samples=a.jsonl | samples is 'a.jsonl'; only `twell relufy`
sampled_chat=true | sampled_chat is True; only `twell relufy`
fit_tokens=512 | fit_tokens is 512; only `twell relufy`
hidden_weight=1 | hidden_weight is 1.0; only `twell relufy`
source=hf:a valid_source=b | valid_source is b; a stream
batch_tokens=1000 | batch_tokens 1000 is no multiple of context 128
num_heads=3 | hidden_size 128 and num_heads 3
hidden_size=36 num_heads=4 | heads of 9; rotary positions need an even number
checkpoint_every=5 | checkpoint_every 5 is no multiple of log_every 10
valid_tokens=127 | valid_tokens 127
precision=fp8 | precision is 'fp8'; it has to be 'fp32' or 'bf16'
reinit=1.5 | reinit is 1.5
micro_batch=0 | micro_batch is 0; it has to be at least 1
context=1 | context is 1; it has to be at least 2
learning_rate=.inf | learning_rate is inf
rope_theta=.nan | rope_theta is nan; it has to be more than 0
adam_epsilon=0 | adam_epsilon is 0.0
adam_beta1=1 | adam_beta1 is 1.0
source='' | source is ''
seed=2001-13-01 | 'seed=2001-13-01' is no YAML value
nonsense | 'nonsense' is no override; write key=value
seed=1 seed=2 | seed is given twice: seed=1 and seed=2
seed=[1 | 'seed=\[1' is no YAML value
tokens=128 batch_tokens=128 | warmup_steps is 30 and the run has 1 steps
l1_coefficient=1 l1_zero_steps=480 | l1_zero_steps is 480 and the run has 480 steps
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_mistakes_are_named(line):
    overrides, words = line.split(" | ")
    with pytest.raises(ValueError, match=words):
        TrainConfig.load("quick", overrides.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: {folder}/a.yaml", r"a\.yaml is its own base"),
        ("base: 3", "base is 3"),
        ("1: 2", "unknown field 1 in the configuration"),
        ("seed: [", r"a\.yaml cannot be read as YAML"),
        ("- seed", r"a\.yaml is no configuration"),
    ],
)
def test_mistakes_of_a_file_are_named(tmp_path, text, words):
    (tmp_path / "a.yaml").write_text(text.format(folder=tmp_path))
    with pytest.raises(ValueError, match=words):
        TrainConfig.load(tmp_path / "a.yaml")


REMARKS = [
    ({}, []),
    ({"warmup_steps": 15, "l1_warmup_steps": 16, "reinit": 0.1, "balance_every": 16}, []),
    ({"l1_zero_steps": 600, "l1_warmup_steps": 5, "l1_coefficient": 0.0}, []),
    ({"warmup_steps": 16}, ["16 steps .* 94% of 0.005"]),
    ({"l1_zero_steps": 6, "l1_warmup_steps": 20}, ["16 steps.*50% of l1_coefficient"]),
    ({"reinit": 0.1, "dead_window_tokens": 2**20}, ["reinit 0.1 never acts"]),
    ({"balance_every": 17}, ["balance_every 17 never acts"]),
    ({"active_share": 0.1, "l1_zero_steps": 15, "l1_stage_steps": 4}, ["active_share 0.1 never"]),
    ({"active_share": 0.1, "l1_zero_steps": 3, "l1_stage_steps": 4}, []),
]


@pytest.mark.parametrize(("changes", "words"), REMARKS)
def test_a_schedule_that_the_run_ends_before_is_said(tiny_config, changes, words):
    remarks = dataclasses.replace(tiny_config, **changes).remarks()
    assert len(remarks) == len(words) and all(map(re.search, words, remarks))
