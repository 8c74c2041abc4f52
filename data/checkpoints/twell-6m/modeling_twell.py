"""The model of this folder, for `trust_remote_code=True`: the package twell computes it.

`save_pretrained` puts this file beside the weights, and config.json names it.
"""

try:
    from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the model in this folder is computed by the package twell, which cannot be imported here "
        f"({error}); install it, or load a gated ReLU model without FP8 weights with "
        "transformers.LlamaForCausalLM, which computes the same densely"
    ) from error
