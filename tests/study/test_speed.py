"""Tables of measured rows, from rows made by hand."""

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories import SEED
from tests.factories.analysis import (
    BASE,
    COMPILED,
    decode_rows,
    model_layer_rows,
    model_rows,
    part_rows,
    speed_rows,
    step_rows,
    together,
    training_rows,
)
from twell import results

UNION = "triton union"


LATER, EARLIER = {"date": "2026-11-23T10:00:00+00:00"}, {"date": "2026-11-21T10:00:00+00:00"}


def rows(table, *columns):
    return sorted(table[list(columns)].itertuples(index=False, name=None))


def near(*values):
    return pytest.approx(values, nan_ok=True)


def test_speedups_are_over_compiled_dense_of_the_same_case_and_call():
    cases = [{}, {"mode": "graph", "weight_sets": 8}, {"mode": "graph"}, {"device": "other"}]
    cases += [{"gated": False}, {"pattern": "even"}, {"dtype": "float32"}]
    parts = [
        speed_rows(64, 29.0, {BASE: 3.0 + 2 * n, UNION: 2.0}, **case)
        for n, case in enumerate(cases)
    ]
    parts += [speed_rows(64, 31.0, {BASE: 17.0, UNION: 2.0})]
    table = analysis.speedups(together(*parts))
    assert sorted(table.loc[table["provider"] == UNION, "speedup"]) == [1.5 + n for n in range(8)]
    assert (table.loc[table["provider"] == BASE, "speedup"] == 1).all() and len(table) == 16
    added = {"p50_dense", "speedup", "energy_per_token", "energy_change"}
    added |= {"p20", "p80", "speedup_low", "speedup_high"}
    assert set(table.columns) == set(parts[0].columns) | added
    assert table["speedup_low"].isna().all()
    spread = {"p20": [9.0, 4.0], "p80": [12.0, 6.0]}
    one = analysis.speedups(speed_rows(64, 29.0, {BASE: 10.0, UNION: 5.0}, **spread))
    union = one.set_index("provider").loc[UNION]
    assert union[["speedup_low", "speedup", "speedup_high"]].tolist() == near(1.5, 2, 3)
    times = {BASE: 2.0, UNION: 1.0, "auto": 1.0}
    table = analysis.speedups(speed_rows(500, 29.0, times, energy=[1000.0, 600.0, np.nan]))
    assert table["energy_per_token"].tolist() == near(2, 1.2, np.nan)
    assert table["energy_change"].tolist() == near(0, -40, np.nan)


@pytest.mark.parametrize(
    "mode, eager, expected",
    [("eager", 1.0, 0.5), ("eager", 8.0, 2.0), ("compiled", 1.0, 2.0), ("graph", 1.0, 2.0)],
)
def test_eager_calls_are_beside_the_faster_dense_one(mode, eager, expected):
    times = {BASE: 4.0, "dense eager": eager, "auto": 2.0}
    table = analysis.speedups(speed_rows(64, 29.0, times, mode=mode)).set_index("provider")
    assert table.loc["auto", "speedup"] == expected and len(table) == 3


def test_the_newest_call_of_each_provider_counts():
    parts = [
        speed_rows(64, 29.28, {BASE: 4.0, UNION: 1.0, "triton rowwise": 1.0}),
        speed_rows(64, 29.27, {BASE: 4.0, UNION: 2.0}, **LATER),  # the same level but for rounding
        speed_rows(64, 98.0, {BASE: 4.0, UNION: 8.0}),  # only measured earlier
        speed_rows(64, 29.28, {BASE: 4.0, UNION: 0.5}, device="other"),
    ]
    parts += [
        speed_rows(64, 29.26, {UNION: 0.1}, date="2026-11-24T10:00:00+00:00")
    ]  # without dense
    table = analysis.speedups(together(*parts))
    expected = [(29.27, "NVIDIA H200", 2.0), (29.28, "other", 8.0), (98.0, "NVIDIA H200", 0.5)]
    assert rows(table[table["provider"] == UNION], "active", "device", "speedup") == expected
    # Of the older call, beside its own dense.
    older = table[table["provider"] == "triton rowwise"]
    assert rows(older, "active", "p50_dense", "speedup") == [(29.28, 4.0, 4.0)]
    near_29 = analysis.at_level(table[table["device"] != "other"], 29)
    assert set(near_29["provider"]) == {BASE, UNION, "triton rowwise"}  # one level, two calls
    # A path timed again within one call counts once, as timed last.
    twice = [speed_rows(64, 29.0, {BASE: 4.0, "auto": 1.0}), speed_rows(64, 29.0, {"auto": 2.0})]
    assert analysis.speedups(pd.concat(twice))["speedup"].tolist() == [1, 2]


def test_training_speedups():
    times = {BASE: 8.0, UNION: 4.0}
    even = {"pattern": "even"}
    parts = [
        training_rows(64, 29.0, times, held=[800, 200], peak=[1000, 900]),
        training_rows(64, 60.0, times, forward=[3.0, 1.0], energy=[64.0, 16.0]),
        training_rows(128, 29.0, {BASE: 6.0, UNION: 4.0}, **even),
        training_rows(128, 29.1, {BASE: 9.0, UNION: 3.0}, **even, **LATER),  # the same level
    ]
    table = analysis.training_speedups(together(*parts))
    columns = "tokens active speedup held_share peak_share energy_change".split()
    union = table[table["provider"] == UNION].fillna({"energy_change": -1})
    assert rows(union, *columns) == [
        (64, 29.0, 2.0, 25.0, 90.0, -1),
        (64, 60.0, 2.0, 100.0, 100.0, -75),
        (128, 29.1, 3.0, 100.0, 100.0, -1),
    ]
    assert not {"held_dense", "energy_dense"} & set(table.columns)


def test_steps_and_models_beside_dense():
    times = {BASE: 8.0, "dense eager": 10.0, f"{UNION} torch.compile": 4.0}
    again = step_rows({BASE: 6.0, UNION: 4.0}, checkpoint_activations=True)
    parts = [step_rows(times, peak=[80, 100, 40], energy=[8192.0, 8192.0, 4096.0]), again]
    table = analysis.step_speedups(together(*parts)).sort_values("p50_dense", kind="stable")
    columns = ["tokens", "speedup", "peak_change", "energy_change"]
    assert rows(table[table["p50_dense"] == 8], *columns) == [
        (8192, 0.8, 25.0, 0.0), (8192, 1.0, 0.0, 0.0), (8192, 2.0, -50.0, -50.0),
    ]  # fmt: skip
    assert sorted(table.loc[table["p50_dense"] == 6, "speedup"]) == [1, 1.5]
    energy = {"energy": [6000.0, 4000.0, 3000.0], "idle": 100.0, "peak": [100, 80, 90]}
    large = model_rows([10.0, 8.0, 5.0], model="2b", num_layers=38)
    parts = [model_rows([10.0, 8.0, 5.0], **energy), model_rows([10.0, 4.0, 2.0], active=911.0)]
    parts += [model_rows([30.0, 10.0, 5.0], batch=16, tokens=32768, mode="graph"), large]
    parts += [model_rows([9.0, 1.0, 1.0], **EARLIER)]
    table = analysis.model_speedups(together(*parts))
    order = list(zip(table["model"], table["tokens"], table["active"], strict=True))[::3]
    assert order == [
        ("1.5b", 32768, 29),
        ("1.5b", 131072, 29),
        ("1.5b", 131072, 911),
        ("2b", 131072, 29),
    ]
    first = table[3:6].set_index("provider").loc[COMPILED]
    assert first["speedup"].tolist() == [1, 1.25, 2]
    assert first["peak_change"].tolist() == near(0, -20, -10)
    assert first["energy_change"].tolist() == near(0, -100 / 3, -50)


def test_trained_models_beside_imposed_activity():
    """The imposed gain is higher only where no time of the calls says otherwise."""
    spread = {"p20": [9.9, 4.9, 7.9], "p80": [10.1, 5.1, 8.1]}
    parts = [model_rows([10.0, 5.0, 8.0], profile="checkpoint", model="flagship-x", **spread)]
    spread["p20"], spread["p80"] = [9.9, 3.9, 7.9], [10.1, 4.1, 8.1]
    about = {"profile": "imposed", "model": "flagship-x", "active": 31.0}
    parts += [model_rows([10.0, 4.0, 8.0], **about, **spread)]
    parts += [model_rows([10.0, 8.0, 5.0], profile="checkpoint", model="85m-x", active=20.0)]
    parts += [model_rows([10.0, 8.0, 5.0], profile="imposed", model="85m-x", active=20.0)]
    parts += [model_rows([10.0, 8.0, 5.0], profile="checkpoint", model="alone")]
    table = analysis.beside_imposed(analysis.model_speedups(together(*parts)))
    assert set(table["model"]) == {"flagship-x", "85m-x"} and len(table) == 6
    assert set(table.loc[table["model"] == "85m-x", "verdict"]) == {"alike"}
    row = table[(table["model"] == "flagship-x") & (table["provider"] == COMPILED[1])].iloc[0]
    assert (row["active"], row["imposed_active"]) == (29, 31)
    assert (row["speedup"], row["imposed_speedup"], row["verdict"]) == (2, 2.5, "higher")


def test_decoding_by_documents_and_tuning():
    tuned = [f"{name} tuned" for name in COMPILED]

    def of(names, times, **columns):
        return decode_rows(dict(zip(names, times, strict=True)), **columns)

    table = analysis.decode_speedups(
        together(
            of(COMPILED, [4.0, 2.0, 1.0]),
            of(COMPILED, [8.0, 6.0, 5.0], batch=32, energy=[10.0, 5.0, 4.0]),
            of(tuned, [5.0, 4.0, 4.5], **EARLIER),
            of(tuned, [6.0, 3.0, 4.6]),
        )
    )
    columns = ["batch", "tuned", "provider", "p50", "speedup"]
    values = [(1, False, *one) for one in ((4, 1), (2, 2), (1, 4))]
    values += [
        (1, True, *one) for one in ((5, 1), (3, 5 / 3), (4.5, 5 / 4.5))
    ]  # fastest on each side
    values += [(32, False, *one) for one in ((8, 1), (6, 4 / 3), (5, 1.6))]
    expected = [
        (*value[:2], name, *value[2:]) for value, name in zip(values, COMPILED * 3, strict=True)
    ]
    found, expected = rows(table, *columns), sorted(expected)
    assert [one[:4] for one in found] == [one[:4] for one in expected]
    assert [one[4] for one in found] == near(*(one[4] for one in expected))
    assert table.query("batch == 32")["energy_per_token"].max() == 10 / 32
    assert set(analysis.decode_speedups(of(tuned, [3.0, 2.0, 1.0]))["tuned"]) == {True}


def line(provider, points, **columns):
    """A line of `speedups`: points of (active, speed-up)."""
    parts = [speed_rows(64, a, {provider: 1.0}, speedup=gain, **columns) for a, gain in points]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize(
    ("points", "crossover"),
    [
        ([(10, 2.0), (1000, 0.5)], 100.0),
        ([(1, 9.0), (10, 4.0), (40, 0.5), (90, 0.1)], 10 * 4 ** (2 / 3)),
        ([(0, 9.0), (10, 2.0), (1000, 0.5)], 100.0),
        ([(10, 1.0), (20, 0.5)], 10.0),
        ([(10, 2.0), (30, 0.5), (50, 1.5), (80, 0.5)], 10 * 3**0.5),
        ([(10, 2.0), (1003, 1.0)], np.nan),
        ([(29, 0.9), (300, 0.2)], np.nan),
        ([(29, 0.9)], np.nan),
    ],
)
def test_crossovers(points, crossover):
    other = line("triton rowwise", [(5, 4.0), (20, 0.25)], pattern="even")
    more = line(UNION, [(1, 2.0), (100, 0.5)]).assign(tokens=128)
    table = analysis.crossovers(together(line(UNION, points), other, line("auto", points), more))
    assert rows(table, "tokens", "pattern", "provider") == [
        (64, "even", "triton rowwise"), (64, "skewed", UNION), (128, "skewed", UNION),
    ]  # fmt: skip
    row = table.query("tokens == 64 and pattern == 'skewed'").iloc[0]
    assert [row["crossover"]] == near(crossover)
    assert table.query("pattern == 'even' or tokens == 128")["crossover"].tolist() == near(10, 10)
    none = analysis.crossovers(line("auto", points))
    assert none.empty and none.columns.equals(table.columns)


def test_the_nearest_level_of_each_case():
    table = together(
        line(UNION, [(9.7, 1.0), (29.3, 2.0), (98.0, 3.0)]),
        line("dense eager", [(29.3, 4.0)]),
        line(UNION, [(0.0, 6.0), (178.0, 5.0)]).assign(tokens=1),
        line(UNION, [(10.0, 7.0), (70.0, 8.0)], mode="graph"),
    )
    expected = [(29.3, 2.0), (29.3, 4.0), (70.0, 8.0), (178.0, 5.0)]
    assert rows(analysis.at_level(table, 29), "active", "speedup") == expected
    assert rows(analysis.at_level(table, 1), "active", "speedup")[0] == (0.0, 6.0)
    kernels = table.drop(columns=["mode", "weight_sets"])
    expected = [(29.3, 2.0), (29.3, 4.0), (178.0, 5.0)]
    assert rows(analysis.at_level(kernels, 29), "active", "speedup") == expected
    assert analysis.at_level(table[:0], 29).empty


def test_gains_by_level():
    times = dict(zip(["dense eager", "triton", *COMPILED], [12.0, 4, 10, 8, 5], strict=True))
    parts = [model_rows(times, energy=[9.0, 9, 8, 6, 4]), model_rows([10.0, 20, 10], active=911.0)]
    table = analysis.level_gains(analysis.model_speedups(together(*parts)), "energy_change")
    assert table[["faster_low", "faster_high"]].isna().all(axis=None)
    table = table[["active", "provider", "faster", "saved"]]
    assert table.fillna(-1).to_numpy().tolist() == [
        [911.0, "auto torch.compile", 0.0, -1],
        [911.0, "triton torch.compile", -50.0, -1],
        [29.0, "auto torch.compile", 100.0, 50.0],
        [29.0, "triton torch.compile", 25.0, 25.0],
    ]
    steps = step_rows({BASE: 6.0, f"{UNION} torch.compile": 4.0}, peak=[100, 70])
    gains = analysis.level_gains(analysis.step_speedups(steps), by="peak_change")
    assert gains[["faster", "saved"]].iloc[0].tolist() == near(50, 30)


def test_what_layers_contribute():
    table = analysis.layer_contributions(
        together(
            model_layer_rows(10.0, [9.0, 7, 12], [50.0, 10, 200], auto=[9.0, 7, 10]),
            model_layer_rows(10.0, [9.9, 9.9, 9.9], [5.0, 1, 2], **EARLIER),
            model_layer_rows(np.nan, [np.nan] * 3, [1.0, 1, 1], **LATER),  # no times
            model_layer_rows(10.0, [15.0, 16, 17], [900.0, 910, 920], level=911.0),
            model_layer_rows(10.0, [1.0, 1, 1], [1.0, 1, 1], level=1.0, model="2b"),
        )
    )
    level = table.query("level == 29")
    assert rows(level, "layer", "saved", "auto_saved") == [(0, 1, 1), (1, 3, 3), (2, -2, 0)]
    assert rows(table.query("level == 911"), "saved") == [(-7,), (-6,), (-5,)] and len(table) == 9
    close = analysis.layers_at(table[table["model"] == "1.5b"], 32)
    assert set(close["level"]) == {29.0} and analysis.layers_at(table, 100).empty
    expected = np.corrcoef([50, 10, 200], [1, 3, -2])[0, 1]
    assert analysis.correlation(close) == pytest.approx(expected)
    for constant in (close.assign(saved=3.0), close[:1]):
        assert np.isnan(analysis.correlation(constant))


def test_where_the_time_of_a_layer_goes():
    dense = {"attention": 3.0, "gate": 4.0, "up and down": 8.0, "between kernels": 1.0}
    sparse = dense | {"up and down": 2.0}
    parts = [part_rows(dense, sparse), part_rows(dense, dense, **EARLIER)]
    parts += [part_rows(dense, sparse | {"attention": 13.0}, model="2b")]
    table = analysis.layer_parts(together(*parts)).sort_values(["model", "provider"])
    assert table["total"].tolist() == [16, 10, 16, 20] and (table["limit"] == 2).all()
    assert table["speedup"].tolist() == [1, 1.6, 1, 0.8]
    assert table[list(sparse)].iloc[1].to_dict() == sparse
    # Parts that take longer under the profiler are scaled to the layer.
    dense = {"attention": 6.0, "up and down": 6.0, "between kernels": -2.0}
    sparse = {"attention": 4.0, "up and down": 2.0, "between kernels": 1.0}
    table = analysis.layer_parts(part_rows(dense, sparse))
    columns = ["total", "attention", "between kernels", "limit"]
    assert table[columns].to_numpy().tolist() == [[10, 5, 0, 2], [7, 4, 1, 2]]


def test_the_scale_of_the_paper_beside_ours():
    options = {"model": "2b", "tokens": 1000}
    parts = [model_rows([100.0, 90, 80], 24.3, energy=[10.0, 9, 6], **options)]
    parts += [model_rows([100.0, 90, 50], 10.0, **options)]  # another level
    parts += [model_rows([100.0, 90, 40], 911.0, model="0.5b", tokens=1000)]
    steps = step_rows({BASE: 6.0, f"{UNION} torch.compile": 4.0}, model="2b", peak=[100e9, 70e9])
    paper, models = results.paper(), analysis.model_speedups(pd.concat(parts))
    table = analysis.scale_table(paper, models, analysis.step_speedups(steps))
    row = table.set_index(["quantity", "model"]).loc
    columns = ["paper_dense", "paper_sparse", "paper_change", "dense", "sparse", "change"]
    speed = row["forward speed", "2B"]
    assert speed[columns].tolist() == near(87.8, 106, 20.5, 10, 12.5, 25)
    assert speed[["paper_active", "active", "paper_note"]].tolist() == [24, 24.3, ""]
    assert "larger micro-batch" in row["training memory", "2B"]["paper_note"]
    assert (speed["paper_device"], speed["device"]) == ("H100 PCIe", "NVIDIA H200")
    memory = row["training memory", "2B"]
    assert memory[["paper_change", "dense", "sparse"]].tolist() == [22.3, 100, 70]
    changes = [row[key]["change"] for key in (("forward energy", "2B"), ("forward speed", "0.5B"))]
    assert changes == near(-40, 150)  # the only level there is
    assert row["training speed", "2B"]["dense"] == pytest.approx(8192 / 6)
    none = table.query("model == '1B'")
    assert none["dense"].isna().all() and (none["device"] == "").all() and len(none) == 4


def test_rows_are_of_the_device_with_the_most(tmp_path):
    few = pd.DataFrame(speed_rows(64, 29.0, {"dense torch.compile": 2.0, "triton union": 1.0}))
    many = pd.concat([few, few]).assign(device="new")
    pd.concat([many, few]).to_csv(tmp_path / "ffn.csv", index=False)
    few.drop(columns="device").to_csv(tmp_path / "other.csv", index=False)
    bench = analysis.Bench(tmp_path, required=["ffn.csv"])
    assert bench.device == "new" and set(bench.rows("ffn.csv")["device"]) == {"new"}
    named = analysis.Bench(tmp_path, device=few["device"][0])
    assert set(named.rows("ffn.csv")["device"]) == {few["device"][0]}
    table = bench.rows("ffn.csv", analysis.speedups, "provider == 'triton union'")
    assert table["speedup"].tolist() == [2.0]
    assert bench.rows("ffn.csv", analysis.speedups, "tokens == 1").empty
    assert bench.rows("training.csv", analysis.training_speedups, "tokens == 1").empty


UNION_FP8, ROWWISE_FP8 = "triton union FP8", "triton rowwise FP8"


BY_ROWS, BY_TENSORS = "dense FP8 torch.compile", "dense FP8 by tensors torch.compile"


TORCHAO = "dense FP8 torchao torch.compile"


def by_side(table):
    return table.set_index("side")


@pytest.mark.parametrize(
    ("provider", "side"),
    [
        (BASE, "dense"), ("triton union", "sparse"), ("triton torch.compile", "sparse"),
        (BY_ROWS, "dense FP8"), (BY_TENSORS, "dense FP8"), (TORCHAO, "dense FP8"),
        ("triton decode FP8", "sparse FP8"), ("triton FP8 torch.compile", "sparse FP8"),
        ("dense FP8 all torch.compile", "dense FP8 all"),
        ("triton FP8 all torch.compile", "sparse FP8 all"),
        ("dense", ""), ("dense eager", ""), ("triton dense FP8", ""), ("auto FP8", ""),
        ("triton", ""), ("dense int8 weights torch.compile", ""), ("auto torch.compile", ""),
    ],
)  # fmt: skip
def test_sides(provider, side):
    assert analysis.side_of(provider) == side


def test_the_fastest_of_each_side_within_a_call():
    times = {BASE: 8.0, "triton union": 4.0, "triton rowwise": 5.0, "auto": 1.0}
    times |= {BY_ROWS: 6.0, BY_TENSORS: 5.0, UNION_FP8: 2.0, ROWWISE_FP8: 3.0, "auto FP8": 1.0}
    call = speed_rows(64, 29.0, times)
    # The same case later, dense FP8 alone; and another case without any.
    again = speed_rows(64, 29.01, {BASE: 9.0, BY_ROWS: 3.0}, **LATER)
    rows = together(call, again, speed_rows(128, 29.0, {BASE: 8.0, "triton union": 4.0}))
    table = analysis.fastest(analysis.speedups(rows))
    sides = by_side(table[table["tokens"] == 64])
    expected = {"dense": 9.0, "sparse": 4.0, "dense FP8": 3.0, "sparse FP8": 2.0}
    assert sides["p50"].to_dict() == expected
    # Sparse FP8 is compared with dense FP8 of its own call.
    assert sides["over_fp8"]["sparse FP8"] == 2.5 and sides["over_fp8"]["dense FP8"] == 1
    assert sides.loc[["dense", "sparse"], "over_fp8"].isna().all()
    assert sides["speedup"]["sparse FP8"] == 4
    assert sorted(table.loc[table["tokens"] == 128, "side"]) == ["dense", "sparse"]
    alone = analysis.fastest(analysis.speedups(speed_rows(64, 29.0, {BASE: 4.0, UNION_FP8: 1.0})))
    assert np.isnan(by_side(alone)["over_fp8"]["sparse FP8"])


P = 1e9


# A GPU sends 10 GB/s to its node of four and 1 GB/s to others, and 100 W keep it waiting.
CLUSTER = analysis.Cluster(node=4, within=1e10, between=1e9, waiting=100.0)


def costs(gpus, active=29.0, **changes):
    """Of ten steps of 64 sequences; a micro-batch of 4 takes 2 s densely, else 1 s."""
    about = {"parameters": P, "watts": 500.0, "peak": 20e9}
    rows = step_rows({"dense torch.compile": 2000.0, "triton union torch.compile": 1000.0}, **about)
    options = {"active": active, "tokens": 640 * 2048, "batch_tokens": 64 * 2048, "gpus": gpus}
    return analysis.training_costs(rows, "1.5b", cluster=CLUSTER, **options | changes)


def test_one_node_and_several():
    node, over_all, in_nodes = costs([4, 8]).query("provider == 'dense torch.compile'").itertuples()
    # One node: 16 sequences are four micro-batches. Each gathers 8 bytes a parameter, and the step
    # reduces 4, which are held whole until then.
    assert (node.sequences, node.compute, node.sent_gb) == (16, 8000, (4 * 8 + 4) * 3 / 4)
    assert node.send == pytest.approx(2700) and node.efficiency == 100 and node.active == 29
    assert node.hours == pytest.approx(10 * 8 / 3600)
    assert node.hours_apart == pytest.approx(10 * 10.7 / 3600)
    assert node.energy == pytest.approx(10 * 4 * 500 * 8 / 3.6e9)
    assert node.memory == pytest.approx(16 / 4 + 4 + 4)
    # Two nodes, sharded over all: the four links of a node share what leaves it.
    assert over_all.sent_gb == pytest.approx((2 * 8 + 4) * 7 / 8)
    assert over_all.send == pytest.approx(1e3 * 17.5 / 4) and over_all.compute == 4000
    assert over_all.efficiency == pytest.approx(100 * 4 / 4.375)
    assert over_all.energy == pytest.approx(10 * 8 * (500 * 4 + 100 * 0.375) / 3.6e9)
    assert over_all.memory == pytest.approx(16 / 8 + 4 + 4)
    # Sharded in a node: the node's quarter of the gradients, once, to one other node.
    assert in_nodes.sent_gb == pytest.approx((2 * 8 + 4) * 3 / 4 + 2 * 4 / 4 / 2)
    assert in_nodes.send == pytest.approx(1500 + 1000) and in_nodes.memory == pytest.approx(12)


def test_cells_show_the_packed_tensors():
    random = np.random.default_rng(SEED)
    dense = (random.random((7, 20)) < 0.2).astype(np.float32)  # the last of three tiles is partial
    dense[2], dense[5], dense[3] = 0, 1, 0
    dense[3, 19] = 1
    cells = analysis.format_cells(dense, tile_n=8, compression=2, ell_width=6)
    active = {token: np.flatnonzero(row).tolist() for token, row in enumerate(dense)}
    for name, table in cells.groupby("format"):
        stored = table[table["kind"] == "value"].groupby(["part", "token"])["label"].apply(list)
        columns = {token: set() for token in active}
        for (part, token), labels in stored.items():
            assert labels == active[token] or (name, part) == ("TwELL", "all rows")
            columns[token] |= set(labels)
        assert {token: sorted(labels) for token, labels in columns.items()} == active, name
    tiles = cells[(cells["format"] == "TwELL") & (cells["part"] == "all rows")]
    assert (
        set(tiles.groupby("token").size()) == {12}
        and (cells.query("kind == 'zero'").label < 0).all()
    )
    counts = np.pad(dense, ((0, 0), (0, 4))).reshape(7, 3, 8).sum(2)
    heads = tiles[tiles["kind"] == "count"]
    assert heads["slot"].tolist() == [0, 4, 8] * 7
    assert heads["label"].tolist() == counts.reshape(-1).tolist()
    for part, tokens in (
        ("overflow rows", np.flatnonzero(counts.max(1) > 3)),
        ("backup rows", np.flatnonzero(dense.sum(1) > 6)),
        ("ELL rows", np.flatnonzero(dense.sum(1) <= 6)),
    ):
        assert cells.loc[cells["part"] == part, "token"].unique().tolist() == tokens.tolist()


def test_bytes_are_those_of_the_formats():
    options = {"tile_n": 128, "compressions": (8,), "ell_width": 16}
    table = analysis.format_bytes(64, 512, [0.5, 1e6], **options)
    sparse, full = (rows.set_index("format")["nbytes"] for _, rows in table.groupby("active"))
    assert table["nbytes"].eq((table["relative"] * 64 * 512 * 2).round()).all()
    slots, counts, vector, dense = 64 * 16 * 4, 64 * 4, 64 * 4, 64 * 512 * 2
    tiles = 64 * 512 // 8 * 4
    assert sparse["TwELL, C = 8"] == tiles and sparse["Hybrid, width 16"] == slots + counts + vector
    assert sparse["ELL"] < sparse["Hybrid, width 16"]
    assert table["active_share"].iloc[-1] == 1 and full["ELL"] == 64 * 512 * 4 + counts
    assert full["Hybrid, width 16"] == dense + vector
    assert full["TwELL, C = 8"] == tiles + dense + vector
