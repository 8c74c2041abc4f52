"""The recorder trains a run again with its fields; `study.keep` reduces a run to small files."""

import argparse
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from study import analysis, keep, record
from twell import results
from twell.config import TrainConfig

PLACES = {"out": Path("out"), "corpus": Path("corpus"), "tasks": Path("t"), "model": Path("m")}
ASKED = "tokens batch_tokens learning_rate l1_coefficient seed warmup_steps active_share threshold"
ASKED += " l1_zero_steps l1_stage_steps reinit"


@pytest.mark.parametrize("name", ["85m-100m-l1-6e-4-seed-1", "flagship-300m-l1-0", "unfitted-0.1-by-t"])
def test_a_recorded_run_is_trained_again_with_its_fields(name):
    given = argparse.Namespace(gpus=["0", "1"], **PLACES)
    training, kept = (record.completed(one, given) for one in record.training(name))
    words = training.rpartition("twell ")[2].split()
    fields = [word for word in words if "=" in word]
    if words[0] == "relufy":
        words, fields = ["train", "relufy"], [*fields, "teacher=m"]
    config = vars(TrainConfig.load(words[1], fields))
    recorded, _ = results.load_run(record.RECORDED / name)
    same = {field: config[field] for field in ASKED.split() if field in recorded}
    assert {field: recorded[field] for field in same} == same and len(same) > 6
    assert training.startswith(record.LAUNCHER) == ("300m" in name)
    assert f"study.keep out/runs/{name} " in kept


def test_what_is_small_of_a_run_is_kept(tiny, tmp_path, monkeypatch):
    """Its log, its activity as the log has it, and answers; the weights are deleted."""
    monkeypatch.setenv("TWELL_CACHE", str(tiny / "cache"))
    item = {"query": "bada _ baga", "choices": ["bada", "gain du", "a", "b", "c"], "gold": 1}
    for name in {name.removesuffix("_cloze") for name in keep.TASKS}:
        (tmp_path / f"{name}_test.jsonl").write_text(2 * (json.dumps(item) + "\n"))
    run, out = tmp_path / "run", tmp_path / "kept"
    shutil.copytree(tiny / "run", run)
    command = ["keep", str(run), "--tasks", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    keep.main()
    assert not (run / "model").exists()
    row, log = results.load_run(out / "runs" / "run")
    pd.testing.assert_frame_equal(log, results.load_log(tiny / "run" / "log.csv"))
    assert row["complete"] and "study.keep" in (out / "runs/run/provenance.json").read_text()
    kept = results.load_kept(out / "traces", ".csv").query("metric == 'mean'")
    logged = analysis.logged_layers(log, row["intermediate_size"])
    assert kept["value"].tolist() == pytest.approx(logged["mean"].tolist(), rel=1e-3)
    asked = results.load_kept(out / "eval", ".csv.xz")
    items = dict.fromkeys(keep.TASKS, 2) | {"held_out_text": 16}
    assert asked.groupby("task").size().to_dict() == items
    loss = asked.loc[asked["task"] == "held_out_text", "nats"].mean()
    last = analysis.last_validation(log.assign(run="run")).query("metric == 'cross_entropy'")
    assert loss == pytest.approx(last["value"].item(), rel=1e-4)
    command[1] = str(tiny / "run")
    with pytest.raises(SystemExit):  # another run of this name
        keep.main()
