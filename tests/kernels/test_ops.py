"""The operators of inference: refusals, rules, compilation. test_kernels.py has the results."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

import twell
from tests import fuzz
from tests.factories.kernels import DEVICE, OPERATORS, integer_case
from tests.factories.ops import run
from twell.sparse import ops


def small_layer(path="union", **changes):
    sizes = dict(num_tokens=5, intermediate_size=70)
    return fuzz.layer(integer_case(path, **sizes | changes), DEVICE)


def test_choice():
    assert [ops.choose(m) for m in (0, 1, 512, 513, 10**6)] == ["decode"] * 3 + ["union"] * 2


# Refusals: an argument, a change of it, the exception and the value that it names.


def strided(w):
    return w.t().contiguous().t()


def set_to(value):
    return lambda _: value.to(DEVICE) if isinstance(value, torch.Tensor) else value


OPERATOR = [
    ("x", lambda x: x.float(), TypeError, "torch.float32"),
    ("x", lambda x: x[0], ValueError, r"\(48,\)"),
    ("x", lambda x: x[:, :40], ValueError, "hidden_size=40"),
    ("w_up", lambda w: w[0], ValueError, r"w_up .*\(48,\)"),
    ("w_up", lambda w: w[:0], ValueError, "intermediate_size=0"),
    ("w_up", lambda w: w[:, :32], ValueError, r"w_up .*\(70, 32\)"),
    ("w_up", lambda w: w.half(), TypeError, "w_up .*torch.float16"),
    ("w_gate", strided, ValueError, r"w_gate .*\(1, 70\)"),
    ("w_gate", set_to(None), ValueError, "b_gate .*w_gate"),
    ("w_down", lambda w: w.contiguous(), ValueError, r"w_down_t .*\(1, 70\)"),
    ("b_up", lambda b: b[:5], ValueError, r"b_up .*\(5,\)"),
    ("b_down", lambda b: b.to("meta"), ValueError, "b_down is on meta"),
]
PUBLIC = [
    ("x", lambda x: x[0, 0], ValueError, "x is a single number"),
    ("w_up", lambda w: w[None], ValueError, r"w_up .*\(1, 70"),
    ("w_down_t", lambda w: w.t(), ValueError, r"w_down_t .*\(48, 70\)"),
    ("path", set_to("fast"), ValueError, "'fast'"),
    ("activation", set_to("silu"), ValueError, "'silu'"),
    ("activation", set_to("gelu"), ValueError, "'gelu'"),
    ("out", set_to(torch.empty(3, 48)), ValueError, "out has shape"),
]


def tensors():
    return small_layer(biases=True)


def public():
    given = tensors()
    w_down_t = given.pop("w_down").t()
    return given | dict(w_down_t=w_down_t, path=None, activation="relu", out=None)


def in_fp8():
    given, _ = fuzz.quantized(integer_case(), small_layer())
    return {name: given.get(name) for name in ops.TENSORS}


REFUSED = {
    "union": (OPERATORS["union"], tensors, OPERATOR),
    "twell": (OPERATORS["twell"], tensors, OPERATOR),
    "ffn": (twell.ffn, public, PUBLIC),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_wrong_arguments_are_named(kind):
    function, arguments, table = REFUSED[kind]
    function(**arguments())
    for name, change, error, value in table:
        given = arguments()
        with pytest.raises(error, match=value):
            function(**given | {name: change(given[name])})


def test_sharded_tensors_are_refused():
    given = small_layer()
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        given["w_up"] = distribute_tensor(given["w_up"], DeviceMesh(DEVICE, [0]), [Replicate()])
        with pytest.raises(TypeError, match="w_up is a DTensor"):
            run("union", *given.values())
    finally:
        destroy_process_group()


def test_weights_are_checked_again_after_a_change():
    given = small_layer()
    given["w_up"] = weight = torch.nn.Parameter(given["w_up"], requires_grad=False)
    run("dense", *given.values())
    for values, error in (
        (weight[:, :32], ValueError),
        (strided(weight), ValueError),
        (weight.float(), TypeError),
    ):
        weight.data = values.detach()
        with pytest.raises(error, match="w_up"):
            run("dense", *given.values())


# Rules of operators and of compilation


@pytest.mark.parametrize("path", OPERATORS)
def test_weights_at_addresses_that_tensor_descriptors_do_not_take(path):
    given = small_layer(path)
    expected = OPERATORS[path](**given)
    for name in ("w_gate", "w_up", "w_down"):
        w = given[name].t() if name == "w_down" else given[name]
        w = torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)
        assert w.data_ptr() % 16
        given[name] = w.t() if name == "w_down" else w
    assert torch.equal(OPERATORS[path](**given), expected)


@pytest.mark.parametrize("path", ["union", "twell", "FP8"])
def test_operators_obey_the_rules_of_operators(path):
    if path == "FP8":  # the test of the schema multiplies, which torch cannot do in FP8
        given = tuple(in_fp8().values())
        torch.library.opcheck(ops.operator, given, test_utils=("test_faketensor",))
        return
    given = small_layer(path, gated=path == "twell", biases=path == "twell")
    given["x"] = given["x"].t().contiguous().t()
    assert not given["x"].is_contiguous() and OPERATORS[path](**given).is_contiguous()
    if path == "twell":
        torch.library.opcheck(OPERATORS[path], (), given)
    else:
        torch.library.opcheck(ops.operator, tuple(given.values()), {"path": path})


@pytest.mark.parametrize("path", ["dense", "union"])
def test_run_under_compilation_is_the_operator(path):
    """In one graph for any number of tokens. A dense layer is torch's own operators, which fuse."""
    x, *rest = small_layer(biases=True).values()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(x, **options):
        return run(path, x, *rest, **options) + 1

    for some in (x, x[:2]):
        assert torch.equal(compiled(some), run(path, some, *rest) + 1)
    (graph,) = counter.graphs
    names = [str(node.target) for node in graph.graph.nodes]
    assert [name for name in names if "twell" in name] == ([] if path == "dense" else ["twell.ffn.default"])
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="torch.bfloat16"):
        compiled(x.float())
    activity = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be counted"):
        compiled(x, activity=activity)
