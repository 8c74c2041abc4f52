"""Whole models: forward passes, each feed-forward layer, and decoding (decode.py).

A sample of the last hidden states (in decoding: of the logits) is compared with fp32, all of them
with the dense model's, and each feed-forward layer with fp64. Without a checkpoint the weights are
random and the activity is imposed (imposed.py). Energy is counted over the same turns as times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from twell.measure import check, imposed, runner
from twell.measure.decode import GENERATION, joined_projections, measure_decode
from twell.measure.imposed import layer_means
from twell.measure.layer import GRAPH_TOKENS, Case
from twell.measure.providers import (
    AUTO,
    DENSE_COMPILED,
    DENSE_EAGER,
    FP8,
    FP8_ALL,
    Provider,
    by_compilation,
    model_providers,
    third_party,
)
from twell.measure.rows import Rows, require, significant
from twell.measure.runner import bench
from twell.measure.sides import Subject, check_model, exact_hidden_states, forward, random_model
from twell.models.llama import SparseLlamaForCausalLM
from twell.models.order import order_tokens
from twell.sparse import float8
from twell.sparse.layer import SparseFFN, captured_by_hand

FILES = "model", "model_layers", "decode"
ORDERED = "checkpoint ordered"  # the column `profile` where similar tokens are side by side
Checkpoint = tuple[str, SparseLlamaForCausalLM, Sequence[int]]


@torch.no_grad()
def language_model(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    checkpoint: Checkpoint | None = None,
    ordered: bool = False,
    alike: bool = False,
    shapes: Sequence[tuple[int, int]] = ((64, 2048),),
    profile: str = "paper",
    active: Sequence[float] | None = None,
    layers: bool = False,
    decode: Sequence[int] | None = None,
    decode_context: int = 512,
    compiled: bool | None = None,
    tuned: bool = False,
    fp8: bool = False,
    graphs: bool = True,
    energy: bool = False,
    providers: Sequence[str] = (),
    out: str | Path | None = None,
) -> dict[str, list[dict]]:
    """Time a language model in bf16: `twell measure model`, whose help explains the options.

    size: a configuration, with random weights; or checkpoint: a name, the model in bf16 and the
    tokens of a text. ordered: similar tokens side by side. shapes: batches (sequences, tokens of
    each). Layers alone, and with `alike` the activity to impose, are of the first one. active:
    means, each imposed in turn. decode: numbers of documents to continue by GENERATION tokens.
    providers: third parties' layers in forward passes, see `ThirdPartyLayer`.

    Returns the rows by file. Raises as `ffn` does. Paper: section 4.1, Table 1, Figs 4, 6, 10, 11.
    """
    third_parties = third_party(providers)
    gpu, rows = runner.Gpu(energy), Rows(out, *FILES)
    decode = decode or ()
    least = min([*itertools.chain(*shapes), *decode, decode_context])
    require(least >= 1, f"batches and documents hold {least}; it has to be at least 1")
    require(bool(shapes) or not alike, "alike: the first of the batches is imposed; there is none")
    reason = float8.why_not(gpu.device) if fp8 else None
    require(reason is None, f"FP8 cannot be measured here: {reason}")
    lengths = [context for _, context in shapes] + [decode_context + GENERATION] * bool(decode)
    longest, text, levels = max(lengths, default=1), None, [None]
    if checkpoint is None:
        model, config = random_model(size, overrides, longest, gpu.device)
        levels = [layer_means(profile, config.num_layers, mean, size) for mean in active or [None]]
    else:
        size, model, text = checkpoint
        check_model(size, model.config, longest)
        model = model.to(gpu.device).requires_grad_(False).eval()
        profile = ORDERED if ordered else "checkpoint"
        if ordered:
            order_tokens(model)
    subject = Subject(size, model, profile, gpu, graphs)
    in_passes = (None, FP8, FP8_ALL) if fp8 else (None,)
    in_forward = model_providers(compiled, precisions=in_passes)
    in_forward += by_compilation(third_parties, compiled)
    in_decoding = model_providers(compiled, tuned, in_passes[:2])

    def measure(means: Sequence[float] | None) -> list[dict]:
        """Add the rows of one activity; return each layer's activity on the first batch."""
        of_first: list[dict] = []
        subject.become(DENSE_EAGER)
        if means is None:
            draw = functools.partial(batch_of, torch.as_tensor(text, device=gpu.device))
        else:
            imposed.impose(model, means)
            subject.take_weights()
            vocab_size = model.config.vocab_size
            draw = functools.partial(imposed.draw_tokens, vocab_size, device=gpu.device)
        for shape in shapes:
            ids = draw(*shape)
            passes, case, activity = measure_forward(subject, ids, in_forward)
            rows.add("model", passes)
            if layers and not of_first:
                rows.add("model_layers", layer_rows(subject, ids, case, activity))
            of_first = of_first or activity
            torch.cuda.empty_cache()
        for batch in decode:
            script = draw(batch, decode_context + GENERATION)
            with joined_projections(model):
                rows.add("decode", measure_decode(subject, script, decode_context, in_decoding))
            torch.cuda.empty_cache()
        return of_first

    with captured_by_hand() if graphs else nullcontext():
        activity = [measure(means) for means in levels]
        if alike:
            subject.become(DENSE_EAGER)
            imposed.draw_weights(model)
            subject.columns["profile"] = "imposed"
            measure([layer["mean"] for layer in activity[0]])
    return rows.by_file


def batch_of(tokens: Tensor, batch: int, context: int) -> Tensor:
    """Cut a batch from a text."""
    needed = f"{batch} x {context} need {batch * context}"
    require(len(tokens) >= batch * context, f"the text has {len(tokens)} tokens; {needed}")
    return tokens[: batch * context].view(batch, context)


def measure_forward(
    subject: Subject, ids: Tensor, providers: Sequence[Provider]
) -> tuple[list[dict], dict, list[dict]]:
    """Return rows of model.csv for a batch [B, S], its columns, and each layer's activity."""
    subject.become(DENSE_EAGER)
    model, gpu, tokens = subject.model, subject.gpu, ids.numel()
    activity = imposed.activity_of(model, ids)
    case = subject.observe(ids, activity)
    title = f"{case['model']}  {len(ids)} x {ids.shape[1]} tokens  {case['active']:.4g} active"
    once = functools.partial(forward, model, ids)
    in_graph = subject.graphs and tokens <= GRAPH_TOKENS
    exact = functools.partial(exact_hidden_states, model)

    def take(_: Provider) -> tuple[Tensor, runner.Run, dict]:
        run, (hidden, _) = once, once()
        before, most = gpu.peak(run)
        # With one copy of the weights; those in FP8 are buffers.
        weights = sum(w.nbytes for w in itertools.chain(model.parameters(), model.buffers()))
        if in_graph:
            run, ((hidden, _),) = gpu.capture([run])
            run()
        peak = weights + most - before
        return hidden, run, {"peak": peak, "mode": "graph" if in_graph else "stream"}

    rows = subject.measure(case, providers, ("hidden states", title), ids, exact, once, take)
    for row in rows:
        row["tokens_per_ms"] = significant(tokens / row["p50"], 5)
    return rows, case, activity


def layer_rows(subject: Subject, ids: Tensor, case: dict, activity: Sequence[dict]) -> list[dict]:
    """Return rows of model_layers.csv, of each layer alone on its input in a dense pass."""
    from twell.sparse import ops

    rows = []

    def visit(index: int, ffn: SparseFFN, inputs: tuple[Tensor, ...]) -> None:
        weights = ffn.first.weight, ffn.up_proj.weight, subject.by_neuron[index]
        options = {"gated": ffn.gated, "calibration": subject.calibrations[index]}
        x = inputs[0].flatten(0, -2)
        alone = Case(subject.gpu, f"layer {index}", (x, *weights), **options)
        alone.allowed = check.trained_limit(alone.exact, alone.x, alone.sets[0])
        sparse = Provider("triton", ops.choose(len(alone.x)))
        calls = bench(subject.gpu, alone.prepare, [DENSE_COMPILED, sparse, AUTO])
        dense, by_path, auto = (call.columns for call in calls.values())
        layer = activity[index]
        row = case | {"level": case["active"], "layer": index, "active": round(layer["mean"], 2)}
        row |= {"p99": layer["p99"], "active_max": layer["max"], "union": round(layer["union"], 1)}
        row |= {"dense": dense["p50"], "sparse": by_path["p50"], "auto": auto["p50"]}
        row |= {"auto_path": auto["path"], "relative_rms": by_path["relative_rms"]}
        rows.append(row)

    subject.become(DENSE_EAGER)
    with check.hooked(subject.model.ffns, visit, before=True):
        forward(subject.model, ids)
    return rows
