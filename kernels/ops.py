"""The layer as a PyTorch operator, twell::ffn, and the dispatch point of its paths.

    rowwise   any M; weight rows of each token's active neurons (rowwise.py)
    union     many tokens; products over unions of 64 or 128 tokens (union.py)
    decode    1 to 512 tokens, more 512 at a time (decode.py, few.py)
    dense     any M; three matrix products (dense.py)

`twell.ffn` (twell/sparse/ops.py) is its public face. training_ops.py has the operators of sparse
training, paper/ops.py the paper's own. For x [M, K] all compute the same y [M, K]:

    gated       y = (relu(x w_gate^T + b_gate) * (x w_up^T + b_up)) w_down^T + b_down
    non-gated   y = relu(x w_up^T + b_up) w_down^T + b_down             (w_gate is None)

twell/sparse/activations.py has the other activations and thresholds. Without a path the operator
decides when it runs (`choose`), so that compiled code serves every number of tokens.

Shapes: w_gate and w_up [N, K] contiguous; w_down [K, N] with strides (1, K), so that w_down.t() is
contiguous; b_gate and b_up [N], b_down [K]. K is a multiple of 16, N at most 65,536, M any number;
x may have any strides. All tensors are bf16 or all fp16, and on one device. The operators raise
ValueError or TypeError for anything else, with the name of the tensor.

In FP8 (twell.sparse.float8) w_gate and w_up are float8_e4m3fn, with scales s_gate and s_up [N] in
fp32 behind the other tensors; the rest and y are bf16. x is quantised by the kernels, or is given
in float8_e4m3fn with x_scale [M].

`run` is the dispatch point: a path by name. Eagerly it calls the kernels without
PyTorch's dispatcher, which takes as long as a small layer. The sparse paths then add to `activity`
[4] int64 on x's device, if given: tokens; blocks of 64 consecutive tokens, a part of one counts;
active neurons, summed over tokens; neurons of each block's union, summed over blocks. Compiled,
a dense layer is plain PyTorch, which fuses with its surroundings.

The operator keeps no state and never waits for the device. The same call gives the same bits. It
works under torch.compile(fullgraph=True), in CUDA graphs and on any stream. Its gradients are
dense: backward keeps x and the weights alone and computes the layer again in torch's operators
(reference.gradients). Those of FP8 raise.

Non-finite values: a NaN in a row of x reaches this row of y alone. An inf or NaN in the weights of
an inactive neuron does not reach the token, with two exceptions: w_down of a union or decode block
in which another token activates the neuron, and any weight of a dense layer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _get_current_dispatch_mode, is_traceable_wrapper_subclass

from twell.kernels import decode, dense, few, replay, rowwise, union
from twell.kernels.common import DTYPES, INTERPRETED, Layer, empty_output, on_device
from twell.kernels.float8 import quantize
from twell.kernels.launch import MAX_CASES
from twell.kernels.options import TRACED_TOKENS
from twell.sparse import float8, reference
from twell.sparse.activations import RELU, Activation, get_activation
from twell.sparse.formats import MAX_COLUMNS, check_tensor
from twell.sparse.projections import is_transformed

PLAIN = Tensor, nn.Parameter
FUNCTIONS = {"dense": dense.ffn, "rowwise": rowwise.ffn, "union": union.ffn, "decode": decode.ffn}

COMPILED = not INTERPRETED  # a plain bool, which torch.compile can read
_CHECKED: set[tuple] = set()  # the last cases of `_check_once`


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
) -> None:
    """Raises ValueError or TypeError for tensors that the kernels do not take; see the module."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [tokens, hidden_size]")
    in_fp8 = float8.FLOAT8 in (x.dtype, w_up.dtype)
    if x.dtype not in ((torch.bfloat16, float8.FLOAT8) if in_fp8 else DTYPES):
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
    rest, first = (torch.bfloat16, float8.FLOAT8) if in_fp8 else (x.dtype, x.dtype)
    for name, tensor, shape, dtype in (
        ("w_gate", w_gate, (n, k), first),
        ("w_up", w_up, (n, k), first),
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
        ("x_scale", x_scale, x.dtype == float8.FLOAT8),
        ("s_gate", s_gate, gate_in_fp8),
        ("s_up", s_up, in_fp8),
    ):
        if (tensor is not None) != belongs:
            given = "missing" if belongs else "given"
            raise ValueError(
                f"{name} is {given}, and x is {x.dtype}, w_up {w_up.dtype}; scales belong to FP8"
            )


def _check_once(x: Tensor, *tensors: Tensor | None) -> None:
    """`check_tensors`, whose answer depends on nothing but these properties."""
    given = [t if t is None else (type(t), t.dtype, t.device, t.shape, t.stride()) for t in tensors]
    case = x.shape, x.dtype, x.device, *given
    if case not in _CHECKED:
        check_tensors(x, *tensors)
        if len(_CHECKED) >= MAX_CASES:
            _CHECKED.clear()
        _CHECKED.add(case)


def _check_results(x: Tensor, activity: Tensor | None, out: Tensor | None) -> None:
    """Raise ValueError or TypeError for tensors that results cannot be written to."""
    if activity is not None:
        given = activity.dtype, tuple(activity.shape)
        if given != (torch.int64, (4,)):
            raise ValueError("activity is {} {}, expected torch.int64 (4,)".format(*given))
        _check_device("activity", activity, x.device)
    if out is not None:
        dtype = torch.bfloat16 if x.dtype == float8.FLOAT8 else x.dtype
        check_tensor("out", out, tuple(x.shape), dtype)
        _check_storage("out", out, x.device)
        (x_begin, x_end), (begin, end) = _extent(x), _extent(out)
        if begin < x_end and x_begin < end:
            raise ValueError("out shares memory with x, which kernels read while they write out")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and of the byte behind its last."""
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (steps + 1) * tensor.itemsize if tensor.numel() else begin


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
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        raise ValueError(
            f"x is on {x.device}, expected a GPU "
            "(or TRITON_INTERPRET=1, set before the kernels are imported)"
        )
    return _aligned(x.contiguous())


def to_layer(
    w_gate, w_up, w_down, *biases_and_scales: Tensor | None, act: Activation = RELU
) -> Layer:
    """The tensors as the kernels read them."""
    return Layer(_aligned(w_gate), _aligned(w_up), w_down.t(), *biases_and_scales, act=act)


def _aligned(tensor: Tensor | None) -> Tensor | None:
    """The tensor, copied where it begins at an address that tensor descriptors do not accept."""
    return tensor.clone() if tensor is not None and tensor.data_ptr() % 16 else tensor


def launch(ffn, x: Tensor, *tensors: Tensor | None, act: Activation = RELU, **options) -> Tensor:
    """y [M, K] by the function `ffn` of a kernel file, after all checks."""
    _check_once(x, *tensors)
    _check_results(x, options.get("activity"), options.get("out"))
    if x.shape[0] == 0:
        return options.get("out", empty_output(x))
    # Optional tensors at the end may be left out.
    *weights, x_scale, s_gate, s_up = *tensors, *(None,) * (9 - len(tensors))
    x, layer = prepare(x), to_layer(*weights, s_gate, s_up, act=act)
    with on_device(x):
        if s_up is not None and x_scale is None:
            x, x_scale = quantize(x)
        if x_scale is not None:
            options["x_scale"] = x_scale
        return ffn(x, layer, **options)


def fake(x, *tensors: Tensor | None) -> Tensor:
    """An empty y, after all checks of shapes."""
    check_tensors(x, *tensors)
    return empty_output(x)


OPTIONAL = "b_gate", "b_up", "b_down", "x_scale", "s_gate", "s_up"


@torch.library.custom_op(
    "twell::ffn",
    mutates_args=(),
    schema="(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, "
    + "".join(f"Tensor? {name}=None, " for name in OPTIONAL)
    + "*, str activation='relu', float threshold=0.0, str? path=None) -> Tensor",
)
def operator(x, w_gate, *tensors, activation="relu", threshold=0.0, path=None):
    """y by a path of FUNCTIONS; None: by the number of tokens."""
    act = get_activation(activation, threshold, gated=w_gate is not None, sparse=True)
    path = known_path(path) or choose(x.shape[0])
    return _run(path, x, w_gate, *tensors, act=act)


@operator.register_fake
def _(x, w_gate, *tensors, activation="relu", threshold=0.0, path=None):
    get_activation(activation, threshold, gated=w_gate is not None, sparse=True)
    known_path(path)
    return fake(x, w_gate, *tensors)


@torch.library.triton_op("twell::decode", mutates_args=())
def traced_decode(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    x_scale: Tensor | None = None,
    s_gate: Tensor | None = None,
    s_up: Tensor | None = None,
    *,
    activation: str = "relu",
    threshold: float = 0.0,
) -> Tensor:
    """y of decode.py's two launches, which code of torch.compile makes without an operator.

    A call of an operator waits for Python longer than these kernels take. few.py has no such form:
    its descriptors and overlapping launches cannot be traced.
    """
    tensors = w_gate, w_up, w_down, b_gate, b_up, b_down
    check_tensors(x, *tensors, x_scale, s_gate, s_up)
    act = get_activation(activation, threshold, gated=w_gate is not None, sparse=True)
    layer = Layer(*tensors[:2], w_down.t(), *tensors[3:], s_gate, s_up, act=act)
    return decode.vector_ffn(x.contiguous(), layer, x_scale)


def is_eager(x: Tensor) -> bool:
    """Whether nothing traces, transforms or watches the call, so that it needs no operator."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and torch._C._get_tracing_state() is None
        and not is_transformed()
        and not torch._C._functorch.is_legacy_batchedtensor(x)
        and _get_current_dispatch_mode() is None
    )


def _can_trace(x: Tensor, *tensors: Tensor | None) -> bool:
    """Whether `traced_decode` takes the tensors: few tokens, quantised where weights are.

    Code for any number of tokens takes the operator: to compare the number would fix it.
    """
    few_tokens = x.shape[0] >= 1, x.shape[0] <= TRACED_TOKENS
    alike = x.dtype == tensors[1].dtype
    return alike and x.is_cuda and COMPILED and all(map(statically_known_true, few_tokens))


def known_path(path: str | None) -> str | None:
    """The path. Raises ValueError for one that does not exist."""
    if path is not None and path not in FUNCTIONS:
        raise ValueError(f"path {path!r} is unknown; use one of {', '.join(FUNCTIONS)} or None")
    return path


def _save(ctx, inputs, keyword_only_inputs, output) -> None:
    if inputs[2].dtype == float8.FLOAT8:
        raise RuntimeError("FP8 weights have no gradients; use torch.no_grad()")
    ctx.save_for_backward(*inputs[:7])
    gated = inputs[1] is not None
    options = keyword_only_inputs["activation"], keyword_only_inputs["threshold"]
    ctx.act = get_activation(*options, gated=gated)


def _differentiate(ctx, dy):
    needs = ctx.needs_input_grad[:7]
    gradients = reference.gradients(*ctx.saved_tensors, dy=dy, needs=needs, act=ctx.act)
    return *gradients, None, None, None


operator.register_autograd(_differentiate, setup_context=_save)
# The operator by each sparse path.
PATHS = {path: partial(operator, path=path) for path in FUNCTIONS if path != "dense"}


def takes(x: Tensor, intermediate_size: int, dtype: torch.dtype | None = None) -> bool:
    """Whether the operators take x [M, K], as `dtype`, for layers of N neurons."""
    here = x.is_cuda or (bool(INTERPRETED) and x.device.type == "cpu")
    known = (dtype or x.dtype) in (*DTYPES, float8.FLOAT8)
    fits = x.shape[1] > 0 and x.shape[1] % 16 == 0 and 1 <= intermediate_size <= MAX_COLUMNS
    return here and known and fits


def run(
    path: str | None,
    x: Tensor,
    *tensors: Tensor | None,
    activity: Tensor | None = None,
    act: Activation = RELU,
    down: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y [M, K] by a path of FUNCTIONS, for the tensors of the operator; no gradients.

    path: None chooses by the number of tokens. `activity`: see the module; dense ignores it.
    `down`: w_down in FP8, for the dense path alone (dense.py). `out` [M, K]: where y goes. Raises
    ValueError for `activity` under torch.compile, RuntimeError where a tensor requires gradients.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors)):
        raise RuntimeError(
            "ops.run computes no gradients, and a tensor requires them; "
            "use torch.no_grad(), twell.ffn or training_ops.train"
        )
    if not is_eager(x):
        if activity is not None and (torch.compiler.is_compiling() or type(x) not in PLAIN):
            raise ValueError("activity cannot be counted under torch.compile")
        given = {"activation": act.name, "threshold": act.threshold}
        if path == "dense" or is_transformed():
            check_tensors(x, *tensors)
            if tensors[1].dtype == float8.FLOAT8:
                y = float8.dense(x, *tensors, act=act, down=down)
            else:
                y = reference.ffn(x, *tensors, act=act)
        elif path == "decode" and _can_trace(x, *tensors):
            y = traced_decode(x, *tensors, **given)
        else:
            y = operator(x, *tensors, **given, path=path)
        return y if out is None else out.copy_(y)
    path = known_path(path) or choose(len(x))
    options = {"down": down} if path == "dense" else {"activity": activity}
    options = {name: value for name, value in (options | {"out": out}).items() if value is not None}
    y = _run(path, x, *tensors, act=act, **options)
    if out is not None:  # a launch is no in-place operation of torch, of which autograd knows
        torch.autograd.graph.increment_version(out)
    return y


def _run(path: str, x: Tensor, *tensors: Tensor | None, act: Activation, **options) -> Tensor:
    """`run` in a plain call, by a CUDA graph where it came with the same addresses before.

    The options are those of the path's function that are given.
    """
    ffn = FUNCTIONS[path]
    if path == "dense" or INTERPRETED or not replay.fits(x):
        return launch(ffn, x, *tensors, act=act, **options)
    if "out" not in options:
        options["out"] = empty_output(x)
    given = x, *tensors, *options.values()
    case = [t if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride()) for t in given]
    key = path, act.name, act.threshold, *options, *case
    replay.replay(key, x.device, lambda: launch(ffn, x, *tensors, act=act, **options))
    return options["out"]


def choose(num_tokens: int) -> str:
    """The sparse path for so many tokens: "decode" up to 512, else "union".

    "rowwise" has to be named: one heavy token holds up its launch.
    """
    return "decode" if num_tokens <= few.MAX_TOKENS else "union"
