"""twell: sparse feed-forward layers for transformer language models, and the notebook around them.

Importing this package is cheap: public names are loaded on first use, so neither Triton kernels
nor transformers are touched until something needs them. Once transformers' `AutoModelForCausalLM`
is loaded too, before or after, it knows SparseLlamaForCausalLM.
"""

from __future__ import annotations

from pathlib import Path

from twell.lazy import hand_on, load_after

if not Path(__file__).with_name("kernels").is_dir():
    raise ImportError(
        "twell/kernels is not a link to ../kernels, so twell has no kernels: clone the repository "
        "with git, or delete twell/kernels and run `ln -s ../kernels twell/kernels`; an installed "
        "twell has to be installed again"
    )

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".config": "TrainConfig",
        ".inspector.widget": "inspect",
        ".measure.calibration": "tune",
        ".models": "SparseLlamaConfig SparseLlamaForCausalLM sparsify densify register_adapter "
        "load collect_l1 with_l1 intervene silence order_tokens quantize_ dequantize_",
        ".sparse.float8": "Float8DynamicActivationFloat8WeightConfig",
        ".sparse.formats": "TwELL PackedTwELL ELL Hybrid TileUnion",
        ".sparse.layer": "SparseFFN backend_status",
        ".sparse.ops": "ffn warm_up",
        ".sparse.training": "SparseTraining",
        ".trace": "Trace Aggregate",
    },
    "corpus results measure evaluate train inspector",
)

# Each of the later ones imports the one before it, and Llama needs all of them.
_AUTO = (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_layers",
    "transformers.models.llama.modeling_llama",
)
load_after(_AUTO, "twell.models.llama")  # which registers itself
