"""Tables of pages: their numbers, and what was not measured."""

import numpy as np
import pandas as pd
import pytest

from study import analysis, pages
from tests.factories.analysis import (
    BASE,
    decode_rows,
    model_rows,
    quality_rows,
    speed_rows,
    together,
)
from twell import results

UNION, ROWWISE = "triton union", "triton rowwise"
DENSE_FP8, SPARSE_FP8 = "dense FP8 torch.compile", "triton union FP8"
ROOT = results.root()


def cells(table):
    """The rows of a Markdown table by their first cells, without its head."""
    lines = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in line] for line in lines]


def test_tables_of_the_layer():
    graph = {"mode": "graph", "weight_sets": 8}
    table = analysis.speedups(
        together(
            speed_rows(131_072, 29.3, {BASE: 12.34, UNION: 6.0, ROWWISE: 4.0, "auto": 5.0}),
            speed_rows(131_072, 600.0, {BASE: 12.0, UNION: 24.0}),
            speed_rows(2048, 29.0, {BASE: 0.3, UNION: 0.2}, **graph),
            speed_rows(1, 34.0, {BASE: 0.03, UNION: 0.09, "triton decode": 0.01}, **graph),
            speed_rows(
                65_536, 41.0, {BASE: 9.0, UNION: 3.0}, hidden_size=3072, intermediate_size=8192
            ),
        )
    )
    assert cells(pages.layer(table)) == [
        ["131,072, skewed, 29 active", "row-wise", "12.3 ms", "4.00 ms", "3.08", "2.47"],
        ["2,048, skewed, 29 active, CUDA graph", "union", "0.300 ms", "0.200 ms", "1.50", "–"],
    ]
    by_activity = {row[0]: row[1:] for row in cells(pages.by_activity(table))}
    assert by_activity["29"] == ["3.08", "–", "–", "–"] and by_activity["600"][0] == "0.50"
    assert by_activity["100"] == ["–"] * 4
    assert ["3072 x 8192", "41", "–", "–", "3.00"] in cells(pages.by_width(table))
    few = ["1", "decode", "30.0", "10.0", "3.00", "–"]
    assert cells(pages.few_tokens(table)) == [[*few, "–", "–"]]
    times = {BASE: 0.03, "triton decode": 0.01, "auto FP8": 0.02, DENSE_FP8: 0.025}
    in_fp8 = analysis.speedups(speed_rows(1, 34.0, times, **graph))
    assert cells(pages.few_tokens(in_fp8)) == [[*few, "20.0", "1.25"]]


def test_tables_are_of_the_device_with_the_most_rows(tmp_path):
    folder = tmp_path / "data" / "bench"
    folder.mkdir(parents=True)
    for name in ("ffn", "model", "decode", "quality", "serve"):
        rows = pd.read_csv(ROOT / "data" / "bench" / f"{name}.csv")
        other = rows.iloc[::2].assign(device="another", date="2030-01-01")
        if "p50" in rows:
            other["p50"] *= rows["provider"].str.startswith("dense").map({True: 3.0, False: 1.0})
        pd.concat([rows, other]).to_csv(folder / f"{name}.csv", index=False)
    here, both = pages.tables(ROOT), pages.tables(tmp_path)
    for tables in (here, both):
        del tables["benchmarks.md"]["fp8 quality"]  # no times: of any device
    assert both == here


def test_the_table_of_serving_has_the_bound_of_all_kernels():
    both = {"model": "2b", "date": "d", "requests": 64, "rounds": 2, "attention": "sdpa"}
    rows = [
        both | {"cuda_graph": graph, "provider": by, "requests_per_second": speed}
        for graph, by, speed in (
            ("default", "dense eager", 5.0),
            ("True", "dense eager", 6.4),
            ("True", "triton", 7.04),
        )
    ]
    rows = [row | {"without_ffn": 8000.0} for row in rows]
    # Interrupted before the bound was measured, with graphs by transformers' own choice.
    rows.append(rows[0] | {"attention": "flash", "without_ffn": np.nan})
    rows.append(rows[0] | {"model": "1.5b"})
    table = pd.DataFrame(rows).assign(first_token=1000.4, first_token_p95=2000.0)
    assert cells(pages.serving(table)) == [
        ["eager", "dense", "5.00", "–", "1,000", "2,000", "2"],
        ["eager", "no feed-forward layer", "8.00", "+60.0%", "–", "–", "2"],
        ["CUDA graphs", "dense", "6.40", "–", "1,000", "2,000", "2"],
        ["CUDA graphs", "sparse", "7.04", "+10.0%", "1,000", "2,000", "2"],
        ["CUDA graphs", "no feed-forward layer", "8.00", "+25.0%", "–", "–", "2"],
        ["CUDA graphs", "dense", "5.00", "–", "1,000", "2,000", "2"],
    ]


def test_tables_of_other_shapes():
    biases = {"pattern": "skewed biases", "gated": False, "hidden_size": 2048}
    biases |= {"intermediate_size": 8192, "mode": "graph", "weight_sets": 8}
    few, many = {BASE: 4.0, UNION: 5.0, "auto": 4.0}, {BASE: 4.0, UNION: 3.2, "auto": 4.0}
    rows = together(
        speed_rows(64, 330.0, few, **biases),
        speed_rows(2048, 326.0, {BASE: 1.0, UNION: 2.0}, **biases | {"pattern": "skewed"}),
        speed_rows(2048, 163.0, many, **biases),
        speed_rows(2048, 29.0, many, pattern="skewed merged", mode="graph", weight_sets=8),
    )
    assert cells(pages.other_shapes(analysis.speedups(rows))) == [
        ["OPT-1.3B, 2048 x 8192", "4%", "best sparse path", "–", "0.80", "–", "–"],
        ["OPT-1.3B, 2048 x 8192", "4%", "`auto`", "–", "1.00", "–", "–"],
        ["OPT-1.3B, 2048 x 8192", "2%", "best sparse path", "–", "–", "1.25", "–"],
        ["OPT-1.3B, 2048 x 8192", "2%", "`auto`", "–", "–", "1.00", "–"],
        [
            "Merged gate and up, ReLU, 2048 x 5632",
            "0.5%",
            "best sparse path",
            "–",
            "–",
            "1.25",
            "–",
        ],
        ["Merged gate and up, ReLU, 2048 x 5632", "0.5%", "`auto`", "–", "–", "1.00", "–"],
    ]


def test_tables_of_fp8():
    times = {BASE: 8.0, UNION: 4.0, DENSE_FP8: 5.0, SPARSE_FP8: 2.0}
    layers = together(
        speed_rows(16_384, 29.0, times),
        speed_rows(131_072, 100.0, times, pattern="even"),
        speed_rows(4096, 29.0, times),  # not among the sizes that are printed
        speed_rows(4096, 40.0, times, hidden_size=3072, intermediate_size=8192),
        speed_rows(64, 29.0, {BASE: 8.0, UNION: 4.0}),
    )
    numbers = ["8.00 ms", "4.00 ms", "5.00 ms", "2.00 ms", "4.00", "2.50", "by rows"]
    assert cells(pages.fp8_layer(analysis.speedups(layers))) == [
        ["16,384, skewed, 29 active", *numbers],
        ["131,072, even, 100 active", *numbers],
        ["4,096, skewed, 40 active, 3072 x 8192", *numbers],
    ]
    names = [BASE, DENSE_FP8, "triton FP8 torch.compile"]
    passes = model_rows(
        dict(zip(names, [100.0, 80, 50], strict=True)), peak=8e9, energy=[4.0, 3, 2]
    )
    steps = decode_rows(dict(zip(names, [4.0, 5, 2], strict=True)))
    tables = analysis.model_speedups(passes), analysis.decode_speedups(steps)
    assert cells(pages.fp8_models(*tables)) == [
        ["1.5B, forward, 64 x 2,048", "dense bf16", "1,311,000", "–", "–", "8.00"],
        ["1.5B, forward, 64 x 2,048", "dense FP8", "1,638,000", "+25%", "−25%", "8.00"],
        ["1.5B, forward, 64 x 2,048", "sparse FP8", "2,621,000", "+100%", "−50%", "8.00"],
        ["1.5B, decoding, 1 document", "dense bf16", "250", "–", "–", "–"],
        ["1.5B, decoding, 1 document", "dense FP8", "200", "−20%", "–", "–"],
        ["1.5B, decoding, 1 document", "sparse FP8", "500", "+100%", "–", "–"],
    ]
    quality = analysis.fp8_quality(quality_rows([0.0, 0.004, 0.002, 0.009, 0.007]))
    first, second, *_ = cells(pages.fp8_costs(quality))
    name = "`twell-6m`, 23 active"
    assert first == [name, "dense FP8", "+0.0040 (+0.0036 to +0.0048)", "–"]
    other = "−0.0020 (−0.0024 to −0.0018)"
    assert second == [name, "sparse FP8", "+0.0020 (+0.0018 to +0.0024)", other]


def test_recorded_tables_computed_otherwise():
    rows = pd.read_csv(ROOT / "data" / "bench" / "ffn.csv")
    rows = rows.query("tokens == 131072 and pattern == 'skewed' and 29 < active < 30 and gated")
    newest = rows[rows["date"] == rows["date"].max()].set_index("provider")["p50"]
    tables = pages.tables(ROOT)["benchmarks.md"]
    (line,) = [row for row in cells(tables["fp8 layer"]) if row[0] == "131,072, skewed, 29 active"]
    dense = newest[[name for name in newest.index if name.startswith("dense FP8")]].min()
    gains = newest[BASE] / newest[SPARSE_FP8], dense / newest[SPARSE_FP8]
    assert [float(cell) for cell in line[5:7]] == pytest.approx(gains, abs=0.006)
