"""The layer as a function of tensors, for modules of your own: `twell.ffn`.

It computes with the kernels where they take the tensors, and else in torch's operators, so the same
call also runs on a CPU and in fp32. It wraps the operator twell::ffn (kernels/ops.py).

    gated       y = h w_down_t + b_down    g = relu(x w_gate^T + b_gate)    h = g (x w_up^T + b_up)
    non-gated   y = h w_down_t + b_down    h = relu(x w_up^T + b_up)

Gradients are dense: forward keeps x and the weights, and backward computes the layer again in
torch's operators. `SparseFFN` with `twell.SparseTraining` has sparse ones. Under the transforms of
torch.func and in forward-mode AD the layer is computed in torch's operators.

Tensor parallelism. For a slice of N of each weight and bias, y is a partial sum, for an all-reduce
over the ranks. One rank gets b_down.

Compilation. The number of tokens chooses the path when the operator runs, so torch.compile makes
one graph for all of them. `warm_up` compiles the kernels before a CUDA graph is captured.

Versions. Within a major version of twell, arguments keep their names, order, defaults and meaning,
here and in the schema of twell::ffn, which tests/kernels/test_ffn.py holds. New arguments come at
the end and have defaults. A change of meaning gets a new operator, twell::ffn_v2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from twell.sparse import reference
from twell.sparse.activations import get_activation
from twell.sparse.projections import is_transformed


def ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str = "relu",
    threshold: float = 0,
    path: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return y [..., K] of a feed-forward layer with sparse activations.

    Args:
        x: [..., K], any strides.
        w_gate, w_up: [N, K], contiguous; w_gate is None without a gate. The halves of a merged
            weight [2 N, K] are contiguous, and so are slices of N; neither is copied.
        w_down_t: [N, K], contiguous: the transpose of the weight that `nn.Linear` holds.
        b_gate, b_up: [N]. b_down: [K].
        activation, threshold: see twell/sparse/activations.py.
        path: "union", "decode", "rowwise" or "dense". None: decode up to 512 tokens, else union;
            dense where the kernels do not take the tensors.
        out: a contiguous tensor like y to write to; it may share memory with no other argument.

    Autocast casts all tensors, as nn.Linear's. The kernels take bf16 and fp16 on a GPU, K a
    multiple of 16, N up to 65,536. All tensors have one dtype and one device. Raises ValueError or
    TypeError with the name of what does not fit, RuntimeError for `out` with gradients.
    """
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        given = _cast(x, w_gate, w_up, w_down_t, b_gate, b_up, b_down)
        with torch.autocast(x.device.type, enabled=False):
            return ffn(*given, activation=activation, threshold=threshold, path=path, out=out)
    _check(x, w_up, w_down_t, out)
    act = get_activation(activation, threshold, gated=w_gate is not None, sparse=True)
    rows, tensors = x.reshape(-1, x.shape[-1]), (w_gate, w_up, w_down_t.t(), b_gate, b_up, b_down)
    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, *tensors, out)
    )
    if out is not None and learns:
        raise RuntimeError("out is given, and a tensor requires gradients; use torch.no_grad()")
    given = None if out is None else out.view(rows.shape)
    unfit = is_transformed() or (path in (None, "dense") and not _takes(rows, len(w_up)))
    if unfit or (path == "dense" and learns):
        _check_alike(x, w_gate=w_gate, w_up=w_up, w_down_t=w_down_t, out=out)
        _check_alike(x, b_gate=b_gate, b_up=b_up, b_down=b_down)
        y = reference.ffn(rows, *tensors, act=act)
        y = y if out is None else given.copy_(y)
    else:
        from twell.kernels import ops

        if learns:
            options = {"activation": act.name, "threshold": act.threshold, "path": path}
            y = ops.operator(rows, *tensors, **options)
        else:
            y = ops.run(path, rows, *tensors, act=act, out=given)
    return y.reshape(x.shape) if out is None else out


def _cast(x: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's type; those in fp64 stay, as autocast leaves them."""
    dtype, kept = torch.get_autocast_dtype(x.device.type), torch.float64
    return [t if t is None or t.dtype == kept else t.to(dtype) for t in (x, *tensors)]


def _check(x: Tensor, w_up: Tensor, w_down_t: Tensor, out: Tensor | None) -> None:
    if x.dim() == 0:
        raise ValueError("x is a single number, expected [..., hidden_size]")
    if w_up.dim() != 2:
        expected = "[intermediate_size, hidden_size]"
        raise ValueError(f"w_up has shape {tuple(w_up.shape)}, expected {expected}")
    expected = {"w_down_t": (w_down_t, w_up.shape), "out": (out, x.shape)}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected "
                f"{tuple(shape)}, contiguous"
            )


def _check_alike(x: Tensor, **tensors: Tensor | None) -> None:
    """Refuse what the kernels would, so that a call that works on a CPU works on a GPU."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}, expected {x.dtype}, as x has")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")


def _takes(rows: Tensor, intermediate_size: int) -> bool:
    """Whether the kernels are here and take the rows."""
    try:
        from twell.kernels import ops
    except ImportError:  # without triton
        return False
    return ops.takes(rows, intermediate_size)


def warm_up(
    sizes: Iterable[int], w_gate: Tensor | None, w_up: Tensor, *others: Tensor | None, **options
) -> None:
    """Compile and load the kernels of `ffn` for numbers of tokens that a CUDA graph will capture.

    The arguments behind sizes are those of `ffn` behind x. Which kernels run depends on the number
    of tokens, and not on the values.
    """
    with torch.no_grad():
        for size in sizes:
            ffn(w_up.new_zeros(size, w_up.shape[1]), w_gate, w_up, *others, **options)
