"""A training step of the layer by unions of blocks of 64 tokens.

Forward is inference by unions (union.py) with one more element-wise pass, which keeps g and u of
the active entries (entries.py). Backward makes the same products with the weights of the unions,
and sums the weight gradients over the active tokens of each neuron (weight_gradients.py).

    forward:   g = relu(x Wg^T + bg)    u = x Wu^T + bu    h = g u    y = h Wd^T + bd
               l1 = the sum over neurons of |h|
    backward:  dh = dy Wd + sign(h) dl1    du = dh g    dg = dh u    dx = du Wu + dg Wg
               dWu = du^T x    dWg = dg^T x    dWd^T = h^T dy    dbu, dbg: the sums of du, dg
    non-gated: h = g = relu(x Wu^T + bu) and du = dh; other activations: activations.py

    g        by neurons (gate.py), forward only
    u, h, dh, du, dg over the unions [blocks * width, 64]

Memory. Forward saves 8 bytes for each active entry and a quarter of a byte for each token and
neuron; a dense layer saves 6 bytes for each token and neuron.

Capacity. The number of entries is not known when their buffer is allocated. It holds `capacity`
entries per token; others are not stored, and `needed` reports the capacity that suffices. The
caller then repeats the step (twell/sparse/training.py).

Paper: App. B.2, training with the hybrid format; unions and entries are ours.
Reference: twell.sparse.reference.union_train.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from twell.kernels import entries, union, weight_gradients
from twell.kernels.common import Gradients, cdiv, round_up
from twell.kernels.entries import UnionSaved
from twell.kernels.gate import gate_bits
from twell.kernels.options import launch_options
from twell.sparse.activations import Weights

BLOCK = 64  # tokens that share a union
# A neuron that is active for more than one token in DENSE_FROM has a dense row in the backup. It
# costs M tokens of tensor-core work; an entry costs two rows of x and dy through the cache.
DENSE_FROM = 64


def saved_like(x: Tensor, weights: Weights, capacity: int) -> UnionSaved:
    """Empty tensors for `forward` to save.

    The neurons of the backup are fewer than DENSE_FROM * `capacity`.
    """
    num_tokens, intermediate_size = len(x), weights.w_up.shape[0]
    rows = torch.sym_min(DENSE_FROM * capacity, intermediate_size)
    unions = union.empty_unions(num_tokens, intermediate_size, BLOCK, x.device)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    return UnionSaved(
        entries=empty(torch.sym_max(capacity * num_tokens, 1), dtype=torch.int64),
        index=empty(cdiv(num_tokens, 32), unions.lists.shape[1], dtype=torch.int64),
        **unions._asdict(),
        spans=empty(3, intermediate_size),
        backup=empty(round_up(rows, 128)),
        totals=empty(2, dtype=torch.int64),
    )


def forward(
    x: Tensor, weights: Weights, token_mask: Tensor | None, capacity: int
) -> tuple[Tensor, ...]:
    """y, l1, token_counts, neuron_counts and needed of a training step, then UnionSaved.

    x [M, K], M at least 1; token_mask [M] bool, False for tokens that neuron_counts leaves out, or
    None. g, u and h are rounded to x.dtype.
    """
    num_tokens, intermediate_size = len(x), len(weights.w_up)
    saved = saved_like(x, weights, capacity)
    given = dict(zero=saved.queue, threshold=weights.act.threshold)
    g, bits = gate_bits(x, *weights.first, by_neuron=True, **given)
    unions = union.Unions(saved.lists, saved.counts, saved.queue)
    union.make_lists(bits, unions, num_tokens, intermediate_size, BLOCK)
    num_words, width = saved.index.shape
    neuron_counts = torch.empty(intermediate_size, dtype=torch.int32, device=x.device)
    saved.totals.zero_()
    options = launch_options("training_index", x.device)
    entries.entries_index_kernel[(cdiv(intermediate_size, options["BN"]),)](
        bits,
        None if token_mask is None else token_mask.view(torch.uint8),
        saved.index,
        saved.spans,
        neuron_counts,
        saved.totals,
        saved.backup,
        num_tokens,
        num_words,
        intermediate_size,
        width,
        len(saved.entries),
        num_tokens // DENSE_FROM,
        len(saved.backup),
        **options,
    )
    h = x.new_empty(saved.lists.numel(), BLOCK)
    if weights.gated:  # u at first
        rest = weights.b_up, None
        union.over_unions(union.union_product_kernel, x, weights.w_up, rest, unions, h)
    l1 = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    token_counts = torch.empty(num_tokens, dtype=torch.int32, device=x.device)
    needed = torch.empty((), dtype=torch.int64, device=x.device)
    entries.entries_forward_kernel[(num_words,)](
        g,
        h,
        saved.index,
        saved.lists,
        saved.counts,
        saved.entries,
        l1,
        token_counts,
        saved.totals,
        needed,
        num_tokens,
        width,
        len(saved.entries),
        GATED=weights.gated,
        ACT=weights.act.name,
        BM=BLOCK,
        **launch_options("training_elements", x.device),
    )
    y = torch.empty_like(x)
    union.down(h, weights.w_down_t, weights.b_down, unions, y)
    return y, l1, token_counts, neuron_counts, needed, *saved


def backward(
    x: Tensor, weights: Weights, saved: UnionSaved, dy: Tensor, dl1: Tensor, gradients: Gradients
) -> None:
    """Writes the gradients. dy [M, K] contiguous, in x.dtype; dl1 [M] fp32.

    dh, du and dg are rounded to x.dtype, sums are in fp32.
    """
    dx = gradients.x
    unions = union.Unions(saved.lists, saved.counts, saved.queue)
    # du and, gated, dg over the unions; then the backup's dense rows.
    scratch = x.new_empty(1 + weights.gated, saved.lists.numel(), BLOCK)
    du, dg = scratch[0], scratch[1] if weights.gated else None
    entry_gradients = None
    of_entries = gradients.w_gate, gradients.w_up, gradients.b_gate, gradients.b_up
    if any(gradient is not None for gradient in of_entries):
        entry_gradients = torch.empty(len(saved.entries), dtype=torch.int32, device=x.device)
    if dx is not None or entry_gradients is not None:
        # Non-gated, every active h is above 0, and the L1 term joins dh before it is rounded. The
        # same number added to rounded ones would be rounded the same way for all of a token's
        # neurons.
        add = None if weights.gated else F.pad(dl1, (0, -len(x) % BLOCK))
        rest = None, add
        union.over_unions(union.union_product_kernel, dy, weights.w_down_t, rest, unions, du)
        num_words, width = saved.index.shape
        entries.entries_backward_kernel[(num_words,)](
            du,
            dg,
            saved.index,
            saved.lists,
            saved.counts,
            saved.entries,
            entry_gradients,
            dl1,
            len(x),
            width,
            len(saved.entries),
            ACT=weights.act.name,
            BM=BLOCK,
            **launch_options("training_elements", x.device),
        )
    if dx is not None:
        second = (dg, weights.w_gate) if weights.gated else None
        union.down(du, weights.w_up, None, unions, dx, second)
    weight_gradients.backward(x, dy, saved, entry_gradients, weights, scratch, gradients)
