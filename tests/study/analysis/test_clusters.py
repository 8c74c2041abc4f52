"""Costs of a training on many GPUs: the formulas by hand, and clusters that cannot be."""

import pytest

from study import analysis
from tests.factories.analysis import step_rows

P = 1e9
# A GPU sends 10 GB/s to its node of four and 1 GB/s to others, and 100 W keep it waiting.
CLUSTER = analysis.Cluster(node=4, within=1e10, between=1e9, waiting=100.0)


def costs(gpus, active=29.0, **changes):
    """Of ten steps of 64 sequences; a micro-batch of 4 takes 2 s densely, else 1 s."""
    about = {"parameters": P, "watts": 500.0, "peak": 20e9}
    rows = step_rows({"dense torch.compile": 2000.0, "triton union torch.compile": 1000.0}, **about)
    options = {"active": active, "tokens": 640 * 2048, "batch_tokens": 64 * 2048, "gpus": gpus}
    return analysis.training_costs(rows, "1.5b", cluster=CLUSTER, **options | changes)


def test_one_node_and_several():
    node, over_all, in_nodes = costs([4, 8]).query("provider == 'dense torch.compile'").itertuples()
    # One node: 16 sequences are four micro-batches. Each gathers 8 bytes a parameter, and the step
    # reduces 4, which are held whole until then.
    assert (node.sequences, node.compute, node.sent_gb) == (16, 8000, (4 * 8 + 4) * 3 / 4)
    assert node.send == pytest.approx(2700) and node.efficiency == 100 and node.active == 29
    assert node.hours == pytest.approx(10 * 8 / 3600)
    assert node.hours_apart == pytest.approx(10 * 10.7 / 3600)
    assert node.energy == pytest.approx(10 * 4 * 500 * 8 / 3.6e9)
    assert node.memory == pytest.approx(16 / 4 + 4 + 4)
    # Two nodes, sharded over all: the four links of a node share what leaves it.
    assert over_all.sent_gb == pytest.approx((2 * 8 + 4) * 7 / 8)
    assert over_all.send == pytest.approx(1e3 * 17.5 / 4) and over_all.compute == 4000
    assert over_all.efficiency == pytest.approx(100 * 4 / 4.375)
    assert over_all.energy == pytest.approx(10 * 8 * (500 * 4 + 100 * 0.375) / 3.6e9)
    assert over_all.memory == pytest.approx(16 / 8 + 4 + 4)
    # Sharded in a node: the node's quarter of the gradients, once, to one other node.
    assert in_nodes.sent_gb == pytest.approx((2 * 8 + 4) * 3 / 4 + 2 * 4 / 4 / 2)
    assert in_nodes.send == pytest.approx(1500 + 1000) and in_nodes.memory == pytest.approx(12)


def test_a_fast_network_leaves_the_links_of_a_node():
    slow, fast = (
        analysis.Cluster(node=4, within=1e10, between=between).sending(P, 8, "all GPUs", 1)
        for between in (1e9, 1e12)
    )
    assert slow == pytest.approx((12e9 * 7 / 8, 12 * 7 / 8 / 4)) and fast[1] == pytest.approx(1.05)


def test_a_smaller_share_than_a_micro_batch_takes_less_memory_and_time():
    (last,) = (
        costs([32]).query("provider != 'dense torch.compile' and shards == 'a node'").itertuples()
    )
    assert (last.sequences, last.compute) == (2, 500)
    assert last.memory == pytest.approx(16 / 4 + 4 * 2 / 4)


def test_where_scaling_stops():
    stops = {tuple(one.values()) for one in analysis.stops_scaling(costs([4, 8, 16, 32]))}
    dense, sparse = "dense torch.compile", "triton union torch.compile"
    assert stops == {
        *((dense, "all GPUs", 8), (dense, "a node", 16)),
        *((sparse, "all GPUs", 8), (sparse, "a node", 8)),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": [128]}, "a step has 64 sequences of 2048 tokens, which 128 GPUs cannot share"),
        ({"gpus": [6]}, "6 GPUs are no whole nodes of 4"),
        ({"gpus": [-8]}, "gpus is -8; expected a number above 0"),
        ({"tokens": 0}, "tokens is 0; expected"),
        ({"batch_tokens": -2048}, "batch_tokens is -2048; expected"),
        ({"active": 900}, "active is 900; steps of 1.5b were measured with 29"),
    ],
)
def test_clusters_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        costs(**{"gpus": [4]} | changes)


def test_a_model_that_was_not_measured_is_named():
    rows = step_rows({"dense torch.compile": 2000.0}, parameters=P, watts=500.0)
    with pytest.raises(ValueError, match="model is '2b'; steps were measured of 1.5b"):
        analysis.training_costs(rows, active=24, tokens=1, batch_tokens=2048)


@pytest.mark.parametrize("name", ["node", "within", "between", "weight", "gradient", "waiting"])
def test_assumptions_are_above_zero(name):
    with pytest.raises(ValueError, match=f"{name} is -1; expected a number above 0"):
        analysis.Cluster(**{name: -1})


def test_one_number_of_gpus_needs_no_list():
    assert costs(8).equals(costs([8]))
