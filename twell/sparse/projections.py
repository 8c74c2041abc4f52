"""Whether a layer may read the weights of its projections, or has to call them as modules.

The sparse backends read weights. Reading gives the same as calling only for an `nn.Linear` with
plain parameters and no hooks. With an adapter, a hook, a parametrisation or a quantised weight the
layer calls the projection and computes densely. The kernels also read the FP8 weights of
`Float8Linear` layers (float8.py); any other quantised weight is called.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from twell.sparse.float8 import Float8Linear

PROJECTIONS = "gate_proj", "up_proj", "down_proj"
CALLED_WITH = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The hooks of a module; a layer and the module that it replaces share them.
HOOKS = (
    *CALLED_WITH,
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks_with_kwargs", "_is_full_backward_hook"),
)

# Where a projection that may be read keeps its weight, and the type of the weight.
STORED = {nn.Linear: ("_parameters", nn.Parameter), Float8Linear: ("_buffers", Tensor)}


def is_plain(part: nn.Module | None) -> bool:
    """Return whether `why_called` is None, for nearly every projection within a microsecond.

    Every call of a layer asks. False where only the slow check can tell.
    """
    if type(part) not in STORED:
        return part is None
    own, (place, kind) = part.__dict__, STORED[type(part)]
    weight, bias = own[place].get("weight"), own["_parameters"].get("bias")
    # Not `any` over CALLED_WITH: this runs three times in every call of a layer.
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"]
    hooks = hooks or own["_backward_hooks"] or own["_backward_pre_hooks"]
    plain = type(weight) is kind and (bias is None or type(bias) is nn.Parameter)
    return plain and not hooks and "forward" not in own


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode AD transforms this call.

    The kernels would leave out tangents without an error.
    """
    return _is_traced_transformed() if torch.compiler.is_compiling() else _transforms()


def _transforms() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# torch.compile enters transforms while it traces, and compiles again inside of others.
_is_traced_transformed = torch.compiler.assume_constant_result(_transforms)


def why_dense(parts: dict[str, nn.Module | None], *, sharded: bool = False) -> str | None:
    """Return why a layer with these modules has to compute by them; None where it need not."""
    if _has_any_global_hook():
        return "every module has hooks"
    if (drop := parts.get("h_dropout")) is not None and drop.p and drop.training:
        return "h has dropout while training"
    if is_transformed():
        return "torch.func or forward-mode AD transforms the call"
    if not torch.compiler.is_compiling() and all(map(is_plain, parts.values())):
        return None
    for name in PROJECTIONS:
        part = parts.get(name)
        reason = None if part is None else why_called(part, sharded=sharded)
        if reason is not None:
            return f"{name} is {reason}"
    return None


def tensors_of(part: nn.Module | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return weight, bias and scale of a projection that may be read; None where there is none.

    Eager calls do not ask nn.Module, which takes half a microsecond for each.
    """
    if part is None:
        return None, None, None
    if not torch.compiler.is_compiling():
        place, parameters = part.__dict__[STORED[type(part)][0]], part.__dict__["_parameters"]
        if "weight" in place and "bias" in parameters:  # FSDP keeps them elsewhere
            return place["weight"], parameters["bias"], place.get("weight_scale")
    return part.weight, part.bias, part.weight_scale if type(part) is Float8Linear else None


def store_neuron_major(part: nn.Linear) -> None:
    """Store the weight [K, N] with strides (1, K), as kernels read that of the down projection."""
    weight = part.weight
    if not weight.t().is_contiguous():
        # Made in inference mode, the weight could not be trained outside of it.
        with torch.inference_mode(weight.is_inference()):
            weight.data = weight.detach().t().contiguous().t()


def why_called(part: nn.Module, *, sharded: bool = False) -> str | None:
    """Return why a projection has to be called; None where reading its weight gives the same.

    `sharded`: the weight may be a DTensor, as FSDP keeps it until it gathers it for a pass.
    """
    if type(part) not in (nn.Linear, Float8Linear):
        return f"a {type(part).__module__}.{type(part).__qualname__}"
    kind = "an nn.Linear" if type(part) is nn.Linear else "a Float8Linear"
    if "forward" in part.__dict__ and not _only_moves_inputs(part):
        return f"{kind} with a forward of its own"
    if any(getattr(part, name) for name in CALLED_WITH):
        return f"{kind} with hooks"
    for name in ("weight", "bias"):
        kind = type(getattr(part, name))
        if kind in (nn.Parameter, Tensor, type(None)):
            continue
        if not (sharded and kind.__name__ == "DTensor"):
            return f"an nn.Linear whose {name} is a {kind.__module__}.{kind.__qualname__}"
    return None


@torch.compiler.assume_constant_result  # torch.compile calls it while it traces
def warn_dense(reason: str) -> None:
    """Say, once for each reason, that a layer with a sparse backend computes densely."""
    _warn_once(reason)


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"SparseFFN computes densely and skips nothing: {reason}. The kernels read the weights of "
        "plain nn.Linear layers. Merge adapters, remove hooks, or serve the model with software "
        "that keeps these layers; backend 'dense' silences this",
        stacklevel=5,
    )


def _only_moves_inputs(part: nn.Module) -> bool:
    """Whether `part.forward` is Accelerate's for a device map, and the weights stay in place."""
    hook, forward = part.__dict__.get("_hf_hook"), part.__dict__.get("_old_forward")
    if hook is None:
        return False
    from accelerate.hooks import AlignDevicesHook

    if type(hook) is not AlignDevicesHook or hook.offload:
        return False
    return getattr(forward, "__func__", None) is type(part).forward
