"""Times, energy, memory and kernels, by clocks and counters of the tests' own."""

import sys
import types

import numpy as np
import pytest
import torch

from tests.measure.factories import event
from twell.measure import clock


def test_graph_times_are_those_of_one_call(monkeypatch, seed):
    r = np.random.default_rng(seed)
    now, replays = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = now[0]

        def elapsed_time(self, end):
            return end.time - self.time

        def synchronize(self):
            pass

    def replay():
        replays.append(r.uniform(1, 3))
        now[0] += replays[-1]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = clock.graph_times(replay, 8, budget=100)
    timed = len(replays) - 5 - 2 * 3
    assert 100 / 3 <= timed <= 100
    np.testing.assert_allclose(times, np.array(replays[-timed:]) / 8)
    quantiles = clock.quantiles(times)
    expected = np.quantile(replays[-timed:], [0.2, 0.5, 0.8]) / 8
    assert list(quantiles) == ["p20", "p50", "p80"]
    np.testing.assert_allclose(list(quantiles.values()), expected, rtol=1e-3)


def test_providers_take_turns():
    order = []

    def timer(name):
        order.append(name)
        return np.full(2, float(len(order)))

    times = clock.in_turns({name: lambda name=name: timer(name) for name in "ab"}, 3)
    assert order == list("ababab")
    assert times["a"]["p50"] == 3 and times["b"]["p50"] == 4  # of 1, 3, 5 and of 2, 4, 6


def test_energy_is_that_of_one_call(monkeypatch):
    counter, now, pending = [5000], [0.0], []

    def synchronize():
        counter[0] += 24 * len(pending)
        now[0] += 0.04 * len(pending)
        pending.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    columns = clock.energy(lambda: pending.append(1), 8, 5.0, lambda: counter[0])
    assert columns == {"energy": 3.0, "watts": 0.6}
    assert now[0] > 1.2  # a second and the runs before it
    nothing = {"energy": None, "watts": None}
    assert clock.energy(lambda: pytest.fail("run"), 8, 5.0, None) == nothing


def test_the_energy_meter_is_that_of_the_gpu_in_use_or_says_why_not(monkeypatch, capsys):
    class NVMLError(Exception):
        pass

    def energy(handle):
        if handle != "GPU-1234":
            raise NVMLError("Not Supported")
        return 77

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )
    device = types.SimpleNamespace(uuid="1234")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    assert clock.energy_meter()() == 77 == clock.optional_meter(True)()
    device.uuid = "5"
    with pytest.raises(RuntimeError, match="NVML says: Not Supported"):
        clock.energy_meter()
    assert clock.optional_meter(False) is None and not capsys.readouterr().out
    assert clock.optional_meter(True) is None
    assert capsys.readouterr().out == "energy is not measured: NVML says: Not Supported\n"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="the package nvidia-ml-py is not installed"):
        clock.energy_meter()


def test_idle_power_is_that_of_a_pause(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(clock.time, "sleep", sleep)
    assert clock.idle_watts(lambda: round(1e3 * 87.5 * now[0])) == 87.5


def test_times_and_energy_are_of_the_same_turns(monkeypatch, seed):
    r = np.random.default_rng(seed)
    now, counter, log = [0.0], [7000], []

    def call():
        log.append(r.uniform(40, 60))
        now[0] += log[-1] / 1e3
        counter[0] += round(20 * log[-1])  # mJ: 20 W

    def between(call, number, lead=3):
        for _ in range(lead):
            call()
        start = len(log)
        for _ in range(number):
            call()
        return np.array(log[start:])

    monkeypatch.setattr(clock, "between_replays", between)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    timed = clock.Clock(call, lambda: counter[0], per_call=4)
    for _ in range(3):
        timed.turn()
    counted, trial, rest = timed.calls // 4, log[1], log[2:]
    settling = -(-clock.SETTLE // trial)
    assert counted == 3 * round(clock.MODEL_TURN / trial)
    assert len(rest) == counted + 3 * settling
    row, times = timed.columns(idle=9.0), np.concatenate(timed.times)
    assert len(times) == counted and row["p50"] == pytest.approx(np.median(times), rel=1e-3)
    assert 10 <= row["p50"] <= 15 and row["idle"] == 9.0
    assert row["energy"] == pytest.approx(20 * times.mean(), rel=1e-3)
    assert row["watts"] == pytest.approx(20, abs=0.1)
    timed = clock.Clock(lambda: log.append(5000.0), None)
    timed.turn()
    assert timed.calls == 2  # long calls too are timed twice
    nothing = {"energy": None, "watts": None, "idle": None}
    assert timed.columns(None) == {"p20": 5000, "p50": 5000, "p80": 5000} | nothing


def test_the_peak_is_that_of_the_run(monkeypatch):
    log = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: log.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: log.append("now") or 5000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: log.append("most") or 7500)
    assert clock.peak_bytes(lambda: log.append("run")) == (5000, 7500)
    order = "synchronize now reset_peak_memory_stats run synchronize most"
    assert log == order.split()


# --- kernels ----------------------------------------------------------------------------------


def test_kernels_have_short_names():
    for name, short in {
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": "cublas matmul",
        "void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::x)": "cublas matmul",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(x)": "cublas matmul",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16>(x)": "cublas matmul",
        "triton_poi_fused__unsafe_view_mul_relu_0": "elementwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::relu>(int)": "elementwise",
        "Memset (Device)": "copy",
        "rowwise_kernel": "rowwise_kernel",
        "void mine<3>(int)": "mine",
    }.items():
        assert clock.kernel_name(name) == short


@pytest.fixture
def profiled(monkeypatch):
    """Runs of a fake profiler: a list of calls, and of each the kernels it shows."""
    runs = types.SimpleNamespace(calls=[], averages=list, events=list)

    class Profile:
        def __init__(self, activities):
            runs.calls.clear()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def key_averages(self):
            return runs.averages()

        def events(self):
            return runs.events()

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return runs


def test_kernel_times_are_means_over_calls(profiled):
    def averages():
        n = len(profiled.calls)
        kernels = [event("nvjet_a", 2 * n, 2000.0 * n), event("nvjet_b", n, 500.0 * n)]
        kernels.append(event("gate_kernel", n, 100.0 * n))
        return [*kernels, event("cudaLaunchKernel", 4 * n, device="CPU")]

    profiled.averages = averages
    times = clock.kernel_times([lambda: profiled.calls.append(1)] * 3)
    assert list(times) == ["cublas matmul", "gate_kernel"] and len(profiled.calls) == 9
    assert times["cublas matmul"] == pytest.approx((3.0, 2.5))
    assert times["gate_kernel"] == pytest.approx((1.0, 0.1))


def test_profiled_calls_follow_others(profiled):
    def events():
        shown = [
            event(name, start=10 * n + place, ms=float(n))
            for n in profiled.calls
            for place, name in enumerate(("gate", "up"))
        ]
        return [*reversed(shown), event("launch", device="CPU")]

    profiled.events = events
    call = lambda: profiled.calls.append(len(profiled.calls))  # noqa: E731
    kernels = clock.kernel_sequence(call, calls=2, lead=3)
    assert kernels == [[("gate", 3.0), ("up", 3.0)], [("gate", 4.0), ("up", 4.0)]]


def test_passes_have_the_same_kernels_each():
    a, b, later = ("a", 1.0), ("b", 2.0), ("a", 3.0)
    assert clock.equal_parts([a, b, later, b], 2) == [[a, b], [later, b]]
    for kernels in ([a, b, a], [], [a, b, b, a]):
        message = f"^{len(kernels)} kernels ran in 2 equal passes, and not the same"
        with pytest.raises(RuntimeError, match=message):
            clock.equal_parts(kernels, 2)
