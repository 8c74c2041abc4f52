"""The operators of inference: rules, errors, compilation. test_kernels.py has the results."""

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from tests.kernels.cases import (  # noqa: F401
    ALL_PATHS,
    DEVICE,
    PATHS,
    integer_case,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell.kernels import ops
from twell.kernels.paper.ops import ffn_twell

OPERATORS = {**ops.PATHS, "twell": ffn_twell}


def test_choice():
    assert [ops.choose(m) for m in (0, 1, 64, 65, 10**6)] == ["decode"] * 3 + ["union"] * 2


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda t: t.update(x=t["x"].float()), TypeError, "torch.float32"),
        (lambda t: t.update(x=t["x"][0]), ValueError, r"\(48,\)"),
        (lambda t: t.update(x=t["x"][:, :40]), ValueError, "hidden_size=40"),
        (lambda t: t.update(w_up=t["w_up"][:, :32]), ValueError, r"w_up has shape \(300, 32\)"),
        (lambda t: t.update(w_up=t["w_up"].half()), TypeError, "w_up has dtype torch.float16"),
        (
            lambda t: t.update(w_gate=t["w_gate"].t().contiguous().t()),
            ValueError,
            r"w_gate has strides \(1, 300\)",
        ),
        (
            lambda t: t.update(w_down=t["w_down"].contiguous()),
            ValueError,
            r"w_down has strides \(300, 1\)",
        ),
        (lambda t: t.update(b_up=t["b_up"][:5]), ValueError, r"b_up has shape \(5,\)"),
        (lambda t: t.update(b_down=t["b_down"].to("meta")), ValueError, "b_down is on meta"),
        (lambda t: t.update(w_gate=None), ValueError, "b_gate is given without w_gate"),
    ],
)
@pytest.mark.parametrize("path", ALL_PATHS)
def test_operators_refuse(path, change, error, message):
    tensors = fuzz.layer(integer_case(biases=True), DEVICE)
    change(tensors)
    with pytest.raises(error, match=message):
        OPERATORS[path](**tensors)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_weights_at_addresses_that_tensor_descriptors_do_not_take(path):
    tensors = fuzz.layer(integer_case(path), DEVICE)
    expected = OPERATORS[path](**tensors)
    for name in ("w_gate", "w_up", "w_down"):
        w = tensors[name].t() if name == "w_down" else tensors[name]
        w = torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)
        assert w.data_ptr() % 16
        tensors[name] = w.t() if name == "w_down" else w
    assert torch.equal(OPERATORS[path](**tensors), expected)


def test_sharded_tensors_are_refused():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    tensors = fuzz.layer(integer_case("union", num_tokens=3), DEVICE)
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        tensors["w_up"] = distribute_tensor(tensors["w_up"], DeviceMesh(DEVICE, [0]), [Replicate()])
        with pytest.raises(TypeError, match="w_up is a DTensor, expected a plain tensor"):
            ops.run("union", *tensors.values())
    finally:
        destroy_process_group()


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_operator_obeys_the_rules_of_operators(path, gated):
    tensors = fuzz.layer(integer_case(path, num_tokens=3, gated=gated, biases=gated), DEVICE)
    torch.library.opcheck(OPERATORS[path], (), tensors)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_compiled_as_one_graph(path):
    case = integer_case(path, num_tokens=3)
    tensors = fuzz.layer(case, DEVICE)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def twice(x):
        y = OPERATORS[path](x, *list(tensors.values())[1:])
        return y + 1

    for rows in (3, 2):
        x = tensors["x"][:rows]
        assert torch.equal(twice(x), fuzz.run(case, {**tensors, "x": x}) + 1)


def test_there_is_no_gradient():
    tensors = fuzz.layer(integer_case(), DEVICE)
    tensors["w_up"].requires_grad_()
    with pytest.raises(RuntimeError, match="autograd"):
        ops.ffn_union(**tensors).sum().backward()


def test_counting_refuses():
    tensors = fuzz.layer(integer_case(num_tokens=3), DEVICE)
    activity = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"activity is torch\.int32 \(4,\), expected torch\.int64 \(4,\)"
    ):
        ops.run("union", *tensors.values(), activity=activity.int())
    with pytest.raises(ValueError, match="activity is on meta"):
        ops.run("union", *tensors.values(), activity=activity.to("meta"))


@pytest.mark.parametrize("path", ["dense", *PATHS])
def test_run_under_compilation_is_the_operator(path):
    """A dense layer is torch's own operators, which the compiler can fuse."""
    tensors = fuzz.layer(integer_case(path, num_tokens=3), DEVICE)
    called: list[str] = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if "twell" in str(node.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(
        lambda x: ops.run(path, x, *list(tensors.values())[1:]), fullgraph=True, backend=backend
    )
    assert torch.equal(compiled(tensors["x"]), ops.run(path, *tensors.values()))
    assert called == ([] if path == "dense" else [f"twell.ffn_{path}.default"])
