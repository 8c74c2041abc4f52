"""A run given away: the weights, rounded once, and a card that says what the log says."""

import dataclasses
import json
import re
import shutil
import stat

import pytest
import torch
import yaml

from tests.factories.trace import aggregate_of
from tests.test_analysis import make_trace
from twell import analysis, load, results
from twell.__main__ import main
from twell.config import TrainConfig
from twell.evaluate import _describe
from twell.trace import Aggregate
from twell.train import evaluate, train


@pytest.fixture(scope="module")
def runs(tiny_config, tmp_path_factory):
    """A sparse run and its dense twin, which was looked at at other steps."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in (
        ("sparse", {"l1_coefficient": 1e-2}),
        ("dense", {"l1_coefficient": 0.0, "valid_every": 5}),
    ):
        train(
            dataclasses.replace(tiny_config, tokens=8 * 512, **changes), folder / name, quiet=True
        )
    return folder


def test_a_run_becomes_a_checkpoint_with_a_card(runs, tmp_path, capsys):
    out = tmp_path / "checkpoint"
    options = ["--text", "nonsense words", "--twin", str(runs / "dense"), "--out", str(out)]
    assert main(["export", str(runs / "sparse"), *options]) == 0
    assert str(out) in capsys.readouterr().out
    model, tokenizer = load(out)
    trained, _ = load(runs / "sparse")
    told = [
        _describe(path, model)["training_tokens"]
        for path in (out, runs / "sparse", runs / "sparse" / "model")
    ]
    assert told == [8 * 512, 8 * 512, None]  # a model that was not exported leaves it to its run
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer("ba de").input_ids) == "ba de"
    for name, weight in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.bfloat16()), name

    card = (out / "README.md").read_text()
    row, log = results.load_run(runs / "sparse")
    dense, twin_log = results.load_run(runs / "dense")
    layers, twin_layers = (
        analysis.logged_layers(table, row["intermediate_size"]) for table in (log, twin_log)
    )
    losses = [
        table.query("split == 'valid' and metric == 'cross_entropy'")["value"].iloc[-1]
        for table in (log, twin_log)
    ]
    assert f"| cross-entropy, nats a token | {losses[0]:.4f} | {losses[1]:.4f} |" in card
    share, twin_share = (
        100 - 100 * table["active_fraction"].mean() for table in (layers, twin_layers)
    )
    assert "| L1 coefficient | 0.01 | 0 |" in card and "\n0.01 on the mean over tokens" in card
    assert f"| inactive | {share:.2f}% | {twin_share:.2f}% |" in card
    assert f"so {share:.1f}% are" in card
    for layer in layers.itertuples():
        assert f"| {layer.layer} | {layer.mean:.3g} | {layer.p99:g} | {layer.max:g} |" in card
    _, _, blocks = TrainConfig.load(runs / "sparse" / "config.yaml").prepare_text()
    stored = evaluate(model, blocks)["cross_entropy"]
    assert f"| the same from the stored weights, in bf16 | {stored:.4f} |  |" in card
    assert f"{len(blocks) * row['context']:,} tokens of held-out text" in card
    price, commit = 100 * (losses[0] / losses[1] - 1), dense["commit"]
    last, empty, line = card.partition("| inactive |")[2].splitlines()[:3]
    twin = f"The twin is the run `dense` of commit {commit}"
    assert not empty and line == f"{twin}; the price is {price:+.2f}% cross-entropy."
    assert "Text: nonsense words" in card and row["command"] in card and row["commit"] in card
    assert yaml.safe_load(card.split("---")[1])["license"] == "apache-2.0"

    assert (
        'twell.load("checkpoint")' in card and str(tmp_path) not in card and str(runs) not in card
    )
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o644}
    counted = Aggregate.load(out / "aggregate.npz")
    assert counted.num_tokens == len(blocks) * row["context"] and counted.meta["run"] == "sparse"

    assert main(["export", str(runs / "sparse"), *options]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_card_names_every_start_and_no_path_of_this_machine(runs, tmp_path, monkeypatch):
    run = shutil.copytree(runs / "sparse", tmp_path / "run")
    aggregate_of(make_trace(0, num_layers=2, intermediate_size=96)[0]).save(run / "aggregate.npz")
    path = run / "provenance.json"
    command = (
        f"python -m twell train quick source={tmp_path / 'texts'} tokenizer=/elsewhere/words "
        f"--out {run}"
    )
    first = results.load_provenance(run)["starts"][0] | {"command": command, "commit": "one"}
    starts = [
        first,
        first | {"commit": "two", "device": "a GPU", "step": 4},
        first | {"commit": "three", "step": 6},
    ]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"starts": starts}))
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "--text", "words", "--out", str(tmp_path / "given")]) == 0
    card = (tmp_path / "given" / "README.md").read_text()
    assert "`python -m twell train quick source=texts tokenizer=words --out run`" in card
    first_resume = "commit one, resumed from step 4 on a GPU, commit two"
    assert f"{first_resume} and from step 6 on {first['device']}, commit three" in card
    copied = (tmp_path / "given" / "aggregate.npz").read_bytes()
    assert copied == (run / "aggregate.npz").read_bytes()


def test_a_card_without_a_twin_names_none(runs, tmp_path):
    options = ["--text", "words", "--out", str(tmp_path / "alone")]
    assert main(["export", str(runs / "sparse"), *options]) == 0
    card = (tmp_path / "alone" / "README.md").read_text()
    assert "The twin" not in card and "its twin" not in card
    assert re.search(r"\| inactive \| [\d.]+% \|\n\n\| layer \|", card)


def test_a_run_whose_text_has_changed_is_not_exported_nor_traced(
    tiny_config, tiny_text, tmp_path, capsys
):
    text = shutil.copy(tiny_text, tmp_path / "text.jsonl")
    config = dataclasses.replace(tiny_config, source=str(text), tokens=512, warmup_steps=0)
    run = train(config, tmp_path / "run", quiet=True)
    trace = ["trace", str(run), "--valid", "--out", str(tmp_path / "out.npz")]
    assert main([*trace, "--aggregate"]) == main(trace) == 0
    text.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    for command in (
        trace,
        [*trace, "--aggregate"],
        ["export", str(run), "--text", "a", "--out", str(tmp_path / "new")],
    ):
        assert main(command) == 2
        assert (
            "run has changed since the run started: its validation and training tokens"
            in capsys.readouterr().err
        )
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_exported_leaves_nothing(runs, tmp_path, capsys, tiny_config):
    origin = runs / "sparse" / "provenance.json"
    whole = origin.read_text()
    options = ["--text", "words", "--out", str(tmp_path / "new")]
    other = train(
        dataclasses.replace(tiny_config, seed=5, tokens=512, warmup_steps=0),
        tmp_path / "other",
        quiet=True,
    )
    assert main(["export", str(runs / "sparse"), "--twin", str(other), *options]) == 2
    assert (
        "is no twin of" in (said := capsys.readouterr().err) and "tokens is 512, not 4096" in said
    )
    try:
        origin.write_text(json.dumps(json.loads(whole) | {"complete": False}))
        assert main(["export", str(runs / "sparse"), *options]) == 2
    finally:
        origin.write_text(whole)
    assert "sparse is not complete" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
