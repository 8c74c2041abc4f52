"""The sparse feed-forward layer, and the one place that chooses how it is computed.

A layer has hidden size K and intermediate size N. With M tokens x [M, K]:

    gated:      g = relu(x Wg)   u = x Wu   h = u * g   y = h Wd
    non-gated:  g = relu(x Wu)              h = g       y = h Wd

activations.py has the other activations. With ReLU, g is zero for most neurons once the model is
trained with an L1 term on h. A neuron is *active* for a token where g is `!= 0`. Four backends
compute the same y:

    dense      three matrix products, for every activation
    reference  the sparse steps in plain torch (reference.py): exact and slow
    triton     the sparse steps as GPU kernels (kernels/), in bf16 or fp16
    auto       the fastest path for the number of tokens and the activity of the layer (plan.py)

A pass hands its L1 term and its activity to the collector that is open around it (observe.py).
Layers whose projections may not be read compute densely (projections.py). Gradients are dense too,
except within training.py: it checks once a step that the buffers of the sparse path were large
enough.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from twell.sparse import float8, reference
from twell.sparse.activations import ACTIVATIONS, RELU, Weights, get_activation
from twell.sparse.calibration import DEPENDS_ON, EAGER, SITUATIONS
from twell.sparse.edit import Edit
from twell.sparse.observe import (
    Activity,
    ActivityStats,
    Collector,
    Outbox,
    Result,
    Wants,
    hand_on,
    open_collector,
    show_hidden,
    summarize_activity,
)
from twell.sparse.order import TokenOrder
from twell.sparse.plan import POWERS, Choice, Chooser, captured_by_hand, situation_of
from twell.sparse.projections import (
    is_plain,
    is_transformed,
    store_neuron_major,
    tensors_of,
    warn_dense,
    why_called,
)

__all__ = [
    "ACTIVATIONS",
    "ActivityStats",
    "SparseFFN",
    "backend_status",
    "captured_by_hand",
    "summarize_activity",
]


def backend_status() -> dict[str, str | None]:
    """Return for each backend None when it can be used here, else the reason why not."""
    return {"dense": None, "reference": None, "triton": _why_no_triton(), "auto": None}


def _why_no_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return "the package triton is not installed"
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        return "no GPU was found (TRITON_INTERPRET=1 runs the kernels on the CPU, for tests)"
    return None


def _check_known(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"{kind} {name!r} is unknown; use one of {', '.join(known)}")


def _handed_on(holder: str, name: str) -> property:
    """Return an attribute of the layer that its activation or chooser holds."""

    def read(layer: SparseFFN) -> Any:
        return getattr(getattr(layer, holder), name)

    def write(layer: SparseFFN, value: Any) -> None:
        setattr(getattr(layer, holder), name, value)

    return property(read, write, doc=f"`{name}` of the {holder}.")


def _gone(name: str, instead: str) -> property:
    """Refuse an attribute of earlier versions, which as a plain attribute would do nothing."""

    def refuse(layer: SparseFFN, *_: Any) -> None:
        raise AttributeError(f"SparseFFN.{name} is gone: use {instead} around the pass")

    return property(refuse, refuse)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Autocast off; nothing where it is off already, since to enter it takes 8 microseconds."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def _dtype(x: Tensor) -> torch.dtype:
    """Autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class SparseFFN(nn.Module):
    """Feed-forward layer with sparse activations, gated or not, with the parameter names of Llama.

    Args:
        hidden_size: K, width of input and output.
        intermediate_size: N, number of neurons.
        gated: whether the layer has a gate projection.
        activation: "relu", "relu2", "drelu" (gated only), or "silu" for comparison (backend
            "dense" only); see twell/sparse/activations.py.
        threshold: neurons are active where the first projection is above this number.
        bias: whether the two or three projections have biases.
        backend: "dense", "reference", "triton" or "auto".

    Input [..., K], output [..., K].

    Watching. `with twell.collect_l1(layer) as terms:` holds the L1 terms of the passes inside.
    `stats` has the activity that collectors counted (observe.py).

    Changing. With `silenced` set the output is zero. With `edit` set (edit.py; by twell.intervene)
    the output has other values of some neurons. Both still count in the L1 term and in `stats`.

    Choosing. The backend "auto" follows `plans`, pairs (most tokens, path) for each way to call the
    layer. They follow from `calibration` (measured times; None: those of the card) and from the
    activity: `twell.tune` fixes it, else the layer observes it at fixed numbers of eager calls.
    `plan` is that of eager calls, the first of which also loads the kernels of a graph. Code of
    torch.compile keeps the plans it was made with, so tune first, or run a batch. It takes the path
    for a CUDA graph where torch.compile will capture it, and within `captured_by_hand`. `path` is
    that of the backend "triton": "rowwise", "union", "decode" or "dense"; None: by the number of
    tokens. While `readable` is False every sparse backend calls the projections, and `repr` says
    why.

    Ordering. With `token_order` set (order.py; by twell.order_tokens) the sparse backends compute
    that many tokens in this order, for smaller unions.

    Training. With `train_path` set ("union" or "hybrid"; by twell.SparseTraining, which retries
    steps that overflow) the backends "triton" and "auto" compute gradients sparsely, with buffers
    of `capacity` active entries per token. With `h_dropout`, an nn.Dropout, whose rate is above 0,
    entries of h are dropped in training mode, and the layer computes densely.

    Raises ValueError for an unknown activation or backend, RuntimeError for one that cannot run
    here. Paper: the feed-forward block; App. A.1 and B.2.1.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool = True,
        activation: str = "relu",
        threshold: float = 0.0,
        bias: bool = False,
        backend: str = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size < 1:
                raise ValueError(f"{name} is {size}; it has to be at least 1")
        self.act = get_activation(activation, threshold, gated=gated)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self._make_parts(gated, bias=bias, device=device, dtype=dtype)
        self.stats, self.outbox = ActivityStats(intermediate_size), Outbox()
        self.chooser = Chooser(hidden_size, intermediate_size, gated)
        # Attributes, not hooks: torch.compile ignores hooks added after compilation.
        self.silenced = False
        self.edit: Edit | None = None
        self.token_order: TokenOrder | None = None
        self.dense_down: float8.Float8Linear | None = None
        self.train_path: str | None = None
        self.capacity = 0
        self.replaced: Any = None  # what a model had in this place (models/adapters.py)
        self._path: str | None = None
        self.backend = backend
        self.register_load_state_dict_pre_hook(SparseFFN._check_loaded)
        self.register_load_state_dict_post_hook(SparseFFN._keep_strides)

    def _make_parts(self, gated: bool, **options: Any) -> None:
        sizes = self.hidden_size, self.intermediate_size
        self.gate_proj = nn.Linear(*sizes, **options) if gated else None
        self.up_proj = nn.Linear(*sizes, **options)
        self.down_proj = nn.Linear(*sizes[::-1], **options)

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The projections, and `h_dropout` where there is one; a subclass may borrow them."""
        return self._modules

    activation, threshold = _handed_on("act", "name"), _handed_on("act", "threshold")
    collect_l1 = _gone("collect_l1", "twell.collect_l1(layer)")
    record = _gone("record", "twell.sparse.observe.Collector([layer], counts=True)")
    token_mask = _gone("token_mask", "twell.sparse.observe.Collector([layer], token_mask=...)")
    calibration, observed = _handed_on("chooser", "calibration"), _handed_on("chooser", "observed")

    @property
    def cuda_graphs(self) -> bool:
        """Deprecated, and without effect: compiled code notices CUDA graphs by itself."""
        return True

    @cuda_graphs.setter
    def cuda_graphs(self, value: bool) -> None:
        message = "SparseFFN.cuda_graphs has no effect: compiled code notices CUDA graphs by itself"
        warnings.warn(message, FutureWarning, stacklevel=2)

    @property
    def l1(self) -> Tensor | None:
        """sum_n |h| of each token of the last pass without a collector; deprecated."""
        warnings.warn(
            "SparseFFN.l1 is deprecated: use twell.collect_l1", FutureWarning, stacklevel=2
        )
        return self.outbox.last

    @property
    def gated(self) -> bool:
        return self.gate_proj is not None

    @property
    def first(self) -> nn.Linear:
        """The projection that decides which neurons are active."""
        return self.gate_proj if self.gated else self.up_proj

    @property
    def device(self) -> torch.device:
        """The device of the first weight that is not offloaded; the CPU where all are."""
        return next((p.device for p in self.parameters() if not p.is_meta), torch.device("cpu"))

    @property
    def backend(self) -> str:
        return self._backend

    @backend.setter
    def backend(self, name: str) -> None:
        status = backend_status()
        _check_known("backend", name, status)
        if status[name] is not None:
            raise RuntimeError(f"backend {name!r} cannot be used: {status[name]}")
        if name != "dense" and not self.act.sparse:
            raise ValueError(
                f"backend {name!r} needs an activation that makes zeros; "
                f"this layer has {self.activation!r}"
            )
        self._backend = name
        # Set here, not in forward, which torch.compile traces.
        self._has_kernels = name in ("triton", "auto") and status["triton"] is None
        self._keep_strides()

    @property
    def path(self) -> str | None:
        return self._path if self.readable else "dense"

    @path.setter
    def path(self, name: str | None) -> None:
        if name is not None:
            _check_known("path", name, DEPENDS_ON)
        self._path = name

    @property
    def quantized(self) -> bool:
        """Whether gate and up have FP8 weights (float8.py)."""
        return isinstance(self.parts["up_proj"], float8.Float8Linear)

    @property
    def readable(self) -> bool:
        """Whether reading the projections' weights gives the same as calling them."""
        return self._why_dense(sharded=True) is None

    def _why_dense(self, *, sharded: bool = False) -> str | None:
        if _has_any_global_hook():
            return "every module has hooks"
        if (drop := self.parts.get("h_dropout")) is not None and drop.p and drop.training:
            return "h has dropout while training"
        if is_transformed():
            return "torch.func or forward-mode AD transforms the call"
        if not torch.compiler.is_compiling() and all(map(is_plain, self.parts.values())):
            return None
        for name in ("gate_proj", "up_proj", "down_proj"):
            part = getattr(self, name)
            reason = None if part is None else why_called(part, sharded=sharded)
            if reason is not None:
                return f"{name} is {reason}"
        return None

    @property
    def plan(self) -> tuple[tuple[int, str], ...]:
        """Pairs (most tokens, path) of "auto" in eager calls; the last path serves more too."""
        return self.plans[EAGER]

    @property
    def plans(self) -> dict[str, tuple[tuple[int, str], ...]]:
        """The plans by situation: eager calls, code of torch.compile, CUDA graphs."""
        dense = dict.fromkeys(SITUATIONS, ((POWERS[-1], "dense"),))
        return self.chooser.plans if self.readable else dense

    def observe(self, active: float, union: float, tokens: int = 64) -> None:
        """Plan for this activity: see `Chooser.observe`."""
        self.chooser.observe(active, union, tokens)

    def _check_loaded(self, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
        """Refuse FP8 values for weights that are not in FP8: without scales they mean nothing."""
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = state_dict.get(f"{prefix}{name}.weight")
            in_fp8 = weight is not None and weight.dtype == float8.FLOAT8
            if in_fp8 and not isinstance(getattr(self, name), float8.Float8Linear):
                raise ValueError(
                    f"{prefix}{name}.weight is in FP8; twell.quantize_ the layer first"
                )

    def _keep_strides(self, _: object = None) -> None:
        if self._has_kernels and why_called(self.down_proj) is None:
            store_neuron_major(self.down_proj)
        if self.dense_down is not None:
            self.keep_down(True)

    @torch.no_grad()
    def keep_down(self, in_fp8: bool) -> None:
        """Keep a copy of the down projection in FP8 for dense passes, or drop it."""
        self.dense_down = float8.Float8Linear.of(self.down_proj, saved=False) if in_fp8 else None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and self._is_quick(x):
            # As a stock module computes it, in as little Python.
            parts, act = self.parts, self.act
            gate, up = parts.get("gate_proj"), parts["up_proj"]
            if gate is None:
                return parts["down_proj"](act.hidden(act.gate(up(x)), None))
            if act is RELU:
                return parts["down_proj"](torch.relu(gate(x)) * up(x))
            return parts["down_proj"](act.hidden(act.gate(gate(x)), up(x)))
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}; its last size has to be {self.hidden_size}"
            )
        if self.quantized:
            x = self._for_inference(x)
        rows, leading = x.reshape(-1, self.hidden_size), x.shape[:-1]
        box = torch.compiler.is_compiling() or self.outbox.compiled
        watch = self.outbox if box else open_collector()
        trains = self.training and self.outbox.watch_capacity
        wants = Wants(self.training, trains).beside(None if watch is None else watch.wants)
        order = None if wants.token_mask is not None else self.token_order
        if self._is_dense(rows):  # adapters and hooks may know the batch by the input's shape
            result = self._dense(x, wants)
        elif order is None or not order.fits(rows):
            result = self._sparse(rows, wants)
        else:
            result = order.undo(self._sparse(order.take(rows), wants))
        if wants.hidden and not box:  # sparse backends keep no h
            show_hidden(self, *(result.hidden or self.activations(x)))
        self._show(watch, wants, result, leading)
        y = torch.zeros_like(result.y) if self.silenced else result.y
        return y.reshape(*leading, self.hidden_size)

    def _is_quick(self, x: Tensor) -> bool:
        """Whether an eager call is dense and nobody looks at or changes what it computes."""
        own, width = self.__dict__, x.shape[-1]  # an attribute of a module may take a microsecond
        if own["training"] or own["silenced"] or own["edit"] is not None:
            return False
        if width != own["hidden_size"] or "h_dropout" in self.parts:
            return False
        if open_collector() is not None or own["outbox"].compiled:
            return False
        backend = own["_backend"]
        if backend == "dense" or not own["_has_kernels"]:
            return backend in ("dense", "auto") and not self.quantized
        if backend != "auto" or not own["chooser"].is_quick(x.numel() // width):
            return False
        # The plan of graphs may be another.
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def _is_dense(self, rows: Tensor) -> bool:
        """Whether the modules compute the call, by the backend or because they have to."""
        if self._backend == "dense":
            return True
        # Asked before all else: everything read here becomes a guard of compiled code.
        compiling = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        if compiling and self._backend == "auto" and not self.quantized:
            if self.chooser.path(rows.shape[0], situation_of(rows)) == "dense":
                return True
        if (reason := self._why_dense()) is not None:
            warn_dense(reason)
        return reason is not None

    def _show(
        self, watch: Collector | Outbox | None, wants: Wants, result: Result, leading: torch.Size
    ) -> None:
        """Hand on the L1 term, as [...] of the input, and the activity of a pass."""
        grad, activity = torch.is_grad_enabled(), result.activity
        l1 = result.l1.reshape(leading) if wants.l1 and result.l1 is not None else None
        if watch is None:
            self.outbox.last = l1
        elif watch is self.outbox:
            watch.leave(l1, activity, grad)
        else:
            if watch.wants.activity:
                self.stats.add(activity, watch.wants.token_mask)
            if l1 is not None:
                hand_on(self, l1, grad)
        if self.training and self.outbox.watch_capacity:
            self.outbox.need(activity)

    def _replicate_for_data_parallel(self) -> SparseFFN:
        """Return a replica for nn.DataParallel, which computes on another device and thread.

        It adds to the same `stats`, counts its own activity for "auto", and trains densely: nobody
        would see its overflow.
        """
        replica = super()._replicate_for_data_parallel()
        replica.outbox, replica.chooser = Outbox(), copy.copy(self.chooser)
        replica.train_path = None
        return replica

    def _for_inference(self, x: Tensor) -> Tensor:
        """x in autocast's type; raises for gradients, and for values that are not bf16 then."""
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *self.parameters()))
        if trained:
            raise RuntimeError(
                "FP8 weights have no gradients; use torch.no_grad(), or train the bf16 weights "
                "(twell.dequantize_ puts them back)"
            )
        x = x.to(_dtype(x))
        if x.dtype != torch.bfloat16:
            raise TypeError(f"x is {x.dtype}; a layer with FP8 weights computes in torch.bfloat16")
        return x

    def activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the dense (g, h), both [..., N]; a neuron is active where g != 0."""
        if self.gate_proj is None:
            g = self.act.gate(self.up_proj(x))
            return g, self.act.hidden(g, None)
        g = self.act.gate(self.gate_proj(x))
        return g, self.act.hidden(g, self.up_proj(x))

    def _dense(self, x: Tensor, wants: Wants) -> Result:
        """The layer by its modules, for x [..., K]."""
        g, h = self.activations(x)
        if (wants.l1 or wants.activity) and g.shape[-1] != self.intermediate_size:
            raise ValueError(
                f"the first projection returns {g.shape[-1]} neurons, and the layer has "
                f"{self.intermediate_size}: of tensor-parallel shards neither the L1 term nor "
                "statistics can be computed; load the model without tp_plan"
            )
        l1 = activity = None
        hidden = (g, h) if wants.hidden else None
        if wants.l1:
            l1 = h.abs().sum(-1, dtype=torch.promote_types(h.dtype, torch.float32))
        if wants.activity:
            activity = Activity.of((g != 0).reshape(-1, g.shape[-1]), wants.token_mask)
        if self.edit is not None:
            h = self.edit.of_h(h)
        if (drop := self.parts.get("h_dropout")) is not None:
            h = drop(h)
        if self.dense_down is None:
            return Result(self.down_proj(h), l1, activity, hidden)
        y = reference.add_bias(self.dense_down(h), self.down_proj.bias)
        return Result(y.to(h.dtype), l1, activity, hidden)

    def _sparse(self, rows: Tensor, wants: Wants) -> Result:
        """The layer without its modules, for rows [M, K]; by them where the kernels cannot."""
        if self._backend == "reference":
            return self._reference(rows, wants)
        if not self._has_kernels:
            return self._dense(rows, wants)
        if not self._wants_only_y(rows, wants):
            return self._train(rows, wants)
        from twell.sparse import ops

        if self._backend == "triton":
            # `forward` has asked whether the layer is readable, as the property `path` would again.
            choice = Choice(self._path or ops.choose(rows.shape[0]))
        elif ops.takes(rows, self.intermediate_size, _dtype(rows)):
            choice = self.chooser.choose(rows, self._gate_of)
        else:
            return self._dense(rows, wants)
        if not choice.by_modules or choice.warm_up is not None:
            x, weights, x_scale = self._operands(rows)
            with without_autocast(rows.device.type):
                if choice.warm_up is not None:
                    ops.sparse_ffn(x, weights, choice.warm_up, x_scale=x_scale)
                if not choice.by_modules:
                    given = {"x_scale": x_scale, "activity": choice.activity}
                    result = Result(ops.sparse_ffn(x, weights, choice.path, **given))
        if choice.by_modules:
            result = self._dense(rows, wants)
        if choice.due:
            self.chooser.end()
        return result

    def _train(self, rows: Tensor, wants: Wants) -> Result:
        """A pass with gradients, L1 term or activity: sparsely where `train_path` allows it."""
        sparsely = self.train_path is not None and not self.quantized
        if not (sparsely and torch.is_grad_enabled() and rows.numel()):
            return self._dense(rows, wants)
        from twell.sparse import ops, training_ops

        fits = self.capacity * rows.shape[0] < training_ops.MAX_ENTRIES
        if not fits or not ops.takes(rows, self.intermediate_size, _dtype(rows)):
            return self._dense(rows, wants)
        x, weights, _ = self._operands(rows)
        with without_autocast(rows.device.type):
            given = self.train_path, self.capacity, wants.token_mask
            return training_ops.sparse_train(x, weights, *given)

    def _reference(self, rows: Tensor, wants: Wants) -> Result:
        if self.quantized and (wants.l1 or wants.activity):
            return self._dense(rows, wants)
        x, weights, x_scale = self._operands(rows)
        tensors = x, *weights[:2], weights.w_down_t.t(), *weights[3:6]
        with without_autocast(rows.device.type):
            if self.quantized:
                scales = x_scale, weights.s_gate, weights.s_up
                return Result(float8.ffn(*tensors, *scales, act=self.act))
            if wants.l1 or torch.is_grad_enabled():
                y, l1, active = reference.union_train(*tensors, act=self.act)
            else:
                g = reference.gate_pack(x, *weights.first, act=self.act)
                y, l1 = reference.rowwise_ffn(g, *tensors, act=self.act), None
                active = g.unpack() != 0 if wants.activity else None
        return Result(y, l1, Activity.of(active, wants.token_mask) if wants.activity else None)

    def _operands(self, rows: Tensor) -> tuple[Tensor, Weights, Tensor | None]:
        """The rows, weights and scales of rows that the kernels read, in autocast's type.

        Compiled, rows of a layer with FP8 weights are quantised here.

        A weight that lost the kernels' strides, as a gathered shard or by assigning to
        `parameter.data`, is copied in every call; setting `backend` stores it anew.
        """
        parts = self.parts  # an attribute of a module takes nn.Module half a microsecond
        gate, up = tensors_of(parts.get("gate_proj")), tensors_of(parts["up_proj"])
        down = tensors_of(parts["down_proj"])
        tensors = [rows, gate[0], up[0], down[0], gate[1], up[1], down[1]]
        if torch.is_autocast_enabled(rows.device.type):
            dtype, kept = _dtype(rows), (None, float8.FLOAT8)
            tensors = [t if t is None or t.dtype in kept else t.to(dtype) for t in tensors]
        if self.edit is not None:
            tensors[3], tensors[6] = self.edit.of_down(tensors[3], tensors[6])
        tensors[3] = tensors[3].t()
        for place in (1, 2, 3):
            if tensors[place] is not None and not tensors[place].is_contiguous():
                tensors[place] = tensors[place].contiguous()
        x, scale, down_fp8 = tensors[0], None, None
        if self.quantized and torch.compiler.is_compiling():  # fused with what makes the rows
            x, scale = float8.quantize(x)
        if (part := self.dense_down) is not None and self.edit is None:  # which changes down
            down_fp8 = part.weight, part.weight_scale
        return x, Weights(*tensors[1:], gate[2], up[2], down_fp8, self.act), scale

    def _wants_only_y(self, rows: Tensor, wants: Wants) -> bool:
        if wants.l1 or wants.activity:
            return False
        if not torch.is_grad_enabled() or self.quantized:
            return True  # asked first: to look at all parameters takes microseconds
        return not any(tensor.requires_grad for tensor in (rows, *self.parameters()))

    def _gate_of(self, blocks: Tensor) -> Tensor:
        """g of tokens, which is not 0 where a neuron is active."""
        return self.act.gate(self.first(blocks))

    def extra_repr(self) -> str:
        threshold = f", threshold={self.threshold:g}" if self.threshold else ""
        text = f"activation={self.activation}{threshold}, backend={self.backend}"
        reason = None if self.backend == "dense" else self._why_dense(sharded=True)
        return text if reason is None else f"{text}, path=dense ({reason})"
