"""Configuration and weights of a checkpoint: ours, a Llama's with ReLU, or the paper's.

The paper has Llama's names, with down_proj transposed where its hybrid kernels trained, or names of
its own, some of them transposed. Every error names the file, and the tensor.
"""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX
from transformers.utils import SAFE_WEIGHTS_NAME as WHOLE

from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.quantize import empty_quantized, note_quantization
from twell.sparse.activations import ACTIVATIONS
from twell.sparse.float8 import FLOAT8, QUANTIZATION

# The paper's field: its kernels for training store down_proj.weight as [intermediate, hidden].
HYBRID = "sparsity_use_hybrid_kernel"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of weights
DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
LLAMAS = (SparseLlamaConfig.model_type, "llama", "llama_sparse_relu")  # model_type
SIZES = tuple(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
)
# The paper's trackers, and rotary tables
NO_WEIGHTS = re.compile(r"(^|\.)(tracker|metrics_accumulator)\.|rotary_emb\.inv_freq$")
# Names of the paper's own layout, of which some are stored transposed
PAPER_WEIGHT = re.compile(r"\.mlp\.((gate|up|down)_weight)$")
PUT_BACK = "put back the file that came with the weights"
PUT_BACK_COPY = "put back a whole copy"


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises ValueError for anything else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {PUT_BACK}") from None
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        raise ValueError(f"{path} holds a {kind}, expected a JSON object; {PUT_BACK}")
    return fields


# --- config.json


def read_config(folder: Path) -> SparseLlamaConfig:
    """Return the configuration that a folder's config.json describes.

    Raises ValueError for a damaged file, and for one that describes no Llama with ReLU.
    """
    path = folder / "config.json"
    fields = read_json(path)
    missing = [name for name in SIZES if name not in fields]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; {PUT_BACK}")
    kind = fields.pop("model_type", None)
    if kind not in LLAMAS:
        raise ValueError(f"{folder} holds a model of type {kind!r}; expected a Llama with ReLU")
    # The type has a newer and an older name.
    names = [fields.pop("dtype", None), fields.pop("torch_dtype", None)]
    names = [str(name).removeprefix("torch.") for name in names if name not in (None, "auto")]
    if names and getattr(torch, names[0], None) not in DTYPES:
        raise ValueError(f"{path}: dtype is {names[0]!r}; expected one of {DTYPE_NAMES}")
    fields["dtype"] = names[0] if names else None
    if (quantization := fields.pop("quantization_config", None)) not in (None, QUANTIZATION):
        problem = f"{path} has a quantization_config; such quantised weights cannot be read"
        raise ValueError(f"{problem}, those of twell.quantize_ can")
    if kind != SparseLlamaConfig.model_type:
        fields = _translated(folder, kind, fields)
    try:
        config = _described(fields)
        note_quantization(config, quantization)
        return config
    except Exception as error:  # transformers raises a dozen kinds
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} describes no model: {' '.join(reason.split())}") from None


def _translated(folder: Path, kind: str, fields: dict) -> dict:
    """Return our fields for a Llama's and for the paper's, whose names begin with `sparsity_`."""
    sparsity = {name: fields.pop(name) for name in list(fields) if name.startswith("sparsity_")}
    activation = fields.get("hidden_act")
    known = ACTIVATIONS.get(str(activation))
    makes_zeros = known is not None and known.sparse
    if not sparsity and kind == "llama" and not makes_zeros:
        raise ValueError(
            f"{folder} holds a Llama with activation {activation!r}; "
            "load it with transformers and use twell.sparsify(model, relufy=True)"
        )
    fields.pop("architectures", None)
    size = sparsity.get("sparsity_new_intermediate_size") or fields.get("intermediate_size")
    # Llama's own defaults, which differ from those of SparseLlamaConfig
    fields = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6} | fields
    return fields | {
        "hidden_act": activation if makes_zeros else "relu",  # the paper's may say "silu"
        "gated_mlp": sparsity.get("sparsity_gated_mlp", True),
        "l1_coefficient": sparsity.get("sparsity_l1_coeff") or 0.0,
        "intermediate_size": size,
    }


def _described(fields: dict) -> SparseLlamaConfig:
    """Return the configuration of these fields. Raises an error when no model can have it."""
    config = SparseLlamaConfig.from_dict(fields)
    rope = {"rope_type": "default", "rope_theta": 1e4} | (config.rope_parameters or {})
    kind, theta = rope["rope_type"], rope["rope_theta"]
    known = sorted({"default", *ROPE_INIT_FUNCTIONS})
    if kind not in known:
        raise ValueError(f"rope_type is {kind!r}; use one of {', '.join(known)}")
    if not 0 < theta < math.inf:
        raise ValueError(f"rope_theta is {theta}; it has to be a finite number above 0")
    # "dense", since no other backend works on every machine
    empty_weights(SparseLlamaConfig.from_dict(fields | {"ffn_backend": "dense"}))
    return config


def empty_weights(config: SparseLlamaConfig) -> dict[str, Tensor]:
    quantization = getattr(config, "quantization_config", None)
    config = copy.deepcopy(config)
    note_quantization(config, None)
    with torch.device("meta"):
        model = SparseLlamaForCausalLM(config)
        if quantization is not None:
            empty_quantized(model)
        return model.state_dict()


# --- *.safetensors


def read_weights(folder: Path, config: SparseLlamaConfig) -> dict[str, Tensor]:
    """Return the weights in a folder with Llama's names and shapes.

    The head is left out where `config` ties it to the embedding. Raises FileNotFoundError for a
    missing file. Raises ValueError for a damaged file, and for a tensor that is missing, unknown,
    or of the wrong shape or type.
    """
    named = getattr(config, "transformers_weights", None)
    tensors = _canonical(_read_tensors(folder, named), config, folder)
    expected = empty_weights(config)
    for name, tensor in tensors.items():
        if name in expected and expected[name].dtype == FLOAT8:
            if tensor.dtype != FLOAT8:
                raise _wrong(folder, name, f"type {tensor.dtype}", "float8_e4m3fn")
        elif tensor.dtype not in DTYPES:
            raise _wrong(folder, name, f"type {tensor.dtype}", f"one of {DTYPE_NAMES}")
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        both = head in tensors and embedding in tensors
        if both and not torch.equal(tensors[head], tensors[embedding]):
            message = f"{head} differs from {embedding}, but config.json ties them"
            raise ValueError(f"{folder}: {message}")
        tensors.pop(head, None)
    for name, shape in ((name, tuple(tensor.shape)) for name, tensor in expected.items()):
        if name not in tensors:
            raise ValueError(f"{folder}: the tensor {name} is missing, expected with shape {shape}")
        if tensors[name].shape != shape:
            raise _wrong(folder, name, f"shape {tuple(tensors[name].shape)}", shape)
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise ValueError(
            f"{folder}: the tensor {unknown[0]} is not part of the model ({len(unknown)} such)"
        )
    return tensors


def _wrong(folder: Path, name: str, given: str, expected: Any) -> ValueError:
    return ValueError(f"{folder}: the tensor {name} has {given}; expected {expected}")


def _read_tensors(folder: Path, named: str | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}  # by the weight's name in Llama's layout
    for file in _files(folder, named):
        for name, tensor in _read_file(file).items():
            weight = PAPER_WEIGHT.sub(r".mlp.\2_proj.weight", name)
            if weight in names:
                both = name if names[weight] == name else f"{names[weight]} and {name}"
                raise ValueError(f"{file}: {both} would be one weight twice; take one of them out")
            names[weight] = name
            is_weight = tensor.dtype in (*DTYPES, FLOAT8) and not NO_WEIGHTS.search(name)
            finite = tensor.float() if tensor.dtype == FLOAT8 else tensor
            if is_weight and not finite.isfinite().all():
                problem = f"the tensor {name} has NaN or infinite values"
                raise ValueError(f"{file}: {problem}: {PUT_BACK_COPY}")
            tensors[name] = tensor
    return tensors


def _files(folder: Path, named: str | None) -> list[Path]:
    """Return the files with the weights, in order.

    As transformers: a file that config.json names, else one file, else the shards of an index.
    """
    paths = [folder / name for name in ((named,) if named else (WHOLE, INDEX))]
    index = next(filter(Path.is_file, paths), paths[0])
    if not index.name.endswith(".index.json"):
        return [index]
    places = read_json(index).get("weight_map")
    is_map = isinstance(places, dict) and places
    if not (is_map and all(isinstance(file, str) for file in places.values())):
        problem = f"{index} has no weight_map with a file for each tensor"
        raise ValueError(f"{problem}; put back the one that came with them")
    return [index.parent / name for name in sorted(set(places.values()))]


def _read_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}, which holds weights of the model"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}; {PUT_BACK_COPY}") from None


def _canonical(
    tensors: dict[str, Tensor], config: SparseLlamaConfig, folder: Path
) -> dict[str, Tensor]:
    """Return the weights of either layout with Llama's names and shapes, and nothing else."""
    result, hybrid = {}, _is_hybrid(folder)
    transposed = {"gate_weight" if config.gated_mlp else "up_weight", "down_weight"}
    for name, tensor in tensors.items():
        if NO_WEIGHTS.search(name):
            continue
        if match := PAPER_WEIGHT.search(name):
            if tensor.dim() != 2:
                raise _wrong(folder, name, f"shape {tuple(tensor.shape)}", "a matrix")
            tensor = tensor.t().contiguous() if match[1] in transposed else tensor
            name = name.replace(match[1], f"{match[2]}_proj.weight")
        elif name.endswith(".mlp.down_proj.weight") and hybrid is not None:
            _check_down(name, tensor, config, hybrid, folder)
            tensor = tensor.t().contiguous() if hybrid else tensor
        result[name] = tensor
    return result


def _is_hybrid(folder: Path) -> bool | None:
    """Return whether down_proj.weight is stored transposed; None for a configuration of ours."""
    path = folder / "config.json"
    fields = read_json(path)
    if fields.get("model_type") == SparseLlamaConfig.model_type:
        return None
    hybrid = fields.get(HYBRID) or False
    if not isinstance(hybrid, bool):
        raise ValueError(f"{path}: {HYBRID} is {hybrid!r}; expected true or false")
    return hybrid


def _check_down(
    name: str, tensor: Tensor, config: SparseLlamaConfig, hybrid: bool, folder: Path
) -> None:
    """Refuse a down projection whose shape contradicts the configuration."""
    shape, stored = (config.hidden_size, config.intermediate_size), tuple(tensor.shape)
    expected, other = (shape[::-1], shape) if hybrid else (shape, shape[::-1])
    # Without the field, `read_weights` refuses any third shape.
    if stored == expected or not (hybrid or stored == other):
        return
    value, remedy = ("true", "false") if hybrid else ("not true", "true")
    hint = f"; if the file is right, set it to {remedy}" if stored == other else ""
    reason = f"{expected}, since {HYBRID} in config.json is {value}{hint}"
    raise _wrong(folder, name, f"shape {stored}", reason)
