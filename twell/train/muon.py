"""Muon for the matrices of the decoder layers, with AdamW for all else.

Muon (Jordan et al. 2024) steps by the orthogonal matrix that is nearest to the gradient's moving
mean. Its steps are scaled as in Liu et al. 2025, arXiv 2502.16982, so that they are about as long
as AdamW's, and one learning rate suits both. torch.optim.Muon takes one matrix at a time, with
thousands of kernel launches a step; here all matrices of one shape are one batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MOMENTUM = 0.95
LENGTH = 0.2  # root mean square of an AdamW step, over the learning rate
# Coefficients of the quintic iteration that brings singular values near 1, and its iterations.
QUINTIC = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


class Muon(torch.optim.AdamW):
    """AdamW whose groups with `muon=True`, all matrices, take Muon's steps in its place."""

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Tensor | None:
        for group in self.param_groups:
            if not group.get("muon"):
                continue
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
            for shape, matrices in shapes.items():
                self._step(shape, matrices, group)
        return super().step(closure)  # of all that has a gradient still

    def _step(self, shape: tuple[int, ...], matrices: list[Tensor], group: dict) -> None:
        """Change matrices of one shape, rows and columns in either order; drop their gradients."""
        gradients = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            if not self.state[matrix]:  # AdamW reads the number of steps when it is loaded
                fresh = {"step": torch.zeros(()), "momentum": torch.zeros_like(matrix)}
                self.state[matrix].update(fresh)
            self.state[matrix]["step"] += 1
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's
        wide = [one if tuple(one.shape) == shape else one.mT for one in ahead]
        steps = orthogonalized(torch.stack(wide)).to(matrices[0].dtype).unbind()
        steps = [
            step if tuple(matrix.shape) == shape else step.mT
            for step, matrix in zip(steps, matrices, strict=True)
        ]
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(matrices, steps, alpha=-group["lr"] * LENGTH * max(shape) ** 0.5)
        for matrix in matrices:
            matrix.grad = None


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices [N, R, C] of R <= C with the same singular vectors, and values near 1.

    In bf16; the values come to lie between 0.7 and 1.2.
    """
    first, third, fifth = QUINTIC
    norm = matrices.float().norm(dim=(1, 2), keepdim=True)  # at least the largest singular value
    near = (matrices / (norm + 1e-7)).bfloat16()
    for _ in range(ITERATIONS):
        square = near @ near.mT
        factor = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        near = torch.baddbmm(near, factor, near, beta=first)
    return near
