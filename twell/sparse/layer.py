"""The sparse feed-forward layer. backends.py and plan.py choose how a call is computed.

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
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from twell.sparse import backends, float8
from twell.sparse.activations import get_activation
from twell.sparse.calibration import DEPENDS_ON, SITUATIONS, Calibration
from twell.sparse.edit import Edit
from twell.sparse.observe import ActivityStats, Outbox, Wants, open_collector, show_hidden
from twell.sparse.order import TokenOrder
from twell.sparse.plan import MODULES, POWERS, Chooser, captured_by_hand, situation_of
from twell.sparse.projections import store_neuron_major, warn_dense, why_called, why_dense

__all__ = ["SparseFFN", "backend_status", "captured_by_hand"]


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


def _version(weight: Tensor) -> tuple[int, int]:
    """Return a weight's address and version: one of them changes if it is replaced or written."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


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

    Watching. Passes inside of `with twell.collect_l1(layer) as terms:` append their L1 terms to
    `terms`. `stats` counts the activity that a collector asked for (observe.py).

    Changing. `silenced` makes the output zero. `edit` (edit.py, set by twell.intervene) changes the
    values of some neurons. The L1 term and `stats` count these neurons all the same.

    Choosing. `backend="auto"` follows `plans`, made from measured times (`calibration`; None: the
    defaults of the card) and from the activity. `twell.tune` fixes the activity; else the layer
    observes it at fixed numbers of eager calls. Compiled code keeps the plans that it was compiled
    with, so tune first, or run a batch. `backend="triton"` takes `path`: "rowwise", "union",
    "decode" or "dense"; None: by the number of tokens. While `readable` is False every sparse
    backend calls the projections, and `repr` says why.

    Ordering. Sparse backends compute calls of as many tokens as `token_order` has (order.py; set by
    twell.order_tokens) in this order, for smaller unions.

    Training. With `train_path` set ("union" or "hybrid"; by twell.SparseTraining, which retries
    steps that overflow) the backends "triton" and "auto" compute gradients sparsely, with buffers
    of `capacity` active entries per token. A module `h_dropout`, an nn.Dropout with a rate above 0,
    drops entries of h in training mode; the layer then computes densely.

    Raises ValueError for an unknown activation or backend and sizes below 1, RuntimeError for a
    backend that cannot run here. Paper: the feed-forward block; App. A.1 and B.2.1.
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
        if min(hidden_size, intermediate_size) < 1:
            raise ValueError(f"the sizes are {hidden_size} and {intermediate_size}, expected 1 or more")
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
        self._copied: tuple[int, int] | None = None
        self.train_path: str | None = None
        self.capacity = 0
        self.replaced: Any = None  # the adapter and the replaced module (models/convert.py)
        self._path: str | None = None
        self.backend = backend
        self.register_load_state_dict_pre_hook(float8.refuse_values)
        self.register_load_state_dict_post_hook(SparseFFN._store_down)

    def _make_parts(self, gated: bool, **options: Any) -> None:
        sizes = self.hidden_size, self.intermediate_size
        self.gate_proj = nn.Linear(*sizes, **options) if gated else None
        self.up_proj = nn.Linear(*sizes, **options)
        self.down_proj = nn.Linear(*sizes[::-1], **options)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "down_proj":  # peft merges without a new version, then assigns it again
            self._copied = None
        super().__setattr__(name, value)

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The projections, and `h_dropout` where there is one; a subclass may borrow them."""
        return self._modules

    activation = property(lambda layer: layer.act.name)
    threshold = property(lambda layer: layer.act.threshold)
    observed = property(lambda layer: layer.chooser.observed)

    @property
    def calibration(self) -> Calibration | None:
        """See `Chooser.calibration`."""
        return self.chooser.calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        self.chooser.calibration = calibration

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
        self._store_down()

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
        return why_dense(self.parts, sharded=True) is None

    @property
    def plans(self) -> dict[str, tuple[tuple[int, str], ...]]:
        """Pairs (most tokens, path) of "auto"; the last path serves more too.

        By situation: "eager" calls, code of torch.compile ("compiled"), CUDA graphs ("graph").
        """
        dense = dict.fromkeys(SITUATIONS, ((POWERS[-1], "dense"),))
        return self.chooser.plans if self.readable else dense

    def observe(self, active: float, union: float, tokens: int = 64) -> None:
        """Plan for this activity: see `Chooser.observe`."""
        self.chooser.observe(active, union, tokens)

    def _store_down(self, _: object = None) -> None:
        if self._has_kernels and why_called(self.down_proj) is None:
            store_neuron_major(self.down_proj)
        if self.dense_down is not None:
            self.keep_down(True)

    @torch.no_grad()
    def keep_down(self, in_fp8: bool) -> None:
        """Keep a copy of the down projection in FP8 for dense passes, or drop it.

        A projection that has to be called, is in FP8 or is offloaded has no copy.
        """
        part = self.down_proj
        fits = in_fp8 and type(part) is nn.Linear and why_called(part) is None
        fits = fits and not part.weight.is_meta
        self.dense_down = float8.Float8Linear.of(part, saved=False) if fits else None
        self._copied = _version(part.weight) if fits else None

    def down_in_fp8(self) -> float8.Float8Linear | None:
        """Return the copy of `keep_down`; eager calls renew it if the weight has changed."""
        if self.dense_down is None or self.edit is not None:  # which changes down
            return None
        compiling = torch.compiler.is_compiling()
        if not compiling and self._copied != _version(self.down_proj.weight):
            self.keep_down(True)
        return self.dense_down

    def forward(self, x: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        path = self._choose_compiled(x) if compiling else backends.choose_eager(self, x)
        if path is not None:
            if path == MODULES:
                return self._by_modules(x)
            if (y := backends.replayed(self, x, path)) is not None:
                return y
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}; its last size has to be {self.hidden_size}"
            )
        if self.quantized:
            x = self._for_inference(x)
        rows, leading = x.reshape(-1, self.hidden_size), x.shape[:-1]
        boxed = compiling or self.outbox.compiled
        receiver = self.outbox if boxed else open_collector()
        counts = self.training and self.outbox.watch_capacity
        wants = Wants(self.training, counts).beside(None if receiver is None else receiver.wants)
        order = None if wants.token_mask is not None else self.token_order
        if self._is_dense(rows):
            result = backends.dense(self, x, wants)  # not rows: hooks may rely on the shape of x
        elif order is None or not order.fits(rows):
            result = backends.sparse(self, rows, wants)
        else:
            result = order.undo(backends.sparse(self, order.take(rows), wants))
        if wants.hidden and not boxed:  # sparse backends keep no h
            show_hidden(self, *(result.hidden or self.activations(x)))
        self.outbox.show(self, receiver, wants, result, leading)
        y = torch.zeros_like(result.y) if self.silenced else result.y
        return y.reshape(*leading, self.hidden_size)

    def _by_modules(self, x: Tensor) -> Tensor:
        """Compute y as a stock module does, in as little Python, and with few guards."""
        parts, act = self.parts, self.act
        gate = parts.get("gate_proj")
        # By name and threshold, since torch.compile does not guard identity.
        if gate is not None and act.name == "relu" and not act.threshold:
            return parts["down_proj"](torch.relu(gate(x)) * parts["up_proj"](x))
        return parts["down_proj"](self.activations(x)[1])

    def _choose_compiled(self, x: Tensor) -> str | None:
        """Return MODULES for a plain dense pass; each attribute read becomes a guard of its code."""
        if self.training or self.silenced or self.edit is not None or torch.is_grad_enabled():
            return None
        if self.dense_down is not None or self.outbox.wants is not None:
            return None
        parts = self.parts
        if "h_dropout" in parts or x.shape[-1] != self.hidden_size:
            return None
        if self._backend == "auto":
            num_tokens = x.numel() // self.hidden_size
            by_modules = self.chooser.path(num_tokens, situation_of(x)) == "dense"
        else:
            by_modules = self._backend == "dense"
        return MODULES if by_modules and type(parts["up_proj"]) is nn.Linear else None

    def _is_dense(self, rows: Tensor) -> bool:
        """Whether the modules compute the call, by the backend or because they have to."""
        if self._backend == "dense":
            return True
        # Before why_dense: everything that it reads becomes a guard of compiled code.
        inference = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        if inference and self._backend == "auto":
            if self.chooser.path(rows.shape[0], situation_of(rows)) == "dense":
                return True
        if (reason := why_dense(self.parts)) is not None:
            warn_dense(reason)
        return reason is not None

    def _for_inference(self, x: Tensor) -> Tensor:
        """x in autocast's type; raises for gradients, and for values that are not bf16 then."""
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *self.parameters())):
            raise RuntimeError(
                "FP8 weights have no gradients; use torch.no_grad(), or train the bf16 weights "
                "(twell.dequantize_ puts them back)"
            )
        x = x.to(backends.dtype_of(x))
        if x.dtype != torch.bfloat16:
            raise TypeError(f"x is {x.dtype}; a layer with FP8 weights computes in torch.bfloat16")
        return x

    def _replicate_for_data_parallel(self) -> SparseFFN:
        """Return a replica for nn.DataParallel, which computes on another device and thread.

        It adds to the same `stats` and trains densely: nobody would see its overflow. Replicas last
        one pass, so "auto" does not learn from the activity that they count.
        """
        replica = super()._replicate_for_data_parallel()
        replica.outbox, replica.chooser = Outbox(), copy.copy(self.chooser)
        replica.train_path = None
        return replica

    def activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the dense (g, h), both [..., N]; a neuron is active where g != 0."""
        parts, act = self.parts, self.act
        gate, up = parts.get("gate_proj"), parts["up_proj"]
        g = act.gate(up(x) if gate is None else gate(x))
        return g, act.hidden(g, None if gate is None else up(x))

    def extra_repr(self) -> str:
        threshold = f", threshold={self.threshold:g}" if self.threshold else ""
        text = f"activation={self.activation}{threshold}, backend={self.backend}"
        reason = None if self.backend == "dense" else why_dense(self.parts, sharded=True)
        return text if reason is None else f"{text}, path=dense ({reason})"
