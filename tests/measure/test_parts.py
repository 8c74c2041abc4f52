"""Kernels of a decoder layer, by their place in it."""

import types

import pytest

from twell.measure import clock, parts
from twell.measure.parts import PARTS, part_rows, split_kernels

BEFORE = [("triton_red_fused__to_copy_mean_0", 1.0), ("nvjet_tst_256x128", 10.0)]
BEFORE += [("nvjet_tst_256x128", 20.0), ("sm90_xmma_gemm_bf16bf16", 40.0)]
BEFORE += [("triton_poi_fused__scaled_dot_product_cudnn_attention_add_mul_1", 2.0)]
OUTPUT = [("nvjet_tst_192", 80.0), ("triton_red_fused__to_copy_add_ffn_union_2", 4.0)]
AFTER = [("triton_poi_fused_add_view_4", 8.0)]
ATTENTION = [
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64> >(Params)",
    "fmha_cutlassF_bf16_aligned_64x64_sm80",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i",
    # The end of one that was split.
    "void cudnn::fusion::lean_reduction_kernel<false, false, false>(void*)",
]
GATE = ("gate_bits_kernel", 300.0)
UNION = [GATE, ("union_lists_kernel", 5.0), ("union_up_kernel", 40.0), ("union_down_kernel", 30.0)]
SPLIT = [("nvjet_splitK", 200.0), ("cublasLt::splitKreduce_kernel<32>", 100.0), ("nvjet", 9.0)]


def dense(name):
    return [("nvjet", 300.0), ("nvjet", 500.0), (name, 50.0), ("nvjet", 700.0)]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    "ffn, gate, rest",
    [
        (dense("triton_poi_fused_mul_relu_3"), 300, 1250),
        (dense("relu_times_kernel"), 300, 1250),
        (UNION, 300, 75),
        (2 * UNION, 600, 150),
        ([("decode_few_up_kernel", 8.0), ("decode_few_down_kernel", 4.0)], 8, 4),  # decoding
        ([("Memset (Device)", 16.0), GATE, ("rowwise_kernel", 30.0)], 300, 30),
        ([*dense("triton_poi_fused_relu_3")[::2], ("nvjet", 700.0)], 300, 750),  # without a gate
        (SPLIT, 300, 9),
    ],
)
def test_kernels_are_told_apart(attention, ffn, gate, rest):
    times = split_kernels([*BEFORE, (attention, 1000.0), *OUTPUT, *ffn, *AFTER])
    extra = sum(ms for name, ms in ffn if name.startswith("Memset"))
    assert list(times) == list(PARTS[:-1])
    assert list(times.values()) == [1000.0, 150.0, 15.0 + extra, gate, rest]


def test_a_layer_without_attention_is_refused():
    message = "no kernel of attention among triton_red_fused__to_copy_mean_0, nvjet"
    with pytest.raises(ValueError, match=message):
        split_kernels([*BEFORE, *OUTPUT])


def test_the_rest_of_the_layer_is_between_its_kernels(fake_clock, monkeypatch):
    kernels = [("nvjet", 0.5), ("sdpa", 0.75)]
    monkeypatch.setattr(clock, "kernel_sequence", lambda call, calls, lead: calls * [kernels])
    sides, case = types.SimpleNamespace(become=lambda name: None), {"batch": 1, "context": 1}
    rows = part_rows(sides, case, dict.fromkeys(parts.PROVIDERS, lambda: None))
    # A layer takes 1 ms; under the profiler kernels take longer.
    assert [row["ms"] for row in rows] == 2 * [0.75, 0.5, 0, 0, 0, -0.25]
