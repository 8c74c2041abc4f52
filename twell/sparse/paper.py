"""The paper's inference as a PyTorch operator, twell::ffn_twell: TwELL words in place of lists.

Shapes, dtypes and errors: see ops.py. The paper's training step: training_ops.py.
"""

from __future__ import annotations

import torch

from twell.kernels.common import empty_output, on_device
from twell.kernels.paper import gate, rowwise
from twell.sparse.activations import Weights
from twell.sparse.ops import align_weights, check_tensors, prepare


@torch.library.custom_op(
    "twell::ffn_twell",
    mutates_args=(),
    schema="(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor? b_gate=None, "
    "Tensor? b_up=None, Tensor? b_down=None, int compression=8) -> Tensor",
)
def ffn_twell(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, compression=8):
    """y [M, K] by the paper's inference: tiles of 256 neurons with 256 / `compression` words.

    `compression` is 2, 4, 8 or 16; raises ValueError for another one. A tile that overflows goes on
    in a second buffer. Only g is rounded; u and h stay in fp32. No gradients. Paper: App. A.1.
    """
    gate.check_compression(compression)
    weights = Weights(w_gate, w_up, w_down.t(), b_gate, b_up, b_down)
    check_tensors(x, weights)
    if len(x) == 0:
        return empty_output(x)
    x = prepare(x)
    with on_device(x):
        return rowwise.ffn(x, align_weights(weights), compression=compression)


def layer(w_gate, w_up, w_down):
    """The layer by the paper's inference: `twell measure --provider twell.sparse.paper:layer`."""
    return lambda x: ffn_twell(x, w_gate, w_up, w_down)


@ffn_twell.register_fake
def _(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, compression=8):
    gate.check_compression(compression)
    check_tensors(x, Weights(w_gate, w_up, w_down.t(), b_gate, b_up, b_down))
    return empty_output(x)
