"""config.json of a checkpoint: ours, a Llama's with ReLU, or the paper's.

Every error names the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM

# The paper's field: its kernels for training store down_proj.weight as [intermediate, hidden].
HYBRID = "sparsity_use_hybrid_kernel"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of weights
DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def read_config(folder: Path) -> SparseLlamaConfig:
    """Return the configuration that a folder's config.json describes.

    Raises ValueError for a damaged file, and for one that describes no Llama with ReLU.
    """
    path = folder / "config.json"
    fields = read_json(path)
    missing = [name for name in SIZES if name not in fields]
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(missing)}; put back the file that came with the weights"
        )
    kind = fields.pop("model_type", None)
    if kind not in (SparseLlamaConfig.model_type, "llama", "llama_sparse_relu"):
        raise ValueError(f"{folder} holds a model of type {kind!r}; expected a Llama with ReLU")
    fields["dtype"] = _dtype_name(
        path, [fields.pop("dtype", None), fields.pop("torch_dtype", None)]
    )
    if "quantization_config" in fields:
        raise ValueError(f"{path} has a quantization_config; quantised weights cannot be read")
    if kind != SparseLlamaConfig.model_type:
        fields = _translated(folder, kind, fields)
    return _described(path, fields)


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises ValueError for anything else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON: {error}; put back the file that came with the weights"
        ) from None
    if not isinstance(fields, dict):
        raise ValueError(
            f"{path} holds a {type(fields).__name__}, expected a JSON object; "
            "put back the file that came with the weights"
        )
    return fields


def is_hybrid(folder: Path) -> bool | None:
    """Return whether down_proj.weight is stored transposed; None for a configuration of ours."""
    path = folder / "config.json"
    fields = read_json(path)
    if fields.get("model_type") == SparseLlamaConfig.model_type:
        return None
    hybrid = fields.get(HYBRID) or False
    if not isinstance(hybrid, bool):
        raise ValueError(f"{path}: {HYBRID} is {hybrid!r}; expected true or false")
    return hybrid


def _dtype_name(path: Path, fields: list) -> str | None:
    """Return the type that the newer or the older field names; None without one."""
    names = [str(name).removeprefix("torch.") for name in fields if name not in (None, "auto")]
    if not names:
        return None
    if getattr(torch, names[0], None) not in DTYPES:
        raise ValueError(f"{path}: dtype is {names[0]!r}; expected one of {DTYPE_NAMES}")
    return names[0]


def _translated(folder: Path, kind: str, fields: dict) -> dict:
    """Return our fields for a Llama's and for the paper's, whose names begin with `sparsity_`."""
    sparsity = {name: fields.pop(name) for name in list(fields) if name.startswith("sparsity_")}
    activation = fields.get("hidden_act")
    if not sparsity and kind == "llama" and activation != "relu":
        raise ValueError(
            f"{folder} holds a Llama with activation {activation!r}; "
            "load it with transformers and use twell.sparsify(model, relufy=True)"
        )
    fields.pop("architectures", None)
    size = sparsity.get("sparsity_new_intermediate_size") or fields.get("intermediate_size")
    return fields | {
        "hidden_act": "relu",  # the paper's files may say "silu" and mean ReLU
        "gated_mlp": sparsity.get("sparsity_gated_mlp", True),
        "l1_coefficient": sparsity.get("sparsity_l1_coeff") or 0.0,
        "intermediate_size": size,
        # Llama's own defaults, which differ from those of SparseLlamaConfig
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
        "rms_norm_eps": fields.get("rms_norm_eps", 1e-6),
    }


def _described(path: Path, fields: dict) -> SparseLlamaConfig:
    """Return the configuration of these fields. Raises ValueError when no model can have it."""
    try:
        config = SparseLlamaConfig.from_dict(fields)
        rope = {"rope_type": "default", "rope_theta": 1e4} | (config.rope_parameters or {})
        known = sorted({"default", *ROPE_INIT_FUNCTIONS})
        if rope["rope_type"] not in known:
            raise ValueError(f"rope_type is {rope['rope_type']!r}; use one of {', '.join(known)}")
        if not 0 < rope["rope_theta"] < math.inf:
            raise ValueError(
                f"rope_theta is {rope['rope_theta']}; it has to be a finite number above 0"
            )
        with torch.device("meta"):  # "dense", since no other backend works on every machine
            SparseLlamaForCausalLM(SparseLlamaConfig.from_dict(fields | {"ffn_backend": "dense"}))
    except Exception as error:  # transformers raises a dozen kinds
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} describes no model: {' '.join(reason.split())}") from None
    return config
