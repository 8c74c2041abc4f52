"""Serving: requests a second and time to the first token of transformers' continuous batching.

All requests arrive at once, with prompts of different lengths, and each gets the same number of
new tokens, greedily. Activity is imposed on random weights (imposed.py); each feed-forward layer is
compared with fp64 before anything is timed. Providers serve in turns. Times are transformers' own:
a request's creation, and each of its tokens. They hold no warming up, no capture of a CUDA graph,
and no HTTP.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from twell.measure import check, imposed, runner
from twell.measure.patterns import layer_means
from twell.measure.providers import DENSE_EAGER, Provider, model_providers
from twell.measure.rows import Rows, require, significant
from twell.measure.sides import Subject, forward, random_model
from twell.models.llama import SparseLlamaForCausalLM

ROUNDS, SEED = 3, 0
Answer = tuple[float, np.ndarray]  # seconds of all requests, and to the first token of each


@torch.no_grad()
def serve(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    requests: int = 64,
    prompts: tuple[int, int] = (128, 1024),
    new_tokens: int = 128,
    cuda_graph: bool = False,
    profile: str = "paper",
    active: float | None = None,
    seconds: float = math.inf,
    out: str | Path | None = None,
) -> list[dict]:
    """Time serving with a model in bf16, dense, sparse and by "auto": `twell measure serve`.

    prompts: the smallest and the largest length; lengths are evenly drawn. A model whose
    feed-forward layers return zeros is timed too: no kernel can serve faster than it. After
    `seconds` no further round begins. An interrupted measurement writes the rows of the rounds that
    it has. Returns the rows of serve.csv. Raises as `ffn` does, and RuntimeError where transformers
    does not finish a request.
    """
    start, gpu, rows = time.monotonic(), runner.Gpu(), Rows(out, "serve")
    shortest, longest = prompts
    counts = f"{requests} requests, prompts of {shortest} to {longest} tokens, {new_tokens} new"
    require(min(requests, shortest, new_tokens) >= 1 and shortest <= longest, f"{counts}: too few")
    mean = imposed.PAPER_ACTIVE.get(size, imposed.ACTIVE) if active is None else active

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {line}", flush=True)

    say(f"build {size}")
    model, config = random_model(size, overrides, longest + new_tokens, gpu.device)
    draw = functools.partial(imposed.draw_tokens, config.vocab_size, device=gpu.device)
    imposed.impose(model, layer_means(profile, config.num_layers, mean), draw(64, 128, seed=1))
    subject, ids = Subject(size, model, profile, gpu), draw(1, longest)
    activity = imposed.activity_of(model, ids)
    subject.observe(activity, ids.numel())
    g = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(shortest, longest + 1, (requests,), generator=g)
    tokens = imposed.draw_tokens(config.vocab_size, requests, longest, seed=SEED)
    texts = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    about = subject.case(ids, activity) | {"requests": requests, "new_tokens": new_tokens}
    about |= {"shortest": shortest, "longest": longest, "prompt_tokens": int(lengths.sum())}
    about |= {"cuda_graph": cuda_graph, "attention": "default", "seed": SEED}

    errors: dict[Provider, float] = {}
    once = functools.partial(forward, model, ids)
    for provider in model_providers(False):
        say(f"check the layers of {provider}")
        subject.become(provider)
        error = check.check_layers(model.ffns, once, f"{provider} of {size}")
        errors[provider] = significant(error, 3)
    # None stands for a model without feed-forward layers.
    answers: dict[Provider | None, list[Answer]] = {provider: [] for provider in (*errors, None)}
    try:
        for number in range(ROUNDS + 1):  # the first one warms up
            if number > 1 and time.monotonic() - start > seconds:
                say(f"{seconds:g} s are over: {number - 1} of {ROUNDS} rounds are done")
                break
            for provider in answers if number % 2 else reversed(answers):
                subject.become(provider or DENSE_EAGER)
                with contextlib.nullcontext() if provider else _without_ffn(model):
                    answer = _answer(model, texts, new_tokens, cuda_graph)
                name = provider or "no feed-forward layer"
                say(f"round {number} of {ROUNDS}: {name} took {answer[0]:.2f} s")
                answers[provider] += [answer] if number else []
    finally:  # also the rounds of an interrupted command
        about["without_ffn"] = _columns(answers.pop(None), new_tokens).get("p50")
        for provider, several in answers.items():
            if columns := _columns(several, new_tokens):
                own = {"provider": provider.name, "layer_rms": errors[provider]}
                rows.add("serve", [about | own | columns])
    return rows.by_file["serve"]


@contextlib.contextmanager
def _without_ffn(model: SparseLlamaForCausalLM) -> Iterator[None]:
    """Let the feed-forward layers return zeros: the time of all else, which no kernel changes."""
    for ffn in model.ffns:
        ffn.forward = torch.zeros_like
    try:
        yield
    finally:
        for ffn in model.ffns:
            del ffn.forward


def _answer(
    model: SparseLlamaForCausalLM, prompts: list[list[int]], new_tokens: int, graphs: bool
) -> Answer:
    """Serve all requests; with CUDA graphs once before, so that all graphs are captured."""
    serve = functools.partial(
        model.generate_batch,
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1
        ),
        # Without sharing: the second pass would find the prompts of the first in the cache.
        continuous_batching_config=ContinuousBatchingConfig(
            use_cuda_graph=graphs, allow_block_sharing=False
        ),
        record_timestamps=True,
        persistent_manager=graphs,
    )
    try:
        if graphs:
            serve()
        answers = serve().values()
    finally:
        if graphs:  # they belong to the present provider
            model.destroy_cached_continuous_batching_manager()
    lengths = [len(answer.generated_tokens) for answer in answers]
    if lengths != [new_tokens] * len(prompts):
        errors = "; ".join({str(answer.error) for answer in answers})
        raise RuntimeError(f"transformers answered with {lengths} tokens: {errors}")
    start = min(answer.created_time for answer in answers)
    end = max(answer.timestamps[-1] for answer in answers)
    first = [answer.timestamps[0] - answer.created_time for answer in answers]
    return end - start, np.array(first)


def _columns(answers: list[Answer], new_tokens: int) -> dict:
    """Return a provider's columns, in ms; none without answers."""
    if not answers:
        return {}
    total = np.array([seconds for seconds, _ in answers])
    first = 1e3 * np.concatenate([seconds for _, seconds in answers])
    columns = runner.quantiles(1e3 * total) | {"rounds": len(answers)}
    columns["requests_per_second"] = len(answers[0][1]) / np.median(total)
    columns["tokens_per_second"] = new_tokens * columns["requests_per_second"]
    columns["first_token"], columns["first_token_p95"] = np.quantile(first, (0.5, 0.95))
    return {name: significant(number, 5) for name, number in columns.items()}
