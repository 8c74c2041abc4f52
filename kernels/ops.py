"""The layer as PyTorch operators for inference: one for each sparse path, and one dispatch point.

    twell::ffn_rowwise   any M; weight rows of each token's active neurons (rowwise.py)
    twell::ffn_union     many tokens; products over unions of 64 or 128 tokens (union.py)
    twell::ffn_decode    1 to 64 tokens, more 64 at a time; each weight row read once (decode.py)

training_ops.py has the operators with gradients, paper/ops.py the paper's own. For x [M, K] all
compute the same y [M, K]:

    gated       y = (relu(x w_gate^T + b_gate) * (x w_up^T + b_up)) w_down^T + b_down
    non-gated   y = relu(x w_up^T + b_up) w_down^T + b_down             (w_gate is None)

Shapes: w_gate and w_up [N, K] contiguous; w_down [K, N] with strides (1, K), so that w_down.t() is
contiguous; b_gate and b_up [N], b_down [K]. K is a multiple of 16, N at most 65,536, M any number;
x may have any strides. All tensors are bf16 or all fp16, and on one device. The operators raise
ValueError or TypeError for anything else, with the name of the tensor.

In FP8 (twell.sparse.float8) x, w_gate and w_up are float8_e4m3fn, with scales x_scale [M], s_gate
and s_up [N] in fp32 behind the other tensors; the rest and y are bf16.

`run` is the dispatch point: a path by name, or "dense". Eagerly it calls the kernels without
PyTorch's dispatcher, which takes as long as a small layer. The sparse paths then add to `activity`
[4] int64 on x's device, if given: tokens; blocks of 64 consecutive tokens, a part of one counts;
active neurons, summed over tokens; neurons of each block's union, summed over blocks. Compiled,
a dense layer is plain PyTorch, which fuses with its surroundings.

The operators keep no state and never wait for the device. The same call gives the same bits. They
work under torch.compile(fullgraph=True), in CUDA graphs and on any stream. They have no gradients:
backward() raises.

Non-finite values: a NaN in a row of x reaches this row of y alone. An inf or NaN in the weights of
an inactive neuron does not reach the token, with two exceptions: w_down of a union or decode block
in which another token activates the neuron, and any weight of a dense layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twell.kernels import decode, dense, rowwise, union
from twell.kernels.common import DTYPES, INTERPRETED, Layer, empty_output, on_device
from twell.sparse import float8, reference
from twell.sparse.formats import MAX_COLUMNS, check_tensor

PLAIN = Tensor, nn.Parameter
FUNCTIONS = {"dense": dense.ffn, "rowwise": rowwise.ffn, "union": union.ffn, "decode": decode.ffn}


def check_tensors(
    x,
    w_gate,
    w_up,
    w_down,
    b_gate=None,
    b_up=None,
    b_down=None,
    x_scale=None,
    s_gate=None,
    s_up=None,
    *,
    activity=None,
) -> None:
    """Raises ValueError or TypeError for tensors that the kernels do not take; see the module."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [tokens, hidden_size]")
    in_fp8 = x.dtype == float8.FLOAT8
    if x.dtype not in DTYPES and not in_fp8:
        raise TypeError(f"x has dtype {x.dtype}, expected {' or '.join(map(str, DTYPES))}")
    if w_up.dim() != 2:
        expected = "[intermediate_size, hidden_size]"
        raise ValueError(f"w_up has shape {tuple(w_up.shape)}, expected {expected}")
    n, k = w_up.shape[0], x.shape[1]
    if k % 16 or k == 0:
        raise ValueError(f"x has hidden_size={k}, expected a multiple of 16")
    if not 1 <= n <= MAX_COLUMNS:
        raise ValueError(f"w_up has intermediate_size={n}, expected 1 to {MAX_COLUMNS}")
    if w_gate is None and b_gate is not None:
        raise ValueError("b_gate is given without w_gate; the bias of a non-gated layer is b_up")
    rest = torch.bfloat16 if in_fp8 else x.dtype
    for name, tensor, shape, dtype in (
        ("w_gate", w_gate, (n, k), x.dtype),
        ("w_up", w_up, (n, k), x.dtype),
        ("w_down", w_down, (k, n), rest),
        ("b_gate", b_gate, (n,), rest),
        ("b_up", b_up, (n,), rest),
        ("b_down", b_down, (k,), rest),
        ("x_scale", x_scale, x.shape[:1], torch.float32),
        ("s_gate", s_gate, (n,), torch.float32),
        ("s_up", s_up, (n,), torch.float32),
    ):
        if tensor is not None:
            check_tensor(name, tensor, tuple(shape), dtype)
            _check_storage(name, tensor, x.device)
    gate_in_fp8 = in_fp8 and w_gate is not None
    for name, tensor, belongs in (
        ("x_scale", x_scale, in_fp8),
        ("s_gate", s_gate, gate_in_fp8),
        ("s_up", s_up, in_fp8),
    ):
        if (tensor is not None) != belongs:
            given = "missing" if belongs else "given"
            raise ValueError(f"{name} is {given}, and x is {x.dtype}; scales belong to FP8 weights")
    if activity is not None:
        given = activity.dtype, tuple(activity.shape)
        if given != (torch.int64, (4,)):
            raise ValueError("activity is {} {}, expected torch.int64 (4,)".format(*given))
        _check_device("activity", activity, x.device)


def _check_storage(name: str, tensor: Tensor, device: torch.device) -> None:
    if type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, "
            "expected a plain tensor, such as full_tensor() gives"
        )
    _check_device(name, tensor, device)
    if not (tensor.t() if name == "w_down" else tensor).is_contiguous():
        expected = "(1, hidden_size)" if name == "w_down" else "those of a contiguous tensor"
        raise ValueError(f"{name} has strides {tensor.stride()}, expected {expected}")


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and x on {device}; expected one device")


def prepare(x: Tensor) -> Tensor:
    """x contiguous and aligned. Raises ValueError where there is no GPU for it."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "x is on cpu, expected a GPU "
            "(or TRITON_INTERPRET=1, set before the kernels are imported)"
        )
    return _aligned(x.contiguous())


def to_layer(w_gate, w_up, w_down, *biases_and_scales: Tensor | None) -> Layer:
    """The tensors as the kernels read them."""
    return Layer(_aligned(w_gate), _aligned(w_up), w_down.t(), *biases_and_scales)


def _aligned(tensor: Tensor | None) -> Tensor | None:
    """The tensor, copied where it begins at an address that tensor descriptors do not accept."""
    return tensor.clone() if tensor is not None and tensor.data_ptr() % 16 else tensor


def launch(ffn, x: Tensor, *tensors: Tensor | None, **options) -> Tensor:
    """y [M, K] by the function `ffn` of a kernel file, after all checks."""
    check_tensors(x, *tensors, activity=options.get("activity"))
    if x.shape[0] == 0:
        return empty_output(x)
    # Optional tensors at the end may be left out.
    *weights, x_scale, s_gate, s_up = *tensors, *(None,) * (9 - len(tensors))
    x, layer = prepare(x), to_layer(*weights, s_gate, s_up)
    if x_scale is not None:
        options["x_scale"] = x_scale
    with on_device(x):
        return ffn(x, layer, **options)


def fake(x, *tensors: Tensor | None) -> Tensor:
    """An empty y, after all checks of shapes."""
    check_tensors(x, *tensors)
    return empty_output(x)


def _register(path: str) -> torch.library.CustomOpDef:
    """Registers twell::ffn_`path`."""

    def compute(*tensors):
        return launch(FUNCTIONS[path], *tensors)

    optional = "b_gate b_up b_down x_scale s_gate s_up".split()
    optional = ", ".join(f"Tensor? {name}=None" for name in optional)
    schema = f"(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, {optional}) -> Tensor"
    name = f"twell::ffn_{path}"
    operator = torch.library.custom_op(name, compute, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


# The operators of the sparse paths.
PATHS = {path: _register(path) for path in ("rowwise", "union", "decode")}


def takes(x: Tensor, intermediate_size: int) -> bool:
    """Whether the operators take x [M, K] for layers of N = `intermediate_size` neurons."""
    here = x.is_cuda or (bool(INTERPRETED) and x.device.type == "cpu")
    known = x.dtype in DTYPES or x.dtype == float8.FLOAT8
    return here and known and x.shape[1] % 16 == 0 and intermediate_size <= MAX_COLUMNS


def run(path: str, x: Tensor, *tensors: Tensor | None, activity: Tensor | None = None) -> Tensor:
    """y [M, K] by a path of PATHS or "dense", for the tensors of the operators; no gradients.

    `activity`: see the module; dense ignores it. Raises ValueError for `activity` under
    torch.compile, RuntimeError where a tensor requires gradients.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors)):
        raise RuntimeError(
            "ops.run computes no gradients, and a tensor requires them; "
            "use torch.no_grad() or training_ops.train"
        )
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        if activity is not None:
            raise ValueError("activity cannot be counted under torch.compile")
        if path != "dense":
            return PATHS[path](x, *tensors)
        check_tensors(x, *tensors)
        return float8.dense(x, *tensors) if x.dtype == float8.FLOAT8 else reference.ffn(x, *tensors)
    options = {} if activity is None or path == "dense" else {"activity": activity}
    return launch(FUNCTIONS[path], x, *tensors, **options)


def choose(num_tokens: int) -> str:
    """The sparse path for so many tokens: "decode" up to 64, else "union".

    "rowwise" has to be named: one heavy token holds up its launch.
    """
    return "decode" if num_tokens <= decode.MAX_TOKENS else "union"
