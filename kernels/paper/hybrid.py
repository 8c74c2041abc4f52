"""A training step by rows: the paper's algorithm on its hybrid format (App. B.2).

Counts of active neurons are very uneven. So a token with few active neurons has a short list, and
any other token a dense backup row. Lists run on ordinary cores (hybrid_rows.py), backup rows on
tensor cores (hybrid_backup.py). The weight gradients (hybrid_weights.py) need the transpose, which
is hybrid again (hybrid_transpose.py). Forward packs g (hybrid_pack.py) and saves g and u at active
entries only.

    forward:   g = relu(x Wg^T + bg)    u = x Wu^T + bu    h = g u    y = h Wd^T + bd
               l1 = the sum over neurons of |h|
    backward:  dh = dy Wd + sign(h) dl1    du = dh g    dg = dh u    dx = du Wu + dg Wg
               dWu = du^T x    dWg = dg^T x    dWd^T = h^T dy    dbu, dbg: the sums of du, dg
    non-gated: h = g = relu(x Wu^T + bu) and du = dh

    x, y, dy, dx  [M, K]        weights  [N, K]        l1, dl1  [M] fp32

g, u, h, du and dg are rounded to the storage type, dh is not. Whether a token or a neuron has a
list or a backup row depends on its number of entries alone, so results do not depend on `capacity`,
which decides how many backup rows there are.

Non-finite values. A NaN in a row of x reaches that row of y alone. An inf or NaN in an operand of
an inactive entry reaches nothing through a list; through a backup row it may.

Reference: twell.sparse.hybrid_reference.ffn_forward, ffn_backward;
test: tests/kernels/test_hybrid.py; options: kernels/options.py 'hybrid_*'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twell.kernels.paper import hybrid_backup, hybrid_rows, hybrid_weights
from twell.kernels.paper.hybrid_pack import ELL_WIDTH, HybridSaved, backup_rows, pack
from twell.kernels.paper.hybrid_transpose import make_transpose


def saved_like(x: Tensor, num_neurons: int, capacity: int, gated: bool) -> HybridSaved:
    """Empty tensors for `forward` to save."""
    num_tokens = x.shape[0]
    num_backup = backup_rows(num_tokens, num_neurons, capacity)
    lists, dense = (num_tokens, ELL_WIDTH.value), (num_backup, num_neurons)

    def empty(*shape: int, dtype: torch.dtype = torch.int16) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    return HybridSaved(
        place=empty(num_tokens, dtype=torch.int32),
        indices=empty(*lists),
        g=empty(*lists),
        u=empty(*lists) if gated else empty(0),
        owners=empty(num_backup, dtype=torch.int32),
        used=empty(1, dtype=torch.int32),
        dense_g=empty(*dense),
        dense_u=empty(*dense) if gated else empty(0),
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
    """y, l1, token_counts, neuron_counts and needed of training_ops.Trained, then HybridSaved.

    x [M, K] contiguous, M at least 1; weights [N, K] contiguous, w_down_t the transpose of w_down,
    w_gate None in a non-gated layer; biases [N], [N], [K] or None; all bf16 or all fp16; token_mask
    [M] bool, False for tokens that neuron_counts leaves out, or None. If `needed` is above
    `capacity`, y, l1 and gradients are wrong; counts are right. Paper: App. B.2, forward pass.
    """
    gated = w_gate is not None
    saved = saved_like(x, len(w_up), capacity, gated)
    w, b = (w_gate, b_gate) if gated else (w_up, b_up)
    counts = pack(x, w, b, token_mask, saved)
    y = torch.empty_like(x)
    l1 = torch.empty(len(x), dtype=torch.float32, device=x.device)
    up = (w_up, b_up) if gated else (None, None)
    hybrid_rows.forward(x, *up, w_down_t, b_down, saved.lists(x.dtype), y, l1)
    h = hybrid_backup.up(x, w_up, b_up, saved) if gated else saved.dense_g.view(x.dtype)
    hybrid_backup.product((h, w_down_t), (None, None), b_down, y, l1, saved.backup())
    return y, l1, *counts, *saved


def backward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    saved: HybridSaved,
    dy: Tensor,
    dl1: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of sum(y * dy) + sum(l1 * dl1), the same bits for the same call.

    Tensors as for `forward`, which returned `saved`; dy [M, K] in x.dtype, dl1 [M] fp32. Returns
    those of x [M, K], w_gate, w_up and w_down_t [N, K], b_gate and b_up [N], in x.dtype, each None
    unless `needs`, six in this order, asks for it. Paper: App. B.2, backward pass.
    """
    gated = w_gate is not None
    dy, dl1 = dy.contiguous(), dl1.contiguous()
    given = x, w_gate, w_up, w_down_t, b_gate, b_up
    pairs = zip(given, needs, strict=True)
    gradients = [torch.empty_like(tensor) if need else None for tensor, need in pairs]
    dx, dw_gate, dw_up, dw_down, db_gate, db_up = gradients

    transposed = make_transpose(saved, x, gated) if any(needs[1:]) else None
    transpose = None if transposed is None else transposed.transpose
    hybrid_rows.backward(dy, dl1, (w_gate, w_up, w_down_t), saved, dx, transpose)
    du, dg = hybrid_backup.backward(dy, dl1, w_down_t, gated, saved, transpose)
    if dx is not None:
        hybrid_backup.product((du, w_up), (dg, w_gate), None, dx, None, saved.backup())
    if transposed is not None:
        weights, biases = (dw_down, dw_up, dw_gate), (db_up, db_gate)
        hybrid_weights.from_lists(x, dy, transpose, weights, biases)
        hybrid_weights.from_backup(x, dy, transposed, weights, biases)
    return tuple(gradients)
