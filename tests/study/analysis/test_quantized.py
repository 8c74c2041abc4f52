"""FP8 beside bf16: which rows are compared, and what is said of them."""

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories.analysis import (
    BASE,
    COMPILED,
    decode_rows,
    evaluation,
    model_rows,
    quality_rows,
    speed_rows,
    together,
)

EMPTY = pd.DataFrame()
UNION, ROWWISE = "triton union FP8", "triton rowwise FP8"
BY_ROWS, BY_TENSORS = "dense FP8 torch.compile", "dense FP8 by tensors torch.compile"
TORCHAO = "dense FP8 torchao torch.compile"
LATER = {"date": "2026-11-23T10:00:00+00:00"}


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
    assert analysis.side_of(provider) == side and side in ["", *analysis.SIDES]


def test_the_fastest_of_each_side_within_a_call():
    times = {BASE: 8.0, "triton union": 4.0, "triton rowwise": 5.0, "auto": 1.0}
    times |= {BY_ROWS: 6.0, BY_TENSORS: 5.0, UNION: 2.0, ROWWISE: 3.0, "auto FP8": 1.0}
    energy = dict.fromkeys(times, 10.0) | {BY_TENSORS: 8.0, UNION: 6.0}
    call = speed_rows(64, 29.0, times, energy=list(energy.values()))
    # The same case later, dense FP8 alone; and another case without any.
    again = speed_rows(64, 29.01, {BASE: 9.0, BY_ROWS: 3.0}, **LATER)
    rows = together(call, again, speed_rows(128, 29.0, {BASE: 8.0, "triton union": 4.0}))
    table = analysis.fastest(analysis.speedups(rows))
    sides = by_side(table[table["tokens"] == 64])
    expected = {"dense": 9.0, "sparse": 4.0, "dense FP8": 3.0, "sparse FP8": 2.0}
    assert sides["p50"].to_dict() == expected
    # Sparse FP8 is compared with dense FP8 of its own call.
    assert sides["over_fp8"]["sparse FP8"] == 2.5 and sides["over_fp8"]["dense FP8"] == 1
    assert sides["energy_over_fp8"]["sparse FP8"] == pytest.approx(-25)
    assert sides.loc[["dense", "sparse"], "over_fp8"].isna().all()
    assert sides["speedup"]["sparse FP8"] == 4
    assert sorted(table.loc[table["tokens"] == 128, "side"]) == ["dense", "sparse"]
    alone = analysis.fastest(analysis.speedups(speed_rows(64, 29.0, {BASE: 4.0, UNION: 1.0})))
    assert np.isnan(by_side(alone)["over_fp8"]["sparse FP8"])
    assert analysis.fastest(EMPTY).empty


def test_calls_without_fp8_are_left_out():
    call, later = decode_rows({BASE: 4.0, BY_ROWS: 5.0}), decode_rows({BASE: 3.0}, **LATER)
    assert analysis.of_fp8_calls(together(call, later))["p50"].tolist() == [4.0, 5.0]


def test_attention_is_compared_with_attention_in_fp8():
    names = [
        f"{kind} FP8{more} torch.compile" for more in ("", " all") for kind in ("dense", "triton")
    ]
    times = dict(zip([*COMPILED, *names], [9.0, 7, 7, 8, 6, 6, 3], strict=True))
    table = by_side(analysis.fastest(analysis.model_speedups(model_rows(times, model="2b"))))
    assert table["over_fp8"][["sparse FP8", "sparse FP8 all"]].tolist() == pytest.approx([8 / 6, 2])


def test_speed_beside_quality():
    older = quality_rows([0.0, 9.0, 9.0, 9.0, 9.0])
    large = quality_rows([0.0] * 5, model="a", parameters=9e7, active=5.0)
    rows = together(quality_rows([0.0, 0.4, 0.2, 0.9, 0.7], **LATER), older, large)
    quality = analysis.fp8_quality(rows)
    assert quality["model"].tolist() == ["twell-6m"] * 5 + ["a"] * 5  # the newest call of each
    quality = quality[quality["model"] == "twell-6m"]
    times = {BASE: 8.0, "triton union": 4.0, BY_ROWS: 6.0, UNION: 2.0}
    speeds = analysis.fastest(analysis.speedups(speed_rows(64, 29.0, times)))
    table = by_side(analysis.speed_and_quality(speeds, quality))
    expected = {"dense": 0.0, "sparse": 0.0, "dense FP8": 0.4, "sparse FP8": 0.2}
    assert table["difference"].to_dict() == expected and table["speedup"]["sparse FP8"] == 4
    assert table["low"]["dense FP8"] == pytest.approx(0.36)
    in_bf16 = speeds[~speeds["side"].str.contains("FP8")]
    for one, other in ((in_bf16, quality), (speeds, EMPTY), (speeds[:0], quality)):
        assert analysis.speed_and_quality(one, other).empty


def test_rounding_is_told_apart_from_fp8():
    records = [
        evaluation("a", gain=gain, backend=backend, dtype=dtype)
        for backend, dtype, gain in (
            ("dense", "float32", 0.0), ("dense", "bfloat16", 0.01),
            ("dense", "FP8", 0.2), ("triton", "FP8", 0.3),
        )
    ]  # fmt: skip
    differences = analysis.backend_differences(analysis.evaluations(records))
    assert differences["compared"].tolist() == ["bfloat16, float32"]
    assert differences["difference"].tolist() == pytest.approx([0.01])
