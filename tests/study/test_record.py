"""The recorder trains what is not recorded, with the fields of what is, and goes on."""

import json
import re
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

from study import analysis, keep, record, trainings
from tests.factories.train import write_pretrained
from twell import results, trace
from twell.config import TrainConfig
from twell.train import relufy_config, train

COMMANDS = {name: command for group in trainings.GROUPS for name, (command, _) in
            trainings.runs(group).items()}  # fmt: skip


def config_of(command):
    words = command.rpartition(" -m ")[2].split()
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
    level = analysis.level_name(config["l1_coefficient"])
    assert f"-l1-{level}" in name or (name.startswith("171m-") and level == "6e-4")


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
    monkeypatch.setattr(record, "wait_for_gpu", lambda gpu, until: None)
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

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
    monkeypatch.setattr(record, "wait_for_gpu", lambda gpu, until: seen.append(gpu))
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


def test_a_checkpoint_is_not_interrupted_twice(recorder, tmp_path, monkeypatch):
    """At its limit of time a training writes one, while the recorder itself is told to end."""
    (tmp_path / "fake.py").write_text(
        "import pathlib, sys, time\n"
        "calls = pathlib.Path(sys.argv[1])\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: calls.open('a').write('!')\n"
        "while calls.read_text() == '!': time.sleep(0.05)\n"
        "calls.open('a').write(' written')\n"
    )
    calls, main = tmp_path / "calls", threading.get_ident()

    def interrupt():
        while not calls.read_text():
            time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGTERM)
        time.sleep(0.5)  # in which a second signal would arrive
        with calls.open("a") as file:
            file.write("!")

    threading.Thread(target=interrupt).start()
    assert recorder("--seconds", "31", a=["a"]) == (143, "!! written")


def test_nothing_begins_after_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)  # a call of it would raise
    for until, end in ((1e9, float("-inf")), (float("-inf"), 1e9)):
        assert record.run("fake", {}, None, until, types.SimpleNamespace(until=end)) == 124


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_part_that_raises_has_not_succeeded(recorder, monkeypatch):
    def full(name, *rest):
        if name == "b":
            raise OSError("no space left on device")
        return True

    monkeypatch.setattr(record, "run_part", full)
    assert recorder(a=["a 0"]) == (False, "") and recorder(a=["a 0"], b=["b 0"]) == (True, "")


def test_what_would_not_end_in_time_does_not_begin(recorder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "SECONDS", {"b": 1e6})
    parts = {name: [f"{name} 0"] for name in "abc"}
    assert recorder("--seconds", "300", **parts) == (True, "ac")
    assert "not begun, for want of time: b" in capsys.readouterr().out
    origin = {"device": "d", "versions": {"a": "1"}, "commit": "c", "command": "x"}
    results.write_run(tmp_path / "runs" / "b", {}, origin | {"complete": True})  # keep is left
    assert recorder("--seconds", "300", **parts) == (False, "acb")
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
    spread = {"ddp-171m", "fsdp-171m"}.union(*map(trainings.missing, trainings.ALL_GPUS))
    assert {name for name in record.PARTS if record.is_spread(name)} == spread
    places = {"out": tmp_path, "gpus": ["0", "1"], "corpus": "c", "tasks": "t", "model": "m"}
    given, configs = types.SimpleNamespace(**places), []
    for name in ("single-171m", "ddp-171m", "fsdp-171m"):
        command = record.completed(record.PARTS[name][1][0], given)
        assert ("--num_processes 2 " in command) == record.is_spread(name)
        configs.append(config_of(command))
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "provenance.json").touch()
        resumed = record.completed(record.PARTS[name][1][0], given)
        assert resumed == f"{command} --resume"
    assert configs[0] == configs[1] == configs[2] and configs[0].steps == 77


def test_relufied_runs_compare():
    """They differ in what was asked for, and in as many L1 stages cut of more or fewer tokens."""
    configs = {}
    for name, (limit, commands) in record.RELUFIED.items():
        words = commands[0].format(model="m", corpus="c", out="o").split()
        assert words[:3] == ["twell", "relufy", "m"] and commands[-1].startswith("study.keep")
        config = TrainConfig.load("relufy", [*words[3 : words.index("--out")], "teacher=m"])
        assert words[-1] == f"o/runs/{name}" and limit > 3 * config.tokens / 2e5
        assert 29.5 < config.steps / config.l1_stage_steps < 31
        assert config.l1_zero_steps == config.l1_stage_steps
        assert 9.5 < config.steps / config.valid_every < 10.5
        configs[name] = vars(config)
        recorded = trainings.RECORDED / name / "config.yaml"
        if recorded.is_file():
            before = {"fit_tokens": 0} | yaml.safe_load(recorded.read_text())
            for field in (*analysis.ASKED, "learning_rate"):
                same = before.get(field, 0) == configs[name][field]
                assert same, (name, field)
    first = configs["relufy-0.1"]
    asked = {"active_share", "l1_coefficient", "threshold", "tokens", "l1_zero_steps"}
    asked |= {"l1_stage_steps", "log_every", "valid_every", "sampled_share", "sampled_tokens"}
    tried = {"rate": {"learning_rate"}, "unfitted": {"fit_tokens"}, "seed": {"seed"}}
    tried |= {"chat": {"sampled_chat", "fit_tokens"}, "hidden": {"hidden_weight", "fit_tokens"}}
    for name, fields in configs.items():
        different = {key for key in fields if fields[key] != first[key]}
        assert different <= asked.union(*map(tried.get, {*name.split("-")} & {*tried})), name


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
    command = f"study.keep runs/r --out {tmp_path}"
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


@pytest.fixture
def tasks_folder(tmp_path):
    """Two items of each of the seven tasks."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    item = {"query": "bada _ baga", "choices": ["bada", "gain du", "a", "b", "c"], "gold": 1}
    for name in {name.removesuffix("_cloze") for name in keep.TASKS}:
        (folder / f"{name}_test.jsonl").write_text(2 * (json.dumps(item) + "\n"))
    return folder


def keep_run(run, tasks, out, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["keep", str(run), "--tasks", str(tasks), "--out", str(out)])
    keep.main()


def test_what_is_small_of_a_run_is_kept(tiny, tasks_folder, tmp_path, monkeypatch, capsys):
    """Its log, its activity as the log has it, and answers; the weights are deleted."""
    monkeypatch.setenv("TWELL_CACHE", str(tiny / "cache"))
    for dear in ("_count_unions", "_count_pairs"):  # nothing that is kept needs them
        monkeypatch.setattr(keep.Counter, dear, None)
    run, out = tmp_path / "run", tmp_path / "kept"
    shutil.copytree(tiny / "run", run)
    keep_run(run, tasks_folder, out, monkeypatch)
    assert "the weights are deleted" in capsys.readouterr().out and not (run / "model").exists()
    row, log = results.load_run(out / "runs" / "run")
    pd.testing.assert_frame_equal(log, results.load_log(tiny / "run" / "log.csv"))
    assert row["complete"] and "study.keep" in (out / "runs/run/provenance.json").read_text()
    kept = results.load_kept(out / "traces", ".csv").query("metric == 'mean'")
    logged = analysis.logged_layers(log, row["intermediate_size"])
    assert kept["value"].tolist() == pytest.approx(logged["mean"].tolist(), rel=1e-3)
    asked = results.load_kept(out / "eval", ".csv.xz")
    assert asked.groupby("task").size().to_dict() == dict.fromkeys(keep.TASKS, 2) | {
        "held_out_text": 16
    }
    loss = asked.loc[asked["task"] == "held_out_text", "nats"].mean()
    last = analysis.last_validation(log.assign(run="run")).query("metric == 'cross_entropy'")
    assert loss == pytest.approx(last["value"].item(), rel=1e-4)
    with pytest.raises(SystemExit):  # another run of this name
        keep_run(tiny / "run", tasks_folder, out, monkeypatch)
    assert "holds a run run; give another --out" in capsys.readouterr().err
    assert (tiny / "run" / "model").is_dir()


def test_the_original_of_a_relufied_run_answers_once(
    tiny_text, tasks_folder, tmp_path, monkeypatch
):
    """With the losses that the run has logged as its teacher's."""
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "cache"))
    out, teacher = tmp_path / "kept", write_pretrained(tmp_path / "teacher", tiny_text)
    fields = f"source={tiny_text} context=32 batch_tokens=512 precision=fp32 valid_tokens=512 "
    fields += "tokens=1024 warmup_steps=0 l1_zero_steps=0 checkpoint_every=0"
    for name in "one", "two":
        run = train(relufy_config(teacher, fields.split()), tmp_path / name, quiet=True)
        log = results.load_run(run)[1]
        keep_run(run, tasks_folder, out, monkeypatch)
    asked = results.load_kept(out / "eval", ".csv.xz")
    one, original, two = sorted(asked["run"].unique())
    assert (one, two) == ("one", "two") and re.fullmatch("teacher-original-[0-9a-f]{8}", original)
    pairs = analysis.relufied_pairs(results.load_runs(out / "runs")[0], asked)
    compared = pairs.drop_duplicates(["run", "reference"])[["run", "reference"]]
    assert compared.to_numpy().tolist() == [["one", "original"], ["two", "original"]]
    asked["run"] = asked["run"].replace({original: "teacher"})
    losses = asked[asked["task"] == "held_out_text"].groupby("run")["nats"].mean()
    last = analysis.last_validation(log.assign(run="two")).groupby("metric")["value"].mean()
    assert losses["two"] == pytest.approx(last["cross_entropy"], rel=1e-4)
    assert losses["teacher"] == pytest.approx(last["cross_entropy_teacher"], rel=1e-4)
    records = analysis.answer_records(asked)
    pairs = analysis.paired_records(records["one"], records["teacher"]).set_index("task")
    right = asked.groupby(["run", "task"])["correct"].mean()
    assert pairs.loc["piqa", "accuracy"] == right["one", "piqa"] and len(pairs) == 8


def test_a_folder_may_have_fewer_tasks(tasks_folder):
    """But not none, and of each one file."""
    for file in tasks_folder.glob("*qa_*"):
        file.unlink()
    left = ["arc_challenge", "arc_easy", "hellaswag", "winogrande"]
    assert sorted(keep.task_files(tasks_folder)) == left
    (tasks_folder / "hellaswag_val.jsonl").touch()
    with pytest.raises(ValueError, match="has 2 files of hellaswag; it should have one"):
        keep.task_files(tasks_folder)
    with pytest.raises(ValueError, match=r"has no task: no \.jsonl begins with one of arc_easy"):
        keep.task_files(tasks_folder.parent)


def test_questions_are_put_as_lm_eval_puts_them(tasks_folder):
    tasks = pytest.importorskip("twell.evaluate.tasks")
    _, _, loaded = tasks.load_tasks(["paper7", "commonsense_qa_cloze"], "m", tasks_folder, None)
    assert sorted(loaded) == sorted(keep.TASKS)
    for name, task in loaded.items():
        task.build_all_requests()
        expected = [request.args for request in task.instances]
        (file,) = tasks_folder.glob(f"{name.removesuffix('_cloze')}_test*")
        items = [keep.put(name, json.loads(line)) for line in file.read_text().splitlines()]
        asked = [
            (query, f" {choice}")
            for item in items
            for query, choice in zip(
                item.get("queries") or 5 * [item["query"]], item["choices"], strict=True
            )
        ]
        assert asked == expected and len(asked) == 2 * 5


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


def test_of_a_choice_longer_than_the_context_all_that_fits_counts(tiny, monkeypatch):
    model, tokenizer = trace.load_with_tokenizer(tiny / "run")
    context, taken = model.config.max_position_embeddings, []

    def flat(model, sequences):
        """Each token has the log-likelihood -1."""
        taken.extend(map(len, sequences))
        return [(-np.ones(len(ids) - 1), np.ones(len(ids) - 1, bool)) for ids in sequences]

    monkeypatch.setattr(keep, "scored", flat)
    item = {"query": "bada", "choices": ["gain", "bada " * 3 * context], "gold": 0}
    table = keep.answers(model, tokenizer, [("a", item)])
    assert max(taken) == context and table["correct"].tolist() == [1]
