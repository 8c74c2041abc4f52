"""Dead neurons: which neurons are dead, and remedies.

A neuron is *dead* when no token of a whole window activated it. The paper's window is one step of
2^20 tokens. Ours is `dead_window_tokens`, carried across steps and checkpoints: in one small step
most rare neurons would look dead. `reinitialize` is the paper's remedy; `balance` is ours: smaller
activations and longer output columns would lower the L1 term without any sparsity.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from twell.models import SparseLlamaForCausalLM, sparse_ffns


class DeadWindow:
    """The active neurons of the current window of tokens, layer by layer, on their devices."""

    def __init__(self, window_tokens: int):
        self.window_tokens = window_tokens
        self.tokens, self.number = 0, 0  # tokens of this window, number of finished windows
        self.active: list[torch.Tensor] = []  # of each layer, once the window has begun

    def add(self, neuron_counts: list[torch.Tensor], tokens: int) -> list[torch.Tensor] | None:
        """Count tokens; at the end of a window return each layer's dead neurons [N] bool.

        The next call starts the next window.
        """
        self.tokens += tokens
        active = [counts > 0 for counts in neuron_counts]
        pairs = zip(self.active or active, active, strict=True)
        self.active = [before | now for before, now in pairs]
        if self.tokens < self.window_tokens:
            return None
        dead = [~active for active in self.active]
        self.tokens, self.active, self.number = 0, [], self.number + 1
        return dead

    def state(self) -> dict:
        return {"tokens": self.tokens, "active": self.active, "number": self.number}

    def restore(self, state: dict, device: torch.device) -> None:
        self.tokens, self.number = state["tokens"], state["number"]
        self.active = [active.to(device) for active in state["active"]]


@torch.no_grad()
def reinitialize(
    model: SparseLlamaForCausalLM, dead: list[torch.Tensor], share: float, seed: list[int]
) -> None:
    """Mix noise into the gate weights of dead neurons: w <- (1 - share) w + share N(0, s^2).

    dead: [N] bool for each layer; only these rows of the gate (non-gated: up) projection change.
    The noise depends on `seed` only, so all processes draw the same. Its standard deviation s is
    the configuration's `initializer_range`, 0.02. Paper: App. C.3.
    """
    seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    generator = torch.Generator().manual_seed(seed)
    for ffn, rows in zip(sparse_ffns(model), dead, strict=True):
        weight = ffn.first.weight
        noise = torch.randn(weight.shape, generator=generator) * model.config.initializer_range
        # w + share * (noise - w) at the dead rows, as one product and one sum, which work on
        # sharded weights too.
        shares = rows.cpu().to(noise.dtype)[:, None] * share
        weight.mul_(_placed(1 - shares, weight)).add_(_placed(shares * noise, weight))


@torch.no_grad()
def balance(model: SparseLlamaForCausalLM) -> None:
    """Bring the output columns (of down_proj) of all neurons to one length.

    The scale moves into the rows of up_proj. No layer's output changes, since act(x Wg) * (x Wu)
    is proportional to the row of Wu (and ReLU to its input). The L1 term changes: it then weighs
    |h| by what a neuron adds to the residual stream. A fresh column has this length,
    `initializer_range` sqrt(K). Columns of zeros and Adam's moments stay. Not in the paper.
    """
    for ffn in sparse_ffns(model):
        down, up = ffn.down_proj.weight, ffn.up_proj.weight
        lengths = (down.full_tensor() if isinstance(down, DTensor) else down).norm(dim=0)
        factor = lengths / (model.config.initializer_range * math.sqrt(ffn.hidden_size))
        factor = torch.where(factor > 0, factor, 1.0)
        down.div_(_placed(factor, down))
        up.mul_(_placed(factor[:, None], up))
        if ffn.up_proj.bias is not None:
            ffn.up_proj.bias.mul_(_placed(factor, ffn.up_proj.bias))


def _placed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `values` in the weight's shape, dtype and device, and sharded like it."""
    values = values.to(weight.device, weight.dtype).expand(weight.shape)
    if not isinstance(weight, DTensor):
        return values
    return distribute_tensor(values.contiguous(), weight.device_mesh, weight.placements)
