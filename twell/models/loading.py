"""Save models, and load those of runs, of `save_pretrained`, and of the paper.

A Llama with ReLU is read here, ours, transformers' or the paper's, and every error names the file
and the tensor. The paper's checkpoints have Llama's names, with down_proj transposed where its
hybrid kernels trained; or names of their own, with some tensors transposed. transformers loads
models of other families.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import warnings
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX
from transformers.utils import SAFE_WEIGHTS_NAME as WHOLE
from transformers.utils import logging

from twell.config import SIZES
from twell.corpus import read_tokenizer
from twell.models.convert import sparse_ffns, sparsify
from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.quantize import note_quantization
from twell.sparse import calibration
from twell.sparse.activations import ACTIVATIONS
from twell.sparse.calibration import Calibration
from twell.sparse.float8 import FLOAT8, FP8_DOWN, QUANTIZATION
from twell.sparse.formats import DTYPES

# Files beside the weights
CALIBRATION, GENERATION = "calibration.json", "generation_config.json"
ADAPTER = "adapter_config.json"  # of peft
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# Files that are downloaded; *.jinja: chat templates
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
# The paper's field: its kernels for training store down_proj.weight as [intermediate, hidden].
HYBRID = "sparsity_use_hybrid_kernel"
DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
READ_TYPES = (SparseLlamaConfig.model_type, "llama", "llama_sparse_relu")  # model_type
# The paper's trackers, and rotary tables
NO_WEIGHTS = re.compile(r"(^|\.)(tracker|metrics_accumulator)\.|rotary_emb\.inv_freq$")
# Names of the paper's own layout, of which some are stored transposed
PAPER_WEIGHT = re.compile(r"\.mlp\.((gate|up|down)_weight)$")
PUT_BACK = "put back the file that came with the weights"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, **options
) -> None:
    """Write a model and its tokenizer in Hugging Face layout. Raises OSError naming the folder."""
    try:
        model.save_pretrained(folder, **options)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # safetensors has a class of its own for a full disk; tokenizers raises plain Exception.
        if isinstance(error, SafetensorError) or type(error) is Exception:
            raise OSError(f"{folder} could not be written: {error}") from None
        raise


def load(
    name_or_path: str | Path, *, backend: str | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model, in evaluation mode, and its tokenizer (None when there is none).

    name_or_path: a run folder, a folder of `save_pretrained`, or a name on the hub. A Llama with
    ReLU becomes a SparseLlamaForCausalLM, from every layout of the paper's checkpoints
    (`SakanaAI/SparseLM1.5B` and others). Any other model is loaded by transformers and changed by
    `twell.sparsify`. backend: of the feed-forward layers; "auto" chooses by the times in
    `calibration.json`, if that file lies beside the weights.

    All weights get one type: `dtype`, else the type that config.json names (`dtype`, or the older
    `torch_dtype`), else a type that holds all stored ones. Values stay the same bit for bit, unless
    that type rounds them. Where the type in config.json rounds, a UserWarning names a tensor. FP8
    weights (`twell.quantize_`) stay FP8, and the rest is in bf16.

    Raises FileNotFoundError for a missing file. Raises ValueError for a damaged file, an impossible
    configuration, and a tensor that is missing, unknown or of the wrong shape or type, by name; and
    for a folder with an adapter of peft.
    """
    folder = resolve(name_or_path)
    if _is_llama(folder):
        model = _load_llama(folder, backend, dtype)
    else:
        load_empty(folder)  # refuses what cannot become sparse, before weights load
        model = sparsify(load_stock(name_or_path, dtype or "auto"), backend=backend or "dense")
    ffns = sparse_ffns(model)
    if ffns[0].backend == "auto" and (times := read_calibration(folder, ffns[0].quantized)):
        for ffn in ffns:
            ffn.calibration = times
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER)
    return model.eval(), read_tokenizer(folder) if has_tokenizer else None


def load_empty(name_or_path: str | Path) -> tuple[Path, PreTrainedModel]:
    """Return the folder with a model's weights, and the model of `load` on the meta device."""
    folder = resolve(name_or_path)
    if _is_llama(folder):
        return folder, _empty_llama(read_config(folder))
    config, auto = stock_config(folder)
    with torch.device("meta"):
        return folder, sparsify(auto.from_config(config))


def resolve(name: str | Path) -> Path:
    """Return the folder with config.json, downloaded if `name` is no folder here.

    Raises FileNotFoundError where there is none, and ValueError for an adapter of peft.
    """
    folder = Path(name)
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    elif not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(name), allow_patterns=PATTERNS))
        except HFValidationError:
            reason = f"no model at {name}: it is no folder, and no name on the Hugging Face hub"
            raise FileNotFoundError(reason) from None
        except Exception as error:  # offline, no such repository, no access: a dozen kinds
            reason = f"no model {name}: it is no folder here, and the hub answered: {error}"
            raise FileNotFoundError(reason) from None
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder} has {ADAPTER}, an adapter of peft, which would be left out; load the folder "
            "with transformers' AutoModelForCausalLM.from_pretrained, which applies it"
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no model: it has no config.json")
    return folder


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


def _is_llama(folder: Path) -> bool:
    return read_json(folder / "config.json").get("model_type") in READ_TYPES


def read_calibration(folder: str | Path, quantized: bool) -> Calibration | None:
    """Return the times in a folder; warn of another device, and of times for other weights."""
    path = Path(folder) / CALIBRATION
    if not path.is_file():
        return None
    measured = Calibration.load(path)
    if torch.cuda.is_available() and (device := torch.cuda.get_device_name()) != measured.device:
        times = f"{path} has times of {measured.device!r}, and this is {device!r}"
        warnings.warn(f"{times}: `twell measure calibrate` measures here", stacklevel=3)
    if (measured.dtype == calibration.FLOAT8) == quantized:
        return measured
    command = f"twell measure calibrate{' --fp8' if quantized else ''}"
    times = f"{path} has times of {measured.dtype}, unlike the weights, and is not used"
    warnings.warn(f"{times}; `{command}` measures them", stacklevel=3)
    return None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _from_pretrained(
    auto: type, source: str | Path | None, folder: Path, **options
) -> PreTrainedModel:
    """Return a model as transformers loads it; ValueError for damaged, absent or other weights."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # notebooks would keep the bar at 0%
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, report = auto.from_pretrained(source, **options)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be loaded: {_reason(error)[:300]}") from None
    finally:
        if enabled:
            logging.enable_progress_bar()
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            keys = f"{problem.replace('_', ' ')}, such as {sorted(report[problem])[0]}"
            raise ValueError(f"{folder}: the weights have {keys}; put back a whole copy")
    return model


# --- models of other families


def load_stock(name: str | Path, dtype: torch.dtype | str) -> PreTrainedModel:
    """Return a model of any family as transformers loads it; ValueError for damaged files."""
    folder = resolve(name)
    config, auto = stock_config(folder)
    source = folder if Path(name).is_dir() else name  # transformers downloads other files too
    return _from_pretrained(auto, source, folder, config=config, dtype=dtype)


def stock_config(folder: Path) -> tuple[PreTrainedConfig, type]:
    """Return the configuration of a model, and the class that loads it."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises a dozen kinds
        path = folder / "config.json"
        raise ValueError(f"{path} describes no model: {_reason(error)}; {PUT_BACK}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder} has quantised weights of a {config.model_type!r}; load bf16 weights "
            "(twell.dequantize_ before saving) and quantise them then"
        )
    return config, AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


# --- Llamas with ReLU


def _load_llama(
    folder: Path, backend: str | None, dtype: torch.dtype | None
) -> SparseLlamaForCausalLM:
    config = read_config(folder)
    if backend is not None:
        config.ffn_backend = backend
    tensors = read_weights(folder, config)
    if getattr(config, "quantization_config", None) is not None:
        if dtype not in (None, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}, and {folder} has FP8 weights; expected bfloat16")
        dtype = torch.bfloat16
    dtype = dtype or _dtype_of(tensors, config, folder)
    options = {"config": config, "state_dict": tensors, "dtype": dtype}
    model = _from_pretrained(SparseLlamaForCausalLM, None, folder, **options)
    if (folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_dict(read_json(folder / GENERATION))
    return model


def read_config(folder: Path) -> SparseLlamaConfig:
    """Return the configuration of a Llama with ReLU. Raises ValueError for any other."""
    path = folder / "config.json"
    fields = read_json(path)
    if missing := [name for name in SIZES.values() if name not in fields]:
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
        has = f"{path} has the quantization_config {quantization}"
        raise ValueError(f"{has}; twell reads FP8 weights of twell.quantize_ only")
    if kind != SparseLlamaConfig.model_type:
        fields = _translated(folder, kind, fields)
    try:
        config = SparseLlamaConfig.from_dict(fields)
        _empty_llama(config)
    except Exception as error:  # transformers raises a dozen kinds
        raise ValueError(f"{path} describes no model: {_reason(error)}") from None
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


def _empty_llama(config: SparseLlamaConfig) -> SparseLlamaForCausalLM:
    """Return a model on the meta device, dense and not in FP8, which every machine can make."""
    config = copy.deepcopy(config)
    config.ffn_backend = "dense"
    note_quantization(config, None)
    with torch.device("meta"):
        return SparseLlamaForCausalLM(config)


def read_weights(folder: Path, config: SparseLlamaConfig) -> dict[str, Tensor]:
    """Return the tensors of either layout with Llama's names and shapes, without a tied head."""
    fields = read_json(folder / "config.json")
    hybrid = fields.get(HYBRID) is True and fields.get("model_type") != SparseLlamaConfig.model_type
    turned = {"gate_weight" if config.gated_mlp else "up_weight", "down_weight"}
    quantized = getattr(config, "quantization_config", None) is not None
    in_fp8 = ("gate_proj.weight", "up_proj.weight") if quantized else ()
    tensors: dict[str, Tensor] = {}
    for file in _files(folder, getattr(config, "transformers_weights", None)):
        if not file.is_file():
            raise FileNotFoundError(f"{file.parent} has no {file.name}, which holds weights")
        try:
            stored = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut short: {error}") from None
        for name, tensor in stored.items():
            if NO_WEIGHTS.search(name):
                continue
            weight, transposed = name, hybrid and name.endswith(".mlp.down_proj.weight")
            if match := PAPER_WEIGHT.search(name):
                weight = PAPER_WEIGHT.sub(r".mlp.\2_proj.weight", name)
                transposed = match[1] in turned
            if weight in tensors:
                raise ValueError(f"{file}: {name} would be {weight} twice; take one of them out")
            is_fp8 = weight.endswith(in_fp8)
            if tensor.dtype not in ((FLOAT8,) if is_fp8 else DTYPES):
                expected = FLOAT8 if is_fp8 else f"one of {DTYPE_NAMES}"
                has = f"the tensor {name} has type {tensor.dtype}"
                raise ValueError(f"{file}: {has}; expected {expected}")
            if not (tensor.float() if is_fp8 else tensor).isfinite().all():
                raise ValueError(f"{file}: the tensor {name} has NaN or infinite values")
            # Of another number of dimensions it stays the wrong shape, which transformers reports.
            tensors[weight] = tensor.transpose(0, -1).contiguous() if transposed else tensor
    if config.tie_word_embeddings:
        head = tensors.pop(HEAD, None)
        if head is not None and not torch.equal(head, tensors.get(EMBEDDING, head)):
            raise ValueError(f"{folder}: {HEAD} differs from {EMBEDDING}; config.json ties them")
    return tensors


def _files(folder: Path, named: str | None) -> list[Path]:
    """Return the files with the weights: the named one, else one file, else an index's shards."""
    paths = [folder / name for name in ((named,) if named else (WHOLE, INDEX))]
    index = next(filter(Path.is_file, paths), paths[0])
    if not index.name.endswith(".index.json"):
        return [index]
    return [index.parent / name for name in sorted(set(read_json(index)["weight_map"].values()))]


def _dtype_of(tensors: dict[str, Tensor], config: SparseLlamaConfig, folder: Path) -> torch.dtype:
    """Return the type that config.json names, else one that holds all tensors; warn of rounding."""
    widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    if config.dtype is None:
        return widest
    for name, tensor in tensors.items():
        if torch.promote_types(tensor.dtype, config.dtype) != config.dtype:
            warnings.warn(
                f"{folder}: the tensor {name} is stored as {tensor.dtype} and rounded to the "
                f"type in config.json, {config.dtype}; dtype={widest} keeps the stored values",
                stacklevel=4,
            )
            break
    return config.dtype
