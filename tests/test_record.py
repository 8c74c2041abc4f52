"""The recorder trains what is not recorded, with the fields of what is, and goes on."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from scripts import keep, record, trainings
from twell import analysis, results, trace
from twell.config import TrainConfig

COMMANDS = {name: command for group in trainings.GROUPS for name, (command, _) in
            trainings.runs(group).items()}  # fmt: skip


def config_of(command):
    words = command.split()
    return TrainConfig.load(words[2], words[3 : words.index("--out")])


@pytest.mark.parametrize("name", COMMANDS)
def test_trainings_have_the_fields_of_the_recorded_runs(name):
    """Of the same run or, where only another seed is recorded, of that."""
    stem = name.partition("-seed-")[0]
    recorded = sorted(trainings.RECORDED.glob(f"{stem}*/config.yaml"))
    recorded = [path for path in recorded if path.parent.name.partition("-seed-")[0] == stem]
    if not recorded and not name.startswith("flagship"):
        assert "-25m-" in name or "-200m-" in name or "-300m-" in name
        recorded = [trainings.RECORDED / "85m-100m-l1-0-seed-0" / "config.yaml"]
    elif not recorded:
        recorded = [trainings.RECORDED / "flagship-half" / "config.yaml"]
    config = vars(config_of(COMMANDS[name]))
    before = yaml.safe_load(recorded[0].read_text())
    may_differ = {*analysis.MAY_DIFFER, "tokens"} if stem not in str(recorded[0]) else set(
        analysis.MAY_DIFFER) - {"l1_coefficient"}  # fmt: skip
    different = {key for key in before if before[key] != config[key]}
    assert different <= may_differ, different
    assert f"-l1-{analysis.level_name(config['l1_coefficient'])}" in name


def test_recorded_runs_are_no_parts(tmp_path):
    names = list(trainings.runs("sizes"))
    assert trainings.missing("sizes", tmp_path) == sorted(names, key=lambda name: name[-1])
    for name in names[:3]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "provenance.json").touch()
    assert set(trainings.missing("sizes", tmp_path)) == set(names[3:])
    assert not set(names[:3]) & set(trainings.parts(tmp_path))
    assert set(trainings.parts(tmp_path)) >= set(names[3:])


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """A function that runs parts of fake commands, in which a module counts its calls."""
    (tmp_path / "fake.py").write_text(
        "import pathlib, sys, time\n"
        "def note(text): calls.write_text(calls.read_text() + text)\n"
        "calls = pathlib.Path(sys.argv[1])\n"
        "try: note(sys.argv[2]); time.sleep(float(sys.argv[3]))\n"
        "except KeyboardInterrupt: note('!'); sys.exit(130)\n"
    )
    calls = tmp_path / "calls"
    calls.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(record, "wait_for_gpu", lambda gpu: None)
    monkeypatch.setattr(record, "STOPPING", 30)  # on a busy machine it takes seconds

    def call(*arguments, **parts):
        made = {name: (60, [f"fake {calls} {x} --out x" for x in xs]) for name, xs in parts.items()}
        monkeypatch.setattr(record, "PARTS", made)
        monkeypatch.setattr(trainings, "GROUPS", {"group": []})
        monkeypatch.setattr(trainings, "missing", lambda group: list(parts))
        monkeypatch.setattr(sys, "argv", ["record", "group", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as end:
            record.main()
        return end.value.code, calls.read_text()

    return call


def test_parts_go_on_where_they_stopped(recorder, tmp_path, monkeypatch):
    calls = tmp_path / "calls"

    class Process(subprocess.Popen):
        """The time of "c 60" is over once it has begun, however slow the machine is."""

        def wait(self, timeout=None):
            if "60" in self.args and "!" not in calls.read_text() and timeout != record.STOPPING:
                while "c" not in calls.read_text():
                    time.sleep(0.05)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    over = types.SimpleNamespace(monotonic=lambda: 1e6 * ("!" in calls.read_text()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(record, "time", over)
    slow = {"a": ["a 0"], "b": ["b 0", "c 60"], "d": ["d 0"]}
    assert recorder("--seconds", "300", **slow) == (True, "abc!")
    assert recorder(**slow | {"b": ["b 0", "c 0"]}) == (False, "abc!bcd")
    assert recorder(**slow) == (False, "abc!bcd")


def test_interrupted_commands_may_end_and_nothing_else_begins(recorder, tmp_path, monkeypatch):
    calls, main = tmp_path / "calls", threading.get_ident()

    def interrupt():
        while "b" not in calls.read_text():
            time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    assert recorder(a=["a 0", "b 60", "c 0"], d=["d 0"]) == (143, "ab!")


def test_two_trainings_share_a_gpu(recorder, tmp_path, monkeypatch):
    """Each waits here until the other has begun. Nothing that is timed may share."""
    seen = []
    monkeypatch.setattr(record, "wait_for_gpu", seen.append)
    (tmp_path / "fake.py").write_text(
        "import pathlib, sys, time\n"
        "calls = pathlib.Path(sys.argv[1])\n"
        "with calls.open('a') as file: file.write(sys.argv[2])\n"
        "while len(calls.read_text()) < 2: time.sleep(0.05)\n"
    )
    parts = {"a": ["a"], "b": ["b"]}
    assert recorder("--gpus", "0,0", **parts) == (2, "")
    monkeypatch.setattr(record, "SHARING", set(parts))
    code, calls = recorder("--gpus", "0,0", **parts)
    assert code is False and sorted(calls) == ["a", "b"] and not seen
    assert "flagship-200m-l1-0" in record.SECONDS and "flagship-200m-l1-0" not in record.SHARING


def test_what_would_not_end_in_time_does_not_begin(recorder, monkeypatch, capsys):
    monkeypatch.setattr(record, "SECONDS", {"b": 1e6})
    parts = {name: [f"{name} 0"] for name in "abc"}
    assert recorder("--seconds", "300", **parts) == (True, "ac")
    assert "not begun, for want of time: b" in capsys.readouterr().out
    assert recorder(**parts) == (False, "acb")
    monkeypatch.setattr(record, "SECONDS", {"d": 200})  # as long again where two share
    monkeypatch.setattr(record, "SHARING", {"d"})
    assert recorder("--gpus", "0,0", "--seconds", "300", d=["d 0"]) == (True, "acb")
    assert recorder("--gpus", "0", "--seconds", "300", d=["d 0"]) == (False, "acbd")


def test_parts_with_the_launcher_take_all_gpus_after_the_others(recorder, monkeypatch):
    seen, run = [], record.run

    def noting(command, environment, *rest):
        seen.append((command.split()[2], environment["CUDA_VISIBLE_DEVICES"]))
        return run(command, environment, *rest)

    monkeypatch.setattr(record, "run", noting)
    monkeypatch.setattr(record, "is_spread", lambda name: name in "bc")
    parts = {name: [f"{name} 0"] for name in "abcd"}
    assert recorder("--gpus", "0", **parts)[0] == 2
    assert recorder("--gpus", "0,3", **parts)[0] is False
    assert sorted(seen[:2])[0][0] == "a" and {gpus for _, gpus in seen[:2]} <= {"0", "3"}
    assert seen[2:] == [("b", "0,3"), ("c", "0,3")]


def test_trainings_on_all_gpus_differ_in_their_launcher_alone(tmp_path):
    assert [name for name in record.PARTS if record.is_spread(name)] == ["ddp-171m", "fsdp-171m"]
    places = {"out": tmp_path, "gpus": ["0", "1"], "corpus": "c", "tasks": "t", "model": "m"}
    given, configs = types.SimpleNamespace(**places), []
    for name in ("single-171m", "ddp-171m", "fsdp-171m"):
        command = record.completed(record.PARTS[name][1][0], given)
        assert ("--num_processes 2 " in command) == record.is_spread(name)
        configs.append(config_of(command.rpartition("-m ")[2] or command))
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "provenance.json").touch()
        resumed = record.completed(record.PARTS[name][1][0], given)
        assert resumed == f"{command} --resume"
    assert configs[0] == configs[1] == configs[2] and configs[0].steps == 77


def test_what_is_left_of_a_command(tmp_path):
    places = {"corpus": "c", "tasks": "t", "model": "m"}
    given = types.SimpleNamespace(out=tmp_path, gpus=["0"], **places)
    origin = {"device": "d", "versions": {"a": "1"}, "commit": "c", "command": "x"}
    for command in ("twell train quick", "twell relufy {model}"):
        run = tmp_path / command[6:11]
        whole = f"{command} --out {run}".format(**places)
        assert record.completed(f"{command} --out {run}", given) == whole
        results.write_run(run, {}, origin)
        assert record.completed(f"{command} --out {run}", given) == f"{whole} --resume"
    command = f"scripts.keep runs/r --out {tmp_path}"
    assert record.completed(command, given) == command
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "log.csv.xz").touch()
    assert record.completed(command, given) is None
    for command in ("twell trace r", "twell evaluate r"):
        whole = f"{command} --out {tmp_path}/{command[6]}.json"
        assert record.completed(f"{command} --out {{out}}/{command[6]}.json", given) == whole
        (tmp_path / f"{command[6]}.json").touch()
        assert record.completed(whole, given) is None
    assert record.completed("fake", given) == f"fake --out {tmp_path / 'bench'}"


def test_what_is_small_of_a_run_is_kept(tiny, tmp_path, monkeypatch, capsys):
    """Its log, its activity as the log has it, and answers; the weights are deleted."""
    monkeypatch.setenv("TWELL_CACHE", str(tiny / "cache"))
    run, tasks, out = tmp_path / "run", tmp_path / "tasks", tmp_path / "kept"
    shutil.copytree(tiny / "run", run)
    tasks.mkdir()
    item = {"query": "bada baga", "choices": ["bada", "gain du"], "gold": 1}
    for name in keep.PROMPTS:
        (tasks / f"{name}_test.jsonl").write_text(2 * (json.dumps(item) + "\n"))
    monkeypatch.setattr(sys, "argv", ["keep", str(run), "--tasks", str(tasks), "--out", str(out)])
    keep.main()
    assert "the weights are deleted" in capsys.readouterr().out and not (run / "model").exists()
    row, log = results.load_run(out / "runs" / "run")
    pd.testing.assert_frame_equal(log, results.load_log(tiny / "run" / "log.csv"))
    assert row["complete"] and "scripts.keep" in (out / "runs/run/provenance.json").read_text()
    kept = results.load_kept(out / "traces", ".csv").query("metric == 'mean'")
    logged = analysis.logged_layers(log, row["intermediate_size"])
    assert kept["value"].tolist() == pytest.approx(logged["mean"].tolist(), rel=1e-3)
    asked = results.load_kept(out / "eval", ".csv.xz")
    assert asked.groupby("task").size().to_dict() == dict.fromkeys(keep.PROMPTS, 2) | {
        "held_out_text": 16
    }
    loss = asked.loc[asked["task"] == "held_out_text", "nats"].mean()
    last = analysis.last_validation(log.assign(run="run")).query("metric == 'cross_entropy'")
    assert loss == pytest.approx(last["value"].item(), rel=1e-4)


def test_questions_are_put_as_lm_eval_puts_them():
    folder = results.root() / "twell" / "tasks" / "local"
    (usual,) = [
        line for line in (folder / "_local").read_text().splitlines() if "doc_to_text" in line
    ]
    for name, prompt in keep.PROMPTS.items():
        task = (folder / f"{name}.yaml").read_text()
        (own,) = [line for line in task.splitlines() if "doc_to_text" in line] or [usual]
        given = yaml.safe_load(own)["doc_to_text"]
        assert prompt == ("{}" if given == "query" else given.replace("{{query}}", "{}"))


def test_answers_are_the_likeliest(tiny):
    """By a plain pass a choice, without batches."""
    model, tokenizer = trace.load_with_tokenizer(tiny / "run")
    model.eval()
    items = [{"query": "bada", "choices": ["bada baga", "gain"], "gold": g} for g in (0, 1)]
    items.append({"query": "bada gain", "choices": ["du"], "gold": 0})
    sums, lengths = [], []
    for choice in items[0]["choices"]:
        before = len(trace.encode(tokenizer, "bada"))
        ids = torch.tensor([trace.encode(tokenizer, f"bada {choice}")])
        logprob = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
        sums.append(logprob.gather(-1, ids[0, 1:, None])[before - 1 :].sum().item())
        lengths.append(len(choice))
    table = keep.answers(model, tokenizer, [("a", items[0]), ("a", items[1]), ("b", items[2])])
    assert table["task"].tolist() == ["a", "a", "b"]
    best = int(np.argmax(sums)), int(np.argmax(np.divide(sums, lengths)))
    assert table["correct"].tolist()[:2] == [int(best[0] == g) for g in (0, 1)]
    assert table["by_bytes"].tolist()[:2] == [int(best[1] == g) for g in (0, 1)]
