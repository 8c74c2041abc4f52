"""Language models with sparse feed-forward layers.

Importing this package registers SparseLlamaForCausalLM with transformers' `AutoConfig` and
`AutoModelForCausalLM`.
"""

from twell.models.adapters import Adapter, register_adapter
from twell.models.convert import densify, last_norm, sparse_ffns, sparsify
from twell.models.intervene import intervene, silence
from twell.models.l1 import collect_l1, with_l1
from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM, check_llama
from twell.models.loading import CALIBRATION, load, load_empty, load_stock, read_json, resolve, save
from twell.models.order import order_tokens
from twell.models.quantize import dequantize_, num_weights, quantize_
