"""The sparse feed-forward layer, and the one place that chooses how it is computed.

A layer has hidden size K and intermediate size N. With M tokens x [M, K]:

    gated:      g = act(x Wg)   u = x Wu   h = u * g   y = h Wd
    non-gated:  h = act(x Wu)              y = h Wd

With ReLU, g (non-gated: h) is zero for most neurons once the model is trained with an L1 term on h;
a neuron is *active* for a token where that entry is `!= 0`. Four backends compute the same y:

    dense      three matrix products; works for every activation
    reference  the sparse steps in plain torch (twell/sparse/reference.py): exact and slow
    triton     the sparse steps as GPU kernels (kernels/), in bf16 or fp16; where gradients are asked for it computes
               densely, unless twell.SparseTraining has the layer train sparsely
    auto       the fastest for the number of tokens and the activity that the layer sees (twell/sparse/plan.py): dense or one
               of triton's paths; dense wherever triton cannot be used

Sparse backends read the weights of the projections. They may where a projection is an `nn.Linear` and nothing else; with
an adapter, a hook, a parametrisation or a quantised weight it is called, and the layer computes densely.

Gradients on the sparse path need buffers whose size is chosen before the activity is known. That they were large enough
is for twell/sparse/training.py to check, once a step; without it gradients are always computed densely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from twell.sparse import reference
from twell.sparse.plan import DEPENDS_ON, POWERS, Calibration, Chooser

if TYPE_CHECKING:
    from twell.kernels.ops import Trained

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu}


def backend_status() -> dict[str, str | None]:
    """Return for each backend None when it can be used here, else the reason why not."""
    return {
        "dense": None,
        "reference": None,
        "triton": _why_no_triton(),
        "auto": None,
    }


def _why_no_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return "the package triton is not installed"
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        return "no GPU was found (TRITON_INTERPRET=1 runs the kernels on the CPU, for tests)"
    return None


class ActivityStats:
    """Exact counters of a layer's activity, kept on the layer's device without synchronising with it.

    `neuron_counts` [N] int64: tokens for which each neuron was active. `histogram` [N + 1] int64:
    tokens by their number of active neurons, so that mean, maximum and every percentile are exact.
    The counters appear on the device of the first recorded tokens. They are no buffers of the module:
    DistributedDataParallel would overwrite them with those of the first process.
    """

    def __init__(self, intermediate_size: int):
        self.intermediate_size = intermediate_size
        self.neuron_counts: Tensor | None = None
        self.histogram: Tensor | None = None

    @torch.no_grad()
    def record(self, active: Tensor, token_mask: Tensor | None = None) -> None:
        """Count tokens: `active` [M, N] bool, `token_mask` [M], zero for the tokens to leave out (padding)."""
        if token_mask is not None:
            active = active & (token_mask.reshape(-1, 1) != 0)
        self.add(active.sum(0), active.sum(1), token_mask)

    @torch.no_grad()
    def add(
        self, neuron_counts: Tensor, token_counts: Tensor, token_mask: Tensor | None = None
    ) -> None:
        """Add counts: `neuron_counts` [N] of the tokens that `token_mask` keeps, `token_counts` [M] of all.

        The counters are replaced, not written, so that who holds the old ones can put them back.
        """
        device = neuron_counts.device
        if self.neuron_counts is None or self.neuron_counts.device != device:
            self.neuron_counts = torch.zeros(
                self.intermediate_size, dtype=torch.int64, device=device
            )
            self.histogram = torch.zeros(
                self.intermediate_size + 1, dtype=torch.int64, device=device
            )
        if token_mask is None:
            keep = torch.ones(token_counts.shape[0], dtype=torch.int64, device=device)
        else:
            keep = (token_mask.reshape(-1) != 0).to(torch.int64)
        self.neuron_counts = self.neuron_counts + neuron_counts
        self.histogram = self.histogram.scatter_add(0, token_counts.to(torch.int64), keep)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return (neuron_counts, histogram) and start again from zero."""
        zeros = torch.zeros(2 * self.intermediate_size + 1, dtype=torch.int64)
        taken = (self.neuron_counts, self.histogram)
        if self.neuron_counts is None:
            taken = (zeros[: self.intermediate_size], zeros[self.intermediate_size :])
        self.neuron_counts = self.histogram = None
        return taken


def summarize_activity(neuron_counts: Tensor, histogram: Tensor) -> dict[str, float]:
    """Return tokens, active neurons per token (mean, p99, max), and the fraction of neurons never active.

    `neuron_counts` [N] and `histogram` [N + 1] as ActivityStats counts them. p99 is the smallest
    number of active neurons that at least 99% of the tokens do not exceed. NaN when no token was counted.
    """
    tokens = int(histogram.sum())
    if tokens == 0:
        return dict.fromkeys(("mean", "p99", "max", "dead"), float("nan")) | {"tokens": 0}
    number = torch.arange(len(histogram), device=histogram.device)
    cumulative = histogram.cumsum(0)
    return {
        "tokens": tokens,
        "mean": float((number * histogram).sum() / tokens),
        "p99": int((cumulative * 100 < 99 * tokens).sum()),
        "max": int(number[histogram > 0].max()),
        "dead": float((neuron_counts == 0).double().mean()),
    }


class _ReferenceTraining(torch.autograd.Function):
    """The sparse training step in plain torch: (y, per-token L1 of h, active entries)."""

    @staticmethod
    def forward(ctx, *arguments):
        y, l1, _, saved = reference.ffn_forward(*arguments)
        pattern = saved.h if saved.g is None else saved.g
        active = pattern.unpack() != 0
        ctx.mark_non_differentiable(active)
        ctx.save_for_backward(*arguments)
        ctx.entries = saved.g, saved.u, saved.h  # neither inputs nor outputs
        return y, l1, active

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dl1, _):
        gradients = reference.ffn_backward(
            reference.Saved(*ctx.saved_tensors, *ctx.entries), dy, dl1
        )
        return tuple(
            g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=True)
        )


# What hooks a module has; a layer and the module that it replaces share these.
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)


def _is_plain(part: nn.Module | None) -> bool:
    """What `_why_called` finds of nearly every projection, in a microsecond: every call of a layer asks it."""
    if type(part) is not nn.Linear:
        return part is None
    own = part.__dict__
    weight, bias = own["_parameters"].get("weight"), own["_parameters"].get("bias")
    hooks = (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )
    plain = type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)
    return plain and not hooks and "forward" not in own


def _why_called(part: nn.Module, *, sharded: bool = False) -> str | None:
    """Why a projection has to be called; None where reading its weight and bias gives the same.

    `sharded`: the weight may be a DTensor, as FSDP has it until it gathers it for a forward pass.
    """
    if type(part) is not nn.Linear:
        return f"a {type(part).__module__}.{type(part).__qualname__}"
    if "forward" in part.__dict__ and not _only_moves_inputs(part):
        return "an nn.Linear with a forward of its own"
    if (
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
    ):
        return "an nn.Linear with hooks"
    for name in ("weight", "bias"):
        tensor = getattr(part, name)
        if tensor is not None and type(tensor) not in (nn.Parameter, Tensor):
            if sharded and type(tensor).__name__ == "DTensor":
                continue
            return f"an nn.Linear whose {name} is a {type(tensor).__module__}.{type(tensor).__qualname__}"
    return None


def _only_moves_inputs(part: nn.Module) -> bool:
    """Whether the module's own forward is Accelerate's for a device map, with the weights at home."""
    from accelerate.hooks import AlignDevicesHook

    hook, forward = part.__dict__.get("_hf_hook"), part.__dict__.get("_old_forward")
    return (
        type(hook) is AlignDevicesHook
        and not hook.offload
        and getattr(forward, "__func__", None) is nn.Linear.forward
    )


class SparseFFN(nn.Module):
    """Feed-forward layer with sparse activations, gated or not; parameters are named as in Llama's MLP.

    Args:
        hidden_size: K, width of input and output.
        intermediate_size: N, number of neurons.
        gated: y = (act(x Wg) * (x Wu)) Wd, else y = act(x Wu) Wd.
        activation: "relu", or "silu" for comparison (dense backend only: nothing is zero after SiLU).
        bias: whether the two or three projections have biases.
        backend: "dense", "reference", "triton" or "auto".

    Input [..., K], output [..., K]. After a forward pass with `collect_l1` set (always on in training mode)
    `l1` holds sum_n |h| for each token, fp32, of the input's leading shape, part of the autograd graph;
    with `record` set, `stats` has counted the pass, without the tokens where `token_mask` [...] is zero. With
    `silenced` set the output is zero; neurons that `muted` [N] marks add nothing to it. Both still count in `l1` and `stats`.

    The backend "auto" goes by `plan`, pairs (most tokens, path), which follows from `calibration` (measured times; None:
    those of an H200) and from `observed`, the layer's newest activity. It counts and plans in ordinary calls; code
    compiled by torch.compile or captured in a CUDA graph keeps to the path of its making (compiled code is compiled
    again for another). So run a batch before, call `observe`, or have a calibration that says what to expect.

    `path` chooses between the paths of the backend "triton": "rowwise", "union", "decode" or "dense"; None, the default,
    goes by the number of tokens. It is "dense" on every sparse backend while `readable` is False: a projection is no plain
    `nn.Linear`, so that the projections are called and nothing is skipped. `repr` says which one, and why.

    With `train_path` set (by twell.SparseTraining, which sees to it that nothing is lost) the backends "triton" and "auto"
    compute gradients sparsely, with room for `capacity` active entries per token. With `watched` set, `needed` is the most
    room that any pass in training mode needed since it was last set to None (int64, on the device).

    Raises ValueError for an activation or backend that does not exist, and RuntimeError for one that
    cannot be used here, with the reason. Paper: the feed-forward block; App. A.1 and B.2.1 for its sparse
    computation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool = True,
        activation: str = "relu",
        bias: bool = False,
        backend: str = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size < 1:
                raise ValueError(f"{name} is {size}; it has to be at least 1")
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}"
            )
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)
        self.stats = ActivityStats(intermediate_size)
        self.collect_l1 = False
        self.record = False
        self.silenced = (
            False  # a switch, not a hook: compiled layers do not see hooks that come later
        )
        self.muted: Tensor | None = None  # bool
        self.token_mask: Tensor | None = None
        self.l1: Tensor | None = None
        self._path: str | None = None
        self.chooser = Chooser(hidden_size, intermediate_size, gated)  # of the auto backend
        self.train_path: str | None = (
            None  # how gradients are computed sparsely: "union" or "hybrid"; None: densely
        )
        self.capacity = 0  # of the buffers of a sparse training pass: entries per token
        self.watched = False  # whether `needed` is kept
        self.needed: Tensor | None = None
        self.replaced: tuple[nn.Module] | None = None  # in a tuple, so that it is no submodule
        self.backend = backend
        self.register_load_state_dict_post_hook(SparseFFN._keep_strides)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "l1": None,
            "needed": None,
        }  # of the last pass, and part of its graph

    @classmethod
    def around(cls, mlp: nn.Module, *, backend: str = "dense") -> SparseFFN:
        """Return a gated ReLU layer that shares the projections and hooks of an MLP with Llama's names; it keeps `mlp`."""
        ffn = cls(mlp.hidden_size, mlp.intermediate_size, device="meta")
        ffn.gate_proj, ffn.up_proj, ffn.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        ffn.backend = backend
        ffn.replaced = (mlp,)
        for name in HOOKS:
            setattr(ffn, name, getattr(mlp, name))
        if "_hf_hook" in mlp.__dict__:
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(ffn, mlp._hf_hook)
        return ffn.train(mlp.training)

    @torch.no_grad()
    def restored(self) -> nn.Module:
        """Return the module that `around` took, now with ReLU, with this layer's projections and hooks as they are."""
        (mlp,) = self.replaced
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = self.gate_proj, self.up_proj, self.down_proj
        mlp.act_fn = nn.ReLU()
        for name in HOOKS:
            setattr(mlp, name, getattr(self, name))
        for parameter in mlp.down_proj.parameters():  # an adapter may stand around the weight
            if parameter.shape == (self.hidden_size, self.intermediate_size):
                parameter.data = parameter.data.contiguous()
        return mlp.train(self.training)

    @property
    def gated(self) -> bool:
        return self.gate_proj is not None

    @property
    def device(self) -> torch.device:
        """That of the first weight that is not offloaded; the CPU where all are."""
        return next((p.device for p in self.parameters() if not p.is_meta), torch.device("cpu"))

    @property
    def backend(self) -> str:
        return self._backend

    @backend.setter
    def backend(self, name: str) -> None:
        status = backend_status()
        if name not in status:
            raise ValueError(f"backend {name!r} is unknown; use one of {', '.join(status)}")
        if status[name] is not None:
            raise RuntimeError(f"backend {name!r} cannot be used: {status[name]}")
        if name != "dense" and self.activation != "relu":
            raise ValueError(
                f"backend {name!r} needs activation 'relu'; this layer has {self.activation!r}"
            )
        self._backend = name
        # Looked up here: torch.compile traces what stands in forward.
        self._has_kernels = name in ("triton", "auto") and status["triton"] is None
        self._keep_strides()

    @property
    def path(self) -> str | None:
        return self._path if self.readable else "dense"

    @path.setter
    def path(self, name: str | None) -> None:
        if name is not None and name not in DEPENDS_ON:
            raise ValueError(
                f"path {name!r} is unknown; use one of {', '.join(DEPENDS_ON)}, or None"
            )
        self._path = name

    @property
    def readable(self) -> bool:
        """Whether reading the weights of the projections gives what calling them does, as sparse backends need."""
        return self._why_dense(sharded=True) is None

    def _why_dense(self, *, sharded: bool = False) -> str | None:
        if _has_any_global_hook():
            return "every module has hooks"
        if not torch.compiler.is_compiling() and all(map(_is_plain, self._modules.values())):
            return None
        for name in ("gate_proj", "up_proj", "down_proj"):
            part = getattr(self, name)
            reason = None if part is None else _why_called(part, sharded=sharded)
            if reason is not None:
                return f"{name} is {reason}"
        return None

    @property
    def calibration(self) -> Calibration | None:
        """Measured times of such layers, for the backend "auto"; ValueError for a calibration of others."""
        return self.chooser.calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        self.chooser.calibration = calibration

    @property
    def observed(self) -> tuple[float, float] | None:
        """Mean active neurons per token and mean union of a block, newest; None when "auto" has seen nothing yet."""
        return self.chooser.observed

    @property
    def plan(self) -> tuple[tuple[int, str], ...]:
        """Pairs (most tokens, path) of the backend "auto"; the last path for any number above too."""
        return self.chooser.plan if self.readable else ((POWERS[-1], "dense"),)

    def observe(self, active: float, union: float, tokens: int = 64) -> None:
        """Plan for this activity: see `Chooser.observe`."""
        self.chooser.observe(active, union, tokens)

    @torch.no_grad()
    def _keep_strides(self, _: object = None) -> None:
        """Store the down weight [K, N] by neurons, strides (1, K), as the kernels read it; loading may undo that."""
        if self._has_kernels and _why_called(self.down_proj) is None:
            weight = self.down_proj.weight
            if not weight.t().is_contiguous():
                weight.data = weight.t().contiguous().t()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}; its last size has to be {self.hidden_size}"
            )
        rows = x.reshape(-1, self.hidden_size)
        with_l1 = self.training or self.collect_l1
        watched = self.watched and self.training
        backend = self.backend if self.backend == "dense" or self._why_dense() is None else "dense"
        y, l1, active = getattr(self, f"_{backend}")(rows, with_l1, self.record or watched)
        self.l1 = l1.reshape(x.shape[:-1]) if with_l1 else None
        if self.record:
            self._record(active)
        if watched:
            self._need(active)
        if self.silenced:
            y = torch.zeros_like(y)
        return y.reshape(*x.shape[:-1], self.hidden_size)

    def activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the dense (g, h), both [..., N]; a neuron is active where g != 0. Non-gated: g is h."""
        gate = self.up_proj if self.gate_proj is None else self.gate_proj
        g = ACTIVATIONS[self.activation](gate(x))
        return g, g if self.gate_proj is None else g * self.up_proj(x)

    @torch.no_grad()
    def direction(self, neuron: int) -> Tensor:
        """Return what a neuron adds to the output where its h is 1, [K]: its column of the down projection."""
        if _is_plain(self.down_proj):
            return self.down_proj.weight[:, neuron]
        h = torch.zeros(
            2, self.intermediate_size, device=self.device, dtype=next(self.parameters()).dtype
        )
        h[1, neuron] = 1
        without, with_it = self.down_proj(h)
        return with_it - without

    def _record(self, active: Tensor | Trained) -> None:
        if isinstance(active, Tensor):
            self.stats.record(active, self.token_mask)
        else:
            self.stats.add(active.neuron_counts, active.token_counts, self.token_mask)

    @torch.no_grad()
    def _need(self, active: Tensor | Trained) -> None:
        """Keep the largest mean of active neurons per token, rounded up, and the largest room that a pass needed."""
        tokens = max(
            active.shape[0] if isinstance(active, Tensor) else active.token_counts.shape[0], 1
        )
        entries = (active if isinstance(active, Tensor) else active.token_counts).sum()
        needed = (entries + (tokens - 1)) // tokens
        if not isinstance(active, Tensor):
            needed = torch.maximum(needed, active.needed)
        self.needed = needed if self.needed is None else torch.maximum(self.needed, needed)

    # Each backend takes rows [M, K] and returns y [M, K], l1 [M] fp32 or None, and what was active or None: [M, N] bool, or
    # what ops.train counted.

    def _dense(self, rows: Tensor, with_l1: bool, with_active: bool):
        g, h = self.activations(rows)
        if (with_l1 or with_active) and g.shape[-1] != self.intermediate_size:
            raise ValueError(
                f"the first projection returns {g.shape[-1]} neurons, and the layer has {self.intermediate_size}: of "
                "tensor-parallel shards neither the L1 term nor statistics can be computed; load the model without tp_plan"
            )
        l1 = h.abs().sum(-1, dtype=torch.promote_types(h.dtype, torch.float32)) if with_l1 else None
        if self.muted is not None:
            h = h.masked_fill(self.muted.to(h.device), 0)
        return self.down_proj(h), l1, g != 0 if with_active else None

    def _tensors(self, rows: Tensor) -> list[Tensor | None]:
        """Arguments of a sparse layer: rows, three weights, three biases, in the type that autocast asks for.

        A weight that lost the kernels' strides, as a gathered shard or by assigning to `parameter.data`, is copied in every
        call; setting `backend` stores it anew.
        """
        parts = (self.gate_proj, self.up_proj, self.down_proj)
        tensors = [
            rows,
            *(part and part.weight for part in parts),
            *(part and part.bias for part in parts),
        ]
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
            tensors = [None if t is None else t.to(dtype) for t in tensors]
        if self.muted is not None:
            tensors[3] = tensors[3].masked_fill(self.muted.to(rows.device), 0)
        if tensors[3].stride() != (1, self.hidden_size):
            tensors[3] = tensors[3].t().contiguous().t()
        for place in (1, 2):
            if tensors[place] is not None and not tensors[place].is_contiguous():
                tensors[place] = tensors[place].contiguous()
        return tensors

    def _reference(self, rows: Tensor, with_l1: bool, with_active: bool):
        tensors = self._tensors(rows)
        with torch.autocast(rows.device.type, enabled=False):
            if with_l1 or torch.is_grad_enabled():
                return _ReferenceTraining.apply(*tensors)
            rows, w_gate, w_up, w_down, b_gate, b_up, b_down = tensors
            if w_gate is None:
                active = reference.gate_pack(rows, w_up, b_up)
                y = reference.down(active, w_down, b_down)
            else:
                active = reference.gate_pack(rows, w_gate, b_gate)
                y = reference.up_down(rows, active, w_up, w_down, b_up, b_down)
            return y, None, active.unpack() != 0 if with_active else None

    def _infers(self, rows: Tensor, with_l1: bool, with_active: bool) -> bool:
        """Whether y alone is wanted."""
        trains = torch.is_grad_enabled() and any(
            p.requires_grad for p in (rows, *self.parameters())
        )
        return not (trains or with_l1 or with_active)

    def _train(self, rows: Tensor, with_l1: bool, with_active: bool):
        """What `_triton` and `_auto` do where more than y is wanted: gradients sparsely if they may be, else all densely."""
        if self.train_path is None or not (torch.is_grad_enabled() and rows.numel()):
            return self._dense(rows, with_l1, with_active)
        from twell.kernels import ops

        tensors = self._tensors(rows)
        fits = self.capacity * rows.shape[0] < ops.MAX_ENTRIES
        if not fits or not ops.takes(tensors[0], self.intermediate_size):
            return self._dense(rows, with_l1, with_active)
        with torch.autocast(rows.device.type, enabled=False):
            found = ops.train(self.train_path, self.capacity, *tensors, token_mask=self.token_mask)
        return found.y, found.l1 if with_l1 else None, found

    def _triton(self, rows: Tensor, with_l1: bool, with_active: bool):
        if not self._infers(rows, with_l1, with_active):
            return self._train(rows, with_l1, with_active)
        from twell.kernels import ops

        tensors = self._tensors(rows)
        with torch.autocast(rows.device.type, enabled=False):
            return ops.run(self.path or ops.choose(rows.shape[0]), *tensors), None, None

    def _auto(self, rows: Tensor, with_l1: bool, with_active: bool):
        if not self._has_kernels:
            return self._dense(rows, with_l1, with_active)
        if not self._infers(rows, with_l1, with_active):
            return self._train(rows, with_l1, with_active)
        from twell.kernels import ops

        tensors = self._tensors(rows)
        if not ops.takes(tensors[0], self.intermediate_size):
            return self._dense(rows, with_l1, with_active)
        num_tokens = rows.shape[0]
        watched = not torch.compiler.is_compiling() and num_tokens > 0
        watched = watched and not (rows.is_cuda and torch.cuda.is_current_stream_capturing())
        with torch.autocast(rows.device.type, enabled=False):
            if watched:
                self.chooser.update(num_tokens)
            path = self.chooser.path(num_tokens)
            if path != "dense":
                activity = self.chooser.counters(num_tokens, rows.device) if watched else None
                return ops.run(path, *tensors, activity=activity), None, None
            if watched:
                rows, w_gate, w_up, _, b_gate, b_up, _ = tensors
                self.chooser.probe(rows, *((w_gate, b_gate) if self.gated else (w_up, b_up)))
            return ops.run("dense", *tensors), None, None

    def extra_repr(self) -> str:
        reason = None if self.backend == "dense" else self._why_dense(sharded=True)
        text = f"activation={self.activation}, backend={self.backend}"
        return text if reason is None else f"{text}, path=dense ({reason})"
