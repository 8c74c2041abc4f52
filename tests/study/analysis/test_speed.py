"""Tables of measured rows, from rows made by hand."""

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories.analysis import (
    BASE,
    COMPILED,
    ceiling_rows,
    decode_rows,
    kernel_rows,
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


# --- beside dense, in the same case and call ------------------------------------------------------


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
    with pytest.warns(UserWarning, match="left out: 1 of 10 rows"):
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


@pytest.mark.parametrize(
    ("table", "make", "command", "column"),
    [
        (analysis.speedups, speed_rows, "ffn", "mode"),
        (analysis.training_speedups, training_rows, "ffn --backward", "held"),
    ],
)
def test_rows_that_are_not_whole_are_left_out_or_refused(table, make, command, column):
    whole = make(64, 29.0, {BASE: 4.0, UNION: 1.0})
    alone = make(64, 29.0, {UNION: 3.0}, **LATER)
    message = r"left out: 1 of 3 rows have no dense torch.compile .* 64 tokens on 2026-11-23"
    with pytest.warns(UserWarning, match=message) as warned:
        assert rows(table(together(whole, alone)), "provider", "speedup") == [(BASE, 1), (UNION, 4)]
    assert warned[0].filename == __file__
    for bad, message in (
        (alone, r"^1 of 1 rows have no dense torch.compile"),
        (
            whole.drop(columns=column),
            f"need the columns {column}; `twell measure {command}` writes",
        ),
        (whole[:0], "csv has no row"),
        (whole.assign(p50=[4.0, np.nan], commit=[None, "a"]), "empty cells in commit, p50"),
        (whole.assign(p50=[4.0, 0.0]), "p50 of triton union is 0 ms on 2026.*; a time is above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            table(bad)


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
    columns = "tokens active speedup forward_speedup held_share peak_share energy_change".split()
    union = table[table["provider"] == UNION].fillna({"energy_change": -1})
    assert rows(union, *columns) == [
        (64, 29.0, 2.0, 2.0, 25.0, 90.0, -1),
        (64, 60.0, 2.0, 3.0, 100.0, 100.0, -75),
        (128, 29.1, 3.0, 3.0, 100.0, 100.0, -1),
    ]
    assert not {"held_dense", "forward_dense", "energy_dense"} & set(table.columns)


def test_training_steps_of_both_modes_stay_apart():
    """Within one call, of one case: neither is compared with dense of the other, nor is newer."""
    eager = training_rows(64, 29.0, {BASE: 10.0, "triton": 9.0, UNION: 5.0}, mode="eager")
    stream = training_rows(64, 29.0, {BASE: 8.0, UNION: 2.0}, **LATER)
    table = analysis.training_speedups(together(eager, eager.assign(**LATER), stream))
    of_union = table[table["provider"] == UNION].sort_values("mode")
    assert rows(of_union, "mode", "speedup", "date") == [
        ("eager", 2.0, LATER["date"]),
        ("stream", 4.0, LATER["date"]),
    ]
    assert set(analysis.at_level(table, 29)["mode"]) == {"eager", "stream"}
    assert analysis.by_case(table).index.get_level_values("mode").tolist() == ["eager", "stream"]
    slower = training_rows(64, 300.0, {BASE: 1.0, UNION: 2.0}, mode="eager")
    table = analysis.training_speedups(together(eager, stream, slower))
    assert sorted(analysis.crossovers(table)["mode"]) == ["eager", "stream"]


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
    # 100 W of idle power are 1 J in 10 ms: 5, 3.2 and 2.5 J are left.
    assert first["energy_net"].iloc[0] == pytest.approx(5000 / 131072)
    assert first["energy_net_change"].tolist() == near(0, -36, -50)
    for frame, table, command in (
        (again, analysis.step_speedups, "train-step"),
        (large, analysis.model_speedups, "model"),
    ):
        with pytest.raises(ValueError, match=f"the columns peak; `twell measure {command}` writes"):
            table(frame.drop(columns="peak"))


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
    with pytest.raises(ValueError, match="rows of decode.csv need the columns provider"):
        analysis.decode_speedups(of(tuned, [3.0, 2.0, 1.0]).drop(columns="provider"))


# --- levels and cases -----------------------------------------------------------------------------


def line(provider, points, **columns):
    """A line of `speedups`: points of (active, speed-up)."""
    parts = [speed_rows(64, a, {provider: 1.0}, speedup=gain, **columns) for a, gain in points]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize(
    ("points", "crossover", "verdict"),
    [
        ([(10, 2.0), (1000, 0.5)], 100.0, "faster below 100 active"),
        ([(1, 9.0), (10, 4.0), (40, 0.5), (90, 0.1)], 10 * 4 ** (2 / 3), "faster below 25 active"),
        ([(0, 9.0), (10, 2.0), (1000, 0.5)], 100.0, "faster below 100 active"),
        ([(10, 1.0), (20, 0.5)], 10.0, "faster below 10 active"),
        ([(10, 2.0), (30, 0.5), (50, 1.5), (80, 0.5)], 10 * 3**0.5, "faster below 17 active"),
        ([(10, 2.0), (1003, 1.0)], np.nan, "faster at 1003 active, the most measured"),
        ([(29, 0.9), (300, 0.2)], np.nan, "slower from 29 active on, the fewest measured"),
        ([(29, 0.9)], np.nan, "slower from 29 active on, the fewest measured"),
    ],
)
def test_crossovers(points, crossover, verdict):
    other = line("triton rowwise", [(5, 4.0), (20, 0.25)], pattern="even")
    more = line(UNION, [(1, 2.0), (100, 0.5)]).assign(tokens=128)
    table = analysis.crossovers(together(line(UNION, points), other, line("auto", points), more))
    assert rows(table, "tokens", "pattern", "provider") == [
        (64, "even", "triton rowwise"), (64, "skewed", UNION), (128, "skewed", UNION),
    ]  # fmt: skip
    row = table.query("tokens == 64 and pattern == 'skewed'").iloc[0]
    measured = [(active, gain) for active, gain in points if active]
    expected = measured[0][0], measured[-1][0], max(gain for _, gain in measured), crossover
    assert row[["lowest", "highest", "best", "crossover"]].tolist() == near(*expected)
    assert row["verdict"] == verdict
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


def test_a_row_a_case_and_a_column_a_provider():
    dirty = {"commit": "0123456789abcdef-dirty", "pattern": "even"}
    table = analysis.speedups(
        together(
            speed_rows(64, 29.0, {BASE: 4.0, UNION: 2.0, "auto": 1.0}),
            speed_rows(64, 10.0, {BASE: 4.0, UNION: 1.0}, energy=[8.0, np.nan], **dirty),
        )
    )
    gains = analysis.by_case(table)
    assert list(gains.columns) == ["auto", BASE, UNION]
    np.testing.assert_array_equal(gains, [[np.nan, 1, 4], [4, 1, 2]])
    energy = analysis.by_case(table, "energy_per_token")
    assert list(energy.columns) == [BASE] and energy.to_numpy().tolist() == [[0.125]]
    origin, short = analysis.short(gains)
    assert set(origin.split("; ")) == {
        f"NVIDIA H200 2026-11-22 {c}" for c in ("0123456-dirty", "a" * 7)
    }
    layer = ["pattern", "hidden_size", "intermediate_size", "gated"]
    assert list(short.index.names) == [*layer, "tokens", "active", "mode"] and len(short) == 2
    origin, empty = analysis.short(analysis.by_case(table.assign(energy=np.nan), "energy"))
    assert origin == "" and empty.empty and analysis.short(pd.DataFrame())[0] == ""
    trained = analysis.training_speedups(training_rows(64, 29.0, {BASE: 4.0}))
    assert analysis.short(analysis.by_case(trained, "held_share"))[1].to_numpy().tolist() == [[100]]


def test_roofline():
    kernels = kernel_rows(
        ("gate", 5.0, 3.2e12, 2e9),  # 4 ms of operations, 0.5 of bytes
        ("lists", 0.04, 0.0, 8e7),  # 0.02 ms of bytes
        ("up", 2.0, 1.6e11, 4e9),  # 0.2 ms of operations, 1 of bytes
        ("other", 0.1, np.nan, np.nan),
        ("half", 1.0, 4e11, np.nan),
    )
    older = kernel_rows(("gone", 1.0, 1e9, 1e9), **EARLIER)
    dense = kernel_rows(("gate", 6.0, 1e9, 1e9), provider="dense", **EARLIER)
    fp8 = kernel_rows(("gate", 3.0, 1e9, 1e9), provider="triton union FP8")  # has no ceiling
    ceilings = [
        ceiling_rows(),
        ceiling_rows(100.0, 100.0, **EARLIER),
        ceiling_rows(1.0, 1.0, device="b"),
    ]
    table = analysis.roofline(
        pd.concat([kernels, older, dense, fp8], ignore_index=True), together(*ceilings)
    )
    assert table["provider"].tolist() == [UNION] * 5 + ["dense"]
    assert table["peak"].tolist() == [800] * 5 + [100]  # those of the kernel's own call
    assert table["bandwidth"].tolist() == [4000] * 5 + [100]
    alone = analysis.roofline(dense, ceiling_rows())  # else the newest
    assert alone[["peak", "bandwidth"]].to_numpy().tolist() == [[800, 4000]]
    table = table[:5]
    for column, values in {
        "intensity": [1600, 0, 40, np.nan, np.nan],
        "tflops": [640, 0, 80, np.nan, 400],
        "floor": [4, 0.02, 1, np.nan, 0.5],
        "share": [0.8, 0.5, 0.5, np.nan, 0.5],
    }.items():
        np.testing.assert_allclose(table[column], values)
    assert table["bound"].tolist() == ["compute", "memory", "memory", "", "compute"]
    tera = ceiling_rows().replace("GB/s", "TB/s")
    lacks = "ceilings.csv lacks matmul or copy bandwidth of NVIDIA H200"
    for rows_, limits, message in (
        (kernels.drop(columns=["ms", "bytes"]), ceiling_rows(), "need the columns ms, bytes"),
        (
            kernels,
            ceiling_rows().drop(columns="unit"),
            "rows of ceilings.csv need the columns unit",
        ),
        (kernels, tera, "'copy bandwidth' is in 'TB/s'; it has to be in GB/s"),
        (kernels, ceiling_rows(device="other"), lacks),
        (kernels, ceiling_rows()[:1], lacks),
    ):
        with pytest.raises(ValueError, match=message):
            analysis.roofline(rows_, limits)


# --- whole models ---------------------------------------------------------------------------------


def test_gains_by_level():
    times = dict(zip(["dense eager", "triton", *COMPILED], [12.0, 4, 10, 8, 5], strict=True))
    parts = [model_rows(times, energy=[9.0, 9, 8, 6, 4]), model_rows([10.0, 20, 10], active=911.0)]
    table = analysis.level_gains(analysis.model_speedups(together(*parts)))
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
    two = analysis.model_speedups(pd.concat([parts[1], model_rows([2.0, 1, 1], model="2b")]))
    with pytest.raises(ValueError, match="of one model and batch; this table has 2"):
        analysis.level_gains(two)


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
    with pytest.raises(ValueError, match="no times; `twell measure model --layers` measures them"):
        analysis.layer_contributions(model_layer_rows(np.nan, [np.nan], [1.0]))


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
    assert table["quantity"].unique().tolist() == [name for name, _ in analysis.SCALE.values()]
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
    empty = pd.DataFrame()
    assert analysis.scale_table(paper, empty, empty)["dense"].isna().all()
    mixed = analysis.step_speedups(pd.concat([steps, steps.assign(checkpoint_activations=True)]))
    for call in (
        lambda: analysis.scale_table(paper, empty, mixed),
        lambda: analysis.level_gains(mixed),
    ):
        with pytest.raises(ValueError, match="with and without checkpointed activations; choose"):
            call()
