"""The price of L1 on text that is read once, by the plan study/price.yaml.

    python -m study.record price-85m-0-seed-0 ... --out DIR    trains the runs on a GPU
    python -m study.price RUN --out DIR                        evaluates a run's models

`prices`, `verdicts` and `worth` analyse the rows of data/bench/price.csv.
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.stats
import yaml

from study.analysis import holm
from twell import corpus, results
from twell.config import TrainConfig, cache_folder
from twell.measure import providers

PLAN = yaml.safe_load(Path(__file__).with_name("price.yaml").read_text(encoding="utf-8"))
TIMED_AS = {"model": {"0.5b": "445m"}}  # "0.5b" was timed with the plan's vocabulary
DENSE = providers.DENSE_COMPILED.name
SPARSE = providers.AUTO_COMPILED.name, providers.UNION_COMPILED.name


def parts() -> dict[str, list[str]]:
    """Return the commands of each run of the plan, for study/record.py."""
    runs = {}
    for size, levels in PLAN["levels"].items():
        for level, seed in ((level, seed) for level, seeds in levels.items() for seed in seeds):
            name = f"price-{size}-{level}-seed-{seed}"
            fields = f"{PLAN['train']} {PLAN['sizes'][size]} l1_coefficient={level} seed={seed}"
            runs[name] = [
                f"twell train small {fields} --out {{out}}/runs/{name}",
                f"study.price {{out}}/runs/{name} --corpus {{corpus}} --out {{out}}/kept",
            ]
    return runs


def evaluate_run(run: Path, folder: Path) -> list[dict]:
    """Return the rows of a finished run: cross-entropy (nats) and activity, a model and a text."""
    import torch

    from twell.models import load
    from twell.train.text import evaluate

    config = TrainConfig.load(run / "config.yaml")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"vocab_size": config.vocab_size, "tokenizer": config.tokenizer}
    options |= {"parse_special": config.parse_special, "cache": cache_folder()}
    texts = {}
    for name, path in PLAN["texts"].items():
        source = str(folder / path)
        texts[name] = corpus.prepare(source, valid_source=source, **options).valid
    ends = {f"model-at-{end * config.batch_tokens}": end for end in config.decays.values()}
    rows = []
    for name, end in (ends | {"model": config.steps}).items():
        model = load(run / name)[0].to(device)
        for text, tokens in texts.items():
            with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
                result = evaluate(model, corpus.Blocks(tokens, config.context))
            row = {"run": run.name, "size": run.name.split("-")[1], "seed": config.seed}
            row |= {"l1_coefficient": config.l1_coefficient, "tokens": end * config.batch_tokens}
            row |= {"text": text, "cross_entropy": round(result["cross_entropy"], 5)}
            active = round(float(np.mean([layer["mean"] for layer in result["layers"]])), 2)
            rows.append(row | {"active": active, "neurons": config.intermediate_size})
    return rows


def parameters(size: str) -> int:
    """Return the parameters of a size of the plan but for norms: embedding and layers."""
    fields = dict(field.split("=") for field in f"{PLAN['train']} {PLAN['sizes'][size]}".split())
    names = "vocab_size", "num_layers", "hidden_size", "intermediate_size"
    vocab, layers, width, neurons = (int(fields[name]) for name in names)
    return width * (vocab + layers * (4 * width + 3 * neurons))


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the price (%) of each run with L1 over the run of the same size and seed without."""
    key = ["size", "seed", "text", "tokens"]
    dense = rows[rows["l1_coefficient"] == 0].set_index(key)["cross_entropy"]
    sparse = rows[rows["l1_coefficient"] > 0].join(dense.rename("dense"), on=key)
    price = 100 * (sparse["cross_entropy"] / sparse["dense"] - 1)
    return sparse.assign(price=price).dropna(subset="price")


def interval(values: pd.Series) -> tuple[float, float, float]:
    """Return mean, low and high by Student's t; a single value has no interval."""
    mean, error = values.mean(), values.sem()
    return mean, *scipy.stats.t.interval(PLAN["confidence"], len(values) - 1, mean, error)


def prices(rows: pd.DataFrame) -> pd.DataFrame:
    """Return price, low, high (%), seeds, active neurons and their share, and parameters.

    A row is a size, text, level and number of tokens.
    """
    table, case = [], ["size", "text", "l1_coefficient", "tokens"]
    for key, some in pairs(rows).groupby(case):
        active, share = some["active"].mean(), (some["active"] / some["neurons"]).mean()
        table.append((*key, *interval(some["price"]), len(some), active, share))
    columns = [*case, "price", "low", "high", "seeds", "active", "share"]
    table = pd.DataFrame(table, columns=columns)
    return table.assign(parameters=table["size"].map(parameters))


def verdicts(rows: pd.DataFrame, text: str = "new", level: float = 6e-4) -> pd.DataFrame:
    """Return for each size the change of the price, its interval, and what the plan calls it."""
    table, some = [], pairs(rows).query("text == @text and l1_coefficient == @level")
    for size, runs in some.groupby("size"):
        by_seed = runs.pivot(index="seed", columns="tokens", values="price").dropna()
        if by_seed.shape[1] < 2:
            continue
        change = by_seed.iloc[:, -1] - by_seed.iloc[:, 0]
        mean, low, high, p = change.mean(), np.nan, np.nan, np.nan
        if len(change) >= PLAN["pairs"]:
            _, low, high = interval(change)
            p = float(scipy.stats.ttest_1samp(change, 0).pvalue)
        row = {"size": size, "change": mean, "low": low, "high": high, "p": p, "seeds": len(change)}
        table.append(row | {"small": bool(interval(by_seed.iloc[:, -1])[2] < PLAN["margin"])})
    table = pd.DataFrame(table)
    # Sizes that are not trained yet are part of the family.
    planned = [runs for levels in PLAN["levels"].values() for runs in levels.items()]
    planned = sum(float(key) == level and len(seeds) >= PLAN["pairs"] for key, seeds in planned)
    p = table["p"].reindex(range(max(planned, len(table)))).fillna(1)
    significant = holm(p)[: len(table)] < 1 - PLAN["confidence"]
    flat = (table["low"] > -PLAN["flat"]) & (table["high"] < PLAN["flat"])
    signed = np.where(table["change"] > 0, "rises", "falls")
    other = np.where(flat, "flat", "cannot be told")
    return table.assign(verdict=np.where(significant, signed, other))


def worth(rows: pd.DataFrame, times: dict[str, pd.DataFrame], text: str = "new") -> pd.DataFrame:
    """Return the dense and sparse models at the end of training, a row a use and model.

    rows: of data/bench/price.csv. times: by use, such as "inference", `analysis.model_speedups` or
    `step_speedups` of one device and number of tokens. nanoseconds: of a token, of a dense width the
    median of its calls; of a sparse model that over its speed-up in one call, with the active neurons
    nearest to its own, at most `fewer` % below.
    cross_entropy: on `text`, the mean over seeds that all models of a size with several seeds have.
    Of sparse models also: beside: the neurons of the dense model of the nearest time. slower: time
    over it (%). mean, min, max: cross-entropy over it (%), of `count` pairs of one seed. line: the
    same over a dense model as fast, on a line between two widths, where both are measured. Sizes
    without a sparse model and a dense one of another width are left out.
    """
    some = rows[rows["text"] == text].rename(columns={"neurons": "intermediate_size"})
    end = some.loc[some.groupby("run")["tokens"].idxmax()]
    kind = ["model", "intermediate_size", "sparse"]
    index = [*kind, "l1_coefficient"]
    end = end.assign(sparse=end["l1_coefficient"] > 0, parameters=end["size"].map(parameters))
    end["model"] = end["size"].str.split(".").str[0]
    active = end.groupby(index, as_index=False)["active"].mean()
    timed = pd.concat(times, names=["use"]).reset_index("use").replace(TIMED_AS)
    timed = timed[timed["provider"].isin([DENSE, *SPARSE])]
    timed["sparse"] = timed["provider"] != DENSE
    dense = (1e6 * timed["p50"] / timed["tokens"]).where(~timed["sparse"])
    dense = dense.groupby([timed[name] for name in ("use", *kind[:2])]).transform("median")
    timed["nanoseconds"] = dense / timed["speedup"]
    timed = active.merge(timed, on=kind, suffixes=("", "_timed"))
    more = 100 * (timed["active_timed"] / timed["active"] - 1)
    timed = timed.assign(off=more.abs())[(more >= -PLAN["fewer"]) | ~timed["sparse"]]
    timed = timed.sort_values(["off", "nanoseconds"]).groupby(["use", *index], as_index=False)
    timed = timed["nanoseconds"].first()
    end = end.merge(timed, on=index)

    tables, index = [], ["use", *index, "parameters", "nanoseconds"]
    for _, some in end.groupby(["use", "model"]):
        losses = some.pivot(index=index, columns="seed", values="cross_entropy")
        shared = losses[losses.count(axis=1) > 1].dropna(axis=1).columns
        means = losses[shared].mean(axis=1)
        table = losses.add_prefix("seed ").assign(cross_entropy=means).reset_index()
        sparse = table[table["sparse"]]
        dense = table[~table["sparse"]].sort_values("nanoseconds")
        if sparse.empty or dense.empty or table["intermediate_size"].nunique() < 2:
            continue
        compared = []
        for one in sparse.index:
            slower = 100 * (table.loc[one, "nanoseconds"] / dense["nanoseconds"] - 1)
            other = slower.abs().idxmin()
            change = (100 * (losses.iloc[one] / losses.iloc[other] - 1)).dropna()
            row = change.agg(["count", "mean", "min", "max"]).to_dict()
            row |= {"beside": table.loc[other, "intermediate_size"], "slower": slower[other]}
            line = _as_fast(table.loc[one, "nanoseconds"], dense, losses.iloc[dense.index])
            row["line"] = (100 * (losses.iloc[one] / line - 1)).mean()
            ahead = row["max"] < 0 and row["slower"] <= PLAN["alike"]
            behind = row["min"] > 0 and row["slower"] >= -PLAN["alike"]
            verdict = "ahead" if ahead else "behind" if behind else "cannot be told"
            compared.append(row | {"verdict": "one pair" if len(change) == 1 else verdict})
        tables.append(table.join(pd.DataFrame(compared, sparse.index)))
    return pd.concat(tables or [pd.DataFrame()], ignore_index=True)


def _as_fast(time: float, dense: pd.DataFrame, losses: pd.DataFrame) -> pd.Series:
    """Return each seed's loss at a time, on the line between two widths; NaN where neither is near."""
    times, near = dense["nanoseconds"], 1 + PLAN["alike"] / 100
    inside = times.min() / near <= time <= times.max() * near
    return losses.apply(lambda values: np.interp(time, times, values) if inside else np.nan)


def main() -> None:
    from study.keep import keep_run

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--corpus", type=Path, default="corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder of the small files")
    given = parser.parse_args()
    command = shlex.join(["python", "-m", "study.price", *sys.argv[1:]])
    path = given.out / "bench" / "price.csv"
    if not path.is_file() or given.run.name not in set(pd.read_csv(path)["run"]):
        rows = evaluate_run(given.run.resolve(), given.corpus)
        results.append_rows(path, rows, results.provenance(command))
    keep_run(given.run, given.out, command)  # last: its log says that the run is done
    for folder in given.run.glob("model*"):
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
