"""Whole models: the same pass on all sides, results that are checked, kernels told apart, decoding, and rows."""

import itertools
import random
import types
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

from tests.test_imposed import active_rows, build
from twell import imposed, measure, measure_model
from twell.__main__ import main
from twell.sparse import plan as choose

pytest.importorskip("triton")
from twell.kernels import ops  # noqa: E402

TINY = "num_layers=3 hidden_size=32 intermediate_size=96 num_heads=2 vocab_size=320".split()


@pytest.fixture
def seed():
    """Another one in each run; pytest shows it when a test fails."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return seed


def computed(path, x, w_gate, w_up, w_down, *_, activity=None):
    """ops.run by dense products."""
    return measure._dense(x, w_gate, w_up, w_down)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


# --- a model that changes sides -------------------------------------------------------------------------------------


def test_the_pass_is_the_models_own(seed):
    model = build(seed=seed)
    ids = imposed.draw_tokens(640, 3, 40, seed=seed)
    imposed.impose(model, [20.0] * 4, ids)
    with torch.no_grad():
        hidden, logits = measure_model.forward(model, ids)
        own = model(input_ids=ids, use_cache=False, logits_to_keep=1)
        assert torch.equal(hidden, model.model(input_ids=ids, use_cache=False).last_hidden_state)
        assert torch.equal(logits, own.logits[:, 0])
        exact = measure_model.exact_hidden_states(model, ids)
        wide = model.float().model(input_ids=ids, use_cache=False).last_hidden_state
    assert exact.dtype == torch.float32 and relative(exact, wide) < 1e-6
    assert 1e-4 < relative(hidden, exact) < measure_model.TOLERANCE


@pytest.fixture
def sides(monkeypatch):
    """A model in which 20 neurons are active, not compiled; the list has what the kernels were asked for."""
    asked = []

    def run(path, *tensors, **options):
        asked.append(path)
        return computed(path, *tensors)

    monkeypatch.setattr(ops, "run", run)
    compiled = []

    def compile_(self, *, fullgraph, dynamic, options):
        assert fullgraph and not dynamic
        compiled.append(options)
        self._compiled_call_impl = partial(self._call_impl)  # another one for each way

    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    model = build().requires_grad_(False)
    imposed.impose(model, [20.0] * 4, imposed.draw_tokens(640, 8, 64))
    made = measure_model.Sides(model)
    made.asked, made.compiled_with = asked, compiled
    return made


def test_sides_differ_in_nothing_but_the_feed_forward_layers(sides):
    model, ids = sides.model, imposed.draw_tokens(640, 2, 50)
    names = measure_model.providers(None, tuned=True)
    compiled, tuned = (
        [f"{side} {kind}" for side in ("dense", "triton", "auto")] for kind in measure_model.KINDS
    )
    assert (
        names == ["dense eager", "triton", "auto", *compiled, *tuned]
        and tuned[0] == "dense torch.compile tuned"
    )
    assert (
        measure_model.providers(None) == names[:6]
        and measure_model.providers(True, tuned=True) == names[3:]
    )
    assert measure_model.providers(True) == compiled and measure_model.providers(False) == names[:3]
    values = {name: weight.clone() for name, weight in model.named_parameters()}
    sides.observe([{"mean": 20.0, "union": 90.0}] * 4, 64)
    found = {}
    for name in [*names, names[0]]:
        sides.become(name)
        assert all(torch.equal(weight, values[key]) for key, weight in model.named_parameters())
        strides = {ffn.down_proj.weight.stride() for ffn in model.ffns}
        assert strides == {(192, 1) if name.startswith("dense") else (1, 64)}
        parts = [*model.model.layers, model.model.norm]
        assert {part._compiled_call_impl is not None for part in parts} == {"compile" in name}
        sides.asked.clear()
        with torch.no_grad():
            hidden, _ = measure_model.forward(model, ids)
        paths = Counter(sides.asked)
        if not name.startswith("dense"):
            assert ", ".join(f"{path} {number}" for path, number in paths.items()) == sides.paths(
                name, 100
            )
        assert sides.paths(name, 100) in ("dense 4", "union 4") and (not paths) == name.startswith(
            "dense"
        )
        assert torch.equal(found.setdefault(name, hidden), hidden)
    assert sides.paths("triton", 64) == "decode 4"
    # Each of five parts in each way once, tuned for tuned providers only.
    assert sides.compiled_with == 5 * [None] + 5 * [{"coordinate_descent_tuning": True}]
    calls = {}
    for name in [*compiled, *tuned]:
        sides.become(name)
        calls.setdefault(model.model.norm._compiled_call_impl, []).append(name)
    assert list(calls.values()) == [compiled, tuned]


def test_auto_goes_by_the_activity_of_each_layer(sides, monkeypatch):
    times = [choose.Point(100, 1, u, {"dense": 1.0, "union": u / 50}) for u in (1, 192)]
    calibration = choose.Calibration("x", 64, 192, True, "bfloat16", "", "", tuple(times))
    own = measure_model.Sides(sides.model, calibration)
    activity = [{"mean": 9.0, "union": u} for u in (5.0, 100.0, 20.0, 190.0)]
    own.observe(activity, 64)
    own.become("auto")
    assert own.paths("auto torch.compile", 100) == "dense 2, union 2"
    assert [ffn.chooser.path(100) for ffn in sides.model.ffns] == [
        "union",
        "dense",
        "union",
        "dense",
    ]


def test_new_weights_are_taken_up(sides):
    sides.become("triton")
    sides.become("dense eager")
    imposed.impose(sides.model, [60.0] * 4, imposed.draw_tokens(640, 8, 64))
    weights = [ffn.down_proj.weight.clone() for ffn in sides.model.ffns]
    sides.take_weights()
    for name in ("triton", "dense eager"):
        sides.become(name)
        assert all(
            torch.equal(ffn.down_proj.weight, w)
            for ffn, w in zip(sides.model.ffns, weights, strict=True)
        )


# --- whether a result is right --------------------------------------------------------------------------------------


def test_the_relative_error_is_that_of_the_whole(seed):
    g = torch.Generator().manual_seed(seed)
    right = torch.randn(2**12, 4100, generator=g)  # more than a part
    found = right + 0.01 * torch.randn(right.shape, generator=g)
    assert measure_model.relative(found, right) == pytest.approx(relative(found, right), rel=1e-4)
    assert measure_model.relative(torch.ones(4), torch.zeros(4)) == 2


def test_only_what_is_as_right_as_dense_passes(seed):
    g = torch.Generator().manual_seed(seed)

    def noise(size):
        return size * torch.randn(8, 50, 64, generator=g)

    right = torch.randn(8, 50, 64, generator=g)
    judge = measure_model.Judge("hidden states (case)", right[:2], lambda hidden: hidden[:2])
    assert judge.check("dense eager", right + noise(0.01)) == pytest.approx(0.01, rel=0.1)
    assert judge.check("triton", right + noise(0.01)) == pytest.approx(0.01, rel=0.1)
    outside = right + noise(0.01)
    outside[5] = 0
    for wrong, words in (
        (
            right + noise(0.015),
            r"^hidden states \(case\) of triton are wrong: relative RMS 1\..*e-02, allowed 1\..*e-02",
        ),
        (right * float("nan"), "of triton are wrong"),
        (outside, r"of triton differ from dense ones: relative RMS .*e-01, allowed [12]\..*e-02"),
    ):
        with pytest.raises(ArithmeticError, match=words):
            judge.check("triton", wrong)
    with pytest.raises(
        ArithmeticError, match="of dense eager are wrong: relative RMS 6.*e-02, allowed 5.00e-02"
    ):
        measure_model.Judge("hidden states", right, lambda hidden: hidden).check(
            "dense eager", right + noise(0.065)
        )


def test_a_layer_that_is_wrong_is_named(sides, monkeypatch):
    ids = imposed.draw_tokens(640, 4, 64)
    sides.become("triton")
    with torch.no_grad():
        run = partial(measure_model.hidden_states, sides.model, ids)
        assert 1e-3 < measure_model.check_layers(sides, run, "triton") < measure.TOLERANCE
    calls = []

    def wrong(path, *tensors, **_):
        calls.append(path)
        return computed(path, *tensors) * (
            1.01 if len(calls) == 3 else 1.0
        )  # far below what the last states show

    monkeypatch.setattr(ops, "run", wrong)
    with (
        pytest.raises(ArithmeticError, match="^layer 2 of triton is wrong: relative RMS 1"),
        torch.no_grad(),
    ):
        measure_model.check_layers(sides, run, "triton")
    assert not any(ffn._forward_hooks for ffn in sides.model.ffns)


def test_a_layer_may_be_as_far_off_as_plain_products(sides, monkeypatch):
    ids = imposed.draw_tokens(640, 4, 64)
    sides.become("triton")
    run = partial(measure_model.hidden_states, sides.model, ids)
    monkeypatch.setattr(
        measure, "TOLERANCE", 1e-4
    )  # as if terms cancelled: bf16 rounds by 1e-3 and more
    with torch.no_grad():
        assert measure_model.check_layers(sides, run, "triton") > 1e-3
        monkeypatch.setattr(ops, "run", lambda path, *tensors, **_: computed(path, *tensors) * 1.01)
        with pytest.raises(ArithmeticError, match="^layer 0 of triton is wrong: relative RMS 1"):
            measure_model.check_layers(sides, run, "triton")
        monkeypatch.setattr(ops, "run", computed)
        monkeypatch.setattr(measure_model, "LAYER_TOLERANCE", 1e-3)
        with pytest.raises(ArithmeticError, match="allowed 1.00e-03"):
            measure_model.check_layers(sides, run, "triton")


# --- timing, with a clock of ours -----------------------------------------------------------------------------------


def test_times_and_energy_are_of_the_same_turns(monkeypatch, seed):
    r = np.random.default_rng(seed)
    clock, counter, log = [0.0], [7000], []

    def call():
        log.append(r.uniform(40, 60))
        clock[0] += log[-1] / 1e3
        counter[0] += round(20 * log[-1])  # mJ: 20 W

    def between(call, number, lead=3):
        for _ in range(lead):
            call()
        starts = len(log)
        for _ in range(number):
            call()
        return np.array(log[starts:])

    monkeypatch.setattr(measure, "_between_replays", between)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure_model.time, "perf_counter", lambda: clock[0])
    timed = measure_model.Clock(call, lambda: counter[0], per_call=4)
    for _ in range(3):
        timed.turn()
    counted = timed.calls // 4
    trial, rest = log[1], log[2:]
    settling = -(-measure_model.SETTLE // trial)
    assert counted == 3 * round(measure_model.TURN / trial) and len(rest) == counted + 3 * settling
    row = timed.row(idle=9.0)
    kept = np.concatenate(timed.times)
    assert len(kept) == counted and row["p50"] == pytest.approx(np.median(kept), rel=1e-3)
    assert 10 <= row["p50"] <= 15 and row["idle"] == 9.0
    assert row["energy"] == pytest.approx(20 * kept.mean(), rel=1e-3) and row[
        "watts"
    ] == pytest.approx(20, abs=0.1)
    timed = measure_model.Clock(lambda: log.append(5000.0), None)
    timed.turn()
    assert timed.calls == 2  # long calls too are timed twice
    assert timed.row(None) | {"p50": 0} == {
        "p20": 5000,
        "p50": 0,
        "p80": 5000,
        "energy": None,
        "watts": None,
        "idle": None,
    }


def test_idle_power_is_that_of_a_pause(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure_model.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        measure_model.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    assert measure_model.idle_watts(lambda: round(1e3 * 87.5 * clock[0])) == 87.5


def test_the_peak_counts_the_weights_once(monkeypatch):
    model, log = torch.nn.Linear(10, 5, bias=False), []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: log.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: log.append("now") or 5000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: log.append("most") or 7500)
    assert measure_model._peak(model, lambda: log.append("run")) == 200 + 2500
    assert log == [
        "run",
        "synchronize",
        "now",
        "reset_peak_memory_stats",
        "run",
        "synchronize",
        "most",
    ]


# --- where a layer's time goes --------------------------------------------------------------------------------------

BEFORE = [
    ("triton_red_fused__to_copy_mean_0", 1.0),
    ("nvjet_tst_256x128", 10.0),
    ("nvjet_tst_256x128", 20.0),
]
BEFORE += [
    ("sm90_xmma_gemm_bf16bf16", 40.0),
    ("triton_poi_fused__scaled_dot_product_cudnn_attention_add_mul_1", 2.0),
]
OUTPUT = [("nvjet_tst_192", 80.0), ("triton_red_fused__to_copy_add_ffn_union_2", 4.0)]
AFTER = [("triton_poi_fused_add_view_4", 8.0)]


@pytest.mark.parametrize(
    "attention",
    [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64> >(Params)",
        "fmha_cutlassF_bf16_aligned_64x64_sm80",
    ]
    + ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i"]
    + [
        "void cudnn::fusion::lean_reduction_kernel<false, false, false>(void*)"
    ],  # the end of one that was split
)
@pytest.mark.parametrize(
    "ffn, gate, rest",
    [
        (
            [
                ("nvjet", 300.0),
                ("nvjet", 500.0),
                ("triton_poi_fused_mul_relu_3", 50.0),
                ("nvjet", 700.0),
            ],
            300,
            1250,
        ),
        (
            [("nvjet", 300.0), ("nvjet", 500.0), ("relu_times_kernel", 50.0), ("nvjet", 700.0)],
            300,
            1250,
        ),
        (
            [
                ("gate_bits_kernel", 300.0),
                ("lists_kernel", 5.0),
                ("up_kernel", 40.0),
                ("down_kernel", 30.0),
            ],
            300,
            75,
        ),
        (
            2
            * [
                ("gate_bits_kernel", 300.0),
                ("lists_kernel", 5.0),
                ("up_kernel", 40.0),
                ("down_kernel", 30.0),
            ],
            600,
            150,
        ),
        ([("few_up_kernel", 8.0), ("few_down_kernel", 4.0)], 8, 4),  # decoding
        (
            [("Memset (Device)", 16.0), ("gate_bits_kernel", 300.0), ("up_down_kernel", 30.0)],
            300,
            30,
        ),
        (
            [("nvjet", 300.0), ("triton_poi_fused_relu_3", 50.0), ("nvjet", 700.0)],
            300,
            750,
        ),  # without a gate
        (
            [("nvjet_splitK", 200.0), ("cublasLt::splitKreduce_kernel<32>", 100.0), ("nvjet", 9.0)],
            300,
            9,
        ),
    ],
)
def test_kernels_are_told_apart(attention, ffn, gate, rest):
    found = measure_model.split_kernels([*BEFORE, (attention, 1000.0), *OUTPUT, *ffn, *AFTER])
    assert list(found) == list(measure_model.PARTS[:-1])
    extra = sum(ms for name, ms in ffn if name.startswith("Memset"))
    assert found == {
        "attention": 1000.0,
        "projections": 150.0,
        "norms, rotary, residuals": 15.0 + extra,
        "gate": gate,
        "up and down": rest,
    }


def test_passes_have_the_same_kernels_each():
    a, b, later = ("a", 1.0), ("b", 2.0), ("a", 3.0)
    assert measure_model._equal([a, b, later, b], 2) == [[a, b], [later, b]]
    for kernels in ([a, b, a], [], [a, b, b, a]):
        with pytest.raises(
            RuntimeError, match=f"^{len(kernels)} kernels ran in 2 equal passes, and not the same"
        ):
            measure_model._equal(kernels, 2)


def test_what_is_profiled_comes_behind_other_calls(monkeypatch):
    ran = []

    class Profiler:
        def __enter__(self):
            ran.clear()
            return self

        def __exit__(self, *_):
            return None

        def events(self):
            span = types.SimpleNamespace
            cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
            found = [
                span(
                    device_type=cuda,
                    name=name,
                    time_range=span(start=10 * n + place, elapsed_us=lambda n=n: 1e3 * n),
                )
                for n in ran
                for place, name in enumerate(("gate", "up"))
            ]
            return [*reversed(found), span(device_type=cpu, name="launch", time_range=None)]

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profiler())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = measure_model._profiled(lambda: ran.append(len(ran)), calls=2, lead=3)
    assert found == [("gate", 3.0), ("up", 3.0), ("gate", 4.0), ("up", 4.0)]


def test_a_layer_without_attention_is_refused():
    with pytest.raises(
        ValueError, match="no kernel of attention among triton_red_fused__to_copy_mean_0, nvjet"
    ):
        measure_model.split_kernels([*BEFORE, *OUTPUT])


# --- decoding -------------------------------------------------------------------------------------------------------


def test_decoding_gives_the_logits_of_a_pass_over_the_whole_text(seed):
    model = build(torch.float32, seed, num_key_value_heads=2).requires_grad_(False)
    script = imposed.draw_tokens(640, 3, 29, seed=seed)
    imposed.impose(model, [20.0] * 4, script)
    decoder = measure_model.Decoder(model, script, 17)
    with torch.no_grad():
        decoder.read()
        logits = decoder.generate(decoder.step)
        whole = model(input_ids=script, use_cache=False).logits[:, 17:].transpose(0, 1)
        assert logits.shape == (12, 3, 640) and relative(logits, whole) < 1e-5
        assert (
            torch.equal(decoder.picked[:, 17:].t(), logits.argmax(-1))
            and not decoder.picked[:, :17].any()
        )
        assert int(decoder.position) == 29
        places = [cache.keys.data_ptr() for cache in decoder.caches]
        assert torch.equal(decoder.generate(decoder.step), logits)  # again from where it began
        assert places == [cache.keys.data_ptr() for cache in decoder.caches]
        other = script.clone()
        other[1, 20] += 1
        decoder.script.copy_(other)
        again = decoder.generate(decoder.step)
    same = (again == logits).all(-1)
    assert same[:3].all() and same[:, [0, 2]].all() and not same[3:, 1].any()


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_are_one_product_in_decoding(bias, seed):
    model = build(torch.float32, seed, num_key_value_heads=2, attention_bias=bias).requires_grad_(
        False
    )
    projections = [
        (a.q_proj, a.k_proj, a.v_proj) for a in (layer.self_attn for layer in model.model.layers)
    ]
    if bias:
        for part in itertools.chain(*projections):
            part.bias.normal_()
    ids = imposed.draw_tokens(640, 2, 9, seed=seed)
    hidden, rotary = (
        torch.randn(2, 3, model.config.hidden_size),
        model.model.rotary_emb(torch.ones(1), torch.arange(3)[None]),
    )
    products = []

    def count(graph, _):
        products.append(sum(node.target is F.linear for node in graph.graph.nodes))
        return graph.forward

    def states():
        torch._dynamo.reset()
        torch.compile(model.model.layers[0], fullgraph=True, backend=count)(
            hidden, position_embeddings=rotary
        )
        return measure_model.hidden_states(model, ids)

    apart = states()
    with pytest.raises(ZeroDivisionError), measure_model.joined_projections(model):
        torch.testing.assert_close(states(), apart)
        exact = measure_model.exact_hidden_states(model, ids)  # copies layers
        torch.testing.assert_close(exact, apart)
        raise ZeroDivisionError
    assert products == [7, 5] and torch.equal(states(), apart)
    assert projections == [
        (a.q_proj, a.k_proj, a.v_proj) for a in (layer.self_attn for layer in model.model.layers)
    ]


def test_what_surrounds_the_layers_is_compiled_as_they_are(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch, "compile", lambda part, *, options, **_: asked.append(options) or part
    )
    decoder = measure_model.Decoder(build(), imposed.draw_tokens(640, 1, 8), 4)
    assert asked == 2 * [None] + 2 * [{"coordinate_descent_tuning": True}]
    assert list(decoder.around) == ["", *measure_model.KINDS]


# --- all of it ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """The sparse paths by dense products on the CPU, also where there is a GPU; and no compiler, graph or clock."""

    class Graph:
        def __init__(self, calls):
            self.calls = calls
            self.outputs = [call() for call in calls]

        def replay(self):
            for call, output in zip(self.calls, self.outputs, strict=True):
                found = call()
                if isinstance(output, torch.Tensor):
                    output.copy_(found)

    def capture(calls):
        graph = Graph(calls)
        return graph, graph.outputs

    def times(call, *_, **__):
        call()
        return np.array([0.9, 1.0, 1.1])

    kernels = [
        ("nvjet", 0.1),
        ("sdpa", 0.2),
        ("nvjet", 0.1),
        ("nvjet", 0.1),
        ("nvjet", 0.1),
        ("triton_poi", 0.1),
    ]

    def profiled(call, calls, lead):
        call()
        return kernels * calls * (3 if isinstance(getattr(call, "__self__", None), Graph) else 1)

    monkeypatch.setattr(ops, "run", computed)
    monkeypatch.setattr(ops, "takes", lambda *_: True)
    monkeypatch.setattr(measure, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(measure, "_capture", capture)
    monkeypatch.setattr(measure, "_stream_times", times)
    monkeypatch.setattr(measure, "_between_replays", times)
    monkeypatch.setattr(measure_model, "_profiled", profiled)
    for name, value in {
        "ROUNDS": 1,
        "TURN": 2,
        "SETTLE": 1,
        "SAMPLE": 128,
        "GENERATION": 3,
    }.items():
        monkeypatch.setattr(measure_model, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)


def test_projections_are_joined_in_decoding_alone(quick, monkeypatch):
    joined = Counter()

    def spy(name, measured, bench, *args):
        joined[name] = sum(isinstance(part, measure_model.Joined) for part in bench.model.modules())
        return measured(bench, *args)

    for name in ("_measure_forward", "_measure_decode", "_decode_parts"):
        monkeypatch.setattr(measure_model, name, partial(spy, name, getattr(measure_model, name)))
    measure_model.model(
        "quick", TINY, shapes=[(1, 64)], active=[10, 40], parts=True, decode=[1], decode_context=20
    )
    assert joined == {"_measure_forward": 0, "_measure_decode": 3, "_decode_parts": 3}


def test_layers_get_their_projections_back_when_joining_fails(monkeypatch):
    model = build()
    parts = [layer.self_attn.q_proj for layer in model.model.layers]

    class Failing(measure_model.Joined):
        def __init__(self, projections):
            if projections[0] is parts[1]:
                raise MemoryError
            super().__init__(projections)

    monkeypatch.setattr(measure_model, "Joined", Failing)
    with pytest.raises(MemoryError), measure_model.joined_projections(model):
        pass
    assert [layer.self_attn.q_proj for layer in model.model.layers] == parts


def test_rows_say_what_was_measured(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "_energy_meter", lambda: lambda: 0)
    monkeypatch.setattr(measure_model, "idle_watts", lambda meter: 70.0)
    monkeypatch.setattr(measure, "GRAPH_TOKENS", 100)
    options = {
        "shapes": [(2, 64), (1, 64)],
        "active": [10, 40],
        "layers": True,
        "parts": True,
        "decode": [1, 3],
    }
    kept = measure_model.model(
        "quick", TINY, **options, decode_context=20, tuned=True, energy=True, out=tmp_path
    )
    tables = {}
    for name, columns in measure_model.COLUMNS.items():
        assert all(list(row) == columns for row in kept[name]), name
        tables[name] = pd.read_csv(tmp_path / f"{name}.csv")
        assert len(tables[name]) == len(kept[name]) and tables[name]["date"].nunique() == 1
    table, six = tables["model"], measure_model.providers(None)
    assert list(table["provider"]) == 4 * six and list(table["batch"]) == 2 * (6 * [2] + 6 * [1])
    assert (table["mode"] == np.where(table["tokens"] > 100, "stream", "graph")).all()
    assert (table["tokens_per_ms"] == table["tokens"]).all() and (table["idle"] == 70).all()
    for name, paths in (
        ("triton", ["union 3", "decode 3"]),
        ("dense eager", ["dense 3", "dense 3"]),
    ):
        assert list(table["path"][table["provider"] == name]) == 2 * paths
    assert (
        table["relative_rms"].between(1e-4, 0.05).all()
        and table["layer_rms"].between(1e-4, 5e-3).all()
    )
    assert (table["profile"] == "paper").all() and (table["hidden_size"] == 32).all()
    assert all((rows["sdpa"] == "default").all() for rows in tables.values())
    layers = tables["model_layers"]
    assert list(layers["layer"]) == 4 * [0, 1, 2] and layers["level"].nunique() == 4
    timed = layers["batch"] == 2
    assert (layers.loc[timed, ["dense", "sparse", "auto"]] == 1.0).all(axis=None)
    assert layers.loc[~timed, ["dense", "sparse", "auto"]].isna().all(axis=None)
    for wanted, rows in zip((10, 40), (layers[:6], layers[6:]), strict=True):
        assert rows["wanted"][:3].mean() == pytest.approx(wanted, abs=0.01)
        assert rows["level"].iloc[0] == pytest.approx(rows["active"][:3].mean(), abs=0.01)
        assert (rows["active"] < rows["p99"]).all() and (rows["p99"] <= rows["active_max"]).all()
        assert (rows["union"] > rows["active"]).all() and np.allclose(
            rows["active"], rows["wanted"], rtol=0.6
        )
    parts = tables["model_parts"]
    # Of each level two providers in the first of the batches, then in decoding one document and three.
    assert list(parts["part"]) == 2 * 3 * 2 * list(measure_model.PARTS)
    assert list(parts["batch"]) == 2 * (12 * [2] + 12 * [1] + 12 * [3])
    assert (parts["layer"].isna() == (parts["context"] == 20)).all()
    one = parts[:6].set_index("part")["ms"]
    assert (
        one.sum() == pytest.approx(1.0)
        and one["projections"] == 0.2
        and one["between kernels"] == pytest.approx(0.3)
    )
    decode = tables["decode"]
    assert list(decode["provider"]) == 4 * measure_model.providers(None, tuned=True)
    assert list(decode["batch"]) == 2 * (9 * [1] + 9 * [3])
    assert (decode["tokens"] == decode["batch"]).all() and (decode["context"] == 20).all()
    assert decode["layer_rms"].between(1e-4, 1e-2).all()
    assert (decode["same"] == 1).all() and (decode["steps"] == 3).all()
    assert np.allclose(
        decode["tokens_per_second"], 1e3 * decode["batch"] / decode["p50"], rtol=1e-3
    )
    said = [
        line for line in capsys.readouterr().out.splitlines() if "  triton torch.compile" in line
    ]
    active = f"{table['active'].iloc[0]:.4g} active"
    assert said[0].startswith("quick  2 x 64 tokens  " + active)
    assert said[0].endswith("128.0 tokens/ms  0 mJ a token  union 3")


def test_parts_leave_what_they_leave_of_the_layer(quick, monkeypatch):
    monkeypatch.setattr(
        measure_model,
        "_profiled",
        lambda call, calls, lead: calls * [("nvjet", 0.5), ("sdpa", 0.75)],
    )
    sides, case = types.SimpleNamespace(become=lambda name: None), {"batch": 1, "context": 1}
    rows = measure_model._part_rows(
        sides, case, dict.fromkeys(measure_model.PARTS_OF, lambda: None)
    )
    assert [row["ms"] for row in rows] == 2 * [0.75, 0.5, 0, 0, 0, -0.25]  # a layer takes 1 ms


def test_the_activity_of_a_checkpoint_is_its_own(quick, tmp_path):
    model = build(hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    ids = imposed.draw_tokens(640, 4, 64, seed=3)
    imposed.impose(model, [7.0, 30.0], ids)
    given = ("tiny", model, ids.flatten().tolist())
    kept = measure_model.model(checkpoint=given, shapes=[(4, 64)], compiled=True, out=tmp_path)
    means = [round(float(layer.double().sum(1).mean()), 2) for layer in active_rows(model, ids)]
    assert [row["active"] for row in kept["model_layers"]] == means
    assert {(row["model"], row["profile"], row["wanted"]) for row in kept["model_layers"]} == {
        ("tiny", "checkpoint", None)
    }
    assert [row["provider"] for row in kept["model"]] == measure_model.providers(True)
    assert (
        {row["energy"] for row in kept["model"]} == {None}
        and not kept["decode"]
        and not kept["model_parts"]
    )
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["model.csv", "model_layers.csv"]


@pytest.mark.parametrize("wrong", ["layer", "pass", "step", "layer of a step"])
def test_nothing_is_timed_before_all_is_checked(quick, tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(measure_model.Clock, "turn", lambda self: pytest.fail("timed"))
    forward, step = measure_model.forward, measure_model.Decoder.step

    def bad_forward(model, ids):
        hidden, logits = forward(model, ids)
        return hidden * (1.1 if model.ffns[0].backend == "auto" else 1.0), logits

    def bad_step(decoder, kind=""):
        return step(decoder, kind) * (1.1 if decoder.model.ffns[0].backend == "triton" else 1.0)

    if wrong.startswith("layer"):
        monkeypatch.setattr(ops, "run", lambda *tensors, **_: 1.01 * computed(*tensors))
    if wrong == "pass":
        monkeypatch.setattr(measure_model, "forward", bad_forward)
    if wrong == "step":
        monkeypatch.setattr(measure_model.Decoder, "step", bad_step)
    words = {
        "layer": "^layer 0 of triton of quick  2 x 32 tokens .* is wrong",
        "pass": r"^hidden states \(quick .*\) of auto are wrong",
        "layer of a step": "^layer 0 of triton of quick  decoding 2 x 1 behind 20 tokens .* is wrong",
        "step": r"^logits \(quick  decoding 2 x 1 behind 20 tokens .*\) of triton are wrong",
    }[wrong]
    shapes, decode = ([], [2]) if wrong.endswith("step") else ([(2, 32)], [])
    with pytest.raises(ArithmeticError, match=words):
        options = {"shapes": shapes, "decode": decode, "decode_context": 20}
        measure_model.model("quick", TINY, **options, active=[20], compiled=False, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_mistakes_are_found_before_anything_is_measured(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure_model, "_measure_forward", lambda *_: pytest.fail("measured something")
    )
    (tmp_path / "decode.csv").write_text("tokens,active\n1,2\n")
    model = build(torch.float32, num_hidden_layers=1)
    biased = build(num_hidden_layers=1, mlp_bias=True)
    silu = build(num_hidden_layers=1, hidden_act="silu")
    narrow = build(num_hidden_layers=1, hidden_size=40)
    short = build(num_hidden_layers=1)
    for options, kind, words in (
        ({"size": "no"}, FileNotFoundError, "no configuration no"),
        (
            {"active": None},
            ValueError,
            "active: the paper has no model 'quick'; say how many neurons",
        ),
        (
            {"active": [96]},
            ValueError,
            "each of 3 layers can have more than 0 and less than 96 active neurons",
        ),
        ({"profile": "hump"}, ValueError, "profile 'hump' is unknown; use one of paper, flat"),
        ({"shapes": [(4, 0)]}, ValueError, "shapes holds 0; it has to be at least 1"),
        ({"decode": [4, -1]}, ValueError, "decode holds -1; it has to be at least 1"),
        (
            {"shapes": [], "layers": True},
            ValueError,
            "layers: measured on the first of the batches, and there is none",
        ),
        (
            {"tuned": True},
            ValueError,
            "tuned: decoding is timed so with compiled layers, and decode has no number",
        ),
        (
            {"tuned": True, "compiled": False, "decode": [1]},
            ValueError,
            "compiled layers, and compiled is False",
        ),
        (
            {"shapes": [], "parts": True},
            ValueError,
            "parts: measured on the first of the batches, and there is none",
        ),
        (
            {"overrides": [*TINY, "activation=silu"]},
            ValueError,
            "activation is 'silu'; sparse layers need 'relu'",
        ),
        (
            {"overrides": [*TINY[2:], TINY[0], "hidden_size=40"]},
            ValueError,
            "hidden_size is 40; the kernels need a multiple of 16",
        ),
        ({"out": tmp_path}, ValueError, r"decode.csv has the columns \['tokens', 'active'\]"),
        (
            {"checkpoint": ("x", short, [1])},
            ValueError,
            "active is imposed on random weights; a checkpoint has its own",
        ),
        (
            {"checkpoint": ("x", model, [1]), "active": None},
            ValueError,
            "x is in torch.float32; load it in torch.bfloat16",
        ),
        (
            {"checkpoint": ("x", biased, [1]), "active": None},
            ValueError,
            "x has feed-forward layers with biases",
        ),
        (
            {"checkpoint": ("x", silu, [1]), "active": None},
            ValueError,
            "x has the activation 'silu'",
        ),
        (
            {"checkpoint": ("x", narrow, [1]), "active": None},
            ValueError,
            "hidden_size is 40; the kernels need",
        ),
        (
            {"checkpoint": ("x", short, [1]), "active": None},
            ValueError,
            "the text has 1 tokens; 2 x 32 need 64",
        ),
        (
            {"checkpoint": ("x", short, [1]), "active": None, "shapes": [(1, 300)]},
            ValueError,
            "x is for 256 tokens; 300 were asked for",
        ),
    ):
        given = {"size": "quick", "overrides": TINY, "shapes": [(2, 32)], "active": [20]} | options
        with pytest.raises(kind, match=words):
            measure_model.model(**given)


# --- the command line -----------------------------------------------------------------------------------------------


def test_the_command_line_passes_everything_on(tmp_path, tiny_run, monkeypatch):
    seen = []
    monkeypatch.setattr(measure, "_gpu", lambda: None)
    monkeypatch.setattr(measure_model, "model", lambda *a, **o: seen.append((a, o)))
    words = (
        f"measure model --size 1.5b --tokens 4x64,1x128 --profile flat --active 2.5,9 --layers --parts --decode 1,8 \
        --context 30 --no-compile --tuned --calibration {choose.DEFAULT} --energy --out {tmp_path}"
    )
    assert main(words.split()) == 0
    arguments, options = seen.pop()
    assert options.pop("calibration").device == "NVIDIA H200"
    assert arguments == ("1.5b",) and options == {
        "checkpoint": None,
        "shapes": [(4, 64), (1, 128)],
        "profile": "flat",
        "active": [2.5, 9.0],
        "layers": True,
        "parts": True,
        "decode": [1, 8],
        "decode_context": 30,
        "compiled": False,
        "tuned": True,
        "energy": True,
        "out": tmp_path,
    }
    assert main(["measure", "model"]) == 0
    arguments, options = seen.pop()
    assert arguments == ("2b",) and options["shapes"] == [(64, 2048), (16, 2048), (1, 2048)]
    assert (options["profile"], options["active"], options["decode"]) == ("paper", None, ())
    assert (
        options["out"] == Path("build/bench")
        and options["compiled"] is None
        and not options["tuned"]
    )
    (tmp_path / "text.txt").write_text("bain da fo")
    assert (
        main(
            f"measure model --model {tiny_run} --text {tmp_path / 'text.txt'} --tokens none --decode 1".split()
        )
        == 0
    )
    name, model, ids = seen.pop()[1]["checkpoint"]
    assert name == Path(tiny_run).name and model.dtype == torch.bfloat16 and len(ids) >= 3
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    # The folder in a run is named as the run.
    text = f"--text {tmp_path / 'text.txt'} --tokens none --decode 1"
    assert main(f"measure model --model {Path(tiny_run) / 'model'} {text}".split()) == 0
    assert seen.pop()[1]["checkpoint"][0] == Path(tiny_run).name
    monkeypatch.chdir(tiny_run)
    assert main(f"measure model --model model {text}".split()) == 0
    assert seen.pop()[1]["checkpoint"][0] == Path(tiny_run).name


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            "--tokens 64",
            "--tokens is '64'; write sequences x tokens with commas, such as 64x2048,16x2048,1x2048",
        ),
        ("--decode 1,many", "--decode is '1,many'; write numbers with commas, such as 1,16,256"),
        (
            "--model x",
            "--model NAME and --text FILE go together: the activity of a checkpoint is that of a text",
        ),
        (
            "--model x --text y --active 3",
            "--size, --profile and --active are for random weights; a checkpoint has its own",
        ),
        ("", "measuring needs a GPU, and torch sees none"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(
    arguments, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["measure", "model", *arguments.split(), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"twell measure: {words}\n"
    assert not list(tmp_path.iterdir())


def test_relu_is_what_the_kernels_stand_in_for():
    """`computed`, which these tests take for the kernels, is the layer."""
    ffn = build(torch.float32, num_hidden_layers=1).ffns[0]
    x = torch.randn(5, 64)
    weights = ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight
    expected = F.linear(F.relu(F.linear(x, weights[0])) * F.linear(x, weights[1]), weights[2])
    torch.testing.assert_close(computed("union", x, *weights), expected)
