"""Tensors of a checkpoint: read from every layout, renamed, transposed, and checked.

Every error names the file and the tensor.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from twell.models.config_file import DTYPE_NAMES, DTYPES, HYBRID, is_hybrid, read_json
from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM

# The paper's trackers, and rotary tables
NO_WEIGHTS = re.compile(r"(^|\.)(tracker|metrics_accumulator)\.|rotary_emb\.inv_freq$")
# Names of the paper's own layout, of which some are stored transposed
PAPER_WEIGHT = re.compile(r"\.mlp\.((gate|up|down)_weight)$")


def read_weights(folder: Path, config: SparseLlamaConfig) -> dict[str, Tensor]:
    """Return the weights in a folder with Llama's names and shapes.

    The head is left out where `config` ties it to the embedding. Raises FileNotFoundError for a
    missing file. Raises ValueError for a damaged file, and for a tensor that is missing, unknown,
    or of the wrong shape or type.
    """
    tensors = _canonical(_read_tensors(folder), config, folder)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{folder}: the tensor {name} has type {tensor.dtype}; "
                f"expected one of {DTYPE_NAMES}"
            )
    with torch.device("meta"):
        expected = SparseLlamaForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        _drop_tied_head(tensors, folder)
        expected.pop("lm_head.weight")
    _check_tensors(tensors, expected, folder)
    return tensors


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}  # by the weight's name in Llama's layout
    for file in _files(folder):
        part = _read_file(folder, file)
        for name, tensor in part.items():
            weight = PAPER_WEIGHT.sub(r".mlp.\2_proj.weight", name)
            if weight in names:
                both = name if names[weight] == name else f"{names[weight]} and {name}"
                raise ValueError(
                    f"{folder / file}: {both} would be one weight twice; take one of them out"
                )
            names[weight] = name
            is_weight = tensor.dtype in DTYPES and not NO_WEIGHTS.search(name)
            if is_weight and not tensor.isfinite().all():
                raise ValueError(
                    f"{folder / file}: the tensor {name} has NaN or infinite values: "
                    "put back a whole copy"
                )
        tensors |= part
    return tensors


def _files(folder: Path) -> list[str]:
    """Return the names of the files with the weights, in order."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    places = read_json(index).get("weight_map")
    is_map = isinstance(places, dict) and places
    if not (is_map and all(isinstance(file, str) for file in places.values())):
        raise ValueError(
            f"{index} has no weight_map with a file for each tensor; "
            "put back the one that came with them"
        )
    return sorted(set(places.values()))


def _read_file(folder: Path, name: str) -> dict[str, Tensor]:
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder} has no {name}, which holds weights of the model")
    try:
        return load_file(folder / name)
    except SafetensorError as error:
        raise ValueError(
            f"{folder / name} is damaged or cut short: {error}; put back a whole copy"
        ) from None


def _canonical(
    tensors: dict[str, Tensor], config: SparseLlamaConfig, folder: Path
) -> dict[str, Tensor]:
    """Return the weights of either layout with Llama's names and shapes, and nothing else."""
    result, hybrid = {}, is_hybrid(folder)
    transposed = {"gate_weight" if config.gated_mlp else "up_weight", "down_weight"}
    for name, tensor in tensors.items():
        if NO_WEIGHTS.search(name):
            continue
        if match := PAPER_WEIGHT.search(name):
            if tensor.dim() != 2:
                raise ValueError(
                    f"{folder}: the tensor {name} has shape {tuple(tensor.shape)}; "
                    "expected a matrix"
                )
            tensor = tensor.t().contiguous() if match[1] in transposed else tensor
            name = name.replace(match[1], f"{match[2]}_proj.weight")
        elif name.endswith(".mlp.down_proj.weight") and hybrid is not None:
            _check_down(name, tensor, config, hybrid, folder)
            tensor = tensor.t().contiguous() if hybrid else tensor
        result[name] = tensor
    return result


def _check_down(
    name: str, tensor: Tensor, config: SparseLlamaConfig, hybrid: bool, folder: Path
) -> None:
    """Refuse a down projection whose shape contradicts the configuration."""
    shape, stored = (config.hidden_size, config.intermediate_size), tuple(tensor.shape)
    expected, other = (shape[::-1], shape) if hybrid else (shape, shape[::-1])
    # Without the field, `_check_tensors` refuses any third shape.
    if stored == expected or not (hybrid or stored == other):
        return
    value, remedy = ("true", "false") if hybrid else ("not true", "true")
    hint = f"; if the file is right, set it to {remedy}" if stored == other else ""
    raise ValueError(
        f"{folder}: the tensor {name} has shape {stored}; "
        f"expected {expected}, since {HYBRID} in config.json is {value}{hint}"
    )


def _drop_tied_head(tensors: dict[str, Tensor], folder: Path) -> None:
    """Drop a head that repeats the embedding. Refuse one that differs: it would be lost."""
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}: lm_head.weight differs from model.embed_tokens.weight, "
            "but config.json ties them"
        )


def _check_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    """Refuse tensors that are missing, of another shape, or unknown to the model."""
    for name, tensor in expected.items():
        shape = tuple(tensor.shape)
        if name not in tensors:
            raise ValueError(f"{folder}: the tensor {name} is missing, expected with shape {shape}")
        if tensors[name].shape != shape:
            raise ValueError(
                f"{folder}: the tensor {name} has shape {tuple(tensors[name].shape)}; "
                f"expected {shape}"
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise ValueError(
            f"{folder}: the tensor {unknown[0]} is not part of the model ({len(unknown)} such)"
        )
