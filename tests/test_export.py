"""A run given away: the weights, rounded once, and a card that says what the log says."""

import json
import shutil

import torch
import yaml

from tests.factories.train import SHORT, series, train_changed
from twell import load, results
from twell.__main__ import main
from twell.trace import Aggregate
from twell.train import evaluate, run_text


def test_a_run_becomes_a_checkpoint_with_a_card(tiny_run, tmp_path, capsys):
    out = tmp_path / "checkpoint"
    options = ["--trained-on", "nonsense words", "--out", str(out)]
    assert main(["export", str(tiny_run), *options]) == 0
    assert str(out) in capsys.readouterr().out
    model, tokenizer = load(out)
    assert model.config.ffn_backend == "auto" and len(model.config.ffn_activity) == 2  # tuned
    assert model.dtype == torch.bfloat16 and model.config.training_tokens == 16 * 512
    assert tokenizer.decode(tokenizer("ba de").input_ids) == "ba de"
    for name, weight in load(tiny_run)[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.bfloat16()), name

    card = (out / "README.md").read_text()
    row, log = results.load_run(tiny_run)
    last = series(log, "cross_entropy", "valid").iloc[-1]
    share = 100 - 100 * series(log, "active_mean", "valid").loc[16].mean() / 96
    blocks = run_text(tiny_run)
    stored = evaluate(model, blocks)["cross_entropy"]
    for line in (
        "| L1 coefficient | 0.01 |",
        f"| cross-entropy, nats a token | {last:.4f} |",
        f"| the same from the stored weights, in bf16 | {stored:.4f} |",
        f"| inactive | {share:.2f}% |",
        f"{len(blocks) * 32:,} tokens of held-out text, in sequences of 32.",
        *("Text: nonsense words", row["command"], row["commit"], 'twell.load("checkpoint")'),
    ):
        assert line in card, line
    assert yaml.safe_load(card.split("---")[1])["license"] == "apache-2.0"
    counted = Aggregate.load(out / "aggregate.npz")
    assert counted.num_tokens == len(blocks) * 32 and counted.meta["run"] == "tiny"

    assert main(["export", str(tiny_run), *options]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_run_has_its_validation_tokens_or_needs_its_text(
    tiny_config, tiny_text, tmp_path, capsys
):
    text = shutil.copy(tiny_text, tmp_path / "text.jsonl")
    run = train_changed(tiny_config, tmp_path / "run", source=str(text), **SHORT)
    trace = ["trace", str(run), "--valid", "--out", str(tmp_path / "out.npz")]
    export = ["export", str(run), "--trained-on", "a", "--out", str(tmp_path / "new")]
    text.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    assert main(trace) == 0
    (run / "valid.npy").write_bytes(b"damaged")  # or of an older version, which wrote none
    for command in (trace, export):
        capsys.readouterr()
        assert main(command) == 2 and str(run) in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    shutil.copy(tiny_text, text)
    assert (main(trace), main(export)) == (0, 0)


def test_runs_that_cannot_be_exported_leave_nothing(tiny_run, tmp_path, capsys):
    out = tmp_path / "new"
    unfinished = shutil.copytree(tiny_run, tmp_path / "unfinished")
    origin = json.loads((unfinished / "provenance.json").read_text()) | {"complete": False}
    (unfinished / "provenance.json").write_text(json.dumps(origin))
    assert main(["export", str(unfinished), "--trained-on", "words", "--out", str(out)]) == 2
    assert not out.exists() and "unfinished is not complete" in capsys.readouterr().err
