"""Serving: requests a second and time to the first token of transformers' continuous batching.

All requests arrive at once, with prompts of different lengths, and each gets the same number of
new tokens, greedily. Activity is imposed on random weights (imposed.py). Times are transformers'
own: a request's creation, and each of its tokens. They hold no warming up, no capture of a CUDA
graph, and no HTTP.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from twell.measure import imposed, runner
from twell.measure.imposed import layer_means
from twell.measure.providers import Provider, model_providers
from twell.measure.rows import Rows, significant
from twell.measure.sides import Subject, forward, random_model
from twell.models.llama import SparseLlamaForCausalLM

REQUESTS, SEED = 64, 0
SHORTEST, LONGEST = 128, 1024  # tokens of a prompt; lengths are evenly drawn
NEW_TOKENS = 128


@torch.no_grad()
def serve(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    cuda_graph: bool = False,
    profile: str = "paper",
    active: float | None = None,
    out: str | Path | None = None,
) -> list[dict]:
    """Time serving with a model in bf16, dense, sparse and by "auto": `twell measure serve`.

    Returns the rows of serve.csv. Raises as `ffn` does, and RuntimeError where transformers does
    not finish a request.
    """
    gpu, rows = runner.Gpu(), Rows(out, "serve")
    model, config = random_model(size, overrides, LONGEST + NEW_TOKENS, gpu.device)
    imposed.impose(model, layer_means(profile, config.num_layers, active, size))
    g = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (REQUESTS,), generator=g)
    tokens = imposed.draw_tokens(config.vocab_size, REQUESTS, LONGEST, seed=SEED)
    texts = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    subject = Subject(size, model, profile, gpu)
    ids = imposed.draw_tokens(config.vocab_size, 1, LONGEST, device=gpu.device)
    case = subject.observe(ids, imposed.activity_of(model, ids))
    first_tokens: dict[Provider, list[float]] = {}  # ms, of all rounds

    def answer(provider: Provider) -> float:
        ms, first = serve_once(model, texts, cuda_graph)
        first_tokens[provider] += first
        return ms

    def prepare(provider: Provider) -> runner.Call:
        enter, run = (functools.partial(f, provider) for f in (subject.become, answer))
        once = functools.partial(forward, model, ids)
        columns = {"layer_rms": significant(subject.check_layers(provider, once, size), 3)}
        serve_once(model, texts, cuda_graph)  # warms up
        first_tokens[provider] = []
        return runner.Call(run, columns, enter=enter)

    case |= {"requests": REQUESTS, "new_tokens": NEW_TOKENS, "seed": SEED, "shortest": SHORTEST}
    case |= {"longest": LONGEST, "prompt_tokens": int(lengths.sum()), "cuda_graph": cuda_graph}
    case |= {"attention": "default", "rounds": runner.TURNS["serving"].rounds}
    calls = runner.bench(gpu, prepare, model_providers(False), "serving")
    for provider, call in calls.items():
        first = np.quantile(first_tokens[provider], (0.5, 0.95))
        speed = 1e3 * REQUESTS / call.columns["p50"]
        numbers = dict(zip(("first_token", "first_token_p95"), first, strict=True))
        numbers |= {"requests_per_second": speed, "tokens_per_second": NEW_TOKENS * speed}
        numbers = {name: significant(number, 5) for name, number in numbers.items()}
        rows.add("serve", [case | {"provider": provider.name} | call.columns | numbers])
    return rows.by_file["serve"]


def serve_once(
    model: SparseLlamaForCausalLM, prompts: list[list[int]], cuda_graph: bool
) -> tuple[float, list[float]]:
    """Serve all prompts; return the ms that transformers counted, and those to first tokens."""
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    # Without sharing: the second pass would find the prompts of the first in the cache.
    batching = ContinuousBatchingConfig(use_cuda_graph=cuda_graph, allow_block_sharing=False)
    run = functools.partial(
        model.generate_batch,
        prompts,
        generation_config=generation,
        continuous_batching_config=batching,
        record_timestamps=True,
        persistent_manager=cuda_graph,
    )
    try:
        if cuda_graph:  # so that all graphs are captured before the pass that counts
            run()
        answers = run().values()
    finally:
        if cuda_graph:  # they belong to the present provider
            model.destroy_cached_continuous_batching_manager()
    lengths = [len(answer.generated_tokens) for answer in answers]
    if lengths != [NEW_TOKENS] * len(prompts):
        errors = "; ".join({str(answer.error) for answer in answers})
        raise RuntimeError(f"transformers answered with {lengths} tokens: {errors}")
    start = min(answer.created_time for answer in answers)
    first = [1e3 * (answer.timestamps[0] - answer.created_time) for answer in answers]
    return 1e3 * (max(answer.timestamps[-1] for answer in answers) - start), first
