"""Where the time of a decoder layer goes: its kernels, by their place in the layer."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from torch import Tensor

from twell.measure import clock
from twell.measure.decode import Decoder
from twell.measure.providers import DENSE_COMPILED, DENSE_EAGER, TRITON_COMPILED, Provider
from twell.measure.rows import significant
from twell.measure.sides import Bench, embed

PROVIDERS = DENSE_COMPILED, TRITON_COMPILED
ATTENTION, PROJECTIONS, OTHERS = "attention", "projections", "norms, rotary, residuals"
GATE, UP_DOWN, BETWEEN = "gate", "up and down", "between kernels"
PARTS = ATTENTION, PROJECTIONS, OTHERS, GATE, UP_DOWN, BETWEEN


def split_kernels(kernels: Sequence[tuple[str, float]]) -> dict[str, float]:
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
        short = clock.kernel_name(name)
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


def measure_parts(bench: Bench, ids: Tensor, activity: Sequence[dict]) -> list[dict]:
    """Return rows of model_parts.csv for the layer whose activity is nearest to the mean."""
    layers = bench.model.model.layers
    means = np.array([layer["mean"] for layer in activity])
    index = int(np.abs(means - means.mean()).argmin())
    bench.become(DENSE_EAGER)
    hidden, rotary = embed(bench.model, ids)
    for layer in layers[:index]:
        hidden = layer(hidden, position_embeddings=rotary)
    bench.observe(activity, ids.numel())
    run = functools.partial(layers[index], hidden, position_embeddings=rotary)
    case = bench.case(ids, activity) | {"layer": index}
    return part_rows(bench, case, dict.fromkeys(PROVIDERS, run))


def decode_parts(bench: Bench, decoder: Decoder, row: dict) -> list[dict]:
    """Return rows of model_parts.csv for the case of a row of decode.csv: medians over layers."""
    decoder.restart()
    bench.become(DENSE_EAGER)
    run = functools.partial(decoder.through, *decoder.begin(decoder.position))
    calls = {}
    for provider in PROVIDERS:
        bench.become(provider)
        calls[provider] = bench.gpu.capture([run])[0]
    return part_rows(bench, row | {"layer": None}, calls, len(decoder.caches))


def part_rows(
    bench: Bench, case: dict, calls: Mapping[Provider, Callable[[], object]], layers: int = 1
) -> list[dict]:
    """Return rows from a call for each of PROVIDERS, in which so many layers run one by one.

    The passes that these layers are part of were checked before.
    """

    def times(provider: Provider) -> np.ndarray:
        bench.become(provider)
        return bench.gpu.replay_times(calls[provider], 20) / layers

    def check(provider: Provider) -> tuple[dict, Callable]:
        return {}, functools.partial(times, provider)

    rows = []
    for provider, columns in clock.measure(calls, check, clock.LAYER_ROUNDS).items():
        bench.become(provider)
        total = columns["p50"]
        lead = min(math.ceil(clock.SETTLE / (total * layers)), 20)
        passes = clock.kernel_sequence(bench.gpu, calls[provider], clock.PROFILED, lead)
        splits = [
            split_kernels(kernels)
            for kernels_of_pass in passes
            for kernels in clock.equal_parts(kernels_of_pass, layers)
        ]
        parts = pd.DataFrame(splits).median().to_dict()
        # Negative where kernels take longer under the profiler.
        parts[BETWEEN] = total - sum(parts.values())
        for part, ms in parts.items():
            row = {"provider": provider.name, "part": part, "ms": significant(ms, 4)}
            rows.append(case | row)
    return rows
