"""What a training would cost on many GPUs: a measured step of one GPU, and sending by formula.

Nothing here was measured on several nodes. A micro-batch takes the time and power that it took on
one GPU, in proportion to its sequences. Parameters P are sharded with their gradients and Adam's
moments. A GPU sends in a step of a micro-batches, with c bytes a weight and g bytes a gradient:

    over all n GPUs              a (2c + g) P (n - 1)/n
    in nodes of k GPUs           a (2c + g) P (k - 1)/k   within its node, and once a step
                                 2g P/k (n/k - 1)/(n/k)   to other nodes

Weights are gathered before forward and backward, gradients reduced after it; rings send so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from twell.analysis.speed import step_speedups

_STATE = 16  # bytes of a parameter: weight, gradient and Adam's two moments in fp32
_ALL, _NODE = "all GPUs", "a node"  # over what the parameters are sharded


@dataclass(frozen=True)
class Cluster:
    """What is assumed: GPUs of a node, bytes/s that a GPU sends, bytes, and watts while it waits.

    within: to GPUs of its node; between: to other nodes. weight, gradient: bytes of what is sent.
    """

    node: int = 8
    within: float = 450e9
    between: float = 50e9
    weight: int = 2
    gradient: int = 4
    waiting: float = 120.0

    def sent(self, parameters: float, gpus: int, shards: str, steps: int) -> tuple[float, float]:
        """Return the bytes that a GPU sends in a step of `steps` micro-batches: within, between."""

        def ring(size: int) -> float:
            return (size - 1) / size

        each = steps * (2 * self.weight + self.gradient) * parameters
        if gpus <= self.node:
            return each * ring(gpus), 0.0
        if shards == _ALL:
            return 0.0, each * ring(gpus)
        copied = 2 * self.gradient * parameters / self.node
        return each * ring(self.node), copied * ring(gpus // self.node)


def training_costs(
    rows: pd.DataFrame,
    model: str = "2b",
    *,
    active: float,
    tokens: float,
    batch_tokens: int,
    gpus: Sequence[int] = (8, 64, 512),
    cluster: Cluster | None = None,
) -> pd.DataFrame:
    """Return one row a provider, number of GPUs and sharding, for a training of `tokens` tokens.

    rows: of data/bench/train_step.csv; taken are those of `model` and the paper's profile whose
    activity is nearest to `active` neurons per token and layer, of one call.
    Columns: gpus, shards, sequences (of a GPU and step), compute and send (ms of a step), sent_gb
    (of a GPU and step), hours where sending overlaps computing and hours_apart where it does not,
    efficiency (%, of the first), energy (MWh of the GPUs), memory (GB of a GPU).

    Raises ValueError where there is no row, and for GPUs that cannot share a step's sequences or
    fill nodes.
    """
    cluster, measured = cluster or Cluster(), step_speedups(rows)
    fits = (measured["model"] == model) & (measured["profile"] == "paper")
    measured = measured[fits & ~measured["checkpoint_activations"].astype(bool)]
    if measured.empty:
        known = ", ".join(sorted(set(rows["model"])))
        raise ValueError(f"model is {model!r}; steps were measured of {known}")
    newest_first = measured.sort_values("date", ascending=False, kind="stable")
    nearest = newest_first.loc[(newest_first["active"] - active).abs().idxmin(), "date"]
    table = []
    for row in measured[measured["date"] == nearest].to_dict("records"):
        for number in gpus:
            sequences = _share(batch_tokens, row["context"], number, cluster.node)
            for shards in (_ALL, _NODE) if number > cluster.node else (_ALL,):
                one = {"provider": row["provider"], "gpus": number, "shards": shards}
                one |= {"sequences": sequences}
                table.append(one | _costs(row, one, tokens / batch_tokens, cluster))
    return pd.DataFrame(table)


def _costs(row: dict, case: dict, batches: float, cluster: Cluster) -> dict:
    """Return the other columns: of a measured step, a number of GPUs, and steps of all of them."""
    work = case["sequences"] / row["micro_batch"]
    sent = cluster.sent(row["parameters"], case["gpus"], case["shards"], math.ceil(work))
    send = sent[0] / cluster.within + sent[1] / cluster.between
    compute = row["p50"] * work / 1e3  # s
    step, state = max(compute, send), _STATE * row["parameters"]
    joules = row["watts"] * compute + cluster.waiting * (step - compute)
    ways = case["gpus"] if case["shards"] == _ALL else cluster.node
    return {
        "compute": 1e3 * compute,
        "send": 1e3 * send,
        "sent_gb": sum(sent) / 1e9,
        "hours": batches * step / 3600,
        "hours_apart": batches * (compute + send) / 3600,
        "efficiency": 100 * compute / step,
        "energy": batches * case["gpus"] * joules / 3.6e9,
        "memory": (state / ways + (row["peak"] - state) * min(work, 1)) / 1e9,
    }


def stops_scaling(costs: pd.DataFrame) -> Iterator[dict]:
    """Yield for each provider and sharding the fewest GPUs whose sending exceeds computing."""
    waits = costs[costs["send"] > costs["compute"]]
    for (provider, shards), some in costs.groupby(["provider", "shards"], sort=False):
        first = waits.loc[waits["provider"].eq(provider) & waits["shards"].eq(shards), "gpus"]
        most = some["gpus"].max()
        stops = first.min() if len(first) else f"above {most}"
        yield {"provider": provider, "shards": shards, "gpus": stops}


def _share(batch_tokens: int, context: int, gpus: int, node: int) -> int:
    """The sequences of a GPU in a step."""
    if gpus > node and gpus % node:
        raise ValueError(f"{gpus} GPUs are no whole nodes of {node}")
    if batch_tokens % (context * gpus):
        sequences = f"a step has {batch_tokens / context:g} sequences of {context} tokens"
        raise ValueError(f"{sequences}, which {gpus} GPUs cannot share alike")
    return batch_tokens // (context * gpus)
