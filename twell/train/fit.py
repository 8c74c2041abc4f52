"""Fits a student's down projections to its teacher before training, by least squares.

With ReLU in place of SiLU a layer has other activations h. Decoder layer after decoder layer, the
down projection W becomes W + D with the D that minimises, over tokens of the training text,

    sum |D h - e|^2 + RIDGE * mean(sum h_n^2) * |D|^2,    e = wanted - found,

where `wanted` and `found` are the outputs of the decoder layer in the teacher and in the student,
each after its own earlier layers: so a layer also corrects the error of the earlier ones. D has a
closed form, known from pruning without training. Here gradient descent follows. Ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twell.train.relufy import Student

RIDGE = 1e-2


@torch.no_grad()
def fit_down(
    student: Student, batches: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]
) -> Iterator[int]:
    """Fit a student's down projections in place; yield the number of each layer.

    batches: token ids [B, S] of this process, all of one size, on the teacher's device. It holds
    both models' hidden states of all batches; a student elsewhere moves there one layer at a time.
    reduce: returns the sum of a tensor over processes, so that all get the same weights. Raises
    ValueError for a layer whose activations are not finite.
    """
    student.eval()
    teacher, device, home = student.teacher[0].base_model, batches[0].device, student.device
    given = _arguments(teacher, batches[0])  # `own` replaces some for the student's layers
    wanted = [teacher.get_input_embeddings()(ids) for ids in batches]
    embedding = student.model.get_input_embeddings()
    found = [embedding(ids.to(home)).to(device) for ids in batches]
    rotary = student.model.rotary_emb.to(device)  # in fp32; the teacher's may be in bf16
    own = {"position_embeddings": rotary(found[0], given[0]["position_ids"])}
    rotary.to(home)
    models = teacher.layers, student.model.layers, student.ffns, given
    for number, (original, layer, ffn, named) in enumerate(zip(*models, strict=True)):
        layer.to(device)
        seen: list[Tensor] = []  # the input of the feed-forward layer
        hook = ffn.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        weight = ffn.down_proj.weight
        size, width = weight.shape
        square, product = (weight.new_zeros(width, columns) for columns in (width, size))
        for index, hidden in enumerate(found):
            wanted[index] = original(wanted[index], **named)
            error = (wanted[index].float() - layer(hidden, **named | own).float()).flatten(0, -2)
            h = ffn.activations(seen.pop())[1].float().flatten(0, -2)
            square.addmm_(h.T, h)
            product.addmm_(h.T, error)
        hook.remove()
        weight += _solved(reduce(square), reduce(product), number).T.to(weight.dtype)
        torch.clear_autocast_cache()  # it holds the old weight
        for index, hidden in enumerate(found):
            found[index] = layer(hidden, **named | own)
        layer.to(home)
        yield number


def _arguments(model: nn.Module, ids: Tensor) -> list[dict[str, Any]]:
    """Return each decoder layer's arguments for `ids`, without the hidden states."""
    given: dict[nn.Module, dict[str, Any]] = {}

    def keep(layer: nn.Module, _: tuple, named: dict[str, Any]) -> None:
        given[layer] = {name: value for name, value in named.items() if name != "hidden_states"}

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.layers]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [given[layer] for layer in model.layers]


def _solved(square: Tensor, product: Tensor, number: int) -> Tensor:
    """Return D^T [N, K] for the sums h h^T [N, N] and h e^T [N, K]."""
    square, product = square.double(), product.double()
    mean = square.diagonal().mean()
    if not (mean.isfinite() and product.isfinite().all()):
        raise ValueError(f"layer {number} of the student has activations that are not finite")
    if not mean:  # no neuron fires
        return product
    square.diagonal().add_(RIDGE * mean)
    return torch.cholesky_solve(product, torch.linalg.cholesky(square))
