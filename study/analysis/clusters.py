"""What a training would cost on many GPUs: a measured step of one GPU, and sending by formula.

Nothing here was measured on several nodes. A micro-batch takes the time and power that it took on
one GPU, in proportion to its sequences. Parameters P are sharded with their gradients and Adam's
moments. A GPU sends in a step of a micro-batches, with c bytes a weight and g bytes a gradient:

    over all n GPUs              (2 a c + g) P (n - 1)/n
    in nodes of k GPUs           (2 a c + g) P (k - 1)/k  within its node, and then
                                 2g P/k (n/k - 1)/(n/k)   to other nodes

Weights are gathered before forward and backward of each micro-batch, gradients reduced once a step,
as twell/train does with FSDP2; rings send so. In rings over several nodes each byte leaves a node
once, and the k links of a node share these bytes: 1/k of the first line takes a GPU's link to other
nodes, while the rest moves within the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from study.analysis.speed import step_speedups
from twell.measure.rows import require

_STATE = 16  # bytes of a parameter: weight, gradient and Adam's two moments in fp32
_ALIKE = 1.5  # a step of another activity is taken up to this factor
_ALL, _NODE = "all GPUs", "a node"  # over what the parameters are sharded


@dataclass(frozen=True)
class Cluster:
    """What is assumed: GPUs of a node, bytes/s that a GPU sends, bytes, and watts while it waits.

    within: to GPUs of its node; between: to other nodes. weight, gradient: bytes of what is sent.
    Raises ValueError for a number that is not above 0.
    """

    node: int = 8
    within: float = 450e9
    between: float = 50e9
    weight: int = 4
    gradient: int = 4
    waiting: float = 120.0

    def __post_init__(self):
        for name, value in vars(self).items():
            _check_positive(name, value)

    def sending(self, parameters: float, gpus: int, shards: str, steps: int) -> tuple[float, float]:
        """Return the bytes that a GPU sends in a step of `steps` micro-batches, and the seconds."""

        def ring(size: int) -> float:
            return (size - 1) / size

        each = (2 * self.weight * steps + self.gradient) * parameters
        if gpus <= self.node:
            return each * ring(gpus), each * ring(gpus) / self.within
        if shards == _ALL:
            sent = each * ring(gpus)
            return sent, max(sent / self.within, sent / self.node / self.between)
        inside = each * ring(self.node)
        copied = 2 * self.gradient * parameters / self.node * ring(gpus // self.node)
        return inside + copied, inside / self.within + copied / self.between


def _check_positive(name: str, value: float) -> None:
    require(value > 0, f"{name} is {value}; expected a number above 0")


def training_costs(
    rows: pd.DataFrame,
    model: str = "2b",
    *,
    active: float,
    tokens: float,
    batch_tokens: int,
    gpus: int | Sequence[int] = (8, 64, 512),
    cluster: Cluster | None = None,
) -> pd.DataFrame:
    """Return one row a provider, number of GPUs and sharding, for a training of `tokens` tokens.

    rows: of data/bench/train_step.csv, of which the one call counts whose activity is nearest to
    `active` neurons per token and layer. compute and send are ms of a step, sent_gb is of a GPU and
    step; hours is the training where sending overlaps computing, hours_apart where it does not;
    efficiency is in %, energy in MWh of all GPUs, memory in GB of one. Raises ValueError where no
    step of about this activity was measured, and for GPUs that cannot share a step.
    """
    gpus = [gpus] if isinstance(gpus, int) else gpus
    given = {"active": [active], "tokens": [tokens], "batch_tokens": [batch_tokens], "gpus": gpus}
    for name, value in ((name, value) for name, values in given.items() for value in values):
        _check_positive(name, value)
    cluster, measured = cluster or Cluster(), step_speedups(rows)
    fits = measured["profile"].eq("paper") & ~measured["checkpoint_activations"].astype(bool)
    known, measured = measured[fits], measured[fits & (measured["model"] == model)]
    if measured.empty:
        names = ", ".join(sorted(set(known["model"])))
        raise ValueError(f"model is {model!r}; steps were measured of {names}")
    newest_first = measured.sort_values("date", ascending=False, kind="stable")
    nearest, there = newest_first.loc[
        (newest_first["active"] - active).abs().idxmin(), ["date", "active"]
    ]
    if not 1 / _ALIKE <= active / there <= _ALIKE:
        levels = ", ".join(f"{level:g}" for level in sorted(set(measured["active"])))
        raise ValueError(f"active is {active:g}; steps of {model} were measured with {levels}")
    table = []
    for row in measured[measured["date"] == nearest].to_dict("records"):
        for number in gpus:
            sequences = _share(batch_tokens, row["context"], number, cluster.node)
            for shards in (_ALL, _NODE) if number > cluster.node else (_ALL,):
                one = {"provider": row["provider"], "active": row["active"], "gpus": number}
                one |= {"shards": shards, "sequences": sequences}
                table.append(one | _costs(row, one, tokens / batch_tokens, cluster))
    return pd.DataFrame(table)


def _costs(row: dict, case: dict, batches: float, cluster: Cluster) -> dict:
    """Return the other columns: of a measured step, a number of GPUs, and steps of all of them."""
    work = case["sequences"] / row["micro_batch"]
    steps, parameters = math.ceil(work), row["parameters"]
    sent, send = cluster.sending(parameters, case["gpus"], case["shards"], steps)
    compute = row["p50"] * work / 1e3  # s
    step, state = max(compute, send), _STATE * parameters
    # FSDP2 holds the gradients of several micro-batches whole until they are reduced.
    whole = cluster.gradient * parameters if steps > 1 else 0
    joules = row["watts"] * compute + cluster.waiting * (step - compute)
    ways = case["gpus"] if case["shards"] == _ALL else cluster.node
    return {
        "compute": 1e3 * compute,
        "send": 1e3 * send,
        "sent_gb": sent / 1e9,
        "hours": batches * step / 3600,
        "hours_apart": batches * (compute + send) / 3600,
        "efficiency": 100 * compute / step,
        "energy": batches * case["gpus"] * joules / 3.6e9,
        "memory": (state / ways + whole + (row["peak"] - state) * min(work, 1)) / 1e9,
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
