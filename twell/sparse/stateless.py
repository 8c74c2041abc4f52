"""The layer for Hugging Face's package `kernels`, which gives its forward to the model's own MLP.

Such a layer has no state, so it plans nothing and counts nothing: `SparseFFN` does. It is for
inference with gated ReLU layers of Llama's names, and `twell layer` writes it with its kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twell.sparse import ops
from twell.sparse.activations import Weights
from twell.sparse.projections import store_neuron_major, why_called


class SparseMLP(nn.Module):
    """y [..., K] of x [..., K] by the sparse kernels, in place of an MLP's own forward.

    The MLP has the modules gate_proj, up_proj, down_proj and act_fn. It computes by itself where
    the kernels cannot: with gradients, on the CPU, in fp32, and where a projection is no plain
    nn.Linear. Its down projection is stored neuron-major by the first call outside of
    torch.compile; compiled before that, the layer copies it in every call.

    Raises ValueError for an activation other than ReLU.
    """

    can_torch_compile = True
    has_backward = False

    def forward(self, x):
        if not isinstance(self.act_fn, nn.ReLU):
            raise ValueError(f"SparseMLP is for layers with ReLU, and this one has {self.act_fn}")
        parts = self.gate_proj, self.up_proj, self.down_proj
        rows = x.reshape(-1, x.shape[-1])
        if not _takes(rows, parts):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        first = self.gate_proj.weight, self.up_proj.weight
        biases = (part.bias for part in parts)
        weights = Weights(*first, _down_t(self.down_proj), *biases)
        return ops.sparse_ffn(rows, weights, ops.choose(len(rows))).reshape(x.shape)


def _takes(rows: Tensor, parts: tuple[nn.Module, ...]) -> bool:
    if any(why_called(part) is not None for part in parts):
        return False
    tensors = [rows, *(part.weight for part in parts)]
    tensors += [part.bias for part in parts if part.bias is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    one_type = {tensor.dtype for tensor in tensors} == {rows.dtype}
    return one_type and ops.takes(rows, parts[0].out_features)


def _down_t(part: nn.Linear) -> Tensor:
    """The transposed weight [N, K], contiguous; one copy is kept."""
    if torch.compiler.is_compiling():
        return part.weight.detach().t().contiguous()
    store_neuron_major(part)
    return part.weight.t()
