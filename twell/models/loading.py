"""Save models, and load those of runs, of `save_pretrained`, and of the paper."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from twell.models.checkpoint import (
    LLAMAS,
    PUT_BACK,
    PUT_BACK_COPY,
    read_config,
    read_json,
    read_weights,
)
from twell.models.convert import sparse_ffns, sparsify
from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.quantize import note_quantization
from twell.sparse.calibration import FLOAT8, Calibration

CALIBRATION = "calibration.json"  # beside the weights, as the next two
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"  # of peft
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# Files that are downloaded; *.jinja: chat templates
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


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

    A Llama with ReLU becomes a SparseLlamaForCausalLM. Any other model is loaded by transformers
    and changed by `twell.sparsify`.

    `name_or_path` is a run folder, a folder of `save_pretrained`, or a name on the hub. Every
    layout of the paper's checkpoints loads (`SakanaAI/SparseLM1.5B` and others). Where config.json
    sets `sparsity_use_hybrid_kernel`, `down_proj.weight` is stored as [intermediate, hidden].
    `backend` computes the feed-forward layers; "auto" chooses by the times in `calibration.json`,
    if that file lies beside the weights.

    A model that was saved with FP8 weights (`twell.quantize_`) keeps them, the rest is in bf16.
    Text is generated as `generation_config.json` says, if that file lies beside the weights.

    All weights get one type: `dtype`, else the type that config.json names (`dtype`, or the older
    `torch_dtype`), else a type that holds all stored ones. Values stay the same bit for bit, unless
    that type rounds them. Where the type in config.json rounds, a UserWarning names a tensor.

    Raises FileNotFoundError for a missing file. Raises ValueError for a damaged file, an impossible
    configuration, and a tensor that is missing, unknown or of the wrong shape or type, by name; and
    for a Llama with an adapter of peft beside its weights.
    """
    folder = resolve(name_or_path)
    _refuse_adapter(folder)
    if _is_llama(folder):
        model = _load_llama(folder, backend, dtype)
    else:
        load_empty(folder)  # refuses what cannot become sparse, before weights load
        model = sparsify(load_stock(name_or_path, dtype or "auto"), backend=backend or "dense")
    ffns = sparse_ffns(model)
    if ffns[0].backend == "auto" and (calibration := _calibration_of(folder)):
        if (calibration.dtype == FLOAT8) == ffns[0].quantized:
            for ffn in ffns:
                ffn.calibration = calibration
        else:
            option = " --fp8" if ffns[0].quantized else ""
            warnings.warn(
                f"{folder / CALIBRATION} has times of {calibration.dtype}, unlike the weights, and "
                f"is not used; `twell measure calibrate{option}` measures them",
                stacklevel=2,
            )
    return model.eval(), _tokenizer_of(folder)


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
    with _no_progress_bar():
        model = SparseLlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype
        )
    if (folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_dict(read_json(folder / GENERATION))
    return model


def load_empty(name_or_path: str | Path) -> tuple[Path, PreTrainedModel]:
    """Return the folder with a model's weights, and the model of `load` on the meta device."""
    folder = resolve(name_or_path)
    with torch.device("meta"):
        if _is_llama(folder):
            config = read_config(folder)
            config.ffn_backend = "dense"
            note_quantization(config, None)
            return folder, SparseLlamaForCausalLM(config)
        config, auto = stock_config(folder)
        return folder, sparsify(auto.from_config(config))


def resolve(name: str | Path) -> Path:
    """Return the folder with config.json, downloaded if `name` is no folder here."""
    folder = Path(name)
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no model: it has no config.json")
        return folder
    if folder.exists():
        raise ValueError(
            f"{folder} is a file; a model is a folder with config.json and *.safetensors"
        )
    try:
        return Path(snapshot_download(str(name), allow_patterns=PATTERNS))
    except HFValidationError:
        reason = f"no model at {name}: it is no folder, and no name on the Hugging Face hub"
    except Exception as error:  # offline, no such repository, no access: the hub has a dozen kinds
        reason = f"no model {name}: it is no folder here, and the hub answered: {error}"
    raise FileNotFoundError(reason)


# --- models of other families


def load_stock(name: str | Path, dtype: torch.dtype | str) -> PreTrainedModel:
    """Return a model of any family as transformers loads it; see `load` for the name.

    Raises ValueError for a damaged file, a missing or unknown tensor, and quantised weights.
    """
    folder = resolve(name)
    _refuse_adapter(folder)
    config, auto = stock_config(folder)
    source = folder if Path(name).is_dir() else name  # transformers downloads other files too
    try:
        with _no_progress_bar():
            options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, report = auto.from_pretrained(source, config=config, dtype=dtype, **options)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = _reason(error)[:300]
        raise ValueError(f"{folder} cannot be loaded: {reason}; {PUT_BACK_COPY}") from None
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise ValueError(
                f"{folder}: the weights have {problem.replace('_', ' ')}, such as "
                f"{sorted(report[problem])[0]}; {PUT_BACK_COPY}"
            )
    return model


def _is_llama(folder: Path) -> bool:
    return read_json(folder / "config.json").get("model_type") in LLAMAS


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


# --- files


def _refuse_adapter(folder: Path) -> None:
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder} has {ADAPTER}, an adapter of peft, which would be left out; load the folder "
            "with transformers' AutoModelForCausalLM.from_pretrained, which applies it"
        )


def _dtype_of(tensors: dict[str, Tensor], config: SparseLlamaConfig, folder: Path) -> torch.dtype:
    """Return the type that config.json names, else one that holds all tensors; warn of rounding."""
    widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    if config.dtype is None:
        return widest
    rounded = (
        n for n, t in tensors.items() if torch.promote_types(t.dtype, config.dtype) != config.dtype
    )
    if name := next(rounded, None):
        warnings.warn(
            f"{folder}: the tensor {name} is stored as {tensors[name].dtype} and rounded to the "
            f"type in config.json, {config.dtype}; dtype={widest} keeps the stored values",
            stacklevel=4,
        )
    return config.dtype


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide transformers' bar: the tensors are read before, and notebooks keep the bar at 0%."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _calibration_of(folder: Path) -> Calibration | None:
    """Return the calibration beside the weights, if any; warn when another device measured it."""
    if not (folder / CALIBRATION).is_file():
        return None
    calibration = Calibration.load(folder / CALIBRATION)
    if torch.cuda.is_available() and (device := torch.cuda.get_device_name()) != calibration.device:
        warnings.warn(
            f"{folder / CALIBRATION} has times of {calibration.device!r}, and this is {device!r}: "
            "`twell measure calibrate` measures here",
            stacklevel=3,
        )
    return calibration


def _tokenizer_of(folder: Path) -> PreTrainedTokenizerBase | None:
    files = [folder / name for name in TOKENIZER if (folder / name).is_file()]
    if not files:
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except ImportError:
        raise
    except Exception as error:  # damaged files raise a dozen kinds
        names = " and ".join(map(str, files))
        raise ValueError(f"{names} make no tokenizer: {_reason(error)}; {PUT_BACK}") from None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
