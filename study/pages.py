"""Tables of pages below docs/, written from the measured rows of data/bench.

`tables` returns them by page and name. scripts/claims.py puts them between their markers. Speeds
are over dense torch.compile of the same measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from study import analysis
from study.analysis import at_level, near_level
from twell.measure import providers

SPARSE = [providers.UNION.name, providers.ROWWISE.name, providers.DECODE.name]
# Cases of the layer alone: tokens, pattern, mode, active neurons, gated.
CASES = {
    "131,072, skewed, 29 active": (131_072, "skewed", "stream", 29, True),
    "131,072, even, 29 active": (131_072, "even", "stream", 29, True),
    "131,072, skewed, 100 active": (131_072, "skewed", "stream", 100, True),
    "16,384, skewed, 29 active": (16_384, "skewed", "stream", 29, True),
    "2,048, skewed, 29 active, CUDA graph": (2048, "skewed", "graph", 29, True),
    "2,048, skewed, 29 active, stream": (2048, "skewed", "stream", 29, True),
    "without gate, N = 8192, 131,072, skewed, 40 active": (131_072, "skewed", "stream", 40, False),
}
LARGE = "131,072, skewed, 29 active"
USUAL = "gated and hidden_size == 2048 and intermediate_size == 5632"
# Of which published model a layer has the shape; most have no gate or another activation.
SHAPES = {
    (2048, 8192, "biases"): "OPT-1.3B",
    (4096, 16384, "biases"): "OPT-6.7B",
    (3072, 9216, "relu2"): "Minitron 4B, ReLU²",
    (4096, 14336, "drelu"): "TurboSparse-Mistral, dReLU",
    (2048, 5632, "merged"): "Merged gate and up, ReLU",
}
# Shares of active neurons; else 4% and 2%.
SHARES = {"merged": (29 / 5632,), "drelu": (0.1, 0.04, 0.02)}


def tables(root: str | Path) -> dict[str, dict[str, str]]:
    """Return the tables of each page below docs/ as Markdown, from data/ of a repository."""
    bench = analysis.Bench(Path(root) / "data" / "bench", ["ffn.csv", "model.csv", "decode.csv"])
    layers = bench.rows("ffn.csv", analysis.speedups)
    forward = analysis.model_speedups(analysis.of_fp8_calls(bench.rows("model.csv")))
    decode = analysis.decode_speedups(analysis.of_fp8_calls(bench.rows("decode.csv")))
    decode = decode.query("profile == 'paper' and mode == 'graph' and not tuned")
    benchmarks = {
        "layer": layer(layers),
        "activity": by_activity(layers),
        "few tokens": few_tokens(layers),
        "fp8 layer": fp8_layer(layers),
        "fp8 models": fp8_models(forward.query("profile == 'paper'"), decode),
        "fp8 quality": fp8_costs(analysis.fp8_quality(bench.rows("quality.csv"))),
    }
    return {
        "benchmarks.md": benchmarks,
        "models.md": {"shapes": other_shapes(layers)},
        "serving.md": {"serving": serving(bench.rows("serve.csv"))},
    }


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return a text with `content` between two marker lines, which it has to have."""
    for marker in (begin, end):
        if marker not in text.splitlines():
            raise ValueError(f"no line {marker!r} in the text; put it where the table belongs")
    head, _, rest = text.partition(f"{begin}\n")
    _, _, tail = rest.partition(f"{end}\n")
    return f"{head}{begin}\n{content}\n{end}\n{tail}"


def markdown(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table; columns: names between bars, a colon behind those of numbers."""
    names = [name.strip() for name in columns.split("|")]
    rule = "|".join("---:" if name.endswith(":") else "---" for name in names)
    lines = [" | ".join(map(str, row)) for row in ([name.rstrip(":") for name in names], *rows)]
    head, *rest = (f"| {line} |" for line in lines)
    return "\n".join([head, f"|{rule}|", *rest])


def _number(value: float, spec: str = ".2f") -> str:
    """Return a number, or a dash where it was not measured."""
    return "–" if pd.isna(value) else f"{value:{spec}}".replace("-", "−")


def _percent(change: float, spec: str = "+.0f") -> str:
    return "–" if pd.isna(change) else f"{_number(change, spec)}%"


def _time(value: float, unit: str = " ms") -> str:
    """Return a time with three digits, or a dash where it was not measured."""
    return "–" if pd.isna(value) else f"{value:#.3g}".rstrip(".") + unit


_NOTHING = pd.Series({"speedup": np.nan, "p50": np.nan, "p50_dense": np.nan, "path": "–"})


def _best(table: pd.DataFrame, of: Iterable[str] = SPARSE) -> pd.Series:
    """Return the fastest row of some providers, by default of the sparse paths in bf16."""
    some = table[table["provider"].isin(of)]
    return some.loc[some["speedup"].idxmax()] if len(some) else _NOTHING


def _auto(table: pd.DataFrame, provider: providers.Provider = providers.AUTO) -> pd.Series:
    some = table[table["provider"] == provider.name]
    return some.iloc[-1] if len(some) else _NOTHING


def _named(path: str) -> str:
    return path.replace("rowwise", "row-wise")


# --- the layer ------------------------------------------------------------------------------------


def layer_case(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of one of CASES."""
    tokens, pattern, mode, active, gated = CASES[name]
    neurons = 5632 if gated else 8192
    query = f"gated == {gated} and hidden_size == 2048 and intermediate_size == {neurons} and "
    query += f"tokens == {tokens} and pattern == '{pattern}' and mode == '{mode}'"
    return near_level(table.query(query), active)


def layer(table: pd.DataFrame) -> str:
    """Return the cases of the layer alone."""
    rows = []
    for name in CASES:
        case = layer_case(table, name)
        best = _best(case)
        times = _time(best["p50_dense"]), _time(best["p50"])
        gains = _number(best["speedup"]), _number(_auto(case)["speedup"])
        rows.append((name, _named(best["path"]), *times, *gains))
    columns = "tokens, activity | path | dense: | sparse: | speed-up: | `auto`, speed-up:"
    return markdown(columns, rows)


def by_activity(table: pd.DataFrame) -> str:
    """Return the speed-up of the best sparse path by active neurons."""
    cases = [(pattern, tokens) for pattern in ("skewed", "even") for tokens in (131_072, 16_384)]
    query = f"{USUAL} and mode == 'stream' and tokens == {{1}} and pattern == '{{0}}'"
    some = [table.query(query.format(*case)) for case in cases]
    rows = [
        (level, *(_number(_best(near_level(one, level))["speedup"]) for one in some))
        for level in (1, 3, 10, 29, 60, 100, 200, 300, 600)
    ]
    names = " | ".join(f"{pattern}, {tokens:,} tokens:" for pattern, tokens in cases)
    return markdown(f"active: | {names}", rows)


def few_tokens(table: pd.DataFrame) -> str:
    """Return up to 1,024 tokens in CUDA graphs; auto in FP8 is beside the fastest dense FP8."""
    few = table.query(f"{USUAL} and pattern == 'skewed' and mode == 'graph' and tokens <= 1024")
    rows = []
    few = few[few["tokens"].isin(_FP8_TOKENS)]
    for tokens, case in at_level(few, 29).groupby("tokens"):
        best, in_fp8 = _best(case), _auto(case, providers.AUTO_FP8)
        times = (_time(1e3 * best[column], "") for column in ("p50_dense", "p50"))
        dense = case.loc[case["provider"].map(analysis.side_of) == "dense FP8", "speedup"].max()
        cells = _number(best["speedup"]), _auto(case)["path"], _time(1e3 * in_fp8["p50"], "")
        over = _number(in_fp8["speedup"] / dense)
        rows.append((f"{tokens:,}", _named(best["path"]), *times, *cells, over))
    columns = "tokens: | best sparse path | dense, us: | sparse, us: | speed-up: | `auto` takes | "
    return markdown(f"{columns}`auto` in FP8, us: | over dense FP8:", rows)


def other_shapes(table: pd.DataFrame) -> str:
    """Return the speed-up of auto in layers that are not of the usual kind or size."""
    rows = []
    for (width, neurons, kind), name in SHAPES.items():
        shape = table[(table["hidden_size"] == width) & (table["intermediate_size"] == neurons)]
        shape = shape[shape["pattern"] == f"skewed {kind}".strip()]
        for share in SHARES.get(kind, (0.04, 0.02)):
            # At one token the number of active neurons varies most.
            tokens = (shape[shape["tokens"] == number] for number in (1, 64, 2048, 65_536))
            gains = [_auto(near_level(some, share * neurons))["speedup"] for some in tokens]
            label = f"{name}, {width} x {neurons}", f"{round(100 * share, 1):g}%"
            rows.append((*label, *map(_number, gains)))
    return markdown("layer | active: | 1: | 64: | 2,048: | 65,536:", rows)


_SERVED_BY = {
    providers.DENSE_EAGER.name: "dense",
    providers.TRITON.name: "sparse",
    providers.AUTO.name: "`auto`",
}


def serving(table: pd.DataFrame) -> str:
    """Return the 2B model's requests a second and times to the first token, and what bounds them.

    The bound of all feed-forward kernels is a model without these layers.
    """
    rows, table = [], table[table["model"] == "2b"]
    by = ["cuda_graph", "attention", "date"]
    for (graphs, attention, _), case in table.groupby(by, sort=False):
        # By itself, transformers takes graphs where it has flash attention.
        takes = attention == "flash" if graphs == "default" else str(graphs) == "True"
        way = "CUDA graphs" if takes else "eager"
        speeds = case.set_index("provider")["requests_per_second"]
        dense = speeds[providers.DENSE_EAGER.name]
        for row in case.to_dict("records"):
            name, speed = _SERVED_BY[row["provider"]], row["requests_per_second"]
            times = (f"{row[name]:,.0f}" for name in ("first_token", "first_token_p95"))
            gain = "–" if name == "dense" else _percent(100 * (speed / dense - 1), "+.1f")
            rows.append((way, name, _number(speed), gain, *times, row["rounds"]))
        if pd.notna(row["without_ffn"]):  # else it was interrupted before
            bound = 1e3 * row["requests"] / row["without_ffn"]
            cells = _number(bound), _percent(100 * (bound / dense - 1), "+.1f"), "–", "–"
            rows.append((way, "no feed-forward layer", *cells, row["rounds"]))
    columns = "calls | computed by | requests/s: | over dense: | "
    return markdown(f"{columns}first token, ms: | 95%, ms: | rounds:", rows)


# --- FP8 ------------------------------------------------------------------------------------------

# Of the paper's width few sizes are printed; lesson 5 has all.
_FP8_TOKENS = [131_072, 16_384, 2048, 1024, 512, 256, 64, 16, 4, 1]
_SIDES = {
    "dense": "dense bf16",
    "sparse": "sparse bf16",
    "dense FP8 all": "dense FP8, attention too",
    "sparse FP8 all": "sparse FP8, attention too",
}


def fp8_layer(table: pd.DataFrame) -> str:
    """Return the cases of the layer that were measured in FP8, dense and sparse, beside bf16."""
    table = analysis.fastest(table[table["pattern"].isin(["skewed", "even"])])
    usual = (table["hidden_size"] == 2048) & (table["intermediate_size"] == 5632)
    table = table[~usual | table["tokens"].isin(_FP8_TOKENS)]
    case = "hidden_size intermediate_size gated pattern mode tokens date active".split()
    rows = []
    for keys, some in table.groupby(case):
        sides = some.set_index("side")
        if "sparse FP8" not in sides.index:
            continue
        width, neurons, gated, pattern, mode, tokens, _, active = keys
        other = (width, neurons) != (2048, 5632)
        parts = [f"{tokens:,}", pattern, f"{active:.0f} active"]
        parts += ["CUDA graph"] * (mode == "graph") + ["without gate"] * (not gated)
        times = sides["p50"].reindex(["dense", "sparse", "dense FP8", "sparse FP8"])
        gains = sides.loc["sparse FP8", ["speedup", "over_fp8"]]
        dense = sides["provider"].get("dense FP8")
        by = "–"
        if dense:
            by = analysis.DENSE_FP8_BY[providers.Provider.parse(dense).precision]
        name = ", ".join(parts + [f"{width} x {neurons}"] * other)
        order = other, width, not gated, pattern == "even", -tokens, active
        rows.append((order, (name, *map(_time, times), *map(_number, gains), by)))
    columns = "tokens, activity | dense bf16: | sparse bf16: | dense FP8: | sparse FP8: | "
    columns += "sparse FP8 over dense bf16: | over dense FP8: | fastest dense FP8"
    return markdown(columns, (cells for _, cells in sorted(rows)))


def fp8_models(forward: pd.DataFrame, decode: pd.DataFrame) -> str:
    """Return forward passes and decoding of models that were measured in FP8."""
    rows = []
    for table, decoding in ((forward, False), (decode, True)):
        table, by = analysis.fastest(table), ["model", "batch", "context", "date"]
        for (model, batch, context, _), some in table.groupby(by, sort=False):
            if not some["side"].str.contains("FP8").any():
                continue
            documents = f"decoding, {batch} document{'s' * (batch > 1)}"
            what = documents if decoding else f"forward, {batch} x {context:,}"
            for row in some.to_dict("records"):
                changes = 100 * (row["speedup"] - 1), row["energy_change"]
                cells = ["–", "–"] if row["side"] == "dense" else map(_percent, changes)
                peak = _number(row.get("peak", np.nan) / 1e9)
                speed = float(f"{1e3 * row['tokens'] / row['p50']:.4g}")
                side = _SIDES.get(row["side"], row["side"])
                rows.append((f"{model.upper()}, {what}", side, f"{speed:,.0f}", *cells, peak))
    return markdown("model | computed by | tokens/s: | speed: | energy: | peak, GB:", rows)


def fp8_costs(quality: pd.DataFrame) -> str:
    """Return the change of cross-entropy of models with feed-forward layers in FP8."""
    rows = []
    quality = quality[quality["side"].isin(["dense FP8", "sparse FP8"])]
    for row in quality.to_dict("records"):
        changes = [
            "{} ({} to {})".format(
                *(_number(row[prefix + name], "+.4f") for name in ("difference", "low", "high"))
            )
            for prefix in ("", "dense_")
        ]
        changes = changes if row["side"].startswith("sparse") else [changes[0], "–"]
        about = f"`{row['model']}`, {row['active']:.0f} active"
        rows.append((about, _SIDES.get(row["side"], row["side"]), *changes))
    return markdown("model | computed by | over bf16, nats: | over dense FP8, nats:", rows)
