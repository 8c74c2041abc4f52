"""Times, energy and kernels, by a clock of our own; the GPU's clock by stand-ins for torch's."""

import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch

from tests.factories import SEED
from tests.factories.measure import FakeGpu
from twell.measure import clock


@pytest.fixture
def fake():
    return FakeGpu()


def spending(gpu, low, high, log):
    """A call of random length; the list gets the ms of each."""
    r = np.random.default_rng(SEED)

    def call():
        log.append(r.uniform(low, high))
        gpu.spend(log[-1])

    return call


def test_graph_times_are_those_of_one_call(fake):
    log = []
    times = clock.graph_times(fake, spending(fake, 1, 3, log), 8, budget=100)
    timed = len(log) - 5 - 2 * 3
    assert 100 / 3 <= timed <= 100
    np.testing.assert_allclose(times, np.array(log[-timed:]) / 8)
    quantiles = clock.quantiles(times)
    expected = np.quantile(log[-timed:], [0.2, 0.5, 0.8]) / 8
    assert list(quantiles) == ["p20", "p50", "p80"]
    np.testing.assert_allclose(list(quantiles.values()), expected, rtol=1e-3)


def test_calls_are_checked_and_then_take_turns():
    order = []

    def check(name):
        def times():
            order.append(name)
            return np.full(2, float(len(order)))

        order.append(f"check {name}")
        if name == "wrong":
            raise ArithmeticError
        return {"error": name}, times

    columns = clock.measure("ab", check, 5)
    assert order[:2] == ["check a", "check b"] and list(columns) == ["a", "b"]
    rounds = ["".join(order[place : place + 2]) for place in range(2, 12, 2)]
    assert len(rounds) == 5 and set(rounds) == {"ab", "ba"}  # nobody always comes last
    for name in "ab":
        places = [2 + place for place, other in enumerate(order[2:], 1) if other == name]
        assert columns[name]["error"] == name and columns[name]["p50"] == np.median(places)
    order.clear()
    with pytest.raises(ArithmeticError):
        clock.measure(["a", "wrong"], check, 3)
    assert order == ["check a", "check wrong"]


def test_energy_is_that_of_one_call(fake):
    fake.meter = lambda: 0
    run = lambda: fake.spend(40.0)  # noqa: E731
    assert clock.energy(fake, run, 8, 5.0) == {"energy": 100.0, "watts": 20.0}
    assert fake.now >= 1300  # a second, and the runs before it
    fake.meter = None
    assert set(clock.energy(fake, pytest.fail, 8, 5.0).values()) == {None}
    assert clock.idle_watts(fake) is None


def test_times_and_energy_are_of_the_same_turns(fake):
    log = []
    fake.meter = lambda: 0
    timed = clock.Clock(fake, spending(fake, 40, 60, log), per_call=4)
    times = np.concatenate([timed.turn() for _ in range(3)])
    counted, trial, rest = timed.calls // 4, log[1], log[2:]
    assert len(times) == counted == 3 * round(clock.MODEL_TURN / trial)
    assert len(rest) == counted + 3 * -(-clock.SETTLE // trial)
    columns = timed.energy(idle=9.0)
    assert columns == {"energy": pytest.approx(20 * times.mean(), rel=1e-3), "watts": 20, "idle": 9}
    timed = clock.Clock(fake, lambda: fake.spend(5000.0))
    assert list(timed.turn()) == [5000, 5000] and timed.calls == 2  # long calls are timed twice
    fake.meter = None
    assert timed.energy(None) == {"energy": None, "watts": None, "idle": None}


def test_the_gpu_reads_torchs_events_counters_and_profiler(monkeypatch, capsys):
    """With stand-ins for what needs a GPU: the order of calls, and what is taken from them."""
    cuda, nvml, profile = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    kind = torch.autograd.DeviceType
    cuda.memory_allocated.return_value, cuda.max_memory_allocated.return_value = 5000, 7500
    cuda.Event.return_value.elapsed_time.return_value = 2.0
    nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = [0, 100, 130]
    nvml.NVMLError = KeyError
    events = [("up", 2, kind.CUDA, False), ("gate", 1, kind.CUDA, False)]
    events += [("launch", 0, kind.CPU, False), ("region", 0, kind.CUDA, True)]
    profile.return_value.__enter__.return_value.events.return_value = [
        types.SimpleNamespace(
            name=name,
            time_range=types.SimpleNamespace(start=start, elapsed_us=lambda: 500.0),
            device_type=device,
            is_user_annotation=annotation,
        )
        for name, start, device, annotation in events
    ]
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpu, run = clock.Gpu(energy=True), cuda.run
    assert nvml.nvmlDeviceGetHandleByUUID.call_args[0][0].startswith("GPU-")
    assert list(gpu.replay_times(run, 2)) == [2.0, 2.0] and run.call_count == 5
    cuda.reset_mock()
    result, used, seconds = gpu.metered(run)
    assert result is run.return_value and used == 30 and 0 < seconds < 1
    assert [call[0] for call in cuda.mock_calls] == ["synchronize", "run", "synchronize"]
    cuda.reset_mock()
    assert gpu.peak(run) == (5000, 7500)
    order = "synchronize memory_allocated reset_peak_memory_stats run synchronize"
    order = [*order.split(), "max_memory_allocated"]
    assert [call[0] for call in cuda.mock_calls] == order
    cuda.mem_get_info.return_value, cuda.memory_reserved.return_value = (9000, 10**5), 500
    assert gpu.available() == 9500
    assert gpu.kernels([run], 3) == [("gate", 0.5), ("up", 0.5)]
    nvml.nvmlInit.side_effect = KeyError("Not Supported")
    assert clock.Gpu(energy=True).meter is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clock.Gpu(energy=True).metered(run)[1] == 0
    output = capsys.readouterr().out
    for reason in ("NVML says: 'Not Supported'", "the package nvidia-ml-py is not installed"):
        assert f"energy is not measured: {reason}\n" in output
    cuda.is_available.return_value = False
    with pytest.raises(RuntimeError, match="measuring needs a GPU, and torch sees none"):
        clock.Gpu()


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


def test_kernel_times_are_means_over_calls(fake):
    fake.shown = lambda call: [("nvjet_a", 1.0), ("gate_kernel", 0.1), ("nvjet_b", call())]
    times = clock.kernel_times(fake, [lambda: 0.5, lambda: 1.0, lambda: 1.5])
    assert list(times) == ["cublas matmul", "gate_kernel"]
    assert times["cublas matmul"] == pytest.approx((2.0, 2.0))
    assert times["gate_kernel"] == pytest.approx((1.0, 0.1))


def test_profiled_calls_follow_others_and_have_the_same_kernels(fake):
    calls = []
    fake.shown = lambda call: calls.append(1) or [("gate", 1.0 * len(calls)), ("up", 1.0)]
    kernels = clock.kernel_sequence(fake, calls.append, calls=2, lead=3)
    assert kernels == [[("gate", 4.0), ("up", 1.0)], [("gate", 5.0), ("up", 1.0)]]
    a, b = ("a", 1.0), ("b", 2.0)
    for kernels in ([a, b, a], [], [a, b, b, a]):
        message = f"^{len(kernels)} kernels ran in 2 equal passes, and not the same"
        with pytest.raises(RuntimeError, match=message):
            clock.equal_parts(kernels, 2)
