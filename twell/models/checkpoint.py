"""Configuration and weights of a checkpoint: ours, a Llama's with ReLU, or the paper's.

The paper's checkpoints have Llama's names, with down_proj transposed where its hybrid kernels
trained; or they have names of their own, and store some tensors transposed. Every error names the
file, and the tensor.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX
from transformers.utils import SAFE_WEIGHTS_NAME as WHOLE

from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.quantize import empty_quantized, note_quantization
from twell.sparse.activations import ACTIVATIONS
from twell.sparse.float8 import FLOAT8, FP8_DOWN, QUANTIZATION

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
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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
    if missing := [name for name in SIZES if name not in fields]:
        raise ValueError(f"{path} has no {', '.join(missing)}; {PUT_BACK}")
    kind = fields.pop("model_type", None)
    # The type has a newer and an older name.
    names = [fields.pop("dtype", None), fields.pop("torch_dtype", None)]
    names = [str(name).removeprefix("torch.") for name in names if name not in (None, "auto")]
    if names and getattr(torch, names[0], None) not in DTYPES:
        raise ValueError(f"{path}: dtype is {names[0]!r}; expected one of {DTYPE_NAMES}")
    fields["dtype"] = names[0] if names else None
    quantization = fields.pop("quantization_config", None)
    if quantization not in (None, QUANTIZATION, FP8_DOWN):
        raise ValueError(
            f"{path} has the quantization_config {quantization}; twell reads FP8 weights of "
            "twell.quantize_ only"
        )
    if kind != SparseLlamaConfig.model_type:
        fields = _translated(folder, kind, fields)
    try:
        config = SparseLlamaConfig.from_dict(fields)
        # The "dense" backend works on every machine.
        empty_weights(SparseLlamaConfig.from_dict(fields | {"ffn_backend": "dense"}))
    except Exception as error:  # transformers raises a dozen kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} describes no model: {reason}") from None
    note_quantization(config, quantization)
    return config


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


def empty_weights(config: SparseLlamaConfig) -> dict[str, Tensor]:
    """Return the state dictionary of a model on the meta device: names, shapes and types."""
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
        in_fp8 = name in expected and expected[name].dtype == FLOAT8
        if tensor.dtype not in ((FLOAT8,) if in_fp8 else DTYPES):
            types = FLOAT8 if in_fp8 else f"one of {DTYPE_NAMES}"
            raise _wrong(folder, name, f"type {tensor.dtype}", types)
    if config.tie_word_embeddings:
        expected.pop(HEAD)
        head = tensors.pop(HEAD, None)
        if head is not None and not torch.equal(head, tensors.get(EMBEDDING, head)):
            raise ValueError(
                f"{folder}: {HEAD} differs from {EMBEDDING}, but config.json ties them"
            )
    for name, tensor in expected.items():
        shape = tuple(tensor.shape)
        if name not in tensors:
            raise ValueError(f"{folder}: the tensor {name} is missing, expected with shape {shape}")
        given = tuple(tensors[name].shape)
        if given != shape:
            turned = given == shape[::-1] and name.endswith("down_proj.weight")
            hint = f"; see {HYBRID} in config.json" if turned else ""
            raise _wrong(folder, name, f"shape {given}", f"{shape}{hint}")
    if unknown := sorted(set(tensors) - set(expected)):
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
    try:
        files = sorted(set(read_json(index)["weight_map"].values()))
        return [index.parent / name for name in files]
    except (KeyError, AttributeError, TypeError):
        raise ValueError(f"{index} has no weight_map with a file for each tensor") from None


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
        elif hybrid and name.endswith(".mlp.down_proj.weight"):
            tensor = tensor.t().contiguous()
        result[name] = tensor
    return result


def _is_hybrid(folder: Path) -> bool:
    """Return whether down_proj.weight is stored transposed, as in files of the paper alone."""
    fields = read_json(folder / "config.json")
    hybrid = fields.get(HYBRID) or False
    if not isinstance(hybrid, bool):
        raise ValueError(f"{folder}: {HYBRID} is {hybrid!r}; expected true or false")
    return hybrid and fields.get("model_type") != SparseLlamaConfig.model_type
