"""Operations and bytes against plain counts, and a formula for every kernel."""

import itertools

import numpy as np
import pytest
import torch

from tests.measure.factories import K, case
from twell.measure.costs import kernel_formulas, roofline, work

pytest.importorskip("triton")


@pytest.mark.parametrize("gated", [True, False])
def test_operations_and_bytes_are_those_of_a_count(gated, seed):
    r = np.random.default_rng(seed)
    m, k, n = (int(size) for size in r.integers(1, 12, 3))
    mask = r.random((m, n)) < 0.3
    first, *others = ("gate", "up", "down") if gated else ("up", "down")
    for path in ("dense", "rowwise", "union", "decode"):
        flops, backward_flops, forward, backward = 0, 0, set(), set()
        for token, neuron in itertools.product(range(m), range(n)):
            flops += 2 * k
            forward.add((first, neuron))
            if path == "dense" or mask[token, neuron]:
                flops += 2 * k * len(others)
                # dh, each weight's gradient, and dx from all but down
                backward_flops += 2 * k * (1 + len(others) + 1 + len(others))
                forward |= {(other, neuron) for other in others}
                backward |= {(weight, neuron) for weight in (first, *others)}
        num_bytes = 2 * k * (len(forward) + 2 * m)
        shape = m, k, n, gated, int(mask.sum()), int(mask.any(0).sum())
        assert work(path, *shape) == (flops, num_bytes)
        gradients = (1 + len(others)) * n
        num_bytes += 2 * k * (len(backward) + gradients + 3 * m)
        assert work(path, *shape, backward=True) == (flops + backward_flops, num_bytes)


def test_every_kernel_has_a_formula_or_is_known_to_have_none():
    from twell.kernels import decode, dense, gate, rowwise, union

    # One only counts activity, the other belongs to training.
    none = {("rowwise", "count_activity_kernel"), ("union", "union_product_kernel")}
    given = case(5)
    formulas = set(kernel_formulas(given.columns, given.exact))
    modules = {"dense": dense, "rowwise": rowwise, "union": union, "decode": decode}
    for path, module in modules.items():
        own = {(path, name) for name in vars(module) if name.endswith("_kernel")}
        shared = {(path, name) for name in vars(gate) if name.endswith("_kernel")}
        library = {("dense", "cublas matmul"), ("dense", "elementwise")}
        assert own <= formulas | none, "a kernel is new: say what it needs"
        named = {key for key in formulas | none if key[0] == path}
        assert named <= own | shared | library, "a kernel is gone"


@pytest.mark.parametrize("gated", [True, False])
def test_the_kernels_of_a_path_add_up_to_its_operations(gated, seed):
    """By unions and in decoding also to those on inactive entries, which `work` does not count."""
    given = case(int(np.random.default_rng(seed).integers(1, 200)), gated, active=7, seed=seed)
    formulas = kernel_formulas(given.columns, given.exact)

    def extra(path, *kernels):
        return sum(formulas[path, kernel][0] for kernel in kernels) - given.work(path)[0]

    assert extra("dense", "cublas matmul") == 0
    assert extra("rowwise", "gate_bits_kernel", "token_lists_kernel", "rowwise_kernel") == 0
    first = given.sets[0][0 if gated else 1]
    active = torch.relu(given.x.double() @ first.double().t()) != 0
    m, entries = len(active), int(active.sum())
    in_unions = sum(min(m, 64) * int(block.any(0).sum()) for block in active.split(64))
    products = 2 * K * (2 if gated else 1)
    kernels = "gate_bits_kernel", "union_lists_kernel", "union_up_kernel", "union_down_kernel"
    assert extra("union", *kernels) == products * (in_unions - entries)
    touched = int(active.any(0).sum())
    assert extra("decode", "decode_up_kernel", "decode_down_kernel") == products * (
        m * touched - entries
    )


def test_the_roofline_is_the_slower_of_both_ceilings():
    peaks = [{"metric": "copy bandwidth", "value": 4000.0}, {"metric": "matmul", "value": 800.0}]
    assert roofline(8e12, 4e9, 20.0, peaks) == 0.5  # 10 ms of operations, 1 ms of bytes
    assert roofline(8e10, 4e9, 4.0, peaks) == 0.25  # 0.1 ms and 1 ms
