"""The recorder trains what is not recorded, with the fields of what is, and goes on."""

import sys
import types

import pytest
import yaml

from scripts import record, trainings
from twell import analysis, results
from twell.config import TrainConfig

COMMANDS = {name: command for group in trainings.ROUND for name, (command, _) in
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
        "calls = pathlib.Path(sys.argv[1]); calls.write_text(calls.read_text() + sys.argv[2])\n"
        "try: time.sleep(float(sys.argv[3]))\n"
        "except KeyboardInterrupt: calls.write_text(calls.read_text() + '!'); sys.exit(130)\n"
    )
    calls = tmp_path / "calls"
    calls.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(record, "wait_for_gpu", lambda gpu: None)
    monkeypatch.setattr(record, "STOPPING", 2)

    def call(*arguments, **parts):
        made = {name: (60, [f"fake {calls} {x} --out x" for x in xs]) for name, xs in parts.items()}
        monkeypatch.setattr(record, "PARTS", made)
        monkeypatch.setattr(trainings, "ROUND", {"group": []})
        monkeypatch.setattr(trainings, "missing", lambda group: list(parts))
        monkeypatch.setattr(sys, "argv", ["record", "group", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as end:
            record.main()
        return end.value.code, calls.read_text()

    return call


def test_parts_go_on_where_they_stopped(recorder):
    slow = {"a": ["a 0"], "b": ["b 0", "c 30"], "d": ["d 0"]}
    assert recorder("--seconds", "6", **slow) == (True, "abc!")
    assert recorder(**slow | {"b": ["b 0", "c 0"]}) == (False, "abc!bcd")
    assert recorder(**slow) == (False, "abc!bcd")


def test_a_begun_training_is_resumed(tmp_path):
    given = types.SimpleNamespace(out=tmp_path, corpus="c", tasks="t", gpus=["0"])
    command = "twell train quick --out {out}/runs/x"
    assert record.completed(command, given) == f"twell train quick --out {tmp_path}/runs/x"
    origin = {"device": "d", "versions": {"a": "1"}, "commit": "c", "command": "x"}
    results.write_run(tmp_path / "runs" / "x", {}, origin)
    assert record.completed(command, given).endswith("/runs/x --resume")
    assert record.completed("fake", given) == f"fake --out {tmp_path / 'bench'}"
