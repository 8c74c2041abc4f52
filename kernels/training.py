"""A training step of the layer by unions of blocks of 64 tokens.

Forward is inference by unions (union.py) with one more element-wise pass, which keeps g and u of
the active entries (entries.py). Backward makes the same products with the weights of the unions,
and sums the weight gradients over the active tokens of each neuron (weight_gradients.py).

    forward:   g = relu(x Wg^T + bg)    u = x Wu^T + bu    h = g u    y = h Wd^T + bd
               l1 = the sum over neurons of |h|
    backward:  dh = dy Wd + sign(h) dl1    du = dh g    dg = dh u    dx = du Wu + dg Wg
               dWu = du^T x    dWg = dg^T x    dWd^T = h^T dy    dbu, dbg: the sums of du, dg
    non-gated: h = g = relu(x Wu^T + bu) and du = dh

    x, y, dy, dx    [M, K]           g          [N, tokens], neuron-major, forward only
    weights         [N, K]           u, h, dh, du, dg over the unions [blocks * width, 64]
    l1, dl1         [M] fp32         entries    8 bytes for each active pair of token and neuron

Memory. Forward saves 8 bytes for each active entry and a quarter of a byte for each token and
neuron; a dense layer saves 6 bytes for each token and neuron.

Capacity. The number of entries is not known when their buffer is allocated. It holds `capacity`
entries per token; others are not stored, and `needed` reports the capacity that suffices. The
caller then repeats the step (twell/sparse/training.py).

Paper: App. B.2, training with the hybrid format; unions and entries are ours.
Reference: twell.sparse.reference.union_train_forward, union_train_backward;
test: tests/kernels/test_training.py;
options: kernels/options.py 'training_*', 'union_up_64', 'union_down_64'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from twell.kernels import entries, union, weight_gradients
from twell.kernels.common import cdiv, round_up
from twell.kernels.entries import UnionSaved
from twell.kernels.gate import gate_bits
from twell.kernels.weight_gradients import WeightGradients

BLOCK = 64  # tokens that share a union
# A neuron that is active for more than one token in DENSE_FROM has a dense row in the backup. It
# costs M tokens of tensor-core work; an entry costs two rows of x and dy through the cache.
DENSE_FROM = 64


def saved_like(x: Tensor, intermediate_size: int, capacity: int, gated: bool) -> UnionSaved:
    """Empty tensors for `forward` to save, the same whether gated or not.

    The neurons of the backup are fewer than DENSE_FROM * `capacity`.
    """
    num_tokens = len(x)
    rows = torch.sym_min(DENSE_FROM * capacity, intermediate_size)
    width, num_blocks = round_up(intermediate_size, 256), cdiv(num_tokens, BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    return UnionSaved(
        entries=empty(torch.sym_max(capacity * num_tokens, 1), dtype=torch.int64),
        index=empty(cdiv(num_tokens, 32), width, dtype=torch.int64),
        lists=empty(num_blocks, width),
        counts=empty(num_blocks),
        queue=union.queue(num_tokens, intermediate_size, BLOCK, x.device),
        spans=empty(3, intermediate_size),
        backup=empty(round_up(rows, 128)),
        totals=empty(2, dtype=torch.int64),
    )


def forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    token_mask: Tensor | None,
    capacity: int,
) -> tuple[Tensor, ...]:
    """y, l1, token_counts, neuron_counts and needed of training_ops.Trained, then UnionSaved.

    x [M, K]; weights [N, K] contiguous, w_down_t the transpose of w_down, w_gate None in a
    non-gated layer; biases [N], [N], [K] or None; token_mask [M] bool, False for tokens that
    neuron_counts leaves out, or None; M at least 1. g, u and h are rounded to x.dtype.
    """
    num_tokens, intermediate_size = len(x), len(w_up)
    gated = w_gate is not None
    saved = saved_like(x, intermediate_size, capacity, gated)
    w, b = (w_gate, b_gate) if gated else (w_up, b_up)
    g, bits = gate_bits(x, w, b, by_neuron=True, zero=saved.queue)
    out = saved.lists, saved.counts
    unions = union.make_lists(bits, saved.queue, num_tokens, intermediate_size, BLOCK, out=out)
    dense_count = num_tokens // DENSE_FROM
    neuron_counts = entries.make_index(bits, token_mask, num_tokens, dense_count, saved)
    if gated:
        h = union.product(x, w_up, b_up, unions, BLOCK)
    else:
        h = x.new_empty(saved.lists.numel(), BLOCK)
    l1, token_counts, needed = entries.forward(g, h, num_tokens, gated, saved)
    y = torch.empty_like(x)
    union.down(h, w_down_t, b_down, unions, y)
    return y, l1, token_counts, neuron_counts, needed, *saved


def backward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    saved: UnionSaved,
    dy: Tensor,
    dl1: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of x [M, K], w_gate, w_up and w_down_t [N, K], b_gate and b_up [N].

    Each is None unless `needs`, six in this order, asks for it. dy [M, K] contiguous, in x.dtype;
    dl1 [M] fp32. dh, du and dg are rounded to x.dtype, sums are in fp32.
    """
    given = x, w_gate, w_up, w_down_t, b_gate, b_up
    pairs = zip(given, needs, strict=True)
    gradients = [torch.empty_like(tensor) if need else None for tensor, need in pairs]
    dx, d_gate, d_up, d_down, d_b_gate, d_b_up = gradients
    gated = w_gate is not None
    unions = union.Unions(saved.lists, saved.counts, saved.queue)
    # du and, gated, dg over the unions; then the backup's dense rows.
    scratch = x.new_empty(1 + gated, saved.lists.numel(), BLOCK)
    du, dg = scratch[0], scratch[1] if gated else None
    entry_gradients = None
    if any(gradient is not None for gradient in (d_gate, d_up, d_b_gate, d_b_up)):
        entry_gradients = torch.empty(len(saved.entries), dtype=torch.int32, device=x.device)
    if dx is not None or entry_gradients is not None:
        # Non-gated, every active h is above 0, and the L1 term joins dh before it is rounded. The
        # same number added to rounded ones would be rounded the same way for all of a token's
        # neurons.
        add = None if gated else F.pad(dl1, (0, -len(x) % BLOCK))
        union.product(dy, w_down_t, None, unions, BLOCK, add=add, out=du)
        entries.backward(du, dg, entry_gradients, dl1, saved)
    if dx is not None:
        union.down(du, w_up, None, unions, dx, (dg, w_gate) if gated else None)
    if d_b_gate is not None or d_b_up is not None:
        weight_gradients.of_biases(entry_gradients, saved.spans, d_b_gate, d_b_up)
    weights = WeightGradients(d_gate, d_up, d_down)
    if any(gradient is not None for gradient in weights):
        step = x, dy, saved, entry_gradients
        weight_gradients.from_backup(*step, scratch, gated, weights)
        weight_gradients.from_lists(*step, gated, weights)
    return tuple(gradients)
