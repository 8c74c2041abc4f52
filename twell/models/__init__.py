"""Language models with sparse feed-forward layers.

llama        SparseLlamaForCausalLM: transformers' Llama with SparseFFN layers
convert      sparsify and densify models of transformers, in place
masks        which tokens of a batch are padding
l1           the L1 term of each layer
silencing    layers or single neurons without output
loading      save models, and load them from every layout
config_file  config.json of such a model
weights      its *.safetensors

Importing this package registers SparseLlamaForCausalLM with transformers' `AutoConfig` and
`AutoModelForCausalLM`. `twell.model` is its public name.
"""

from twell.models.config_file import DTYPES, HYBRID, SIZES
from twell.models.convert import SPARSIFIABLE, densify, sparse_ffns, sparsify
from twell.models.l1 import l1_by_layer
from twell.models.llama import SparseCausalLMOutput, SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.loading import CALIBRATION, load, load_config, save
from twell.models.masks import MASKED
from twell.models.silencing import silence
from twell.models.weights import NO_WEIGHTS

__all__ = [
    "CALIBRATION",
    "DTYPES",
    "HYBRID",
    "MASKED",
    "NO_WEIGHTS",
    "SIZES",
    "SPARSIFIABLE",
    "SparseCausalLMOutput",
    "SparseLlamaConfig",
    "SparseLlamaForCausalLM",
    "densify",
    "l1_by_layer",
    "load",
    "load_config",
    "save",
    "silence",
    "sparse_ffns",
    "sparsify",
]
