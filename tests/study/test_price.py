"""The price of L1: rows are those of the run's log, and verdicts those that the plan names."""

import dataclasses
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from study import price, record
from tests.factories import SEED
from twell import results
from twell.config import TrainConfig
from twell.train import train


def test_a_run_is_evaluated_at_each_of_its_points(tiny_config, tiny_text, tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "cache"))
    shutil.copy(tiny_text, tmp_path / "valid.jsonl")
    monkeypatch.setitem(price.PLAN, "texts", {"valid": "valid.jsonl"})
    tiny_config.prepare_text()[0].save_pretrained(tmp_path / "tokenizer")
    changes = {"valid_source": str(tmp_path / "valid.jsonl"), "valid_tokens": 2**20, "log_every": 2}
    changes |= {"tokenizer": str(tmp_path / "tokenizer"), "decay_at": "4096"}
    config = dataclasses.replace(tiny_config, **changes)
    run = train(config, tmp_path / "price-1m-0-seed-0", quiet=True)
    rows = pd.DataFrame(price.evaluate_run(run, tmp_path))
    assert rows["tokens"].tolist() == [4096, 8192]
    log = results.load_run(run)[1].set_index(["tokens", "split", "metric"])["value"]
    for row, split in zip(rows.itertuples(), ("valid-decay", "valid"), strict=True):
        some = log[row.tokens, split]
        assert row.cross_entropy == pytest.approx(some["cross_entropy"].item(), abs=2e-5)
        assert row.active == pytest.approx(some["active_mean"].mean(), abs=1e-2)


def outcomes(changes):
    """Return rows of price.csv: for each size the prices of three seeds at two points."""
    random, rows = np.random.default_rng(SEED), []
    for size, seeds in changes.items():
        for seed, (first, last) in enumerate(seeds):
            for tokens, value in ((60, first), (221, last)):
                dense = 3 + random.random() / 10
                row = {"size": size, "seed": seed, "tokens": tokens, "text": "new"}
                row |= {"active": 20.0, "neurons": 100, "l1_coefficient": 0.0}
                rows.append(row | {"cross_entropy": dense})
                row["cross_entropy"] = dense * (1 + value / 100)
                rows.append(row | {"l1_coefficient": 6e-4})
    return pd.DataFrame(rows)


def test_prices_and_verdicts_follow_the_plan(monkeypatch):
    changes = {
        "rises": [(0.0, 1.0), (0.1, 1.11), (-0.1, 0.92)],
        "flat": [(1.0, 1.1), (1.2, 1.15), (0.9, 1.0)],
        "cannot be told": [(0.0, 1.5), (0.0, -1.0), (0.0, 4.0)],
        "falls": [(3.0, 2.0), (3.1, 2.12), (3.3, 2.31)],
    }
    monkeypatch.setitem(price.PLAN, "sizes", dict.fromkeys(changes, price.PLAN["sizes"]["12m"]))
    table = price.verdicts(rows := outcomes(changes)).set_index("size")
    assert table["verdict"].to_dict() == {name: name for name in changes}
    assert table["small"].to_dict() == dict(zip(changes, (True, True, False, False), strict=True))
    end = price.prices(rows).query("size == 'falls' and tokens == 221").iloc[0]
    expected = scipy.stats.t.interval(0.95, 2, 2.1433333, scipy.stats.sem([2.0, 2.12, 2.31]))
    assert (end["low"], end["high"], end["share"]) == pytest.approx((*expected, 0.2))
    # Holm counts the plan's three sizes. A size of one point has no change.
    some = outcomes({"12m": [(0.0, 0.5), (0.0, 0.4), (0.0, 0.7)], "445m": [(0.0, 1.0)] * 3})
    (one,) = price.verdicts(some[(some["size"] == "12m") | (some["tokens"] == 60)]).itertuples()
    assert one.p < 0.05 and one.verdict == "cannot be told"


@pytest.mark.parametrize("losses, expected", [((2.7, 2.8), "ahead, ?"), ((2.9, 3.2), "?, behind")])
def test_a_sparse_model_is_compared_with_the_dense_one_of_its_time(losses, expected):
    models = {("85m", 0.0): (2.8, 2.9), ("85m.1216", 0.0): (3.0, 3.1), ("85m", 6e-4): losses}
    models[("85m", 1.5e-4)] = (2.7,)  # one pair is no verdict
    rows = [(*name, *pair) for name, values in models.items() for pair in enumerate(values)]
    rows = pd.DataFrame(rows, columns=["size", "l1_coefficient", "seed", "cross_entropy"])
    rows["neurons"] = 2112 - 896 * (rows["size"] != "85m")
    rows["run"] = rows["size"] + rows["l1_coefficient"].map("-{:g}-".format) + rows["seed"].map(str)
    rows = rows.assign(text="new", tokens=221, active=20.0)
    other = rows.assign(cross_entropy=range(7))  # of an earlier point, and of another text
    others = other.assign(tokens=60), other.assign(text="valid")
    rows = pd.concat([rows, *others], ignore_index=True)
    timed = {"provider": [price.DENSE] * 2 + [price.SPARSE[0]] * 3, "model": "85m", "tokens": 100}
    timed |= {"intermediate_size": [2112, 1216, 2112, 2112, 2112], "active": [20, 20, 9, 19.8, 40]}
    timed = pd.DataFrame(timed | {"p50": [14.0, 10.0, 5.0, 10.1, 13.0]})
    timed["speedup"] = [1.0, 1.0, 14 / 5, 14 / 10.1, 14 / 13]
    times = {"inference": timed, "training": timed.replace({"speedup": {14 / 10.1: 0.7}})}
    table = price.worth(rows, times).dropna(subset="verdict").set_index(["l1_coefficient", "use"])
    assert set(table.loc[1.5e-4, "verdict"]) == {"one pair"}
    found = (table := table.loc[6e-4])["verdict"].replace("cannot be told", "?")
    assert ", ".join(found[["inference", "training"]]) == expected
    assert table["beside"].to_dict() == {"inference": 1216, "training": 2112}
    line = 100 * np.mean(np.divide(losses, (2.995, 3.095)) - 1)  # 10.1 lies between 10 and 14
    assert table["line"].to_dict() == pytest.approx({"inference": line, "training": np.nan}, nan_ok=True)


def test_the_plan_reads_the_text_once_with_paired_runs():
    commands = price.parts()
    assert len(commands) == 29 and all(len(parts) == 2 for parts in commands.values())
    configs = {}
    for name, (training, _) in commands.items():
        words = training.format(corpus="c", out="o").split()
        configs[name] = TrainConfig.load(words[2], [word for word in words if "=" in word])
        assert record.commands_of(name) == commands[name]
        assert configs[name].steps * configs[name].batch_tokens <= 221.09e6
    for name, config in configs.items():
        pair = vars(configs[re.sub(r"(\.\d+)?-[\d.e-]+-seed", "-0-seed", name)])
        allowed = {"l1_coefficient"} | ({"intermediate_size"} if "m." in name else set())
        assert {key for key in pair if vars(config)[key] != pair[key]} <= allowed
