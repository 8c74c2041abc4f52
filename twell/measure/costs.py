"""Operations and bytes that a layer needs at least, those of each kernel, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twell.measure.check import BLOCK, Exact
from twell.measure.clock import CEILING_TURN, Gpu, quantiles
from twell.measure.rows import significant


def work(
    path: str,
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    gated: bool,
    entries: int,
    touched: int,
    backward: bool = False,
) -> tuple[int, int]:
    """Return the operations and the bytes of device memory that a path needs, in a 2-byte type.

    `entries` are the active neurons summed over tokens, `touched` the neurons active for any token.
    With P = 3 products (non-gated: 2), and with E entries and T touched neurons (dense: M N and N)

        forward    2 M N K + 2 (P - 1) E K operations, 2 (N K + (P - 1) T K + 2 M K) bytes
        backward   4 P E K operations more, 2 (P T K + P N K + 3 M K) bytes more

    The first product is whole, the others are at the active entries. The backward pass has dh, P
    gradients of weights and P - 1 products for dx. Each weight row in use, x and dy are read once
    a pass; y, dx and all gradients of weights are written once. Values between kernels and inactive
    entries count for nothing.
    """
    products = 3 if gated else 2
    if path == "dense":
        entries, touched = num_tokens * intermediate_size, intermediate_size
    flops = 2 * hidden_size * (num_tokens * intermediate_size + (products - 1) * entries)
    rows = intermediate_size + (products - 1) * touched + 2 * num_tokens
    if backward:
        flops += 4 * products * entries * hidden_size
        rows += products * (touched + intermediate_size) + 3 * num_tokens
    return flops, 2 * hidden_size * rows


def kernel_formulas(columns: dict, exact: Exact) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (path, kernel) -> the operations and bytes that the kernel's method needs on a case.

    In a union each of the block's tokens has each of its neurons, active or not. Blocks have 64
    tokens here, also where the kernels take 128. Bytes: weights of touched neurons, inputs and
    outputs once, 2 bytes a value, 4 an active entry (value and index), a bit a flag.
    """
    m, k, n = (columns[name] for name in ("tokens", "hidden_size", "intermediate_size"))
    entries, touched, unions = exact.entries, exact.touched, int(exact.unions.sum())
    values = min(m, BLOCK) * unions  # of g in all unions, and of h
    up = 1 if columns["gated"] else 0
    x_and_gate, flags = 2 * k * (m + n), m * n // 8
    gate = 2 * m * n * k, x_and_gate + 2 * m * n + flags
    both = 2 * m * k * (n + up * touched), x_and_gate + 2 * up * k * touched + 2 * m * touched
    decode_down = 2 * m * touched * k, 2 * k * touched + 2 * m * touched
    few_gate = gate[0], x_and_gate + 2 * m * n + 4 * unions
    products = 2 + up
    matmul = 2 * products * m * n * k, 2 * products * (m * k + n * k + m * n)
    up_down = 2 * (1 + up) * entries * k, 2 * k * (2 * m + (1 + up) * touched) + 4 * entries
    union_down = 2 * values * k, 2 * k * (m + touched) + 2 * values
    union_up = 2 * up * values * k, 2 * up * k * (m + touched) + 2 * 2 * values
    return {
        ("dense", "cublas matmul"): matmul,
        ("dense", "relu_times_kernel"): (2 * m * n, 2 * 3 * m * n),
        ("dense", "elementwise"): (m * n, 2 * 2 * m * n),
        ("rowwise", "gate_bits_kernel"): gate,
        ("rowwise", "token_lists_kernel"): (0, flags + 2 * entries + 4 * entries),
        ("rowwise", "rowwise_kernel"): up_down,
        ("union", "gate_bits_kernel"): gate,
        ("union", "gate_hopper_kernel"): gate,
        ("union", "union_lists_kernel"): (0, flags + 4 * unions),
        ("union", "union_up_kernel"): union_up,
        ("union", "union_down_kernel"): union_down,
        ("decode", "decode_up_kernel"): both,
        ("decode", "decode_down_kernel"): decode_down,
        ("decode", "few_gate_kernel"): few_gate,
        ("decode", "few_up_kernel"): union_up,
        ("decode", "few_down_kernel"): union_down,
    }


def ceilings(gpu: Gpu) -> list[dict]:
    """Measure the GPU's ceilings: rows of metric, value and unit.

    "copy bandwidth": a copy of 2 GiB, read and written, in GB/s. "matmul": 8192 x 8192 x 8192 in
    bf16 on random numbers, in TFLOP/s (zeros take less power, so they are faster). Both from p20: a
    ceiling is the best that the GPU can do.
    """
    source = torch.empty(2**31, dtype=torch.uint8, device=gpu.device).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=gpu.device) for _ in range(2))
    copy, product = (
        quantiles(gpu.stream_times(call, CEILING_TURN))["p20"]
        for call in (lambda: target.copy_(source), lambda: a @ b)
    )
    return [
        {"metric": "copy bandwidth", "value": round(2 * 2**31 / copy / 1e6, 1), "unit": "GB/s"},
        {"metric": "matmul", "value": round(2 * 8192**3 / product / 1e9, 1), "unit": "TFLOP/s"},
    ]


def roofline(flops: float, num_bytes: float, milliseconds: float, peaks: Sequence[dict]) -> float:
    """Return the share of the roofline: the least time that the ceilings allow over the time."""
    peak = {row["metric"]: row["value"] for row in peaks}
    least = max(flops / (peak["matmul"] * 1e12), num_bytes / (peak["copy bandwidth"] * 1e9))
    return significant(1e3 * least / milliseconds, 3)
