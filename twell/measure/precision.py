"""The quality that FP8 costs: a model's cross-entropy on the same tokens in several precisions.

Differences are paired: the same tokens, summed by sequence, and bootstrapped over sequences. The
sparse rows have gate and up in FP8 and down in bf16, the dense ones all three; "FP8 all" adds
attention's linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from twell.measure.providers import DENSE_EAGER, FP8, FP8_ALL, Provider
from twell.measure.rows import Rows, require, significant
from twell.measure.sides import Linears, check_model
from twell.models.llama import SparseLlamaForCausalLM, check_llama
from twell.models.quantize import num_weights
from twell.sparse import float8
from twell.trace.tracing import passes

DRAWS = 2000  # bootstrap samples


def quality(
    name: str,
    model: SparseLlamaForCausalLM,
    sequences: Sequence[Sequence[int]],
    *,
    source: str = "",
    out: str | Path | None = None,
) -> list[dict]:
    """Return rows of quality.csv for a model in bf16, one for each precision.

    On a GPU with FP8 the kernels compute the sparse rows, elsewhere plain torch with the same
    roundings. `difference` is from bf16, `dense_difference` from the dense layers of the same
    precision, in nats a predicted token, with 95% intervals.

    sequences: token ids; the first of each is not predicted. Raises ValueError for another
    activation than ReLU, and for fewer than two sequences with a predicted token.
    """
    check_llama(name, model)
    check_model(name, model.config, 1)
    sequences = [sequence for sequence in sequences if len(sequence) > 1]
    require(len(sequences) > 1, "the text has to have at least two sequences of two tokens")
    sparse = "triton" if float8.why_not(model.device) is None else "reference"
    in_fp8 = [Provider(b, precision=p) for p in (FP8, FP8_ALL) for b in ("dense", sparse)]
    rows, linears = Rows(out, "quality"), Linears(model)
    predicted = np.array([len(sequence) - 1 for sequence in sequences])
    about = {"model": name, "parameters": num_weights(model), "source": source}
    about |= {"tokens": int(predicted.sum()), "sequences": len(sequences)}
    losses: dict[Provider, np.ndarray] = {}
    backend = model.config.ffn_backend
    try:
        for provider in (DENSE_EAGER, *in_fp8):
            linears.become(provider)
            model.set_ffn_backend(provider.backend)
            parts, active = [], 0
            for _, layers, logprob in passes(model, sequences, model.ffns):
                parts.append(-logprob[:, 1:].double().sum(1).cpu().numpy())
                active += sum(len(token) for token, *_ in layers)
            loss = losses[provider] = np.concatenate(parts)  # of each sequence
            active /= sum(map(len, sequences)) * len(model.ffns)
            row = about | {"provider": provider.name, "active": significant(active, 5)}
            row["cross_entropy"] = significant(loss.sum() / predicted.sum(), 7)
            row |= _difference("", loss - losses[DENSE_EAGER], predicted)
            other = losses[replace(provider, backend="dense")]
            rows.add("quality", [row | _difference("dense_", loss - other, predicted)])
    finally:
        linears.become(DENSE_EAGER)
        model.set_ffn_backend(backend)
    return rows.by_file["quality"]


def _difference(prefix: str, difference: np.ndarray, predicted: np.ndarray) -> dict:
    """Return the columns of a paired difference in nats a token, with its 95% interval."""
    drawn = np.random.default_rng(0).integers(0, len(predicted), (DRAWS, len(predicted)))
    means = difference[drawn].sum(1) / predicted[drawn].sum(1)
    values = difference.sum() / predicted.sum(), *np.quantile(means, (0.025, 0.975))
    names = (f"{prefix}{name}" for name in ("difference", "low", "high"))
    return {name: round(float(value), 7) for name, value in zip(names, values, strict=True)}
