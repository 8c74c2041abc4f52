"""The layer as a function of tensors: the entry to the kernels, and the operators of PyTorch.

    sparse_ffn   y by one path, without gradients; `SparseFFN` calls it
    ffn          the public face, `twell.ffn`: any shape and dtype, and dense gradients
    twell::ffn   the operator under both, for torch.compile

training_ops.py has the operators of sparse training. For x [M, K] all paths compute the same y:

    rowwise   any M; weight rows of each token's active neurons (kernels/rowwise.py)
    union     many tokens; products over unions of 64 or 128 tokens (kernels/union.py)
    decode    1 to 512 tokens, more 512 at a time (kernels/decode.py, few.py)
    dense     any M; three matrix products (kernels/dense.py)

    gated       y = (relu(x w_gate^T + b_gate) * (x w_up^T + b_up)) w_down_t + b_down
    non-gated   y = relu(x w_up^T + b_up) w_down_t + b_down             (w_gate is None)

activations.py has the other activations, thresholds and `Weights`. Without a path the number of
tokens decides (`choose`), in compiled code when it runs.

Shapes: w_gate, w_up and w_down_t [N, K] contiguous; b_gate and b_up [N], b_down [K]. K is a
multiple of 16, N at most 65,536, M any number; x may have any strides. All tensors are bf16 or all
fp16, and on one device. Anything else raises ValueError or TypeError with the name of the tensor.
The operators take w_down [K, N] with strides (1, K), as `nn.Linear` names it.

In FP8 (float8.py) w_gate and w_up are float8_e4m3fn with scales s_gate and s_up [N] in fp32; all
else and y are bf16. The kernels quantise x, or x is in float8_e4m3fn with x_scale [M].

Eager calls skip PyTorch's dispatcher, which takes as long as a small layer, and a call that comes
again is a CUDA graph (kernels/replay.py). A dense layer in compiled code is plain PyTorch, which
fuses with its surroundings. Nothing here waits for the device, and the same call gives the same
bits, under torch.compile(fullgraph=True), in CUDA graphs and on any stream. Gradients of twell::ffn
are dense: backward keeps x and the weights alone and computes the layer again.

Non-finite values: a NaN in a row of x reaches this row of y alone. An inf or NaN in the weights of
an inactive neuron does not reach the token, with two exceptions: w_down of a union or decode block
in which another token activates the neuron, and any weight of a dense layer.

Versions. Within a major version of twell, the arguments of `ffn` and of twell::ffn keep their
names, order, defaults and meaning (tests/kernels/test_ffn.py). New arguments come at the end and
have defaults. A change of meaning gets a new operator, twell::ffn_v2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, is_traceable_wrapper_subclass

from twell.sparse import float8, reference
from twell.sparse.activations import Weights, get_activation
from twell.sparse.float8 import FLOAT8
from twell.sparse.formats import MAX_COLUMNS, check_tensor
from twell.sparse.projections import is_transformed

try:
    from twell.kernels import decode, dense, few, replay, rowwise, union
    from twell.kernels.common import DTYPES, INTERPRETED, empty_output, on_device
    from twell.kernels.options import TRACED_TOKENS
except ImportError:  # without the package triton
    PATHS = {}
    ON_CPU = False
else:
    PATHS = {
        "dense": dense.ffn,
        "rowwise": rowwise.ffn,
        "union": union.ffn,
        "decode": decode.ffn,
    }
    ON_CPU = bool(INTERPRETED)  # a plain bool, which torch.compile can read

PLAIN = Tensor, nn.Parameter
MAX_CASES = 4096  # of `_check_once` and `load`; then all are dropped
_CHECKED: set[tuple] = set()
LOADED: set[tuple] = set()


def sparse_ffn(
    x: Tensor,
    weights: Weights,
    path: str | None = None,
    *,
    x_scale: Tensor | None = None,
    activity: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return y [M, K] of x [M, K] by a path of PATHS; no gradients.

    path: None chooses by the number of tokens. activity [4] int64 on x's device: the sparse paths
    add tokens; blocks of 64 consecutive tokens, a part of one counts; active neurons, summed over
    tokens; neurons of each block's union, summed over blocks. out [M, K]: where y goes.

    Raises RuntimeError where a tensor requires gradients, and ValueError or TypeError as the module
    says, and for `activity` under torch.compile.
    """
    tensors = *weights.tensors, x_scale
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors)):
        raise RuntimeError(
            "sparse_ffn computes no gradients, and a tensor requires them; "
            "use torch.no_grad(), twell.ffn or twell.SparseTraining"
        )
    if not is_eager(x):
        if activity is not None and (torch.compiler.is_compiling() or type(x) not in PLAIN):
            raise ValueError("activity cannot be counted under torch.compile")
        y = _traced(x, weights, path, x_scale)
        return y if out is None else out.copy_(y)

    y = _compute(x, weights, known_path(path) or choose(len(x)), x_scale, activity, out)
    if out is not None:  # a launch is no in-place operation of torch, of which autograd knows
        torch.autograd.graph.increment_version(out)
    return y


def _compute(
    x: Tensor,
    weights: Weights,
    path: str,
    x_scale: Tensor | None = None,
    activity: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Check plain tensors, then compute `sparse_ffn`."""
    _check_once(x, weights, x_scale)
    _check_results(x, activity, out)
    if len(x) == 0:
        return empty_output(x) if out is None else out
    x, weights = prepare(x), align_weights(weights)
    with on_device(x):
        if x_scale is None and replay.fits(x):
            y = replay.ffn(PATHS[path], x, weights, activity, out)
            if y is not None:
                return y
        return PATHS[path](x, weights, x_scale, activity=activity, out=out)


def load(x: Tensor, weights: Weights, path: str, *, x_scale: Tensor | None = None) -> None:
    """Compile and load the kernels of a path, once for all such tensors: a capture cannot."""
    tensors = *weights.tensors, *(weights.down_fp8 or ()), x_scale
    places = [t if t is None else t.data_ptr() % 16 for t in tensors]
    case = path, weights.act, *_case(x, weights, x_scale), *places
    if case not in LOADED:
        sparse_ffn(x, weights, path, x_scale=x_scale)
        _remember(LOADED, case)


def choose(num_tokens: int) -> str:
    """The sparse path for so many tokens: "decode" up to 512, else "union".

    "rowwise" has to be named: one heavy token holds up its launch.
    """
    return "decode" if num_tokens <= few.MAX_TOKENS else "union"


def known_path(path: str | None) -> str | None:
    """The path. Raises ValueError for one that does not exist."""
    if path is not None and path not in PATHS:
        raise ValueError(f"path {path!r} is unknown; use one of {', '.join(PATHS)} or None")
    return path


def takes(x: Tensor, intermediate_size: int, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels are here and take x [M, K], as `dtype`, for layers of N neurons."""
    if not PATHS or not (x.is_cuda or (ON_CPU and x.device.type == "cpu")):
        return False
    known = (dtype or x.dtype) in (*DTYPES, FLOAT8)
    fits = x.shape[1] > 0 and x.shape[1] % 16 == 0 and 1 <= intermediate_size <= MAX_COLUMNS
    return known and fits


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


def prepare(x: Tensor) -> Tensor:
    """x contiguous and aligned. Raises ValueError where there is no GPU for it."""
    if not (x.is_cuda or (ON_CPU and x.device.type == "cpu")):
        raise ValueError(
            f"x is on {x.device}, expected a GPU "
            "(or TRITON_INTERPRET=1, set before the kernels are imported)"
        )
    return _align(x.contiguous())


def align_weights(weights: Weights) -> Weights:
    """The weights, copied where they begin at an address that tensor descriptors do not accept."""
    w_gate, w_up = weights.w_gate, weights.w_up
    if w_up.data_ptr() % 16 == 0 and (w_gate is None or w_gate.data_ptr() % 16 == 0):
        return weights
    return weights._replace(w_gate=_align(w_gate), w_up=_align(w_up))


def _align(tensor: Tensor | None) -> Tensor | None:
    return tensor.clone() if tensor is not None and tensor.data_ptr() % 16 else tensor


# --- checks -----------------------------------------------------------------------------------


def check_tensors(
    x: Tensor, weights: Weights, x_scale: Tensor | None = None, *, by_kernels: bool = True
) -> None:
    """Raise ValueError or TypeError for tensors that do not fit together.

    by_kernels: also for types and sizes that the kernels do not take; see the module.
    """
    w_gate, w_up = weights[:2]
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [tokens, hidden_size]")
    in_fp8 = FLOAT8 in (x.dtype, w_up.dtype)
    known = (torch.bfloat16, FLOAT8) if in_fp8 else DTYPES
    if by_kernels and x.dtype not in known:
        raise TypeError(f"x has dtype {x.dtype}, expected {' or '.join(map(str, DTYPES))}")
    if w_up.dim() != 2:
        expected = "[intermediate_size, hidden_size]"
        raise ValueError(f"w_up has shape {tuple(w_up.shape)}, expected {expected}")
    n, k = w_up.shape[0], x.shape[1]
    if by_kernels and (k % 16 or k == 0):
        raise ValueError(f"x has hidden_size={k}, expected a multiple of 16")
    if by_kernels and not 1 <= n <= MAX_COLUMNS:
        raise ValueError(f"w_up has intermediate_size={n}, expected 1 to {MAX_COLUMNS}")
    if w_gate is None and weights.b_gate is not None:
        raise ValueError("b_gate is given without w_gate; the bias of a non-gated layer is b_up")
    rest, first = (torch.bfloat16, FLOAT8) if in_fp8 else (x.dtype, x.dtype)
    shapes = (n, k), (n, k), (n, k), (n,), (n,), (k,), (n,), (n,), x.shape[:1]
    dtypes = first, first, *(rest,) * 4, *(torch.float32,) * 3
    names, tensors = (*Weights._fields[:8], "x_scale"), (*weights.tensors, x_scale)
    for name, tensor, shape, dtype in zip(names, tensors, shapes, dtypes, strict=True):
        if tensor is not None:
            _check_tensor(name, tensor, tuple(shape), dtype, x.device)
    for name, tensor, belongs in (
        ("x_scale", x_scale, x.dtype == FLOAT8),
        ("s_gate", weights.s_gate, in_fp8 and w_gate is not None),
        ("s_up", weights.s_up, in_fp8),
    ):
        if (tensor is not None) != belongs:
            state = "missing" if belongs else "given"
            raise ValueError(
                f"{name} is {state}, and x is {x.dtype}, w_up {w_up.dtype}; scales belong to FP8"
            )


def _check_once(x: Tensor, weights: Weights, x_scale: Tensor | None) -> None:
    """`check_tensors`, whose answer depends on nothing but these properties."""
    if (case := _case(x, weights, x_scale)) not in _CHECKED:
        check_tensors(x, weights, x_scale)
        _remember(_CHECKED, case)


def _case(x: Tensor, weights: Weights, x_scale: Tensor | None) -> tuple:
    tensors = *weights.tensors, x_scale
    given = [t if t is None else (type(t), t.dtype, t.device, t.shape, t.stride()) for t in tensors]
    return x.shape, x.dtype, x.device, *given


def _remember(cases: set[tuple], case: tuple) -> None:
    if len(cases) >= MAX_CASES:
        cases.clear()
    cases.add(case)


def _check_results(x: Tensor, activity: Tensor | None, out: Tensor | None) -> None:
    """Raise ValueError or TypeError for tensors that results cannot be written to."""
    if activity is not None:
        _check_tensor("activity", activity, (4,), torch.int64, x.device)
    if out is not None:
        dtype = torch.bfloat16 if x.dtype == FLOAT8 else x.dtype
        _check_tensor("out", out, tuple(x.shape), dtype, x.device)
        (x_begin, x_end), (begin, end) = _extent(x), _extent(out)
        if begin < x_end and x_begin < end:
            raise ValueError("out shares memory with x, which kernels read while they write out")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and of the byte behind its last."""
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (steps + 1) * tensor.itemsize if tensor.numel() else begin


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    check_tensor(name, tensor, shape, dtype)
    if type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, "
            "expected a plain tensor, such as full_tensor() gives"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and x on {device}; expected one device")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")


# --- operators --------------------------------------------------------------------------------

OPTIONAL = "b_gate", "b_up", "b_down", "x_scale", "s_gate", "s_up"
TENSORS = "x", "w_gate", "w_up", "w_down", *OPTIONAL  # the arguments of operators
SCHEMA = "Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, " + "".join(
    f"Tensor? {name}=None, " for name in OPTIONAL
)


def weights_of(
    activation: str, threshold: float, w_gate, w_up, w_down, *others
) -> tuple[Weights, Tensor | None]:
    """The weights and x_scale of an operator's arguments behind x."""
    act = get_activation(activation, threshold, gated=w_gate is not None, sparse=True)
    b_gate, b_up, b_down, x_scale, s_gate, s_up = *others, *(None,) * (6 - len(others))
    first = w_gate, w_up, w_down.t(), b_gate, b_up, b_down
    return Weights(*first, s_gate, s_up, act=act), x_scale


def _arguments(weights: Weights, x_scale: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operator's arguments behind x."""
    w_gate, w_up, w_down_t, *biases, s_gate, s_up = weights.tensors
    return w_gate, w_up, w_down_t.t(), *biases, x_scale, s_gate, s_up


@torch.library.custom_op(
    "twell::ffn",
    mutates_args=(),
    schema=f"({SCHEMA}*, str activation='relu', float threshold=0.0, str? path=None) -> Tensor",
)
def operator(x, w_gate, *tensors, activation="relu", threshold=0.0, path=None):
    """y by a path of PATHS; None: by the number of tokens."""
    weights, x_scale = weights_of(activation, threshold, w_gate, *tensors)
    return _compute(x, weights, known_path(path) or choose(len(x)), x_scale)


@operator.register_fake
def _(x, w_gate, *tensors, activation="relu", threshold=0.0, path=None):
    weights, x_scale = weights_of(activation, threshold, w_gate, *tensors)
    known_path(path)
    check_tensors(x, weights, x_scale)
    return empty_output(x)


def _save(ctx, inputs, keyword_only_inputs, output) -> None:
    if inputs[2].dtype == FLOAT8:
        raise RuntimeError("FP8 weights have no gradients; use torch.no_grad()")
    ctx.save_for_backward(*inputs[:7])
    options = keyword_only_inputs["activation"], keyword_only_inputs["threshold"]
    ctx.act = get_activation(*options, gated=inputs[1] is not None)


def _differentiate(ctx, dy):
    needs = (*ctx.needs_input_grad, *[False] * 7)[:7]  # torch leaves out defaults at the end
    with torch.enable_grad():
        # Views: gradients stop at the arguments, and do not run on into the caller's graph.
        tensors = [None if tensor is None else tensor.view_as(tensor) for tensor in ctx.saved_tensors]
        y = reference.ffn(*tensors, act=ctx.act)
    wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    computed = iter(torch.autograd.grad(y, wanted, dy, create_graph=torch.is_grad_enabled()))
    return *(next(computed) if need else None for need in needs), None, None, None


operator.register_autograd(_differentiate, setup_context=_save)


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
    others = b_gate, b_up, b_down, x_scale, s_gate, s_up
    weights, _ = weights_of(activation, threshold, w_gate, w_up, w_down, *others)
    check_tensors(x, weights, x_scale)
    return decode.vector_ffn(x.contiguous(), weights, x_scale)


def _traced(x: Tensor, weights: Weights, path: str | None, x_scale: Tensor | None) -> Tensor:
    """`sparse_ffn` where the call is traced or transformed."""
    act, arguments = weights.act, _arguments(weights, x_scale)
    if path == "dense" or is_transformed():
        check_tensors(x, weights, x_scale)
        if weights.s_up is not None:
            return float8.dense(x, weights, x_scale)
        return reference.ffn(x, *arguments[:6], act=act)
    options = {"activation": act.name, "threshold": act.threshold}
    if path == "decode" and _can_trace(x, weights):
        return traced_decode(x, *arguments, **options)
    return operator(x, *arguments, **options, path=path)


def _can_trace(x: Tensor, weights: Weights) -> bool:
    """Whether `traced_decode` takes the tensors: few tokens, quantised where weights are.

    Code for any number of tokens takes the operator: to compare the number would fix it.
    """
    # Not with the module: it loads sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    few_tokens = x.shape[0] >= 1, x.shape[0] <= TRACED_TOKENS
    alike = x.dtype == weights.w_up.dtype
    return alike and x.is_cuda and not ON_CPU and all(map(statically_known_true, few_tokens))


# --- twell.ffn --------------------------------------------------------------------------------


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

    The kernels take bf16 and fp16 on a GPU, K a multiple of 16, N up to 65,536. Without a path the
    layer is computed in torch's operators where they do not, so the same call runs on a CPU and in
    fp32. Under torch.func and forward-mode AD it always is. All tensors have one dtype and one
    device; autocast casts all, as nn.Linear's. Gradients are dense; `SparseFFN` with
    `twell.SparseTraining` has sparse ones.

    Tensor parallelism: for a slice of N of each weight and bias, y is a partial sum, for an
    all-reduce over the ranks. One rank gets b_down.

    Compilation: the number of tokens chooses the path when the operator runs, so torch.compile
    makes one graph for all. `warm_up` compiles the kernels before a CUDA graph is captured.

    Raises ValueError or TypeError with the name of what does not fit, RuntimeError for `out` with
    gradients.
    """
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        given = _cast(x, w_gate, w_up, w_down_t, b_gate, b_up, b_down)
        with torch.autocast(x.device.type, enabled=False):
            return ffn(*given, activation=activation, threshold=threshold, path=path, out=out)
    if x.dim() == 0:
        raise ValueError("x is a single number, expected [..., hidden_size]")
    if w_up.dim() == 0:
        raise ValueError("w_up is a single number, expected [intermediate_size, hidden_size]")
    if out is not None:
        _check_tensor("out", out, tuple(x.shape), x.dtype, x.device)
    act = get_activation(activation, threshold, gated=w_gate is not None, sparse=True)
    weights = Weights(w_gate, w_up, w_down_t, b_gate, b_up, b_down, act=act)
    rows = x.reshape(-1, x.shape[-1])
    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, *weights.tensors, out)
    )
    if out is not None and learns:
        raise RuntimeError("out is given, and a tensor requires gradients; use torch.no_grad()")
    unfit = is_transformed() or (path in (None, "dense") and not takes(rows, len(w_up)))
    if unfit or (path == "dense" and learns):
        check_tensors(rows, weights, by_kernels=False)
        y = reference.ffn(rows, *_arguments(weights, None)[:6], act=act)
        y = y if out is None else out.copy_(y.reshape(out.shape))
    elif learns:
        options = {"activation": act.name, "threshold": act.threshold, "path": path}
        y = operator(rows, *_arguments(weights, None), **options)
    else:
        y = sparse_ffn(rows, weights, path, out=None if out is None else out.view(rows.shape))
    return y.reshape(x.shape) if out is None else out


def _cast(x: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's type; those in fp64 stay, as autocast leaves them."""
    dtype, kept = torch.get_autocast_dtype(x.device.type), torch.float64
    return [t if t is None or t.dtype == kept else t.to(dtype) for t in (x, *tensors)]


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
