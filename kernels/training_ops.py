"""The layer with gradients, as PyTorch operators: one pair, forward and backward, for each path.

    twell::train_union    products over the unions of blocks of 64 tokens: training.py
    twell::train_hybrid   the paper's hybrid format: paper/hybrid.py, imported at its first use

Both compute y [M, K] of ops.py's layer and each token's L1 term, for an M of at least 1:

    l1[m] = sum over neurons of |h[m, n]|,   h = relu(x w_gate^T + b_gate) * (x w_up^T + b_up)

Between forward and backward they keep x, the weights and the active entries of g and u. The buffers
hold `capacity` entries per token. A step that needs more says so, in `needed`, and is wrong.

Shapes, dtypes and errors: see ops.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from twell.kernels import entries, training
from twell.kernels.common import Gradients, Layer, on_device
from twell.kernels.ops import check_tensors, is_eager, prepare, to_layer
from twell.sparse.activations import ACTIVATIONS, RELU, Activation, get_activation

TRAIN_PATHS = "union", "hybrid"
# Places of entries are 32-bit integers, and kernels step past the last one by up to 256.
MAX_ENTRIES = 2**31 - 2**12


class Trained(NamedTuple):
    """The results of a training step's forward pass, of which y and l1 are differentiable.

    y             [M, K] in x.dtype
    l1            [M] fp32, the sum over neurons of |h|, h rounded to x.dtype
    token_counts  [M] int32, active neurons of each token
    neuron_counts [N] int32, tokens for which each neuron is active, without those masked out
    needed        0-d int64, the least capacity that suffices. Above the given capacity, y, l1 and
                  the gradients are wrong, and the step has to be repeated with more.
    """

    y: Tensor
    l1: Tensor
    token_counts: Tensor
    neuron_counts: Tensor
    needed: Tensor


def train(
    path: str,
    capacity: int,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    token_mask: Tensor | None = None,
    act: Activation = RELU,
) -> Trained:
    """The layer with gradients for x, weights, biases and the L1 term.

    `path` is one of TRAIN_PATHS. `capacity`, at least 1, is the number of entries per token that
    the buffers hold; "hybrid" uses it for backup rows. `token_mask`, of M entries in any shape, is
    0 for tokens that neuron_counts leaves out. Raises ValueError for another path, for other
    activations than ReLU with "hybrid", and as ops.py says. Paper: App. B.2.
    """
    if path not in TRAIN_PATHS:
        raise ValueError(f"path {path!r} is unknown; use one of {', '.join(TRAIN_PATHS)}")
    tensors = x, w_gate, w_up, w_down, b_gate, b_up, b_down
    arguments = *tensors, token_mask, capacity, act.name, act.threshold
    step = operator_step(path)
    if is_eager(x):
        return Trained(*_Eager.apply(*arguments, step))
    return Trained(*step.operator(*arguments)[: len(Trained._fields)])


def operator(path: str) -> torch.library.CustomOpDef:
    """The operator of a path; its results are Trained's, followed by the saved tensors."""
    return operator_step(path).operator


def operator_step(path: str) -> OperatorStep:
    """What the operators of a path do."""
    if path == "hybrid":
        from twell.kernels.paper.ops import train_hybrid

        return train_hybrid
    return train_union


class _Eager(torch.autograd.Function):
    """An operator without PyTorch's dispatcher, which takes as long as the kernels' launches."""

    @staticmethod
    def forward(ctx, *inputs):
        *arguments, ctx.step = inputs
        results = ctx.step.forward(*arguments)
        ctx.step.save(ctx, arguments, results)
        return results[: len(Trained._fields)]

    @staticmethod
    def backward(ctx, *gradients):
        return *ctx.step.differentiate(ctx, *gradients), None


class OperatorStep:
    """The two operators' implementations for one path.

    `path` is a module with the functions forward, backward and saved_like of kernels/training.py,
    and `saved_type` the NamedTuple of the tensors that its forward pass saves.
    """

    def __init__(self, path: ModuleType, saved_type: type):
        self.path = path
        self.saved_type = saved_type
        self.every_activation = path is training
        self.operator: torch.library.CustomOpDef | None = None
        self.backward_operator: torch.library.CustomOpDef | None = None

    def check(self, x, *rest) -> Activation:
        """The activation, after all checks."""
        *tensors, token_mask, capacity, name, threshold = rest
        check_tensors(x, *tensors)
        act = get_activation(name, threshold, gated=tensors[0] is not None, sparse=True)
        if act != RELU and not self.every_activation:
            raise ValueError(
                f"path 'hybrid' takes 'relu' without a threshold; use path 'union' for "
                f"{act.name!r} with threshold {act.threshold:g}"
            )
        num_tokens = x.shape[0]
        if num_tokens == 0:
            raise ValueError("x has no token, expected at least 1")
        if not 1 <= capacity < MAX_ENTRIES / num_tokens:
            raise ValueError(
                f"capacity={capacity} for {num_tokens} tokens, expected 1 or more, "
                f"and below {MAX_ENTRIES} entries in all"
            )
        if token_mask is not None and token_mask.numel() != num_tokens:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask.shape)}, "
                f"expected {num_tokens} entries, one a token"
            )
        return act

    def forward(self, x, *rest):
        act = self.check(x, *rest)
        *tensors, token_mask, capacity, _, _ = rest
        x, layer = prepare(x), to_layer(*tensors, act=act)
        with on_device(x):
            if token_mask is not None:
                token_mask = token_mask.reshape(-1) != 0
            return self.path.forward(x, layer, token_mask, capacity)

    def fake_forward(self, x, *rest):
        self.check(x, *rest)
        *tensors, _, capacity, _, _ = rest
        layer = Layer(*tensors)
        num_tokens, intermediate_size = x.shape[0], layer.w_up.shape[0]
        return (
            x.new_empty(x.shape),
            x.new_empty(num_tokens, dtype=torch.float32),
            x.new_empty(num_tokens, dtype=torch.int32),
            x.new_empty(intermediate_size, dtype=torch.int32),
            x.new_empty((), dtype=torch.int64),
            *self.path.saved_like(x, layer, capacity),
        )

    def gradients(self, x, w_gate, w_up, w_down, b_gate, b_up, *rest) -> list[Tensor | None]:
        """The gradients of the six tensors; None where `needs` asks for none."""
        *saved, dy, dl1, needs, name = rest
        x, dy = prepare(x), prepare(dy.to(x.dtype))
        # Hooks on saved tensors, as of offloading, may give them back with other strides.
        w_gate = None if w_gate is None else w_gate.contiguous()
        w_up, w_down = w_up.contiguous(), w_down.t().contiguous().t()
        # Copied even where it is fp32: in autograd's threads the device has no context before
        # PyTorch runs something on it, and tensor descriptors need one.
        dl1 = dl1.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        # The threshold has done its work: g is 0 up to it.
        layer = to_layer(w_gate, w_up, w_down, b_gate, b_up, None, act=ACTIVATIONS[name])
        pairs = zip((x, *layer), needs, strict=False)
        gradients = [torch.empty_like(tensor) if need else None for tensor, need in pairs]
        with on_device(x):
            saved = self.saved_type(*saved)
            self.path.backward(x, layer, saved, dy, dl1, Gradients(*gradients))
        return gradients

    def backward(self, x, *rest):
        return tuple(x.new_empty(0) if g is None else g for g in self.gradients(x, *rest))

    def fake_backward(self, x, w_gate, w_up, w_down, b_gate, b_up, *rest):
        given = x, w_gate, w_up, w_down.t(), b_gate, b_up
        return tuple(
            tensor.new_empty(tensor.shape) if need else x.new_empty(0)
            for tensor, need in zip(given, rest[-2], strict=True)
        )

    def save(self, ctx, inputs, output) -> None:
        # Else autograd makes zeros for the gradients of all saved tensors.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6], *output[5:])
        ctx.activation = inputs[-2]

    def differentiate(self, ctx, dy, dl1, *_):
        tensors = ctx.saved_tensors
        x = tensors[0]
        dy = torch.zeros_like(x) if dy is None else dy
        dl1 = dy.new_zeros(len(dy), dtype=torch.float32) if dl1 is None else dl1
        # x, the weights and the first two biases: the operator computes the gradients needed.
        requires = zip(tensors, ctx.needs_input_grad[:6], strict=False)
        needs = [tensor is not None and need for tensor, need in requires]
        gradients = [None] * 6
        if any(needs):
            # With create_graph=True the operator remembers that it has no gradients of its own.
            direct = is_eager(dy) and not torch.is_grad_enabled()
            compute = self.gradients if direct else self.backward_operator
            computed = compute(*tensors, dy, dl1, needs, ctx.activation)
            gradients = [g if need else None for g, need in zip(computed, needs, strict=True)]
        if needs[3]:
            gradients[3] = gradients[3].t()
        d_b_down = None
        if ctx.needs_input_grad[6]:
            d_b_down = dy.sum(0, dtype=torch.float32).to(x.dtype)
        return *gradients, d_b_down, None, None, None, None


def register(name: str, path: ModuleType, saved_type: type) -> OperatorStep:
    """Registers twell::train_`name` and its backward operator."""
    step = OperatorStep(path, saved_type)
    layer = "Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up"
    saved = ", ".join(f"Tensor {field}" for field in saved_type._fields)
    outputs = ", ".join(["Tensor"] * len(Trained._fields + saved_type._fields))
    # capacity is a SymInt, so that compiled code serves every capacity.
    step.operator = torch.library.custom_op(
        f"twell::train_{name}",
        step.forward,
        mutates_args=(),
        schema=f"({layer}, Tensor? b_down, Tensor? token_mask, SymInt capacity, "
        f"str activation, float threshold) -> ({outputs})",
    )
    step.backward_operator = torch.library.custom_op(
        f"twell::train_{name}_backward",
        step.backward,
        mutates_args=(),
        schema=f"({layer}, {saved}, Tensor dy, Tensor dl1, bool[] needs, str activation)"
        f" -> ({', '.join(['Tensor'] * 6)})",
    )
    step.operator.register_fake(step.fake_forward)
    step.backward_operator.register_fake(step.fake_backward)
    step.operator.register_autograd(step.differentiate, setup_context=step.save)
    return step


train_union = register("union", training, entries.UnionSaved)
