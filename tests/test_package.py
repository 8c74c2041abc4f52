"""The shipped model is the recorded run, and the list of runs is up to date."""

import json
import shutil
from pathlib import Path

import numpy as np

from study import analysis
from twell import results
from twell.cli import main
from twell.models import load
from twell.models.llama import AUTO_MAP, CODE
from twell.trace import Aggregate

ROOT = results.root()
SHIPPED = ROOT / "data" / "checkpoints" / "twell-6m"
TEXT = "The river rises in the hills north of the town; in most years it can be crossed on foot. "


def test_the_list_of_recorded_runs_is_up_to_date(tmp_path):
    page = Path(shutil.copy(ROOT / "data" / "README.md", tmp_path))
    assert main(["runs", str(ROOT / "data" / "runs"), "--out", str(page)]) == 0
    assert page.read_bytes() == (ROOT / "data" / "README.md").read_bytes()


def test_the_shipped_model_is_the_recorded_run():
    run = "5m-500m-l1-1.5e-3-seed-0"
    config, log = results.load_run(ROOT / "data" / "runs" / run)
    model, tokenizer = load(SHIPPED)
    counted = Aggregate.load(SHIPPED / "aggregate.npz")
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        assert getattr(model.config, name) == config[name]
    assert sum(p.numel() for p in model.parameters()) == config["parameters"]
    assert model.config.training_tokens == config["tokens"]
    assert counted.num_tokens == 2**20 and counted.meta["run"] == run
    logged = analysis.logged_layers(log, config["intermediate_size"])["mean"].to_numpy()
    np.testing.assert_allclose(analysis.per_layer(counted)["mean"], logged, rtol=0.02)
    # On text that it has not seen it predicts far better than a guess among 4,096 tokens, 8.3 nats.
    ids = tokenizer(TEXT * 2, return_tensors="pt", return_token_type_ids=False).input_ids
    assert model(input_ids=ids, labels=ids).cross_entropy.item() < 5
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 15e6
    runs, logs = results.load_runs(ROOT / "data" / "runs", "5m-500m-*-seed-0")
    sparse, dense = analysis.sweep(runs, logs).sort_values("active")["cross_entropy"]
    row = f"| cross-entropy, nats a token | {sparse:.4f} | {dense:.4f} |"
    assert row in (SHIPPED / "README.md").read_text(encoding="utf-8")
    assert (SHIPPED / CODE.name).read_bytes() == CODE.read_bytes()
    assert json.loads((SHIPPED / "config.json").read_text())["auto_map"] == AUTO_MAP
