"""The layer with sparse gradients, as PyTorch operators: forward and backward for each path.

    twell::train_union    products over the unions of blocks of 64 tokens: kernels/training.py
    twell::train_hybrid   the paper's hybrid format: kernels/paper/hybrid.py

Both compute y [M, K] of ops.py's layer and each token's L1 term, for an M of at least 1:

    l1[m] = sum over neurons of |h[m, n]|,   h = relu(x w_gate^T + b_gate) * (x w_up^T + b_up)

Between forward and backward they keep x, the weights and the active entries of g and u. The buffers
hold `capacity` entries per token. A step that needs more reports the need, and is wrong.

Shapes, dtypes and errors: see ops.py.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from twell.kernels import entries, training
from twell.kernels.common import Gradients, on_device
from twell.kernels.paper import hybrid
from twell.sparse.activations import ACTIVATIONS, RELU, Weights, get_activation
from twell.sparse.observe import Activity, Result, mean_entries
from twell.sparse.ops import align_weights, check_tensors, is_eager, prepare

# Places of entries are 32-bit integers, and kernels step past the last one by up to 256.
MAX_ENTRIES = 2**31 - 2**12
RESULTS = 5  # of an operator; the tensors saved for backward follow


def sparse_train(
    x: Tensor, weights: Weights, path: str, capacity: int, token_mask: Tensor | None = None
) -> Result:
    """Return the layer with gradients for x, weights, biases and the L1 term.

    path: one of TRAIN_PATHS. capacity: entries per token that the buffers hold, at least 1;
    "hybrid" uses it for backup rows. token_mask, of M entries in any shape, is 0 for tokens that
    `neuron_counts` leaves out.

    y [M, K] in x.dtype and l1 [M] fp32, the sum over neurons of |h| rounded to x.dtype, are
    differentiable. If `activity.needed` is above the given capacity, y, l1 and the gradients are
    wrong, and the step has to be retried with more; counts are right.

    Raises ValueError for another path, for other activations than ReLU with "hybrid", and as ops.py
    says. Paper: App. B.2.
    """
    if path not in TRAIN_PATHS:
        raise ValueError(f"path {path!r} is unknown; use one of {', '.join(TRAIN_PATHS)}")
    step, act = TRAIN_PATHS[path], weights.act
    arguments = x, *weights[:6], token_mask, capacity, act.name, act.threshold
    if is_eager(x):
        results = _Eager.apply(step, *arguments)
    else:
        results = step.operator(*arguments)
    y, l1, token_counts, neuron_counts, needed = results[:RESULTS]
    if path == "hybrid":  # which reports the rows that it needed
        needed = torch.maximum(needed, mean_entries(token_counts))
    return Result(y, l1, Activity(token_counts, neuron_counts, needed))


class _Eager(torch.autograd.Function):
    """An operator without PyTorch's dispatcher, which takes as long as the kernels' launches."""

    @staticmethod
    def forward(ctx, step: TrainPath, *arguments):
        ctx.step = step
        results = step.forward(*arguments)
        step.save(ctx, arguments, results)
        return results[:RESULTS]

    @staticmethod
    def backward(ctx, *gradients):
        return None, *ctx.step.differentiate(ctx, ctx.needs_input_grad[1:], *gradients)


class TrainPath:
    """The two operators of one path.

    `kernels` is a module with the functions of kernels/training.py: forward, backward, saved_like;
    `saved_type` is the NamedTuple of the tensors that its forward pass saves.
    """

    def __init__(self, name: str, kernels: ModuleType, saved_type: type):
        self.kernels, self.saved_type = kernels, saved_type
        first = (
            "Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, Tensor? b_gate, Tensor? b_up"
        )
        saved = ", ".join(f"Tensor {field}" for field in saved_type._fields)
        outputs = ", ".join(["Tensor"] * (RESULTS + len(saved_type._fields)))
        # capacity is a SymInt, so that compiled code serves every capacity.
        self.operator = torch.library.custom_op(
            f"twell::train_{name}",
            self.forward,
            mutates_args=(),
            schema=f"({first}, Tensor? b_down, Tensor? token_mask, SymInt capacity, "
            f"str activation, float threshold) -> ({outputs})",
        )
        self.backward_operator = torch.library.custom_op(
            f"twell::train_{name}_backward",
            self.backward,
            mutates_args=(),
            schema=f"({first}, {saved}, Tensor dy, Tensor dl1, bool[] needs, str activation)"
            f" -> ({', '.join(['Tensor'] * 6)})",
        )
        self.operator.register_fake(self.fake_forward)
        self.backward_operator.register_fake(self.fake_backward)
        self.operator.register_autograd(
            lambda ctx, *gradients: self.differentiate(ctx, ctx.needs_input_grad, *gradients),
            setup_context=self.save,
        )

    def check(self, x, *rest) -> tuple[Weights, Tensor | None, int]:
        """The weights, token_mask and capacity, after all checks."""
        *tensors, token_mask, capacity, name, threshold = rest
        act = get_activation(name, threshold, gated=tensors[0] is not None, sparse=True)
        weights = Weights(*tensors, act=act)
        check_tensors(x, weights)
        if act != RELU and self.kernels is hybrid:
            raise ValueError(
                f"path 'hybrid' takes 'relu' without a threshold; use path 'union' for "
                f"{act.name!r} with threshold {act.threshold:g}"
            )
        num_tokens = x.shape[0]
        if not num_tokens or not 1 <= capacity < MAX_ENTRIES / num_tokens:
            raise ValueError(
                f"capacity={capacity} for {num_tokens} tokens, expected 1 or more of "
                f"each, and below {MAX_ENTRIES} entries in all"
            )
        if token_mask is not None and token_mask.numel() != num_tokens:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask.shape)}, "
                f"expected {num_tokens} entries, one a token"
            )
        return weights, token_mask, capacity

    def forward(self, x, *rest):
        weights, token_mask, capacity = self.check(x, *rest)
        x, weights = prepare(x), align_weights(weights)
        with on_device(x):
            if token_mask is not None:
                token_mask = token_mask.reshape(-1) != 0
            return self.kernels.forward(x, weights, token_mask, capacity)

    def fake_forward(self, x, *rest):
        weights, _, capacity = self.check(x, *rest)
        num_tokens, intermediate_size = x.shape[0], weights.w_up.shape[0]
        return (
            x.new_empty(x.shape),
            x.new_empty(num_tokens, dtype=torch.float32),
            x.new_empty(num_tokens, dtype=torch.int32),
            x.new_empty(intermediate_size, dtype=torch.int32),
            x.new_empty((), dtype=torch.int64),
            *self.kernels.saved_like(x, weights, capacity),
        )

    def gradients(self, x, *rest) -> list[Tensor | None]:
        """The gradients of x, weights and two biases; None where `needs` asks for none."""
        *saved, dy, dl1, needs, name = rest
        x, dy = prepare(x), prepare(dy.to(x.dtype))
        # Hooks on saved tensors, as of offloading, may give them back with other strides.
        first = [None if tensor is None else tensor.contiguous() for tensor in saved[:5]]
        # Copied even where it is fp32: in autograd's threads the device has no context before
        # PyTorch runs something on it, and tensor descriptors need one.
        dl1 = dl1.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        # The threshold has done its work: g is 0 up to it.
        weights = align_weights(Weights(*first, act=ACTIVATIONS[name]))
        pairs = zip((x, *first), needs, strict=True)
        gradients = [torch.empty_like(tensor) if need else None for tensor, need in pairs]
        with on_device(x):
            saved = self.saved_type(*saved[5:])
            self.kernels.backward(x, weights, saved, dy, dl1, Gradients(*gradients))
        return gradients

    def backward(self, x, *rest):
        return tuple(x.new_empty(0) if g is None else g for g in self.gradients(x, *rest))

    def fake_backward(self, x, *rest):
        return tuple(
            tensor.new_empty(tensor.shape) if need else x.new_empty(0)
            for tensor, need in zip((x, *rest[:5]), rest[-2], strict=True)
        )

    def save(self, ctx, inputs, output) -> None:
        # Else autograd makes zeros for the gradients of all saved tensors.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6], *output[RESULTS:])
        ctx.activation = inputs[-2]

    def differentiate(self, ctx, requires, dy, dl1, *_):
        tensors = ctx.saved_tensors
        x = tensors[0]
        dy = torch.zeros_like(x) if dy is None else dy
        dl1 = dy.new_zeros(len(dy), dtype=torch.float32) if dl1 is None else dl1
        # x, the weights and the first two biases: the operator computes the gradients needed.
        pairs = zip(tensors, requires[:6], strict=False)
        needs = [tensor is not None and need for tensor, need in pairs]
        gradients = [None] * 6
        if any(needs):
            # With create_graph=True the operator remembers that it has no gradients of its own.
            direct = is_eager(dy) and not torch.is_grad_enabled()
            compute = self.gradients if direct else self.backward_operator
            computed = compute(*tensors, dy, dl1, needs, ctx.activation)
            gradients = [g if need else None for g, need in zip(computed, needs, strict=True)]
        d_b_down = dy.sum(0, dtype=torch.float32).to(x.dtype) if requires[6] else None
        return *gradients, d_b_down, None, None, None, None


TRAIN_PATHS = {
    "union": TrainPath("union", training, entries.UnionSaved),
    "hybrid": TrainPath("hybrid", hybrid, hybrid.HybridSaved),
}
