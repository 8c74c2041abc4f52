"""The paper's own algorithms as PyTorch operators.

    twell::ffn_twell      as twell::ffn_rowwise, with the gate's words in place of whole lists
    twell::train_hybrid   as twell::train_union, by the hybrid format

Shapes, dtypes and errors: see kernels/ops.py. Paper: App. A.1 and B.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell.kernels import ops
from twell.kernels.paper import hybrid, rowwise
from twell.kernels.paper.gate import check_compression
from twell.kernels.training_ops import register


@torch.library.custom_op("twell::ffn_twell", mutates_args=())
def ffn_twell(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    compression: int = 8,
) -> Tensor:
    """y [M, K] by rows, from tiles of 256 neurons with 256 / `compression` words.

    `compression` is 2, 4, 8 or 16; raises ValueError for another one. A tile that overflows is
    computed again, densely, in the same launch. Only g is rounded; u and h stay in fp32.
    """
    tensors = x, w_gate, w_up, w_down, b_gate, b_up, b_down
    check_compression(compression)
    return ops.launch(rowwise.ffn, *tensors, compression=compression)


@ffn_twell.register_fake
def _(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, compression=8):
    check_compression(compression)
    return ops.fake(x, w_gate, w_up, w_down, b_gate, b_up, b_down)


train_hybrid = register("hybrid", hybrid, hybrid.HybridSaved)
