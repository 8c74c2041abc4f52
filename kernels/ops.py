"""The layer as PyTorch operators: one for each sparse path, and the default choice between them.

    twell::ffn_rowwise   any M; weight rows of each token's active neurons
    twell::ffn_union     many tokens; tensor-core products over the unions of blocks of 64 or 128 tokens
    twell::ffn_decode    1 to 64 tokens; each weight row read at most once
    twell::train_*       the same y with gradients, on two paths: see training_ops.py

They compute the same y [M, K] for x [M, K]:

    gated:      y = (relu(x w_gate^T + b_gate) * (x w_up^T + b_up)) w_down^T + b_down
    non-gated:  y = relu(x w_up^T + b_up) w_down^T + b_down                          (w_gate is None)

w_gate and w_up [N, K] are contiguous; w_down has the shape [K, N] and strides (1, K), so that w_down.t() is
contiguous too. All tensors are bf16 or all fp16 and on one device. K is a multiple of 16, N at most 65,536, M
anything; x may have any strides.

`run` computes the same by the name of a path, or by "dense", with all weights, for layers that are not sparse enough. Called
eagerly it leaves out PyTorch's dispatcher, whose bookkeeping takes as long as a small layer, and the sparse paths then
count what they see where they are given `activity`, an int64 tensor [4] on x's device: each call adds its tokens, its
blocks of 64 consecutive tokens (a last one that is not full is one), the active neurons of each token, and the neurons
that any token of each block has active. Compiled, a dense layer is torch's own operators, which fuse with their surroundings.

The operators keep no state, never wait for the device, and give the same bits for the same call. They work
under torch.compile(fullgraph=True), in CUDA graphs and on any stream. Those of inference have no autograd formula, and
backward() through one raises. Non-finite values: a NaN in a row of x reaches that
row of y alone; an inf or NaN in weights of a neuron that is inactive for a token does not reach the token,
but w_down's may in ffn_union and ffn_decode, if another token of the same block has the neuron active, and any
may in a dense layer.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twell.kernels import decode, dense, rowwise, union
from twell.kernels.common import DTYPES, INTERPRETED
from twell.kernels.gate import COMPRESSIONS
from twell.sparse.formats import MAX_COLUMNS, check_tensor

PLAIN = Tensor, nn.Parameter


def check_tensors(x, w_gate, w_up, w_down, b_gate, b_up, b_down, activity=None) -> None:
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [tokens, hidden_size]")
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}, expected {' or '.join(map(str, DTYPES))}")
    if w_up.dim() != 2:
        raise ValueError(
            f"w_up has shape {tuple(w_up.shape)}, expected [intermediate_size, hidden_size]"
        )
    hidden_size, intermediate_size = x.shape[1], w_up.shape[0]
    if hidden_size % 16 or hidden_size == 0:
        raise ValueError(f"x has hidden_size={hidden_size}, expected a multiple of 16")
    if not 1 <= intermediate_size <= MAX_COLUMNS:
        raise ValueError(
            f"w_up has intermediate_size={intermediate_size}, expected 1 to {MAX_COLUMNS}"
        )
    if w_gate is None and b_gate is not None:
        raise ValueError("b_gate is given without w_gate; the bias of a non-gated layer is b_up")
    shape = intermediate_size, hidden_size
    expected = dict(
        w_gate=shape,
        w_up=shape,
        w_down=shape[::-1],
        b_gate=shape[:1],
        b_up=shape[:1],
        b_down=shape[1:],
    )
    given = dict(w_gate=w_gate, w_up=w_up, w_down=w_down, b_gate=b_gate, b_up=b_up, b_down=b_down)
    for name, tensor in given.items():
        if tensor is None:
            continue
        check_tensor(name, tensor, expected[name], x.dtype)
        if type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, expected a plain tensor, such as full_tensor() gives"
            )
        if tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device} and x on {x.device}; expected one device"
            )
        if not (tensor.t() if name == "w_down" else tensor).is_contiguous():
            wanted = "(1, hidden_size)" if name == "w_down" else "those of a contiguous tensor"
            raise ValueError(f"{name} has strides {tensor.stride()}, expected {wanted}")
    if activity is not None and (activity.dtype, tuple(activity.shape)) != (torch.int64, (4,)):
        raise ValueError(
            f"activity is {activity.dtype} {tuple(activity.shape)}, expected torch.int64 (4,)"
        )
    if activity is not None and activity.device != x.device:
        raise ValueError(
            f"activity is on {activity.device} and x on {x.device}; expected one device"
        )


def prepare(x: Tensor) -> Tensor:
    """x contiguous and aligned. Raises ValueError where there is no GPU for it."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "x is on cpu, expected a GPU (or TRITON_INTERPRET=1, set before the kernels are imported)"
        )
    return aligned(x.contiguous())


def aligned(tensor: Tensor | None) -> Tensor | None:
    """The tensor, copied where it begins at an address that tensor descriptors do not accept."""
    return tensor.clone() if tensor is not None and tensor.data_ptr() % 16 else tensor


def _run(path, x, w_gate, w_up, w_down, b_gate, b_up, b_down, **options) -> Tensor:
    check_tensors(x, w_gate, w_up, w_down, b_gate, b_up, b_down, options.get("activity"))
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    x, w_gate, w_up = prepare(x), aligned(w_gate), aligned(w_up)
    # Triton launches on the current device, which need not be that of x.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        return path(x, w_gate, w_up, w_down.t(), b_gate, b_up, b_down, **options)


@torch.library.custom_op("twell::ffn_rowwise", mutates_args=())
def ffn_rowwise(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    compression: int = 1,
) -> Tensor:
    """The layer by rows: each token's active neurons, one after the other.

    With `compression` 1 these are listed whole, which is the fastest. 2, 4, 8 and 16 read TwELL as the paper's gate packs
    it, with tiles of 256 neurons and 256 / `compression` words; tiles that overflow are computed again, densely, in
    the same launch. Shapes, dtypes and errors: see the module. Only g is rounded on the way; u and h stay in
    fp32. Paper: App. A.1.
    """
    return _run(rowwise.ffn, x, w_gate, w_up, w_down, b_gate, b_up, b_down, compression=compression)


@torch.library.custom_op("twell::ffn_union", mutates_args=())
def ffn_union(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    """The layer by unions of the active neurons of 64 or 128 tokens.

    Shapes, dtypes and errors: see the module; memory: see union.py. g and h are rounded, u is not.
    """
    return _run(union.ffn, x, w_gate, w_up, w_down, b_gate, b_up, b_down)


@torch.library.custom_op("twell::ffn_decode", mutates_args=())
def ffn_decode(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    """The layer for 1 to 64 tokens (more are done 64 at a time).

    Shapes, dtypes and errors: see the module. g and h are rounded, u is not.
    """
    return _run(decode.ffn, x, w_gate, w_up, w_down, b_gate, b_up, b_down)


@ffn_rowwise.register_fake
def _(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None, compression=1):
    if compression not in (1, *COMPRESSIONS):
        raise ValueError(f"compression={compression}, expected 1 or one of {COMPRESSIONS}")
    return _fake(x, w_gate, w_up, w_down, b_gate, b_up, b_down)


@ffn_union.register_fake
@ffn_decode.register_fake
def _fake(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None):
    check_tensors(x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    return x.new_empty(x.shape)


def takes(x: Tensor, intermediate_size: int) -> bool:
    """Whether the operators compute layers of N = `intermediate_size` for an x [M, K] of this device, dtype and K."""
    here = x.is_cuda or (bool(INTERPRETED) and x.device.type == "cpu")
    return here and x.dtype in DTYPES and x.shape[1] % 16 == 0 and intermediate_size <= MAX_COLUMNS


# The sparse ones.
PATHS = {"rowwise": ffn_rowwise, "union": ffn_union, "decode": ffn_decode}


def run(path: str, x: Tensor, *tensors: Tensor | None, activity: Tensor | None = None) -> Tensor:
    """y [M, K] by a path of PATHS or "dense", for x and the six other tensors of the operators; no gradients.

    `activity` (see the module; dense ignores it) is for eager calls: raises ValueError under torch.compile.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors)):
        raise RuntimeError(
            "ops.run computes no gradients, and a tensor requires them; use torch.no_grad() or ops.train"
        )
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        if activity is not None:
            raise ValueError("activity cannot be counted under torch.compile")
        if path != "dense":
            return PATHS[path](x, *tensors)
        check_tensors(x, *tensors)
        return dense.plain(x, *tensors)
    options = {} if activity is None or path == "dense" else {"activity": activity}
    kernels = {"dense": dense.ffn, "rowwise": rowwise.ffn, "union": union.ffn, "decode": decode.ffn}
    return _run(kernels[path], x, *tensors, **options)


def choose(num_tokens: int) -> str:
    """Name of the sparse path for so many tokens: "decode" up to 64, else "union".

    Row-wise computation is an explicit choice: one heavy token holds up its launch.
    """
    return "decode" if num_tokens <= decode.MAX_TOKENS else "union"


def __getattr__(name: str):
    # training_ops imports this module, so its names follow at their first use.
    if name in ("MAX_ENTRIES", "TRAIN_PATHS", "Trained", "train"):
        from twell.kernels import training_ops

        return getattr(training_ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
