"""The operators of inference: rules, errors, compilation. test_kernels.py has the results."""

import pytest
import torch

from tests import fuzz
from tests.factories.kernels import DEVICE, OPERATORS, integer_case
from tests.factories.ops import run
from twell.sparse import ops


def small_layer(path="union", **changes):
    sizes = dict(num_tokens=5, intermediate_size=70)
    return fuzz.layer(integer_case(path, **sizes | changes), DEVICE)


def test_choice():
    assert [ops.choose(m) for m in (0, 1, 512, 513, 10**6)] == ["decode"] * 3 + ["union"] * 2


REFUSED = [
    ("x", lambda x: x.float(), TypeError, "torch.float32"),
    ("x", lambda x: x[0], ValueError, r"\(48,\)"),
    ("x", lambda x: x[:, :40], ValueError, "hidden_size=40"),
    ("w_up", lambda w: w[0], ValueError, r"w_up .*\(48,\)"),
    ("w_up", lambda w: w[:0], ValueError, "intermediate_size=0"),
    ("w_up", lambda w: w[:, :32], ValueError, r"w_up .*\(70, 32\)"),
    ("w_up", lambda w: w.half(), TypeError, "w_up .*torch.float16"),
    ("w_gate", lambda w: w.t().contiguous().t(), ValueError, r"w_gate .*\(1, 70\)"),
    ("w_down", lambda w: w.contiguous(), ValueError, r"w_down_t .*\(1, 70\)"),
    ("b_up", lambda b: b[:5], ValueError, r"b_up .*\(5,\)"),
    ("b_down", lambda b: b.to("meta"), ValueError, "b_down is on meta"),
    ("w_gate", lambda w: None, ValueError, "b_gate .*w_gate"),
]


@pytest.mark.parametrize("path", OPERATORS)
def test_operators_refuse(path):
    for name, change, error, value in REFUSED:
        tensors = small_layer(biases=True)
        tensors[name] = change(tensors[name])
        with pytest.raises(error, match=value):
            OPERATORS[path](**tensors)


@pytest.mark.parametrize("path", OPERATORS)
def test_weights_at_addresses_that_tensor_descriptors_do_not_take(path):
    tensors = small_layer(path)
    expected = OPERATORS[path](**tensors)
    for name in ("w_gate", "w_up", "w_down"):
        w = tensors[name].t() if name == "w_down" else tensors[name]
        w = torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)
        assert w.data_ptr() % 16
        tensors[name] = w.t() if name == "w_down" else w
    assert torch.equal(OPERATORS[path](**tensors), expected)


def test_weights_are_checked_again_after_a_change():
    tensors = small_layer()
    tensors["w_up"] = weight = torch.nn.Parameter(tensors["w_up"], requires_grad=False)
    run("dense", *tensors.values())
    for values, error in (
        (weight[:, :32], ValueError),
        (weight.t().contiguous().t(), ValueError),
        (weight.float(), TypeError),
    ):
        weight.data = values.detach()
        with pytest.raises(error, match="w_up"):
            run("dense", *tensors.values())


def test_sharded_tensors_are_refused():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    tensors = small_layer()
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        tensors["w_up"] = distribute_tensor(tensors["w_up"], DeviceMesh(DEVICE, [0]), [Replicate()])
        with pytest.raises(TypeError, match="w_up is a DTensor"):
            run("union", *tensors.values())
    finally:
        destroy_process_group()


@pytest.mark.parametrize("path", OPERATORS)
def test_operator_obeys_the_rules_of_operators(path):
    gated = path != "union"
    tensors = small_layer(path, gated=gated, biases=gated)
    if path == "twell":
        torch.library.opcheck(OPERATORS[path], (), tensors)
        return
    x = tensors["x"] = tensors["x"].t().contiguous().t()
    torch.library.opcheck(ops.operator, tuple(tensors.values()), {"path": path})
    assert not x.is_contiguous() and OPERATORS[path](**tensors).is_contiguous()


def test_run_under_compilation_is_the_operator():
    """In one graph for any number of tokens. A dense layer is torch's own operators, which fuse."""
    tensors = small_layer(biases=True)
    rest = list(tensors.values())[1:]
    for path in ("dense", "union"):
        called: list[str] = []

        def backend(graph, inputs, called=called):
            targets = [str(node.target) for node in graph.graph.nodes]
            called.extend(target for target in targets if "twell" in target)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        @torch.compile(fullgraph=True, backend=backend, dynamic=True)
        def compiled(x, path=path):
            return run(path, x, *rest) + 1

        for x in (tensors["x"], tensors["x"][:2]):
            assert torch.equal(compiled(x), run(path, x, *rest) + 1)
        assert called == ([] if path == "dense" else ["twell.ffn.default"])
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="torch.bfloat16"):
            compiled(tensors["x"].float())


def test_counting_refuses():
    tensors = small_layer()
    activity = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    for wrong, value in ((activity.int(), "torch.int32"), (activity.to("meta"), "meta")):
        with pytest.raises((ValueError, TypeError), match=f"activity .*{value}"):
            run("union", *tensors.values(), activity=wrong)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be counted"):
        compiled("union", *tensors.values(), activity=activity)
