"""The gate: g = relu(x w^T + b) for all neurons, and one bit an entry: active or not.

With a threshold, g is 0 up to it.

One matrix product. A fixed number of programs stays resident and takes tiles in turn. Operands come
through tensor descriptors, which read zeros outside the matrices, so the loop needs no masks. The
epilogue sums 32 bits to a word in registers, at a few percent of the product. The lists of the
union and row-wise paths are made from these words. The result is stored by tokens (row-wise) or,
in panels of 64 tokens by neurons (union). On sm_90, gate_hopper.py computes the same bits.

    x [M, K], K a multiple of 16    w [N, K]    b [N] or None    W = N rounded up to 256
    by tokens    g [M, W]         bits [tokens, W / 32] int32, bit i of word j: neuron 32 j + i
    by neurons   g [tokens / 64, W, 64]
                                  bits [tokens / 32, W] int32, bit i of word j: token 32 j + i

Reference: twell.sparse.reference.gate_pack.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, gate_value, round_up, scaled, tile_of, wide, with_bias
from twell.kernels.launch import descriptor, direct
from twell.kernels.options import (
    GATE_GROUP,
    hopper_gate,
    hopper_name,
    launch_options,
    num_processors,
)

# Tokens whose g by neurons stands together: a tile is written, and a block read, near one place.
PANEL = tl.constexpr(64)


@triton.jit
def tile_product(x_desc, w_desc, token, neuron, K, BM, BN, BK, BY_NEURON):
    """x w^T of the tile at (token, neuron) in fp32: [BM, BN], or [BN, BM] if BY_NEURON."""
    acc = tl.zeros((BN, BM) if BY_NEURON else (BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = wide(x_desc.load([token, k]))
        w = wide(w_desc.load([neuron, k]))
        acc = tl.dot(w, x.T, acc) if BY_NEURON else tl.dot(x, w.T, acc)
    return acc


@triton.jit
def words_of(g):
    """Bits of g [R, C] != 0, packed along C: [R, C / 32].

    On tensor cores of sm_80 to sm_90, a thread has 2 of each 8 columns: entries of 4 groups, whose
    places are constants. It joins them first; four threads then make a word.
    """
    active = (g.to(tl.uint16, bitcast=True).to(tl.int32) & 0x7FFF) != 0  # not 0 and not -0
    active = tl.reshape(active, (g.shape[0], g.shape[1] // 32, 4, 4, 2))
    group = tl.reshape(tl.arange(0, 4), (1, 1, 4, 1, 1))
    entry = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 2))
    part = tl.where(active, 1 << (8 * group + entry), 0)
    part = tl.sum(tl.sum(part, 4), 2)
    return tl.sum(part << (2 * tl.arange(0, 4)[None, None, :]), 2)


@direct
@triton.jit(do_not_specialize=["M", "N"])
def gate_bits_kernel(
    x_desc,
    w_desc,
    b_ptr,
    x_scale_ptr,
    w_scale_ptr,
    g_desc,
    bits_ptr,
    zero_ptr,
    threshold,
    M,
    N,
    K,
    bits_stride,
    num_programs,
    GROUP: tl.constexpr,
    BY_NEURON: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """g of a queue of tiles, and its bits; see `gate_bits`. Stores 0 at zero_ptr."""
    if zero_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(zero_ptr, 0)
    num_token_tiles = tl.cdiv(M, BM)
    num_neuron_tiles = tl.cdiv(N, BN)
    for number in tl.range(
        tl.program_id(0), num_token_tiles * num_neuron_tiles, num_programs, flatten=True
    ):
        token_tile, neuron_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP)
        token, neuron = token_tile * BM, neuron_tile * BN
        acc = tile_product(x_desc, w_desc, token, neuron, K, BM, BN, BK, BY_NEURON)
        tokens, neurons = token + tl.arange(0, BM), neuron + tl.arange(0, BN)
        acc = scaled(acc, x_scale_ptr, w_scale_ptr, tokens, neurons, M, N, BY_NEURON)
        acc = with_bias(acc, b_ptr, neurons, N, BY_NEURON)
        g = gate_value(acc, threshold, g_desc.dtype)
        row, column = (neuron, token) if BY_NEURON else (token, neuron)
        if BY_NEURON:
            panels = tl.permute(tl.reshape(g, (BN, BM // PANEL, PANEL)), (1, 0, 2))
            g_desc.store([token // PANEL, neuron, 0], panels)
        else:
            g_desc.store([row, column], g)
        bits = words_of(g)
        # Beyond the last column there may be relu(bias) or NaN, which are not active.
        words = column // 32 + tl.arange(0, bits.shape[1])
        inside = (M if BY_NEURON else N) - words * 32
        mask = tl.where(inside >= 32, -1, (1 << tl.minimum(tl.maximum(inside, 0), 31)) - 1)
        bits &= mask[None, :]
        rows = row + tl.arange(0, bits.shape[0])
        if BY_NEURON:
            tl.store(bits_ptr + words.to(tl.int64)[None, :] * bits_stride + rows[:, None], bits)
        else:
            tl.store(bits_ptr + rows.to(tl.int64)[:, None] * bits_stride + words[None, :], bits)


def empty_gate(
    x: Tensor, intermediate_size: int, block_m: int, by_neuron: bool
) -> tuple[Tensor, Tensor]:
    """g and bits of `gate_bits` to write, for tiles of `block_m` tokens; g in bf16 for x in FP8."""
    dtype = torch.bfloat16 if x.itemsize == 1 else x.dtype
    tokens, width = round_up(x.shape[0], block_m), round_up(intermediate_size, 256)
    if by_neuron:
        of_g, of_bits = (tokens // PANEL.value, width, PANEL.value), (tokens // 32, width)
    else:
        of_g, of_bits = (x.shape[0], width), (tokens, width // 32)
    bits = torch.empty(of_bits, dtype=torch.int32, device=x.device)
    return x.new_empty(of_g, dtype=dtype), bits


def gate_bits(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    *,
    by_neuron: bool,
    zero: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    threshold: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """g in x.dtype and its bits, by tokens or by neurons, for an M of at least 1; shapes as above.

    `scales`: of tokens [M] and neurons [N] for x and w in FP8; g is in bf16 then.
    `tokens` is M rounded up to whole tiles, by neurons at least to a multiple of 128. Bits of
    neurons beyond N (by tokens) and of tokens beyond M (by neurons) are 0; other entries outside
    are undefined. The first entry of `zero` is set to 0, which saves its owner a launch.
    Ours: the paper packs each row at once (App. A.1).
    """
    num_tokens, (intermediate_size, hidden_size) = x.shape[0], w.shape
    fp8 = w.itemsize == 1
    hopper = hopper_gate(num_tokens, w, x.device, by_neuron=by_neuron, bias=b is not None)
    name = "gate_neurons" if by_neuron else "gate_tokens"
    options = launch_options(hopper_name(by_neuron) if hopper else name, x.device, fp8=fp8)
    block_m, block_n, block_k = (options[name] for name in ("BM", "BN", "BK"))
    g, bits = empty_gate(x, intermediate_size, block_m, by_neuron)
    stored, panel = g, PANEL.value
    if hopper:
        from twell.kernels import gate_hopper

        kernel, blocks, block = gate_hopper.gate_hopper_kernel, gate_hopper.blocks, [panel, panel]
        stored, options["S"] = g.view(-1, panel) if by_neuron else g, 0
    else:
        kernel, blocks = gate_bits_kernel, descriptor
        block = [block_m // panel, block_n, panel] if by_neuron else [block_m, block_n]
    num_tiles = cdiv(num_tokens, block_m) * cdiv(intermediate_size, block_n)
    num_programs = min(num_processors(x.device), num_tiles)
    kernel[(num_programs,)](
        blocks(x, [block_m, block_k]),
        blocks(w, [block_n, block_k]),
        b,
        *scales,
        blocks(stored, block),
        bits,
        zero,
        threshold or None,
        *(num_tokens, intermediate_size, hidden_size, bits.shape[1], num_programs),
        BY_NEURON=by_neuron,
        **{"GROUP": GATE_GROUP} | options,
    )
    return g, bits
