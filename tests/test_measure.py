"""What is measured: layers of a known activity, what a case needs at least, and rows that are kept case by case."""

import itertools
import random
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from torch.nn import functional as F

from twell import analysis, measure, measure_training, results, trace
from twell.__main__ import main
from twell.sparse import plan as choose

pytest.importorskip("triton")

N, K = 96, 32


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels can run


@pytest.fixture
def seed(record_property):
    """Another one in each run; pytest shows it when a test fails."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return seed


def counts_of(x, w_gate):
    return (torch.relu(x.double() @ w_gate.double().t()) != 0).sum(1)


# --- layers of a known activity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [40, 3000])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("active", [0, 1, 29, 300, 600])
def test_a_synthetic_layer_is_as_active_as_wanted(active, skewed, num_tokens, seed):
    parts = measure.synthetic_layer(
        num_tokens, 128, 600, active=active, skewed=skewed, device="cpu", seed=seed
    )
    x, w_gate, w_up, w_down = parts
    assert [tuple(part.shape) for part in parts] == [
        (num_tokens, 128),
        (600, 128),
        (600, 128),
        (128, 600),
    ]
    assert w_down.stride() == (1, 128) and all(part.dtype == torch.bfloat16 for part in parts)
    mean = float(counts_of(x, w_gate).double().mean())
    if active in (0, 600):
        assert mean == active
    else:
        # Tokens of one document are alike and neurons differ, so that of few tokens the mean scatters.
        assert (
            abs(mean - active)
            <= 5 * (active * (0.3 if skewed else 1 / num_tokens)) ** 0.5 + 0.05 * active
        )


def test_a_skewed_layer_has_popular_neurons_and_heavy_tokens(seed):
    found = {}
    for skewed in (False, True):
        x, w_gate, *_ = measure.synthetic_layer(
            2000, 128, 600, active=30, skewed=skewed, device="cpu", seed=seed
        )
        active = torch.relu(x.double() @ w_gate.double().t()) != 0
        found[skewed] = (
            active.sum(1).max(),
            active.sum(0).max(),
            active.view(-1, 50, 600).any(1).sum(1).double().mean(),
        )
    assert found[True][0] > 2 * found[False][0] and found[True][1] > 2 * found[False][1]
    assert found[True][2] < 0.8 * found[False][2]


def test_a_single_token_is_as_active_as_wanted_whatever_token_is_drawn(seed):
    counts = []
    for number in range(240):
        x, w_gate, *_ = measure.synthetic_layer(
            1, 64, 1000, active=50, device="cpu", seed=seed + number
        )
        counts.append(int(counts_of(x, w_gate)))
    # Of 12,000 draws: mean 48, standard deviation 13, at most 103.
    assert abs(np.mean(counts) - 50) < 7 and max(counts) < 50 + 12 * 50**0.5


def fresh_mask(r, num_tokens, num_neurons):
    """Random rows with an empty one, a full one, and one with the first and last neuron alone."""
    mask = r.random((num_tokens, num_neurons)) < r.random((num_tokens, 1)) ** 3
    for row, value in zip(r.permutation(num_tokens)[:3], (False, True, None), strict=False):
        mask[row] = (
            np.isin(np.arange(num_neurons), (0, num_neurons - 1)) if value is None else value
        )
    return mask


@pytest.mark.parametrize("hidden_size", [16, 48, 256])
def test_a_mask_is_imposed_exactly(hidden_size, seed):
    r = np.random.default_rng(seed)
    for length in (1, 3, hidden_size // 2, hidden_size):
        mask = fresh_mask(r, length, int(r.integers(1, 400)))
        num_tokens = int(r.integers(1, 3 * length + 1))
        x, w_gate, w_up, w_down = measure.imposed_layer(
            mask, num_tokens, hidden_size, device="cpu", seed=seed
        )
        assert (
            x.shape == (num_tokens, hidden_size) and w_gate.shape == w_up.shape == w_down.t().shape
        )
        assert w_down.stride() == (1, hidden_size) and w_gate.dtype == torch.bfloat16
        g = F.relu(F.linear(x, w_gate))  # as a dense layer in bf16 has it
        expected = mask[np.arange(num_tokens) % length]  # a short passage is repeated
        assert np.array_equal((g != 0).numpy(), expected)
        if expected.sum() > 1:
            assert len(g[g != 0].unique()) > 1


def test_a_mask_that_rounding_breaks_is_refused(seed, monkeypatch):
    monkeypatch.setattr(
        torch.linalg, "qr", lambda a: type("QR", (), {"Q": a})
    )  # rows that are not orthogonal
    with pytest.raises(ArithmeticError, match=r"\d+ of 640 entries differ from the mask"):
        measure.imposed_layer(
            np.random.default_rng(seed).random((16, 40)) < 0.1, 16, 16, device="cpu"
        )


@pytest.mark.parametrize("shape", [(17, 5), (0, 5), (5,)])
def test_a_mask_that_does_not_fit_is_refused(shape):
    with pytest.raises(
        ValueError,
        match=r"the mask has shape \(.*\), expected \[1 to 16 \(hidden_size\), neurons\]",
    ):
        measure.imposed_layer(np.ones(shape, bool), 4, 16, device="cpu")


def test_activity_that_no_layer_has_is_refused():
    for active in (-1, 97):
        with pytest.raises(
            ValueError, match=f"active is {active}; a layer of 96 neurons can have 0 to all of them"
        ):
            measure.synthetic_layer(4, K, N, active=active, device="cpu")


def test_the_recorded_masks_are_what_the_readme_says():
    masks = measure.recorded_masks()
    assert {
        name: (mask.shape, round(float(mask.sum(1).mean()), 1)) for name, mask in masks.items()
    } == {
        "sparser_2": ((2048, 2816), 3.3),
        "sparser_8": ((2048, 2816), 12.5),
        "sparser_11": ((2048, 2816), 16.8),
        "denser_8": ((2048, 2816), 100.2),
    }
    path = results.root() / "data" / "traces" / "masks.npz"
    assert path.stat().st_size < 700_000
    text = (results.root() / "data" / "README.md").read_text(encoding="utf-8")
    for name, mask in masks.items():
        assert f"`{name}` {mask.sum(1).mean():.1f}" in text


def test_what_is_no_file_of_masks_is_named(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK nonsense")
    np.savez(tmp_path / "b.npz", something=np.ones(3))
    for name in ("a.npz", "b.npz"):
        with pytest.raises(ValueError, match=rf"{name} is no file of masks"):
            measure.recorded_masks(tmp_path / name)


@pytest.mark.parametrize("gated", [True, False])
def test_permuted_weights_are_the_same_layer_in_other_memory(gated, seed):
    x, w_gate, w_up, w_down = measure.synthetic_layer(70, K, N, active=9, device="cpu", seed=seed)
    weights = (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)
    exact = measure.Exact.of(x, weights)
    seen = [weights]
    for number in range(3):
        other = measure.permuted(weights, seed + number)
        assert other[2].stride() == w_down.stride() and (other[0] is None) == (not gated)
        for before, part in itertools.product(seen, range(3)):
            if other[part] is not None:
                assert other[part].data_ptr() != before[part].data_ptr() and not torch.equal(
                    other[part], before[part]
                )
        again = measure.Exact.of(x, other)
        assert torch.equal(again.counts, exact.counts) and torch.equal(again.unions, exact.unions)
        assert again.touched == exact.touched
        torch.testing.assert_close(again.y, exact.y)
        seen.append(other)


# --- what is exact, and what a case needs at least ------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200, 4096 + 70])
def test_counts_unions_and_result_are_those_of_a_plain_loop(num_tokens, gated, seed):
    r = np.random.default_rng(seed)
    mask = fresh_mask(r, min(num_tokens, 16), 40)
    x, w_gate, w_up, w_down = measure.imposed_layer(mask, num_tokens, 16, device="cpu", seed=seed)
    exact = measure.Exact.of(x, (w_gate, w_up, w_down) if gated else (None, w_gate, w_down))
    mask = mask[np.arange(num_tokens) % len(mask)]
    assert exact.counts.tolist() == mask.sum(1).tolist() and exact.entries == mask.sum()
    unions = [int(mask[start : start + 64].any(0).sum()) for start in range(0, num_tokens, 64)]
    assert exact.unions.tolist() == unions and exact.touched == mask.any(0).sum()
    wide = [part.double() for part in (x, w_gate, w_up, w_down)]
    g = (wide[0] @ wide[1].t()).clamp(min=0)
    torch.testing.assert_close(exact.y, (g * (wide[0] @ wide[2].t()) if gated else g) @ wide[3].t())


@pytest.mark.parametrize("gated", [True, False])
def test_operations_and_bytes_are_those_that_a_count_finds(gated, seed):
    r = np.random.default_rng(seed)
    m, k, n = (int(size) for size in r.integers(1, 12, 3))
    mask = r.random((m, n)) < 0.3
    for path in ("dense", "rowwise", "union", "decode"):
        flops, rows = 0, set()
        for token, neuron in itertools.product(range(m), range(n)):
            first, *others = ("gate", "up", "down") if gated else ("up", "down")
            flops += 2 * k
            rows.add((first, neuron))
            if path == "dense" or mask[token, neuron]:
                flops += 2 * k * len(others)
                rows |= {(other, neuron) for other in others}
        num_bytes = 2 * (len(rows) * k + m * k + m * k)
        assert measure.work(path, m, k, n, gated, int(mask.sum()), int(mask.any(0).sum())) == (
            flops,
            num_bytes,
        )


def test_every_kernel_has_a_formula_or_is_known_to_have_none():
    from twell.kernels import decode, dense, gate, rowwise, union

    none = {("rowwise", "count_kernel")}  # only counts activity
    x, *weights = measure.synthetic_layer(5, K, N, device="cpu")
    case = measure._Case.of("skewed", (x, *weights), True, 1)
    formulas = set(measure.kernel_formulas(case.columns, case.exact))
    for path, module in {
        "dense": dense,
        "rowwise": rowwise,
        "union": union,
        "decode": decode,
    }.items():
        own = {(path, name) for name in vars(module) if name.endswith("_kernel")}
        shared = {(path, name) for name in vars(gate) if name.endswith("_kernel")}
        library = {("dense", "cublas matmul"), ("dense", "elementwise")}
        assert own <= formulas | none, "a kernel is new: say what it needs"
        assert {key for key in formulas | none if key[0] == path} <= own | shared | library, (
            "a kernel is gone"
        )


@pytest.mark.parametrize("gated", [True, False])
def test_the_parts_of_a_path_add_up_to_its_operations(gated, seed):
    """By kernels each path does what `work` counts; by unions and in decoding also what is computed in vain."""
    num_tokens = int(np.random.default_rng(seed).integers(1, 200))
    x, w_gate, w_up, w_down = measure.synthetic_layer(
        num_tokens, K, N, active=7, device="cpu", seed=seed
    )
    case = measure._Case.of("skewed", (x, w_gate, w_up, w_down), gated, 1)
    formulas = measure.kernel_formulas(case.columns, case.exact)

    def total(path, *kernels):
        return sum(formulas[path, kernel][0] for kernel in kernels)

    assert total("dense", "cublas matmul") == case.work("dense")[0]
    assert (
        total("rowwise", "gate_bits_kernel", "lists_kernel", "up_down_kernel")
        == case.work("rowwise")[0]
    )
    active = torch.relu(x.double() @ w_gate.double().t()) != 0
    in_unions = sum(min(num_tokens, 64) * int(block.any(0).sum()) for block in active.split(64))
    vain = 2 * K * (2 if gated else 1)
    found = (
        total("union", "gate_bits_kernel", "lists_kernel", "up_kernel", "down_kernel")
        - case.work("union")[0]
    )
    assert found == vain * (in_unions - int(active.sum()))
    found = total("decode", "up_kernel", "down_kernel") - case.work("decode")[0]
    assert found == vain * (num_tokens * int(active.any(0).sum()) - int(active.sum()))


def test_a_wrong_result_is_refused_and_rounding_is_not(seed):
    x, *weights = measure.synthetic_layer(70, K, N, active=20, device="cpu", seed=seed)
    exact = measure.Exact.of(x, tuple(weights))
    y = measure._dense(x, *weights)
    assert 1e-3 < exact.check(y, "dense") < measure.TOLERANCE
    wrong = y.clone()
    wrong[y.float().norm(dim=1).argmax()] = 0
    for bad in (wrong, y * float("nan")):
        with pytest.raises(ArithmeticError, match="union at case is wrong: relative RMS"):
            exact.check(bad, "union at case")


def test_where_nothing_is_active_only_zero_is_right():
    x, *weights = measure.synthetic_layer(3, K, N, active=0, device="cpu")
    exact = measure.Exact.of(x, tuple(weights))
    assert exact.check(torch.zeros(3, K, dtype=torch.bfloat16), "dense") == 0
    with pytest.raises(ArithmeticError):
        exact.check(torch.full((3, K), 1e-2, dtype=torch.bfloat16), "dense")


def test_the_roofline_is_the_slower_of_both_ceilings():
    peaks = [{"metric": "copy bandwidth", "value": 4000.0}, {"metric": "matmul", "value": 800.0}]
    assert measure.roofline(8e12, 4e9, 20.0, peaks) == 0.5  # 10 ms of operations, 1 ms of bytes
    assert measure.roofline(8e10, 4e9, 4.0, peaks) == 0.25  # 0.1 ms and 1 ms


# --- timing, with a clock of ours ----------------------------------------------------------------------------------


def test_graph_times_are_those_of_one_call(monkeypatch, seed):
    r = np.random.default_rng(seed)
    clock, spent = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, end):
            return end.at - self.at

        def synchronize(self):
            pass

    def replay():
        spent.append(r.uniform(1, 3))
        clock[0] += spent[-1]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = measure._graph_times(replay, 8, budget=100)
    timed = len(spent) - 5 - 2 * 3
    assert 100 / 3 <= timed <= 100
    np.testing.assert_allclose(times, np.array(spent[-timed:]) / 8)
    quantiles = measure._quantiles(times)
    expected = np.quantile(spent[-timed:], [0.2, 0.5, 0.8]) / 8
    np.testing.assert_allclose(
        [quantiles[name] for name in ("p20", "p50", "p80")], expected, rtol=1e-3
    )


def test_energy_is_that_of_one_call(monkeypatch):
    counter, clock, pending = [5000], [0.0], []

    def synchronize():
        counter[0] += 24 * len(pending)
        clock[0] += 0.04 * len(pending)
        pending.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    found = measure._energy(lambda: pending.append(1), 8, 5.0, lambda: counter[0])
    assert found == {"energy": 3.0, "watts": 0.6}
    assert clock[0] > 1.2  # a second and what comes before it


def test_the_energy_meter_is_that_of_the_gpu_in_use_or_says_why_not(monkeypatch):
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
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for uuid in ("1234", "5"):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda uuid=uuid: types.SimpleNamespace(uuid=uuid)
        )
        if uuid == "1234":
            assert measure._energy_meter()() == 77
        else:
            with pytest.raises(RuntimeError, match="NVML says: Not Supported"):
                measure._energy_meter()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="the package nvidia-ml-py is not installed"):
        measure._energy_meter()


def test_kernels_have_short_names():
    for name, short in {
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": "cublas matmul",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::x)": "cublas matmul",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int>(x)": "cublas matmul",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16>(x)": "cublas matmul",
        "triton_poi_fused__unsafe_view_mul_relu_0": "elementwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::relu>(int)": "elementwise",
        "Memset (Device)": "copy",
        "up_down_kernel": "up_down_kernel",
        "void mine<3>(int)": "mine",
    }.items():
        assert measure.kernel_name(name) == short


def test_kernel_times_are_means_over_calls(monkeypatch):
    from torch.autograd import DeviceType

    calls = []

    class Event:
        def __init__(self, key, count, total, device_type=DeviceType.CUDA):
            self.key, self.count, self.self_device_time_total, self.device_type = (
                key,
                count,
                total,
                device_type,
            )

    class Profile:
        def __init__(self, activities):
            calls.clear()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def key_averages(self):
            n = len(calls)
            return [
                Event("nvjet_a", 2 * n, 2000.0 * n),
                Event("nvjet_b", n, 500.0 * n),
                Event("gate_kernel", n, 100.0 * n),
                Event("cudaLaunchKernel", 4 * n, 0.0, DeviceType.CPU),
            ]

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = measure._kernel_times([lambda: calls.append(1)] * 3)
    assert found == {"cublas matmul": (3.0, 2.5), "gate_kernel": (1.0, 0.1)} and len(calls) == 9


# --- the whole measurement, on the CPU with a clock of ours ---------------------------------------------------------

PROVIDERS = [
    *(
        "dense eager",
        "dense torch.compile",
        "dense",
        "triton rowwise",
        "triton union",
        "triton decode",
    ),
    "auto",
]
PEAKS = [
    {"metric": "copy bandwidth", "value": 4000.0, "unit": "GB/s"},
    {"metric": "matmul", "value": 800.0, "unit": "TFLOP/s"},
]


class Graph:
    def __init__(self, calls):
        self.calls, self.outputs = calls, [torch.full((1,), float("nan"))] * len(calls)

    def replay(self):
        self.outputs[:] = [call() for call in self.calls]


@pytest.fixture
def on_cpu(monkeypatch):
    """Everything but the clock, graphs, and the compiler."""

    def capture(calls):
        graph = Graph(calls)
        return graph, graph.outputs

    def times(call, *_, **__):
        call()
        return np.array([0.9, 1.0, 1.1])

    monkeypatch.setattr(measure, "_gpu", lambda: torch.device(DEVICE))
    monkeypatch.setattr(measure, "ceilings", lambda: [dict(row) for row in PEAKS])
    monkeypatch.setattr(measure, "_capture", capture)
    monkeypatch.setattr(measure, "_stream_times", times)
    monkeypatch.setattr(measure, "_graph_times", times)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_rows_say_what_was_measured(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "GRAPH_TOKENS", 20)
    monkeypatch.setattr(measure, "WEIGHT_SETS", 3)
    monkeypatch.setattr(
        measure, "_kernel_times", lambda calls: {"cublas matmul": (3.0, 0.5), "other": (1.0, 0.1)}
    )
    options = dict(hidden_size=K, intermediate_size=N, kernels=True, out=tmp_path)
    rows = measure.ffn([5, 24], [9], ["even", "skewed"], **options)
    assert all(list(row) == measure.COLUMNS["ffn"] for row in rows)
    table = pd.read_csv(tmp_path / "ffn.csv")
    assert list(table.columns)[: len(rows[0])] == measure.COLUMNS["ffn"]
    assert list(table["provider"]) == 2 * 2 * PROVIDERS and len(rows) == len(table)
    assert table["date"].nunique() == 1  # one call, one date
    few = table["tokens"] == 5
    assert (few == (table["mode"] == "graph")).all() and (few == (table["mode"] != "stream")).all()
    assert (table["weight_sets"] == few.map({True: 3, False: 1})).all()
    assert table["pattern"].value_counts().to_dict() == {
        "even": len(rows) // 2,
        "skewed": len(rows) // 2,
    }
    dense = table.query("provider == 'dense' and tokens == 24").iloc[0]
    assert (dense["flops"], dense["bytes"]) == (6 * 24 * N * K, 2 * (3 * N * K + 2 * 24 * K))
    assert (
        table["energy"].isna().all()
        and table["gated"].all()
        and set(table["dtype"]) == {"bfloat16"}
    )
    assert (table["relative_rms"] < measure.TOLERANCE).all()
    parts = pd.read_csv(tmp_path / "kernels.csv")
    assert list(parts.columns)[: len(measure.COLUMNS["kernels"])] == measure.COLUMNS["kernels"]
    assert set(parts["provider"]) == {"dense", "triton rowwise", "triton union", "triton decode"}
    assert parts.query("kernel == 'other'")["flops"].isna().all()
    product = parts.query("kernel == 'cublas matmul' and provider == 'dense' and tokens == 5").iloc[
        0
    ]
    assert (product["flops"], product["launches"], product["ms"]) == (6 * 5 * N * K, 3.0, 0.5)
    assert pd.read_csv(tmp_path / "ceilings.csv")["value"].tolist() == [4000.0, 800.0]


def test_recorded_rows_have_the_activity_of_their_masks(on_cpu, seed, monkeypatch):
    monkeypatch.setattr(measure, "ROWWISE_ENTRIES", 0)  # slow in the interpreter
    r = np.random.default_rng(seed)
    masks = {"a": fresh_mask(r, 20, 40), "b": fresh_mask(r, 10, 30)}
    rows = measure.ffn([25], patterns=["recorded"], hidden_size=16, gated=False, masks=masks)
    for name, mask in masks.items():
        mask = mask[:16][
            np.arange(25) % min(len(mask), 16)
        ]  # of 20 tokens as many as the hidden size allows
        found = [row for row in rows if row["pattern"] == f"recorded {name}"]
        assert len(found) == len(PROVIDERS) - 1 and not any(row["gated"] for row in found)
        assert {row["intermediate_size"] for row in found} == {mask.shape[1]}
        activity = round(mask.sum() / 25, 2), mask.sum(1).max(), mask.any(0).sum()
        assert {(row["active"], row["active_max"], row["union"]) for row in found} == {activity}


def test_paths_that_would_take_too_long_are_left_out(on_cpu, monkeypatch):
    monkeypatch.setattr(measure, "DECODE_TOKENS", 20)
    monkeypatch.setattr(measure, "ROWWISE_ENTRIES", 70 * 4)
    rows = measure.ffn([20, 70], [9], ["even"], hidden_size=K, intermediate_size=N, mode="stream")
    found = {
        tokens: {row["path"] for row in rows if row["tokens"] == tokens} for tokens in (20, 70)
    }
    assert found == {20: {"dense", "rowwise", "union", "decode"}, 70: {"dense", "union"}}


def test_what_was_measured_is_kept_when_a_later_case_fails(on_cpu, tmp_path, monkeypatch):
    check, seen = measure.Exact.check, []

    def fails_later(self, y, what):
        seen.append(what)
        return check(self, y * 2 if len(seen) == 12 else y, what)

    monkeypatch.setattr(measure.Exact, "check", fails_later)
    with pytest.raises(ArithmeticError, match="triton union at .* 70 tokens  skewed .* is wrong"):
        measure.ffn(
            [70], [4, 9, 20], hidden_size=K, intermediate_size=N, mode="stream", out=tmp_path
        )
    table = pd.read_csv(tmp_path / "ffn.csv")
    assert list(table["provider"]) == PROVIDERS and table["active"].nunique() == 1


def test_each_output_of_a_graph_is_checked(on_cpu, monkeypatch):
    class Forgets(Graph):
        def replay(self):
            super().replay()
            self.outputs[-1] = self.outputs[-1] * 0

    monkeypatch.setattr(measure, "_capture", lambda calls: (graph := Forgets(calls), graph.outputs))
    with pytest.raises(ArithmeticError, match="dense eager at .* is wrong"):
        measure.ffn([5], [20], hidden_size=K, intermediate_size=N)


def test_energy_that_cannot_be_measured_is_said_and_left_empty(on_cpu, monkeypatch, capsys):
    def meter():
        raise RuntimeError("no such counter")

    monkeypatch.setattr(measure, "_energy_meter", meter)
    rows = measure.ffn([5], [4], hidden_size=K, intermediate_size=N, mode="stream", energy=True)
    assert {row["energy"] for row in rows} == {None}
    assert "energy is not measured: no such counter" in capsys.readouterr().out


def test_mistakes_are_found_before_anything_is_measured(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ceilings", lambda: pytest.fail("measured something"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "ffn.csv").write_text("tokens,active,device\n1,2,x\n")
    (tmp_path / "file").write_text("")
    for options, kind, words in (
        (
            {"patterns": ["evn"]},
            ValueError,
            "pattern 'evn' is unknown; use one of even, skewed, recorded",
        ),
        ({"mode": "fast"}, ValueError, "mode 'fast' is unknown; use 'stream' or 'graph'"),
        ({"tokens": [4, 0]}, ValueError, "tokens holds 0; it has to be at least 1"),
        ({"hidden_size": 0}, ValueError, "hidden_size is 0; the kernels need a multiple of 16"),
        ({"hidden_size": 40}, ValueError, "hidden_size is 40; the kernels need a multiple of 16"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size is 0; it has to be at least 1"),
        ({"kernels": True}, ValueError, "say in which folder"),
        (
            {"out": tmp_path / "old"},
            ValueError,
            r"ffn.csv has the columns \['tokens', 'active', 'device'\]",
        ),
        ({"out": tmp_path / "file"}, NotADirectoryError, "file is a file; out is a folder"),
    ):
        with pytest.raises(kind, match=words):
            measure.ffn(**({"tokens": [4]} | options))


@pytest.mark.parametrize("known, path", [((1.0, 2.0), "union"), ((90.0, 95.0), "dense")])
def test_auto_is_given_the_activity_and_its_path_is_told(on_cpu, monkeypatch, known, path):
    made = []

    def fast_unions(shape):
        times = [(70, 1, u, {"dense": 1.0, "union": u / 50}) for u in (1, 96)]
        return choose.Calibration(
            "x", *shape, "bfloat16", "", "", tuple(choose.Point(*point) for point in times)
        )

    monkeypatch.setattr(choose, "default", lambda *shape: made.append(shape) or fast_unions(shape))
    monkeypatch.setattr(measure.Exact, "check", lambda *_: 1e-3)
    monkeypatch.setattr(measure, "ROWWISE_ENTRIES", 0)  # slow in the interpreter
    rows = measure.ffn([70], [known[0]], hidden_size=K, intermediate_size=N, mode="stream")
    assert made and [row["path"] for row in rows if row["provider"] == "auto"] == [path]
    inputs = measure.synthetic_layer(70, K, N, active=known[0], device=DEVICE)
    for layer in measure._Case.of(
        "skewed", inputs, True, 2
    ).auto_layers():  # before it has seen anything
        assert layer.chooser.path(70) == path


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_levels_end_with_half_and_all():
    assert measure.calibration_levels(5632) == [1, 10, 30, 100, 300, 1000, 2816, 5632]
    assert measure.calibration_levels(600) == [1, 10, 30, 100, 300, 600]
    assert measure.calibration_levels(1) == [1]


@pytest.fixture
def timed(on_cpu, monkeypatch):
    """Times by a formula; every call is run and checked all the same. The list keeps (tokens, active, what, ms)."""
    made = []

    def calibration_time(case, what, calls):
        case.exact.check(calls[0](), what)
        m, active, union = (case.columns[name] for name in ("tokens", "active", "union"))
        path = what.split("(")[-1].removesuffix(")")
        ms = {
            "rowwise": m * active / 200 or 0.001,
            "union": 0.02 + union * m / 4000,
            "decode": 0.01 + union * m / 2000,
        }
        made.append((m, active, what, ms.get(path, 0.02 + 0.02 * m)))
        return made[-1][-1]

    monkeypatch.setattr(measure, "_calibration_time", calibration_time)
    monkeypatch.setattr(measure, "CHECKED_TOKENS", (4, 20))
    return made


def test_a_calibration_holds_what_was_timed_and_is_checked(timed, tmp_path, capsys):
    found = measure.calibrate(32, 64, out=tmp_path / "c.json", tokens=(1, 8, 16))
    again = choose.Calibration.load(tmp_path / "c.json")
    assert again.times == found.times and (
        again.hidden_size,
        again.intermediate_size,
        again.gated,
    ) == (32, 64, True)
    grid = [
        (m, active, what, ms)
        for m, active, what, ms in timed
        if what in choose.DEPENDS_ON and m in (1, 8, 16)
    ]
    for m, active, what, ms in grid:
        assert any(
            (p.tokens, p.active) == (m, active) and p.ms.get(what) == ms for p in found.times
        )
    assert sum(len(p.ms) for p in found.times) == len(grid)
    # The busiest layer at each number of tokens is timed densely, and what fell far behind is not followed so far.
    for m in (1, 8, 16):
        most = max((p for p in found.times if p.tokens == m), key=lambda p: p.active)
        assert most.active == 64 and "dense" in most.ms
        for path in ("rowwise", "union", "decode"):
            curve = [p.ms for p in sorted(found.times, key=lambda p: p.active) if p.tokens == m]
            ratios = [ms[path] / ms["dense"] for ms in curve if path in ms]
            assert all(ratio <= measure.BEHIND for ratio in ratios[:-1])
            assert len(ratios) == len(curve) or ratios[-1] > measure.BEHIND
            assert path != "rowwise" or m == 1 or len(ratios) < len(curve)
    said = capsys.readouterr().out
    ratios = [
        float(ratio)
        for ratio in re.findall(r"alike .* ([0-9.]+) of the time of torch.compile", said)
    ]
    assert len(ratios) == 4 and max(ratios) <= 1  # two numbers of tokens; 20 active and all
    assert (
        f"worst against dense torch.compile: {max(ratios):.2f} of its time with the activity known"
        in said
    )
    assert {what for m, _, what, _ in timed if m in (4, 20)} >= {
        "dense torch.compile",
        "auto (union)",
    }


def test_the_worst_of_each_kind_is_reported(timed, monkeypatch):
    # Planned for 29 active neurons layers go by rows, which then takes m * 64 / 200 ms when all 64 neurons are active.
    active = {1: 0.001, 40: 0.001, 64: 10.0}
    times = [
        (m, a, a, {"dense": 0.02 + 0.02 * m, "rowwise": ms})
        for m in (4, 20)
        for a, ms in active.items()
    ]
    points = tuple(choose.Point(*point) for point in times)
    calibration = choose.Calibration("x", 32, 64, True, "bfloat16", "", "", points)
    monkeypatch.setattr(measure, "CHECKED_ACTIVE", (5,))
    worst = measure._check_choices(calibration, torch.device(DEVICE))
    assert set(worst) == {"alike", "even", "busier"}
    assert worst["busier"] == pytest.approx(max(m * 64 / 200 / (0.02 + 0.02 * m) for m in (4, 20)))
    assert {what for _, active, what, _ in timed if active == 64} >= {
        "auto (dense)",
        "auto (rowwise)",
    }
    rows = {
        (m, active): ms for m, active, what, ms in timed if what == "auto (rowwise)" and active < 20
    }
    alike = [ms / (0.02 + 0.02 * m) for (m, _), ms in rows.items()]
    assert len(alike) == 2 and worst["alike"] == pytest.approx(max(1.0, *alike))


@pytest.mark.parametrize("num_tokens, mode, number", [(4, "graph", 8), (5, "stream", 1)])
def test_few_tokens_are_calibrated_in_a_graph(on_cpu, monkeypatch, num_tokens, mode, number):
    monkeypatch.setattr(measure, "GRAPH_TOKENS", 4)
    seen = []

    def checked(case, what, calls, mode):
        return (
            1e-3,
            lambda budget: seen.append((len(calls), mode, budget)) or np.array([3.0, 7.0, 8.0]),
            calls[0],
        )

    monkeypatch.setattr(measure, "_checked", checked)
    inputs = measure.synthetic_layer(num_tokens, K, N, device="cpu")
    case = measure._Case.of("skewed", inputs, True, number)
    assert measure._calibration_time(case, "dense", case.path_calls("dense")) == 7.0
    assert seen == [(number, mode, measure.BUDGET)]


def test_a_calibration_that_could_not_be_saved_is_not_begun(timed, tmp_path):
    for out in (tmp_path / "none" / "c.json", tmp_path):
        with pytest.raises(
            FileNotFoundError, match="cannot be written: name a file in a folder that exists"
        ):
            measure.calibrate(32, 64, out=out, tokens=(1,))
    with pytest.raises(ValueError, match="hidden_size is 33"):
        measure.calibrate(33, 64, out=tmp_path / "c.json")
    assert not timed


# --- where training sparsely stops to pay ------------------------------------------------------------------------------

LEVELS = 0.02, 0.1, 0.3, 0.6  # of 96 neurons


@pytest.fixture
def stepped(on_cpu, monkeypatch):
    """Times of training steps by a formula of their activity; the list keeps (tokens, active, sparse, ms).

    `stepped.pays`: the active neurons at which both sides take as long.
    """

    class Made(list):
        pays = 17.0

    made = Made()

    def times(step, budget):
        assert budget == measure_training.ROUND
        leaves = step.leaves
        first = leaves["w_up"] if leaves["w_gate"] is None else leaves["w_gate"]
        active = float(counts_of(leaves["x"], first).double().mean())
        sparse = step.function is not measure_training._dense
        made.append(
            (len(leaves["x"]), active, sparse, (active / made.pays) ** 0.5 if sparse else 1.0)
        )
        return np.array([made[-1][-1]] * 3)

    monkeypatch.setattr(measure, "_stream_times", times)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure_training, "CROSSOVER_SHARES", LEVELS)
    return made


@pytest.mark.parametrize("gated", [True, False])
def test_the_crossover_of_training_is_where_both_sides_take_as_long(stepped, gated, capsys):
    found = measure_training.crossover(K, N, gated=gated, tokens=70)
    assert found == pytest.approx(
        17.0, rel=5e-3
    )  # the formula is a line in logarithms; p50 has four digits
    assert {tokens for tokens, *_ in stepped} == {70}
    assert [sparse for _, _, sparse, _ in stepped] == [
        False,
        True,
    ] * 3  # not the level after the first slower one
    active = [active for _, active, sparse, _ in stepped if sparse]
    assert active == sorted(active) and active[1] < 17 < active[2]
    said = capsys.readouterr().out
    for level in active:
        speedup = (17 / level) ** 0.5
        assert (
            f" {level:.2f}".rstrip("0").rstrip(".") in said
            and f"{speedup:.2f} times as fast" in said
        )
    assert said.endswith(f"training is faster sparsely up to {found:g} active neurons per token\n")


def test_steps_that_are_slower_or_faster_at_every_level(stepped, monkeypatch):
    monkeypatch.setattr(measure_training, "CROSSOVER_SHARES", LEVELS[:2])
    stepped.pays = 0.5
    assert measure_training.crossover(K, N, tokens=70) == 0 and len(stepped) == 2
    stepped.clear()
    stepped.pays = 1e3
    found = measure_training.crossover(K, N, tokens=70)
    assert len(stepped) == 4 and found == pytest.approx(stepped[-1][1], abs=0.01)


def test_the_crossover_is_that_of_the_tables(seed):
    r = np.random.default_rng(seed)
    for _ in range(50):
        levels = [
            (float(a), float(g))
            for a, g in zip(np.cumsum(r.uniform(1, 90, 5)), r.uniform(0.7, 1.6, 5), strict=True)
        ]
        slower = next((place for place, (_, gain) in enumerate(levels) if gain < 1), len(levels))
        levels = levels[: slower + 1]  # where a measurement ends
        rows = [
            {"provider": "triton union", "tokens": 64, "active": a, "speedup": g} for a, g in levels
        ]
        expected = analysis.training_crossover(pd.DataFrame(rows))
        assert measure_training._crossing(levels) == pytest.approx(expected, rel=1e-3)


def test_a_wrong_step_is_not_timed(stepped, monkeypatch):
    from twell.kernels import ops

    train = ops.train

    def wrong(*arguments):
        found = train(*arguments)
        return found._replace(l1=1.02 * found.l1)

    monkeypatch.setattr(ops, "train", wrong)
    with pytest.raises(
        ArithmeticError, match="^l1 of triton union at .* 70 tokens  skewed .* is wrong"
    ):
        measure_training.crossover(K, N, tokens=70)
    assert not stepped


def test_a_layer_that_the_kernels_do_not_take_has_no_crossover(stepped):
    with pytest.raises(ValueError, match="hidden_size is 33; the kernels need a multiple of 16"):
        measure_training.crossover(33, N)
    with pytest.raises(ValueError, match="tokens holds 0"):
        measure_training.crossover(K, N, tokens=0)


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_passes_everything_on(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        measure, "ffn", lambda *arguments, **options: seen.update(options, arguments=arguments)
    )
    h = scipy.sparse.csr_array(np.array([[0, 2.0, 0], [3.0, 0, 0], [0, 0, 0]], np.float32))
    h.data[0] = 0  # active, though its value came out 0
    recorded = trace.Trace(
        token_ids=np.arange(3, dtype=np.int32),
        strings=["a", "b", "c"],
        logprob=np.zeros(3, np.float32),
        sequence=np.zeros(3, np.int32),
        position=np.arange(3, dtype=np.int32),
        indptr=np.concatenate([np.zeros(3, np.int64), h.indptr]),
        indices=h.indices.astype(np.uint16),
        values=h.data,
        intermediate_size=3,
    )
    recorded.save(tmp_path / "text.npz")
    words = f"measure ffn --tokens 1,64 --active 2.5,9 --pattern even,recorded --hidden 64 --intermediate 128 --non-gated \
        --mode graph --energy --kernels --calibration {choose.DEFAULT} --trace {tmp_path / 'text.npz'} --layer 1 --out {tmp_path}"
    assert main(words.split()) == 0
    assert seen.pop("calibration").device == "NVIDIA H200"
    masks = seen.pop("masks")
    assert list(masks) == ["text_1"] and masks["text_1"].tolist() == [
        [False, True, False],
        [True, False, False],
        [False] * 3,
    ]
    assert seen == {
        "arguments": ([1, 64], [2.5, 9.0], ["even", "recorded"]),
        "hidden_size": 64,
        "intermediate_size": 128,
        "gated": False,
        "mode": "graph",
        "energy": True,
        "kernels": True,
        "out": tmp_path,
    }


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--tokens 1,many", "--tokens is '1,many'; write numbers with commas, such as 1,16,256"),
        ("--trace x.npz --pattern recorded", "--trace FILE and --layer NUMBER go together"),
        ("--trace x.npz --layer 0", "--trace is for --pattern recorded; the pattern is skewed"),
        ("", "measuring needs a GPU, and torch sees none"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(
    arguments, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["measure", "ffn", *arguments.split(), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"twell measure: {words}\n"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def calibrating(tmp_path, monkeypatch):
    """`measure calibrate` without measuring, in an empty folder; the list keeps the arguments of both measurements."""
    seen = []

    def calibrate(*shape, gated, out):
        seen.append((shape, gated, out))
        points = (choose.Point(1, 1, 1, {"dense": 1.0, "union": 0.5}),)
        found = choose.Calibration("x", *shape, gated, "bfloat16", "", "", points)
        found.save(out)
        return found

    monkeypatch.setattr(measure, "calibrate", calibrate)
    monkeypatch.setattr(
        measure_training, "crossover", lambda *shape, gated: seen.append((shape, gated)) or 12.5
    )
    monkeypatch.chdir(tmp_path)
    return seen


def test_a_model_is_calibrated_by_its_configuration(calibrating, tiny_run, tmp_path, capsys):
    model = Path(shutil.copytree(tiny_run, tmp_path / "run")) / "model"
    for words, shape, gated, out in (
        (f"--model {model.parent}", (32, 96), True, model / "calibration.json"),
        (f"--model {model} --out c.json", (32, 96), True, Path("c.json")),
        ("--hidden 64 --non-gated", (64, 5632), False, Path("build/calibration.json")),
    ):
        calibrating.clear()
        assert main(["measure", "calibrate", *words.split()]) == 0
        assert calibrating == [(shape, gated, out), (shape, gated)]
        written = choose.Calibration.load(out)
        assert written.training == 12.5 and written.times[0].ms == {"dense": 1.0, "union": 0.5}
        written.check_shape(*shape, gated)
    assert main(["measure", "calibrate", "--model", str(model), "--hidden", "64"]) == 2
    assert "leave out --hidden, --intermediate and --non-gated" in capsys.readouterr().err


def test_nothing_is_written_into_recorded_data_unasked(calibrating, tmp_path, capsys):
    folder = results.root(Path(__file__).parent) / "data" / "checkpoints" / "twell-6m"
    assert main(["measure", "calibrate", "--model", str(folder)]) == 2
    assert (
        f"twell-6m is recorded data; --out {folder / 'calibration.json'} writes there"
        in capsys.readouterr().err
    )
    assert calibrating == [] and not (folder / "calibration.json").exists()
    assert main(["measure", "calibrate", "--model", str(folder), "--out", "new/c.json"]) == 0
    assert (tmp_path / "new" / "c.json").is_file()


def test_times_are_kept_where_training_cannot_be_measured(calibrating, monkeypatch, capsys):
    def crossover(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(measure_training, "crossover", crossover)
    assert main(["measure", "calibrate", "--hidden", "64"]) == 2
    assert (
        capsys.readouterr().err
        == "twell measure: not enough memory: lower the sizes (out of memory)\n"
    )
    assert choose.Calibration.load("build/calibration.json").training is None
