"""Providers of `twell measure`: gated layers by PyTorch, dense and with weights in 2:4."""

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.sparse import to_sparse_semi_structured


def joined(w_gate, w_up, w_down):
    """Return the layer with gate and up as one product."""
    both, w_down = torch.cat([w_gate, w_up]), w_down.contiguous()

    def layer(x: Tensor) -> Tensor:
        g, u = linear(x, both).chunk(2, -1)
        return linear(torch.relu(g) * u, w_down)

    return torch.compile(layer, dynamic=False)


def max_autotune(w_gate, w_up, w_down):
    """Return the layer with the products that Inductor measures to be fastest."""
    w_down = w_down.contiguous()

    def layer(x: Tensor) -> Tensor:
        return linear(torch.relu(linear(x, w_gate)) * linear(x, w_up), w_down)

    return torch.compile(layer, dynamic=False, mode="max-autotune-no-cudagraphs")


def two_of_four(*weights):
    """Return the layer with the smaller two of four weights zero, by cuSPARSELt: another result."""
    w_gate, w_up, w_down = (to_sparse_semi_structured(pruned(weight)) for weight in weights)
    hidden = torch.compile(lambda g, u: torch.relu(g) * u, dynamic=False)
    return lambda x: linear(hidden(linear(x, w_gate), linear(x, w_up)), w_down)


def pruned(weight: Tensor) -> Tensor:
    """Return the weight [N, K] with the smaller two of four neighbours in a row zero."""
    fours = weight.detach().reshape(-1, 4)
    kept = fours.abs().topk(2, 1).indices
    return torch.zeros_like(fours).scatter(1, kept, fours.gather(1, kept)).view(weight.shape)
