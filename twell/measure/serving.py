"""Serving: requests a second and time to the first token of transformers' continuous batching.

All requests arrive at once, with prompts of different lengths, and each gets the same number of
new tokens, greedily. Activity is imposed on random weights (imposed.py). Times are transformers'
own: a request's creation, and each of its tokens. They hold no warming up, no capture of a CUDA
graph, and no HTTP.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from twell.measure import check, imposed, runner
from twell.measure.patterns import layer_means
from twell.measure.providers import Provider, model_providers
from twell.measure.rows import Rows, significant
from twell.measure.sides import Subject, forward, random_model

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
    draw = functools.partial(imposed.draw_tokens, config.vocab_size, device=gpu.device)
    mean = imposed.mean_of(size, active)
    imposed.impose(model, layer_means(profile, config.num_layers, mean), draw(64, 128, seed=1))
    g = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (REQUESTS,), generator=g)
    tokens = imposed.draw_tokens(config.vocab_size, REQUESTS, LONGEST, seed=SEED)
    texts = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    subject = Subject(size, model, profile, gpu)
    case = Serving(subject, draw(1, LONGEST), texts, cuda_graph)
    about = case.columns | {"requests": REQUESTS, "new_tokens": NEW_TOKENS, "seed": SEED}
    about |= {"shortest": SHORTEST, "longest": LONGEST, "prompt_tokens": int(lengths.sum())}
    about |= {"cuda_graph": cuda_graph, "attention": "default"}
    for provider, columns in runner.bench(case, model_providers(False), "serving").items():
        first = np.quantile(case.first_tokens[provider], (0.5, 0.95))
        speed = 1e3 * REQUESTS / columns["p50"]
        numbers = dict(zip(("first_token", "first_token_p95"), first, strict=True))
        numbers |= {"requests_per_second": speed, "tokens_per_second": NEW_TOKENS * speed}
        numbers = {name: significant(number, 5) for name, number in numbers.items()}
        rounds = runner.TURNS["serving"].rounds
        numbers |= {"provider": provider.name, "rounds": rounds}
        rows.add("serve", [about | columns | numbers])
    return rows.by_file["serve"]


class Serving:
    """A model that serves the same requests by one provider and then by another, for `bench`."""

    def __init__(
        self, subject: Subject, ids: torch.Tensor, prompts: list[list[int]], cuda_graph: bool
    ):
        self.subject, self.gpu, self.ids = subject, subject.gpu, ids
        self.prompts, self.cuda_graph = prompts, cuda_graph
        activity = imposed.activity_of(subject.model, ids)
        subject.observe(activity, ids.numel())
        self.columns = subject.case(ids, activity)
        self.first_tokens: dict[Provider, list[float]] = defaultdict(list)  # ms, of all rounds

    def prepare(self, provider: Provider) -> runner.Call:
        subject, model = self.subject, self.subject.model
        subject.become(provider)
        once = functools.partial(forward, model, self.ids)
        error = check.check_layers(model.ffns, once, f"{provider} of {self.columns['model']}")
        self.answer(provider)  # warms up
        self.first_tokens[provider].clear()
        columns = {"layer_rms": significant(error, 3)}
        enter = functools.partial(subject.become, provider)
        return runner.Call(functools.partial(self.answer, provider), columns, enter=enter)

    def answer(self, provider: Provider) -> float:
        """Serve all requests; return the ms that transformers counted."""
        model = self.subject.model
        serve = functools.partial(
            model.generate_batch,
            self.prompts,
            generation_config=GenerationConfig(
                max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
            ),
            # Without sharing: the second pass would find the prompts of the first in the cache.
            continuous_batching_config=ContinuousBatchingConfig(
                use_cuda_graph=self.cuda_graph, allow_block_sharing=False
            ),
            record_timestamps=True,
            persistent_manager=self.cuda_graph,
        )
        try:
            if self.cuda_graph:  # so that all graphs are captured before the pass that counts
                serve()
            answers = serve().values()
        finally:
            if self.cuda_graph:  # they belong to the present provider
                model.destroy_cached_continuous_batching_manager()
        lengths = [len(answer.generated_tokens) for answer in answers]
        if lengths != [NEW_TOKENS] * len(self.prompts):
            errors = "; ".join({str(answer.error) for answer in answers})
            raise RuntimeError(f"transformers answered with {lengths} tokens: {errors}")
        start = min(answer.created_time for answer in answers)
        first = [1e3 * (answer.timestamps[0] - answer.created_time) for answer in answers]
        self.first_tokens[provider] += first
        return 1e3 * (max(answer.timestamps[-1] for answer in answers) - start)
