"""Serving: requests a second and time to the first token of transformers' continuous batching.

All requests arrive at once, with prompts of different lengths, and each gets the same number of
new tokens, greedily. Activity is imposed on random weights (imposed.py); each feed-forward layer is
compared with fp64 before anything is timed. Providers serve in turns. Times are transformers' own:
a request's creation, and each of its tokens. They hold no warming up, and no HTTP.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import is_flash_attn_2_available

from twell.measure import check, clock, imposed
from twell.measure.patterns import IMPOSED
from twell.measure.providers import Provider, model_providers
from twell.measure.rows import Rows, require, significant
from twell.measure.sides import Bench, forward, random_model
from twell.models.llama import SparseLlamaForCausalLM

ROUNDS = 3


@dataclass(frozen=True)
class Load:
    """What clients ask for, all at once: prompts of lengths from `shortest` to `longest`.

    Lengths are evenly drawn by `seed`. cuda_graph: transformers' option, None: its own choice.
    """

    requests: int = 64
    shortest: int = 128
    longest: int = 1024
    new_tokens: int = 128
    cuda_graph: bool | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("requests", "shortest", "new_tokens"):
            number = getattr(self, name)
            require(number >= 1, f"{name} is {number}; it has to be at least 1")
        message = f"prompts of {self.shortest} to {self.longest} tokens: there are none"
        require(self.shortest <= self.longest, message)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        g = torch.Generator().manual_seed(self.seed)
        lengths = torch.randint(self.shortest, self.longest + 1, (self.requests,), generator=g)
        tokens = imposed.draw_tokens(vocab_size, self.requests, self.longest, seed=self.seed)
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


@torch.no_grad()
def serve(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    load: Load | None = None,
    profile: str = "paper",
    active: float | None = None,
    out: str | Path | None = None,
) -> list[dict]:
    """Time serving with a model in bf16: dense, sparse and by "auto". Return rows of serve.csv.

    Args:
        size: a configuration of the package or a YAML file (`TrainConfig.load`), random weights.
        overrides: fields of it to change, as key=value.
        load: the requests; None: the defaults of Load.
        profile: how the activity varies over layers, see `Pattern`.
        active: mean active neurons per token and layer; default: the paper's for this size.
        out: the folder of serve.csv.

    Raises ValueError for unfit arguments, ArithmeticError for a wrong result, RuntimeError without
    a GPU and where transformers does not finish a request.
    """
    load, gpu = load or Load(), clock.gpu()
    unfit = f"active: the paper has no model {size!r}; say how many neurons are to be active"
    require(active is not None or size in imposed.PAPER_ACTIVE, unfit)
    rows = Rows(out, ["serve"])
    context = load.longest + load.new_tokens
    model, config = random_model(size, overrides, context, gpu.device)
    draw = functools.partial(imposed.draw_tokens, config.vocab_size, device=gpu.device)
    pattern = replace(IMPOSED, profile=profile)
    mean = imposed.PAPER_ACTIVE[size] if active is None else active
    imposed.impose(model, pattern.means(config.num_layers, mean), draw(64, 128, seed=1))
    bench, ids = Bench(size, model, profile, None, gpu), draw(1, load.longest)
    activity = imposed.activity_of(model, ids)
    bench.observe(activity, ids.numel())
    prompts = load.prompts(config.vocab_size)
    about = bench.case(ids, activity) | dataclasses.asdict(load)
    about |= {"prompt_tokens": sum(map(len, prompts)), "rounds": ROUNDS}
    about["cuda_graph"] = "default" if load.cuda_graph is None else load.cuda_graph
    about["attention"] = "flash" if is_flash_attn_2_available() else "sdpa"
    times: dict[Provider, list] = {provider: [] for provider in model_providers(False)}
    errors = {}
    for provider in times:
        bench.become(provider)
        once = functools.partial(forward, model, ids)
        errors[provider] = check.check_layers(model.ffns, once, f"{provider} of {size}")
    for number in range(ROUNDS + 1):  # the first warms up
        for provider in times if number % 2 else reversed(times):
            bench.become(provider)
            answer = _answer(model, prompts, load)
            what = f"round {number} of {ROUNDS}" if number else "warming up"
            print(f"{what}: {provider} took {answer[0]:.2f} s", flush=True)
            times[provider] += [answer] * (number > 0)
    for provider, answers in times.items():
        error = {"layer_rms": significant(errors[provider], 3)}
        rows.add("serve", [about | {"provider": provider.name} | error | _columns(answers, load)])
    return rows.by_file["serve"]


def _answer(
    model: SparseLlamaForCausalLM, prompts: list[list[int]], load: Load
) -> tuple[float, np.ndarray]:
    """Return seconds to the last token of all requests, and to the first one of each."""
    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=load.new_tokens, do_sample=False, eos_token_id=-1
        ),
        continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=load.cuda_graph),
        record_timestamps=True,
    ).values()
    lengths = [len(answer.generated_tokens) for answer in answers]
    if lengths != [load.new_tokens] * load.requests:
        errors = {answer.error for answer in answers} - {None}
        raise RuntimeError(
            f"transformers answered {len(lengths)} of {load.requests} requests with "
            f"{min(lengths, default=0)} to {max(lengths, default=0)} of {load.new_tokens} tokens: "
            f"{'; '.join(sorted(errors)) or 'it says no reason'}"
        )
    start = min(answer.created_time for answer in answers)
    end = max(answer.timestamps[-1] for answer in answers)
    first = [answer.timestamps[0] - answer.created_time for answer in answers]
    return end - start, np.array(first)


def _columns(answers: list[tuple[float, np.ndarray]], load: Load) -> dict:
    """Return the columns of a provider: ms of all requests, and to the first token of one."""
    total = np.array([seconds for seconds, _ in answers])
    first = 1e3 * np.concatenate([seconds for _, seconds in answers])
    numbers = dict(
        zip(("p20", "p50", "p80"), 1e3 * np.quantile(total, (0.2, 0.5, 0.8)), strict=True)
    )
    numbers["requests_per_second"] = load.requests / np.median(total)
    numbers["tokens_per_second"] = load.requests * load.new_tokens / np.median(total)
    numbers["first_token"], numbers["first_token_p95"] = np.quantile(first, (0.5, 0.95))
    return {name: significant(number, 5) for name, number in numbers.items()}
