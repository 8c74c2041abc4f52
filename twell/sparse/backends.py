"""How a `SparseFFN` computes a pass: by its modules, by the reference, or by the kernels.

layer.py asks for the modules or for `sparse`, which falls back to the modules where kernels cannot.
`ffn` is a SparseFFN, x is [..., K], rows are its tokens [M, K], and `wants` says what the pass
computes beside y.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from twell.sparse import float8, reference
from twell.sparse.activations import Weights, add_bias
from twell.sparse.observe import Activity, Result, Wants, open_collector
from twell.sparse.plan import MODULES, Choice
from twell.sparse.projections import tensors_of, why_called, why_dense


def choose_eager(ffn: nn.Module, x: Tensor) -> str | None:
    """Return the path of an eager call that needs plain y alone; None: `forward` does the rest."""
    own, width = ffn.__dict__, x.shape[-1]  # an attribute of a module may take a microsecond
    if own["training"] or own["silenced"] or own["edit"] is not None:
        return None
    if width != own["hidden_size"] or "h_dropout" in ffn.parts:
        return None
    if open_collector() is not None or own["outbox"].compiled:
        return None
    backend = own["_backend"]
    if backend == "dense" or not own["_has_kernels"]:
        return MODULES if backend in ("dense", "auto") and not ffn.quantized else None
    # The plan of graphs may be another.
    if backend != "auto" or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    path = own["chooser"].quick_path(x.numel() // width)
    if path == MODULES:  # `replayed` or `Chooser.choose` counts calls by other paths
        own["chooser"].count(x.numel() // width)
    return path


def dense(ffn: nn.Module, x: Tensor, wants: Wants) -> Result:
    """Compute by the layer's modules."""
    g, h = ffn.activations(x)
    if (wants.l1 or wants.activity) and g.shape[-1] != ffn.intermediate_size:
        raise ValueError(
            f"the first projection returns {g.shape[-1]} neurons, and the layer has "
            f"{ffn.intermediate_size}: of tensor-parallel shards neither the L1 term nor "
            "statistics can be computed; load the model without tp_plan"
        )
    l1 = activity = None
    hidden = (g, h) if wants.hidden else None
    if wants.l1:
        l1 = h.abs().sum(-1, dtype=torch.promote_types(h.dtype, torch.float32))
    if wants.activity:
        activity = Activity.of((g != 0).reshape(-1, g.shape[-1]), wants.token_mask)
    if ffn.edit is not None:
        h = ffn.edit.of_h(h)
    if (drop := ffn.parts.get("h_dropout")) is not None:
        h = drop(h)
    in_fp8 = ffn.dense_down is not None and why_called(ffn.down_proj) is None
    if not in_fp8 or (down := ffn.down_in_fp8()) is None:
        return Result(ffn.down_proj(h), l1, activity, hidden)
    y = add_bias(down(h), ffn.down_proj.bias)
    return Result(y.to(h.dtype), l1, activity, hidden)


def sparse(ffn: nn.Module, rows: Tensor, wants: Wants) -> Result:
    """Compute without the modules; by them where the kernels cannot."""
    if ffn.backend == "reference":
        return _reference(ffn, rows, wants)
    if not ffn._has_kernels:
        return dense(ffn, rows, wants)
    if not _wants_only_y(ffn, rows, wants):
        return _train_or_dense(ffn, rows, wants)
    from twell.sparse import ops

    if ffn.backend == "triton":
        # `forward` has asked whether the layer is readable, as the property `path` would again.
        choice = Choice(ffn._path or ops.choose(rows.shape[0]))
    elif ops.takes(rows, ffn.intermediate_size, dtype_of(rows)):
        choice = ffn.chooser.choose(rows, lambda blocks: ffn.act.gate(ffn.first(blocks)))
    else:
        return dense(ffn, rows, wants)

    def by_kernels(call: Callable, path: str, **options: Tensor | None) -> Tensor:
        x, weights, x_scale = operands(ffn, rows)
        with _without_autocast(rows):
            return call(x, weights, path, x_scale=x_scale, **options)

    if choice.warm_up is not None:
        by_kernels(ops.load, choice.warm_up)
    if choice.path == MODULES:
        result = dense(ffn, rows, wants)
    else:
        result = Result(by_kernels(ops.sparse_ffn, choice.path, activity=choice.activity))
    if choice.due:
        ffn.chooser.end()
    return result


def replayed(ffn: nn.Module, x: Tensor, path: str) -> Tensor | None:
    """Return y of an eager call by a path of "auto" that is a CUDA graph already; else None.

    Such a call has passed the checks of `ops.sparse_ffn` before.
    """
    readable = ffn.token_order is None and why_dense(ffn.parts) is None
    if torch.is_grad_enabled() or not x.is_cuda or not readable:
        return None
    from twell.sparse import ops

    here = x.get_device() == torch.cuda.current_device()
    if not (here and ops.is_eager(x) and ops.replay.fits(rows := x.reshape(-1, x.shape[-1]))):
        return None
    rows, weights, _ = operands(ffn, rows)
    activity = ffn.chooser.activity_of(path, len(rows), rows.device)
    y = ops.replay.ffn(ops.PATHS[path], rows, weights, activity, captures=False)
    if y is None:
        return None
    ffn.chooser.count(len(rows))
    return y.view(x.shape)


def _wants_only_y(ffn: nn.Module, rows: Tensor, wants: Wants) -> bool:
    if wants.l1 or wants.activity:
        return False
    if not torch.is_grad_enabled() or ffn.quantized:
        return True  # asked first: to look at all parameters takes microseconds
    return not any(tensor.requires_grad for tensor in (rows, *ffn.parameters()))


def _train_or_dense(ffn: nn.Module, rows: Tensor, wants: Wants) -> Result:
    """Compute gradients, L1 term or activity: sparsely by `train_path`, else by the modules."""
    sparsely = ffn.train_path is not None and not ffn.quantized
    if not (sparsely and torch.is_grad_enabled() and rows.numel()):
        return dense(ffn, rows, wants)
    from twell.sparse import ops, training_ops

    fits = ffn.capacity * rows.shape[0] < training_ops.MAX_ENTRIES
    if not fits or not ops.takes(rows, ffn.intermediate_size, dtype_of(rows)):
        return dense(ffn, rows, wants)
    x, weights, _ = operands(ffn, rows)
    with _without_autocast(rows):
        given = ffn.train_path, ffn.capacity, wants.token_mask
        return training_ops.sparse_train(x, weights, *given)


def _reference(ffn: nn.Module, rows: Tensor, wants: Wants) -> Result:
    if ffn.quantized and (wants.l1 or wants.activity):
        return dense(ffn, rows, wants)
    x, weights, x_scale = operands(ffn, rows)
    tensors, act = (x, *weights[:2], weights.w_down_t.t(), *weights[3:6]), ffn.act
    with _without_autocast(rows):
        if ffn.quantized:
            return Result(float8.ffn(x, weights, x_scale))
        if wants.l1 or torch.is_grad_enabled():
            y, l1, active = reference.union_train(*tensors, act=act)
        else:
            g = reference.gate_pack(x, *weights.first, act=act)
            y, l1 = reference.from_gate(g, *tensors, act=act), None
            active = g.unpack() != 0 if wants.activity else None
    return Result(y, l1, Activity.of(active, wants.token_mask) if wants.activity else None)


def operands(ffn: nn.Module, rows: Tensor) -> tuple[Tensor, Weights, Tensor | None]:
    """Return the rows, weights and scales of rows that the kernels read, in autocast's type.

    Compiled, rows of a layer with FP8 weights are quantised here. A weight that lost the kernels'
    strides, as a gathered shard or by assigning to `parameter.data`, is copied in every call;
    setting `backend` stores it anew.
    """
    parts = ffn.parts  # an attribute of a module takes nn.Module half a microsecond
    gate, up = tensors_of(parts.get("gate_proj")), tensors_of(parts["up_proj"])
    down = tensors_of(parts["down_proj"])
    tensors = [rows, gate[0], up[0], down[0], gate[1], up[1], down[1]]
    if torch.is_autocast_enabled(rows.device.type):
        dtype, kept = dtype_of(rows), (None, float8.FLOAT8)
        tensors = [t if t is None or t.dtype in kept else t.to(dtype) for t in tensors]
    if ffn.edit is not None:
        tensors[3], tensors[6] = ffn.edit.of_down(tensors[3], tensors[6])
    tensors[3] = tensors[3].t()
    for place in (1, 2, 3):
        if tensors[place] is not None and not tensors[place].is_contiguous():
            tensors[place] = tensors[place].contiguous()
    x, scale, down_fp8 = tensors[0], None, None
    if ffn.quantized and torch.compiler.is_compiling():  # fused with what makes the rows
        x, scale = float8.quantize(x)
    if (part := ffn.down_in_fp8()) is not None:
        down_fp8 = part.weight, part.weight_scale
    return x, Weights(*tensors[1:], gate[2], up[2], down_fp8, ffn.act), scale


def dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _without_autocast(x: Tensor) -> torch.autocast | nullcontext:
    """Autocast off; nothing where it is off already, since to enter it takes 8 microseconds."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
