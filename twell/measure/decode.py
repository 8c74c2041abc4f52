"""Decoding with a static cache: one token of each document a step, mostly in a CUDA graph.

The queries, keys and values of a layer are one product, for all providers (`joined_projections`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twell.measure import imposed
from twell.measure.providers import DENSE_EAGER, EAGER, Provider
from twell.measure.rows import significant
from twell.measure.runner import Run, compiled
from twell.measure.sides import COMPILE_OPTIONS, Subject, embed, exact_hidden_states
from twell.models.llama import SparseLlamaForCausalLM

GENERATION = 64  # tokens that a document is continued by


class LayerCache:
    """Keys and values [B, H, slots, D] of one layer, at fixed addresses, for a decoder layer.

    A pass over several tokens fills it from the start. One over a single token writes the slot
    `position` [1] and returns all slots, for a mask to choose from.
    """

    def __init__(self, shape: tuple[int, ...], position: Tensor, dtype: torch.dtype):
        self.keys = torch.zeros(shape, dtype=dtype, device=position.device)
        self.values = torch.zeros_like(self.keys)
        self.position = position

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        if keys.shape[2] > 1:
            self.keys[:, :, : keys.shape[2]] = keys
            self.values[:, :, : keys.shape[2]] = values
            return keys, values
        self.keys.index_copy_(2, self.position, keys)
        self.values.index_copy_(2, self.position, values)
        return self.keys, self.values


class Joined(nn.Module):
    """Queries, keys and values as one product; attention calls it once for each, in this order."""

    def __init__(self, parts: Sequence[nn.Linear]):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
        self.bias = None
        if parts[0].bias is not None:  # of all three, or of none
            self.bias = nn.Parameter(torch.cat([part.bias for part in parts]), False)
        self.sizes = [part.out_features for part in parts]
        self.waiting: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.waiting:
            self.waiting.extend(F.linear(x, self.weight, self.bias).split(self.sizes, -1))
        return self.waiting.pop(0)


@contextlib.contextmanager
def joined_projections(model: SparseLlamaForCausalLM) -> Iterator[None]:
    """Temporarily fuse q, k and v into one projection: three products of few rows take longer."""
    names = "q_proj", "k_proj", "v_proj"
    with contextlib.ExitStack() as undo:
        for layer in model.model.layers:
            attention = layer.self_attn
            parts = {name: getattr(attention, name) for name in names}
            joined = Joined(list(parts.values()))
            for name, part in parts.items():
                undo.callback(setattr, attention, name, part)
                setattr(attention, name, joined)
        yield


class Decoder:
    """Continues documents token by token with a static cache.

    Nothing depends on the host, so a graph holds a step. `script` [B, context + steps]: `read`
    reads the first `context` tokens, and each step gets the next one, since the text of a model of
    random weights would have another activity. The token that the model would have chosen is in
    `picked`, of the script's shape.
    """

    def __init__(self, model: SparseLlamaForCausalLM, script: Tensor, context: int):
        self.model, self.script, self.context = model, script, context
        config, device = model.config, script.device
        self.steps = script.shape[1] - context
        self.position = torch.full((1,), context, device=device)
        slots = math.ceil(script.shape[1] / 16) * 16  # attention needs masks of 16-byte multiples
        self.places = torch.arange(slots, device=device)
        shape = len(script), config.num_key_value_heads, slots, config.head_dim
        dtype = model.model.embed_tokens.weight.dtype
        self.caches = [LayerCache(shape, self.position, dtype) for _ in model.model.layers]
        self.picked = torch.zeros_like(script)
        # The parts before and behind the layers, by compilation.
        self.around: dict[str, Sequence[Callable]] = {EAGER: (self.begin, self.end)}
        for kind, options in COMPILE_OPTIONS.items():
            self.around[kind] = [compiled(part, options=options) for part in self.around[EAGER]]

    def read(self) -> None:
        """Fill the cache with the first `context` tokens."""
        self.through(*embed(self.model, self.script[:, : self.context]), None)

    def restart(self) -> None:
        self.position.fill_(self.context)

    def through(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Compute all decoder layers of `hidden` [B, S, K]: a step, or with S > 1 the text."""
        options = {"attention_mask": mask, "position_embeddings": rotary}
        for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
            hidden = layer(hidden, past_key_values=cache, **options)
        return hidden

    def begin(self, position: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return the arguments of `through` at a position [1]."""
        base = self.model.model
        hidden = base.embed_tokens(self.script.index_select(1, position))
        mask = torch.where(self.places <= position, 0.0, float("-inf")).to(hidden.dtype)
        return hidden, base.rotary_emb(hidden, position[None]), mask[None, None, None]

    def end(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.lm_head(hidden[:, -1])
        return logits, logits.argmax(-1, keepdim=True)

    def step(self, compilation: str = EAGER) -> Tensor:
        """Read one token of each document; return the logits [B, V] of the next."""
        begin, end = self.around[compilation]
        logits, token = end(self.model.model.norm(self.through(*begin(self.position))))
        self.picked.index_copy_(1, self.position, token)
        self.position.add_(1)
        return logits

    def generate(self, step: Callable[[], Tensor]) -> Tensor:
        """Restart and return the logits [B, steps, V] of all steps."""
        self.restart()
        return torch.stack([step().clone() for _ in range(self.steps)], 1)

    def replay(self, step: Callable[[], object], steps: int | None = None) -> None:
        """Restart and take all steps, or some."""
        self.restart()
        for _ in range(steps or self.steps):
            step()


def measure_decode(
    subject: Subject, script: Tensor, context: int, providers: Sequence[Provider]
) -> list[dict]:
    """Return rows of decode.csv for documents [B, context + steps]."""
    subject.become(DENSE_EAGER)
    model, decoder = subject.model, Decoder(subject.model, script, context)
    activity = imposed.activity_of(model, script, behind=context)
    decoder.read()
    decoder.replay(decoder.step)
    first = decoder.picked[:, context:].clone()
    case = subject.observe(script[:, :1], activity)
    case |= {"context": context, "steps": decoder.steps}
    title = f"{case['model']}  decoding {len(script)} x 1 behind {context} tokens"
    title += f"  {case['active']:.4g} active"
    head = model.lm_head.weight.float().t()
    exact = lambda few: exact_hidden_states(model, few)[:, context:] @ head  # noqa: E731
    once = functools.partial(decoder.replay, decoder.step, 1)

    def take(provider: Provider) -> tuple[Tensor, Run, dict]:
        decoder.restart()
        step = functools.partial(decoder.step, provider.compilation)
        if subject.graphs:
            replay, (output,) = subject.gpu.capture([step])
            step = lambda: (replay(), output)[1]  # noqa: E731
        logits = decoder.generate(step)
        same = float((decoder.picked[:, context:] == first).double().mean())
        columns = {"same": round(same, 4), "mode": "graph" if subject.graphs else "stream"}
        return logits, functools.partial(decoder.replay, step), columns

    titles = "logits", title
    rows = subject.measure(case, providers, titles, script, exact, once, take, decoder.steps)
    for row in rows:
        row["tokens_per_second"] = significant(1e3 * len(script) / row["p50"], 5)
    return rows
