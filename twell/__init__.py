"""twell: sparse feed-forward layers for transformer language models, and the notebook around them.

Importing this package is cheap: public names are loaded on first use, so neither Triton kernels
nor transformers are touched until something needs them. Once transformers' `AutoModelForCausalLM`
is loaded too, before or after, it knows SparseLlamaForCausalLM.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from twell.lazy import load_after

if not Path(__file__).with_name("kernels").is_dir():
    raise ImportError(
        "twell/kernels is not a link to ../kernels, so twell has no kernels: clone the repository "
        "with git, or delete twell/kernels and run `ln -s ../kernels twell/kernels`; an installed "
        "twell has to be installed again"
    )

__version__ = "0.1.0"

_HOME = {
    "TwELL": "sparse.formats",
    "PackedTwELL": "sparse.formats",
    "ELL": "sparse.formats",
    "Hybrid": "sparse.formats",
    "TileUnion": "sparse.formats",
    "BufferOverflow": "sparse.formats",
    "SparseFFN": "sparse.layer",
    "backend_status": "sparse.layer",
    "ffn": "sparse.ops",
    "warm_up": "sparse.ops",
    "SparseLlamaConfig": "models",
    "SparseLlamaForCausalLM": "models",
    "sparsify": "models",
    "densify": "models",
    "register_adapter": "models",
    "load": "models",
    "collect_l1": "models",
    "l1_by_layer": "models",
    "with_l1": "models",
    "intervene": "models",
    "silence": "models",
    "order_tokens": "models",
    "quantize_": "models",
    "dequantize_": "models",
    "Float8DynamicActivationFloat8WeightConfig": "sparse.float8",
    "PerRow": "sparse.float8",
    "tune": "measure.tune",
    "SparseTraining": "sparse.training",
    "TrainConfig": "config",
    "Trace": "trace",
    "Aggregate": "trace",
    "inspect": "inspector.widget",
}
_MODULES = set("format reference model corpus results measure evaluate train inspector".split())
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"twell.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"twell.{name}")
    raise AttributeError(f"module 'twell' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})


# Each of the later ones imports the one before it, and Llama needs all of them.
_AUTO = (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_layers",
    "transformers.models.llama.modeling_llama",
)
load_after(_AUTO, "twell.models.llama")  # which registers itself
