"""The layer as operators take it: x, weights, biases and scales, one argument after the other."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from twell.sparse import ops
from twell.sparse.activations import RELU, Weights
from twell.sparse.observe import Activity, Result

# The operator by each sparse path.
PATHS = {path: partial(ops.operator, path=path) for path in ops.PATHS if path != "dense"}


class Trained(NamedTuple):
    """The results of a sparse training pass, flat."""

    y: Tensor
    l1: Tensor
    token_counts: Tensor
    neuron_counts: Tensor
    needed: Tensor


def weights_of(w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, *, act=RELU, **others):
    """The weights of an operator's arguments."""
    return Weights(w_gate, w_up, w_down.t(), b_gate, b_up, b_down, act=act, **others)


def run(path, x, *tensors, act=RELU, down=None, **options):
    """ops.sparse_ffn; the scales of x, gate and up may follow the biases."""
    tensors, (x_scale, s_gate, s_up) = tensors[:6], (*tensors[6:], None, None, None)[:3]
    weights = weights_of(*tensors, act=act, s_gate=s_gate, s_up=s_up, down_fp8=down)
    return ops.sparse_ffn(x, weights, path, x_scale=x_scale, **options)


def train(path, capacity, x, *tensors, act=RELU, token_mask=None, **named):
    """training_ops.sparse_train."""
    from twell.sparse import training_ops

    weights = weights_of(*tensors, act=act, **named)
    result = training_ops.sparse_train(x, weights, path, capacity, token_mask)
    return Trained(result.y, result.l1, *result.activity)


def as_sparse_ffn(run):
    """A stand-in for ops.sparse_ffn by a function with the arguments of `run`."""

    def stand_in(x, weights, path=None, *, x_scale=None, activity=None, out=None):
        tensors = *weights[:2], weights.w_down_t.t(), *weights[3:6]
        scales = (x_scale, *weights[6:8]) if weights.s_up is not None else ()
        return run(path, x, *tensors, *scales, activity=activity, act=weights.act)

    return stand_in


def as_sparse_train(train):
    """A stand-in for training_ops.sparse_train by a function with the arguments of `train`."""

    def stand_in(x, weights, path, capacity, token_mask=None):
        tensors = *weights[:2], weights.w_down_t.t(), *weights[3:6]
        y, l1, *counts = train(path, capacity, x, *tensors, act=weights.act, token_mask=token_mask)
        return Result(y, l1, Activity(*counts))

    return stand_in
