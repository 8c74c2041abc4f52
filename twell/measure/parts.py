"""Where the time of a decoder layer goes: its kernels, by their place in the layer."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from twell.measure import runner
from twell.measure.providers import DENSE_COMPILED, DENSE_EAGER, TRITON_COMPILED, Provider
from twell.measure.rows import significant
from twell.measure.runner import Call, bench
from twell.measure.sides import Subject, embed

PROVIDERS = DENSE_COMPILED, TRITON_COMPILED
LEAD = 10  # runs before the profiled ones
ATTENTION, PROJECTIONS, OTHERS = "attention", "projections", "norms, rotary, residuals"
GATE, UP_DOWN, BETWEEN = "gate", "up and down", "between kernels"
PARTS = ATTENTION, PROJECTIONS, OTHERS, GATE, UP_DOWN, BETWEEN


def split_kernels(kernels: runner.Kernels) -> dict[str, float]:
    """Return the time of each of PARTS but the last from one layer's kernels (name, ms), in order.

    Products are recognised by their place: before attention come q, k and v, behind it the
    output's, then those of the feed-forward layer, the first of which is the gate's (without a
    gate: up's; for up to three tokens, the kernel of gate and active up). A large batch is computed
    in chunks, each with its gate. Elementwise work between two of these belongs to the
    feed-forward layer. Raises ValueError for kernels without attention.
    """
    times = dict.fromkeys(PARTS[:-1], 0.0)
    attended, products = False, 0
    waiting = 0.0  # elementwise work since the last product, the layer's if a product follows
    for name, ms in kernels:
        short = runner.kernel_name(name)
        # Inductor names a fused kernel after its consumer, attention too.
        if re.search(r"sdpa|flash|fmha|attention|cudnn", name) and short != "elementwise":
            times[ATTENTION] += ms
            attended = True
        elif short == "cublas matmul":
            split = re.search("reduce", name)  # the end of a product that was split
            if attended and not split:
                products += 1
                times[UP_DOWN if products > 2 else OTHERS] += waiting
                waiting = 0.0
            times[PROJECTIONS if products <= 1 else GATE if products == 2 else UP_DOWN] += ms
        elif short.endswith("_kernel") and short not in ("elementwise", "copy"):
            times[GATE if short.startswith("gate") or products < 2 else UP_DOWN] += ms
            products = max(products, 2)
        elif products >= 2:
            waiting += ms
        else:
            times[OTHERS] += ms
    times[OTHERS] += waiting
    if not attended:
        raise ValueError(f"no kernel of attention among {', '.join(name for name, _ in kernels)}")
    return times


def measure_parts(subject: Subject, ids: Tensor, activity: Sequence[dict]) -> list[dict]:
    """Return rows of model_parts.csv for the layer whose activity is nearest to the mean.

    The passes that this layer is part of were checked before.
    """
    layers = subject.model.model.layers
    means = np.array([layer["mean"] for layer in activity])
    index = int(np.abs(means - means.mean()).argmin())
    subject.become(DENSE_EAGER)
    hidden, rotary = embed(subject.model, ids)
    for layer in layers[:index]:
        hidden = layer(hidden, position_embeddings=rotary)
    subject.observe(activity, ids.numel())
    run = functools.partial(layers[index], hidden, position_embeddings=rotary)
    columns, rows = bench(LayerCase(subject, run), PROVIDERS), []
    for provider in PROVIDERS:
        subject.become(provider)
        runner.repeat([run], LEAD)  # so that clocks are those of steady work
        kernels = subject.gpu.kernels([run], runner.PROFILED)
        splits = [split_kernels(part) for part in runner.equal_parts(kernels, runner.PROFILED)]
        parts = pd.DataFrame(splits).median().to_dict()
        # Negative where kernels take longer under the profiler.
        parts[BETWEEN] = columns[provider]["p50"] - sum(parts.values())
        case = subject.case(ids, activity) | {"layer": index, "provider": provider.name}
        rows += [case | {"part": part, "ms": significant(ms, 4)} for part, ms in parts.items()]
    return rows


@dataclass
class LayerCase:
    """A run of one decoder layer, for `runner.bench`."""

    subject: Subject
    run: runner.Run

    @property
    def gpu(self) -> runner.Gpu:
        return self.subject.gpu

    def prepare(self, provider: Provider) -> Call:
        return Call(self.run, enter=functools.partial(self.subject.become, provider))
