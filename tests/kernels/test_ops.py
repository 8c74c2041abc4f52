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
    ("w_up", lambda w: w[0], ValueError, r"w_up has shape \(48,\), expected \[intermediate_size"),
    ("w_up", lambda w: w[:0], ValueError, "w_up has intermediate_size=0, expected 1 to 65536"),
    ("w_up", lambda w: w[:, :32], ValueError, r"w_up has shape \(70, 32\)"),
    ("w_up", lambda w: w.half(), TypeError, "w_up has dtype torch.float16"),
    ("w_gate", lambda w: w.t().contiguous().t(), ValueError, r"w_gate has strides \(1, 70\)"),
    ("w_down", lambda w: w.contiguous(), ValueError, r"w_down_t has strides \(1, 70\)"),
    ("b_up", lambda b: b[:5], ValueError, r"b_up has shape \(5,\)"),
    ("b_down", lambda b: b.to("meta"), ValueError, "b_down is on meta"),
    ("w_gate", lambda w: None, ValueError, "b_gate is given without w_gate"),
]


@pytest.mark.parametrize("name, change, error, message", REFUSED)
@pytest.mark.parametrize("path", OPERATORS)
def test_operators_refuse(path, name, change, error, message):
    tensors = small_layer(biases=True)
    tensors[name] = change(tensors[name])
    with pytest.raises(error, match=message):
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
    for values, error, message in (
        (weight[:, :32], ValueError, r"w_up has shape \(.*, 32\)"),
        (weight.t().contiguous().t(), ValueError, "w_up has strides"),
        (weight.float(), TypeError, "w_up has dtype torch.float32"),
    ):
        weight.data = values.detach()
        with pytest.raises(error, match=message):
            run("dense", *tensors.values())


def test_sharded_tensors_are_refused():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    tensors = small_layer()
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        tensors["w_up"] = distribute_tensor(tensors["w_up"], DeviceMesh(DEVICE, [0]), [Replicate()])
        with pytest.raises(TypeError, match="w_up is a DTensor, expected a plain tensor"):
            run("union", *tensors.values())
    finally:
        destroy_process_group()


@pytest.mark.parametrize("path", OPERATORS)
def test_operator_obeys_the_rules_of_operators(path):
    gated = path != "union"
    tensors = small_layer(path, gated=gated, biases=gated)
    if path == "twell":
        torch.library.opcheck(OPERATORS[path], (), tensors)
    else:
        torch.library.opcheck(ops.operator, tuple(tensors.values()), {"path": path})


@pytest.mark.parametrize(
    "path",
    ["dense", "union", *(pytest.param(p, marks=pytest.mark.slow) for p in ("rowwise", "decode"))],
)
def test_run_under_compilation_is_the_operator(path):
    """In one graph for any number of tokens. A dense layer is torch's own operators, which fuse."""
    tensors = small_layer(path, biases=True)
    called: list[str] = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if "twell" in str(node.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def compiled(x):
        return run(path, x, *list(tensors.values())[1:]) + 1

    for x in (tensors["x"], tensors["x"][:2]):
        assert torch.equal(compiled(x), run(path, *{**tensors, "x": x}.values()) + 1)
    assert called == ([] if path == "dense" else ["twell.ffn.default"])
    if path == "dense":
        with pytest.raises(torch._dynamo.exc.Unsupported, match="expected torch.bfloat16 or torch"):
            compiled(tensors["x"].float())
        with pytest.raises(ValueError, match=r"w_down_t has strides \(1, 70\)"):
            run("dense", *{**tensors, "w_down": tensors["w_down"].contiguous()}.values())


def test_counting_refuses():
    tensors = small_layer()
    activity = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(TypeError, match=r"activity has dtype torch\.int32, expected torch\.int64"):
        run("union", *tensors.values(), activity=activity.int())
    with pytest.raises(ValueError, match="activity is on meta"):
        run("union", *tensors.values(), activity=activity.to("meta"))
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be counted"):
        compiled("union", *tensors.values(), activity=activity)


def test_results_of_transposed_rows_are_contiguous_when_traced_too():
    tensors = fuzz.layer(integer_case("decode", num_tokens=5), DEVICE)
    tensors["x"] = tensors["x"].t().contiguous().t()
    arguments = tuple(tensors.values())
    operator = torch.ops.twell.ffn.default
    torch.library.opcheck(operator, arguments, test_utils=("test_faketensor",))
    assert operator(*arguments).is_contiguous()
