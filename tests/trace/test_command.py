"""`twell trace`."""

import pytest

from twell import models
from twell.__main__ import main
from twell.trace import Aggregate, tracing
from twell.trace.counter import Counter


def test_aggregate_from_the_shell(tiny_run, tmp_path, capsys):
    out, text = tmp_path / "deep" / "a.npz", tmp_path / "text.txt"
    command = ["trace", str(tiny_run), "--aggregate", "--out", str(out)]
    assert main([*command, "--valid", "--tokens", "500"]) == 0
    printed = capsys.readouterr().out
    assert "500 tokens, 2 layers" in printed and f"{out.stat().st_size} bytes" in printed
    counted = Aggregate.load(out)
    assert counted.num_tokens == 500 and counted.lengths.tolist() == [32] * 15 + [20]
    assert counted.meta["run"] == "tiny" and counted.meta["commit"]
    assert counted.meta["l1_coefficient"] == 1e-2
    assert main([*command, "--valid"]) == 0
    assert Aggregate.load(out).num_tokens > 512  # all that is held out
    text.write_text("ba de fun " * 30, encoding="utf-8")
    assert main([*command, "--file", str(text)]) == 0
    assert 30 < Aggregate.load(out).num_tokens < 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--aggregate --valid --tokens 9999999", "9999999 tokens were asked for; there are "),
        ("--aggregate --valid --tokens 0", "0 tokens were asked for"),
        ("--valid --tokens 10", "--tokens and --max-bytes belong to --aggregate"),
        ("--aggregate --valid --max-bytes 5000", "may need 6144 bytes; max_bytes is 5000"),
        ("--aggregate --text EMPTY", "the text is empty"),
        ("--aggregate --file LATIN", "latin.txt is not UTF-8 text: byte 1"),
    ],
)
def test_bad_requests_leave_nothing_behind(tiny_run, tmp_path, capsys, arguments, words):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"a\xe9")
    values = {"EMPTY": "", "LATIN": str(latin)}
    arguments = [values.get(argument, argument) for argument in arguments.split()]
    assert main(["trace", str(tiny_run), *arguments, "--out", str(tmp_path / "a.npz")]) == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["latin.txt"]


def test_interrupted_aggregate_leaves_no_file(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracing, "BATCH_TOKENS", 64)
    end, calls = Counter.end, []

    def interrupted(counter, logprob):
        end(counter, logprob)
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Counter, "end", interrupted)
    out = str(tmp_path / "a.npz")
    assert main(["trace", str(tiny_run), "--aggregate", "--valid", "--out", out]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [] and len(calls) == 3


@pytest.mark.parametrize("kind", [[], ["--aggregate"]])
def test_a_model_without_a_tokenizer_is_refused_at_once(tiny_run, tmp_path, capsys, kind):
    models.load(tiny_run)[0].save_pretrained(tmp_path / "bare")
    out = str(tmp_path / "a.npz")
    assert main(["trace", str(tmp_path / "bare"), *kind, "--text", "a", "--out", out]) == 2
    assert "bare has no tokenizer" in capsys.readouterr().err
