"""lm-eval's loader around one of our models.

lm-eval's `hf` loader runs the model with any backend. Batches are padded on the right without a
mask, which has no effect in a causal model. A request longer than the context loses its beginning,
and is counted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from twell.corpus import load_tokenizer
from twell.measure.providers import FP8, Provider
from twell.measure.sides import Linears
from twell.models import load_stock, read_json, resolve
from twell.sparse.layer import SparseFFN
from twell.trace import load_with_tokenizer
from twell.train.relufy import RELUFIABLE

# "auto" starts here on a GPU; lm-eval halves it until it fits. Each trial runs five batches of the
# longest request, which with 1024 would be as many tokens as the paper's seven tasks have.
MAX_BATCH_SIZE = 256
CPU_BATCH_SIZE = 8  # on two cores, 32 is several times slower


def _is_original(model: str | Path) -> bool:
    """Return whether a model has SiLU, as before `twell relufy`; `twell.load` refuses it."""
    fields = read_json(resolve(model) / "config.json")
    # The paper's own models have ReLU, and "silu" in their configuration.
    papers = any(name.startswith("sparsity_") for name in fields)
    is_known = fields.get("model_type") in RELUFIABLE and not papers
    return is_known and fields.get("hidden_act") == "silu"


class LM(HFLM):
    """lm-eval's loader around one of our models: fp32 log-likelihoods, requests of any length."""

    def __init__(
        self,
        model: str | Path,
        batch_size: int | str,
        *,
        device: torch.device,
        backend: str | None = None,
        dtype: str | None = None,
    ):
        if batch_size == "auto" and device.type == "cpu":
            batch_size = CPU_BATCH_SIZE
        in_fp8 = dtype == FP8
        kind = None if dtype is None else getattr(torch, "bfloat16" if in_fp8 else dtype)
        if _is_original(model):
            if in_fp8 or backend not in (None, "dense"):
                given = FP8 if in_fp8 else f"backend {backend!r}"
                raise ValueError(f"{given} is for layers with ReLU, and {model} has 'silu'")
            loaded = load_stock(model, kind or "auto").eval()
            tokenizer = load_tokenizer(str(resolve(model)), loaded.config.vocab_size)
        else:
            loaded, tokenizer = load_with_tokenizer(model, backend=backend, dtype=kind)
        self.ffns = [part for part in loaded.modules() if isinstance(part, SparseFFN)]
        self.ffn_backend = self.ffns[0].backend if self.ffns else "dense"
        self.precision = FP8 if in_fp8 else str(loaded.dtype).removeprefix("torch.")
        # Requests of any length are scored in windows, so the tokenizer need not warn.
        tokenizer.model_max_length = VERY_LARGE_INTEGER
        super().__init__(
            loaded.to(device),
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_batch_size=MAX_BATCH_SIZE,
            max_length=loaded.config.max_position_embeddings,
            softmax_dtype=torch.float32,
        )
        if self.ffn_backend == "triton" and loaded.dtype == torch.float32:
            raise ValueError("backend 'triton' computes float32 densely; give a 16-bit dtype")
        if self.prefix_token_id is None:
            raise ValueError(
                f"the tokenizer of {model} has neither bos_token nor eos_token to begin texts with"
            )
        if in_fp8:
            Linears(loaded).become(Provider(self.ffn_backend, precision=FP8))
        loaded.config.use_cache = False  # nothing is generated from these passes
        self.truncated: Counter[str] = Counter()

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        self.asked_by = [request.task_name for request in requests]
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if override_bs is None:  # windows of a rolling likelihood are never cut
            for name, (_, context, continuation) in zip(self.asked_by, requests, strict=True):
                self.truncated[name] += len(context) + len(continuation) > self.max_length + 1
        return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
