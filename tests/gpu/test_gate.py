"""The gate for Hopper gives the bits of the kernel for every device, at odd sizes and anywhere."""

import pytest
import torch

pytest.importorskip("triton")

from twell.kernels import options
from twell.kernels.common import round_up
from twell.kernels.gate import gate_bits
from twell.kernels.paper.gate import store_words

FP8 = torch.float8_e4m3fn
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def hopper_for_any_size(monkeypatch, unwritten_memory_is_nan):
    w = torch.empty(2**13, 2**11, dtype=torch.bfloat16, device="meta")
    given = dict(by_neuron=True, bias=False)
    if not torch.cuda.is_available() or not options.hopper_gate(2**14, w, DEVICE, **given):
        pytest.skip("needs sm_90 and a Triton of options.GLUON_VERSIONS")
    monkeypatch.setattr(options, "HOPPER_TILES", 0)


def random_case(m, n, k, dtype, *, bias=False, nan=False):
    """Operands of gate_bits; with NaN in one token, and in another sums that round to -0."""
    torch.manual_seed(m + n + k)
    x, w = (torch.randn(size, k, device=DEVICE, dtype=torch.bfloat16) for size in (m, n))
    if nan:
        x[m // 2, k // 3] = float("nan")
        x[m // 3] *= 2.0**-130
    w = (w if dtype == FP8 else w * k**-0.5).to(dtype)
    scales, b = (None, None), None
    if dtype == FP8:
        ones = (torch.rand(size, device=DEVICE) + 0.5 for size in (m, n))
        scales = next(ones), next(ones) / k
    if bias:
        b = torch.randn(n, device=DEVICE).to(torch.bfloat16 if dtype == FP8 else dtype) * 0.3
    return dict(x=x.to(dtype), w=w, b=b, scales=scales)


def compute(case, monkeypatch, hopper=True, by_neuron=True, threshold=0.0):
    """g and words as far as they are defined, and the zero."""
    zero = torch.full((2,), 7, device=DEVICE, dtype=torch.int32)
    with monkeypatch.context() as patch:
        patch.setattr(options, "HOPPER_TILES", 0 if hopper else 2**60)
        g, bits = gate_bits(**case, by_neuron=by_neuron, zero=zero, threshold=threshold)
    (m, _), n = case["x"].shape, len(case["w"])
    if not by_neuron:
        return g[:, :n].contiguous().view(torch.int16), bits[:m, : -(-n // 32)].clone(), zero
    g = g.permute(1, 0, 2).flatten(1)
    assert g.shape[1] >= round_up(m, 128) and len(bits) == g.shape[1] // 32
    assert not bits[-(-m // 32) :, :n].any()
    return g[:n, :m].contiguous().view(torch.int16), bits[: -(-m // 32), :n].clone(), zero


def assert_same(case, monkeypatch, **options):
    results = [compute(case, monkeypatch, hopper, **options) for hopper in (True, False)]
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert results[0][2].tolist() == [0, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize("k", [528, 2048, 4096])
@pytest.mark.parametrize("n", [300, 2817, 5632])
def test_the_same_bits_at_odd_sizes(n, k, dtype, monkeypatch):
    for m in (1, 31, 127, 129, 257, 1000, 5000):
        case = random_case(m, n, k, dtype, nan=m % 2)
        assert_same(case, monkeypatch)
        if dtype != FP8:
            assert_same(case, monkeypatch, by_neuron=False, threshold=0.25 * (m % 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize("bias, threshold", [(True, 0.0), (False, 0.25), (True, 0.25)])
def test_the_same_bits_with_bias_and_threshold(bias, threshold, dtype, monkeypatch):
    for m, n, k in ((100, 300, 528), (257, 2817, 2048), (5000, 5632, 2048)):
        case = random_case(m, n, k, dtype, bias=bias, nan=True)
        assert_same(case, monkeypatch, threshold=threshold)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_the_same_bits_at_the_sizes_of_a_layer(dtype, monkeypatch):
    for m in (16_384, 131_072 if dtype != FP8 else 65_536):
        assert_same(random_case(m, 5632, 2048, dtype), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m, n, k", [(1, 300, 528), (100, 257, 2048), (1000, 5632, 2048)])
def test_the_same_twell_words_and_rest(m, n, k, dtype, monkeypatch):
    case = random_case(m, n, k, dtype, nan=True)  # half of the neurons are active: tiles overflow
    num_words = m * -(-n // 256) * 32
    results = []
    for tiles in (0, 2**60):
        monkeypatch.setattr(options, "HOPPER_TILES", tiles)
        words = torch.zeros(num_words * 9, dtype=torch.int32, device=DEVICE)
        store_words(case["x"], case["w"], None, words, 32, num_words)
        results.append(words)
    assert torch.equal(*results) and words[num_words:].any()
