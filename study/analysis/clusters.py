"""What a training would cost on many GPUs: a measured step of one GPU, and sending by formula.

Nothing here was measured on several nodes. A micro-batch takes the time and power that it took on
one GPU, in proportion to its sequences. Parameters P are sharded with their gradients and Adam's
moments. A GPU sends in a step of a micro-batches, with c bytes a weight and g bytes a gradient:

    over all n GPUs              (2 a c + g) P (n - 1)/n
    in nodes of k GPUs           (2 a c + g) P (k - 1)/k  within its node, and then
                                 2g P/k (n/k - 1)/(n/k)   to other nodes

Weights are gathered before forward and backward of each micro-batch, gradients reduced once a step,
as FSDP2 does. In rings over several nodes the k links of a node share the bytes that leave it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from study.analysis.speed import step_speedups

_STATE = 16  # bytes of a parameter: weight, gradient and Adam's two moments in fp32
_ALL, _NODE = "all GPUs", "a node"  # over what the parameters are sharded


@dataclass(frozen=True)
class Cluster:
    """GPUs of a node, bytes/s that a GPU sends within it and to others, bytes, and idle watts."""

    node: int = 8
    within: float = 450e9
    between: float = 50e9
    weight: int = 4
    gradient: int = 4
    waiting: float = 120.0

    def sending(self, parameters: float, gpus: int, shards: str, steps: int) -> tuple[float, float]:
        """Return the bytes that a GPU sends in a step of `steps` micro-batches, and the seconds."""
        each = (2 * self.weight * steps + self.gradient) * parameters
        if gpus <= self.node:
            sent = each * (1 - 1 / gpus)
            return sent, sent / self.within
        if shards == _ALL:
            sent = each * (1 - 1 / gpus)
            return sent, max(sent / self.within, sent / self.node / self.between)
        inside = each * (1 - 1 / self.node)
        copied = 2 * self.gradient * parameters / self.node * (1 - self.node / gpus)
        return inside + copied, inside / self.within + copied / self.between


def training_costs(
    rows: pd.DataFrame,
    model: str,
    *,
    active: float,
    tokens: float,
    batch_tokens: int,
    gpus: Sequence[int],
    cluster: Cluster,
) -> pd.DataFrame:
    """Return one row a provider, number of GPUs and sharding, for a training of `tokens` tokens.

    rows: of train_step.csv, of which the call nearest to `active` neurons counts. compute and send
    are ms of a step, sent_gb is of a GPU and step; hours is the training where sending overlaps
    computing, hours_apart where it does not; efficiency is in %, energy in MWh of all GPUs, memory
    in GB of one. Raises ValueError for GPUs that cannot share a step.
    """
    measured = step_speedups(rows).query(f"profile == 'paper' and model == {model!r}")
    measured = measured[~measured["checkpoint_activations"].astype(bool)]
    measured = measured.sort_values("date", ascending=False, kind="stable")
    newest = measured.loc[(measured["active"] - active).abs().idxmin(), "date"]
    table = []
    for row in measured[measured["date"] == newest].sort_index().to_dict("records"):
        for number in gpus:
            sequences, left = divmod(batch_tokens, row["context"] * number)
            if left or (number > cluster.node and number % cluster.node):
                raise ValueError(f"{number} GPUs cannot share a step of {batch_tokens:,} tokens")
            work, parameters = sequences / row["micro_batch"], row["parameters"]
            steps, compute = math.ceil(work), row["p50"] * work / 1e3
            # FSDP2 holds the gradients of several micro-batches whole until they are reduced.
            whole, state = cluster.gradient * parameters * (steps > 1), _STATE * parameters
            activations = (row["peak"] - state) * min(work, 1)
            for shards in (_ALL, _NODE) if number > cluster.node else (_ALL,):
                sent, send = cluster.sending(parameters, number, shards, steps)
                step, batches = max(compute, send), tokens / batch_tokens
                joules = row["watts"] * compute + cluster.waiting * (step - compute)
                ways = number if shards == _ALL else cluster.node
                one = {"provider": row["provider"], "active": row["active"], "gpus": number}
                one |= {"shards": shards, "sequences": sequences, "compute": 1e3 * compute}
                one |= {"send": 1e3 * send, "sent_gb": sent / 1e9, "hours": batches * step / 3600}
                one |= {"hours_apart": batches * (compute + send) / 3600}
                one |= {"efficiency": 100 * compute / step}
                one |= {"energy": batches * number * joules / 3.6e9}
                table.append(one | {"memory": (state / ways + whole + activations) / 1e9})
    return pd.DataFrame(table)


def stops_scaling(costs: pd.DataFrame) -> Iterator[dict]:
    """Yield for each provider and sharding the fewest GPUs whose sending exceeds computing."""
    for (provider, shards), some in costs.groupby(["provider", "shards"], sort=False):
        waits = some.loc[some["send"] > some["compute"], "gpus"]
        stops = waits.min() if len(waits) else f"above {some['gpus'].max()}"
        yield {"provider": provider, "shards": shards, "gpus": stops}
