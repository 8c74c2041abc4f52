"""Checks before times, turns, energy and kernels, by a clock of our own."""

import pytest

from tests.factories.measure import FakeGpu
from twell.measure import runner
from twell.measure.runner import Call, Turns, bench


class Timed:
    """Providers "a", "b", ...: calls of 1, 2, ... ms. `order` has the checks and turns."""

    def __init__(self, **options):
        self.gpu, self.order, self.options = FakeGpu(), [], options

    def prepare(self, name):
        self.order.append(f"check {name}")
        if name == "wrong":
            raise ArithmeticError
        ms = 1.0 + "abcd".index(name)
        enter = lambda: self.order.append(name)  # noqa: E731
        return Call(lambda: self.gpu.spend(ms), {"error": name}, enter=enter, **self.options)


@pytest.fixture(autouse=True)
def known_turns(monkeypatch):
    monkeypatch.setattr(runner, "TURNS", {"short": Turns(5, 20), "long": Turns(3, 800, settle=300)})


def test_calls_are_checked_and_then_take_turns():
    case = Timed()
    calls = bench(case.gpu, case.prepare, "abc", "short")
    assert case.order[:3] == ["check a", "check b", "check c"]
    rounds = ["".join(case.order[place : place + 3]) for place in range(3, 18, 3)]
    assert len(case.order) == 18 and all(set(order) == set("abc") for order in rounds)
    assert len(set(rounds)) > 1  # nobody always comes last
    assert calls["b"].columns == {"error": "b", "p20": 2.0, "p50": 2.0, "p80": 2.0}
    case = Timed()
    with pytest.raises(ArithmeticError):
        bench(case.gpu, case.prepare, ["a", "wrong"], "short")
    assert case.order == ["check a", "check wrong"] and not case.gpu.timed


@pytest.mark.parametrize("turns, flush", [("short", True), ("long", False)])
def test_energy_is_that_of_one_call(turns, flush):
    case = Timed(per_run=4, flush=flush)
    case.gpu.meter = lambda: 0
    calls = bench(case.gpu, case.prepare, "ab", turns)
    for name, ms in {"a": 1.0, "b": 2.0}.items():
        columns = calls[name].columns
        assert (columns["p50"], columns["watts"]) == (ms / 4, 20)
        assert columns["energy"] == pytest.approx(20 * ms / 4, rel=1e-3)
    assert case.gpu.now > 2 * runner.ENERGY_MS  # a second of each
    case.gpu.metered = lambda run: (run(), 0, 1.0)  # the counter stands still
    assert str(bench(case.gpu, case.prepare, "a", turns)["a"].columns["energy"]) == "nan"


def test_kernel_times_are_means_over_calls_by_short_names():
    gpu = FakeGpu()
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": "cublas matmul",
        "void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::x)": "cublas matmul",
        "triton_poi_fused__unsafe_view_mul_relu_0": "elementwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::relu>(int)": "elementwise",
        "Memset (Device)": "copy",
        "void mine<3>(int)": "mine",
    }
    gpu.shown = lambda call: [(name, call()) for name in names]
    rows = runner.kernel_rows(gpu, [lambda: 0.5, lambda: 1.0, lambda: 1.5])
    assert all(row["launches"] == row["ms"] for row in rows)
    times = {row["kernel"]: row["ms"] for row in rows}
    assert times == {"cublas matmul": 2.0, "elementwise": 2.0, "copy": 1.0, "mine": 1.0}
