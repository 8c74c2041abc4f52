"""`twell trace`."""

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
