import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from tests.factories.models import assert_same, make, tokens
from tests.factories.sparse import DEVICE, triton_here
from twell.models import SparseLlamaForCausalLM, intervene, load, silence
from twell.models.llama import CODE


def test_logits_and_checkpoints_are_those_of_transformers_llama(tmp_path):
    model = make().eval()
    model.save_pretrained(tmp_path)
    assert (tmp_path / CODE.name).read_bytes() == CODE.read_bytes()
    stock = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert stock.config.hidden_act == "relu"
    x = tokens(3, 20)
    assert torch.equal(model(input_ids=x).logits, stock(input_ids=x).logits)
    ours, theirs = (one(x, labels=x, return_dict=False) for one in (model, stock))
    assert type(ours) is tuple and all(map(torch.equal, ours[:2], theirs[:2]))
    assert dict(model.named_parameters()).keys() == dict(stock.named_parameters()).keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is SparseLlamaForCausalLM
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == again.config.to_dict()
    assert_same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {"gated_mlp": False},
        {"hidden_act": "silu", "mlp_bias": True},
        {"hidden_act": "drelu", "activation_threshold": 0.1},  # which transformers does not know
    ],
)
def test_other_layers_survive_saving(tmp_path, changes):
    model = make(**changes).eval()
    model.save_pretrained(tmp_path)
    again = SparseLlamaForCausalLM.from_pretrained(tmp_path).eval()
    x = tokens(2, 9)
    assert torch.equal(model(input_ids=x).logits, again(input_ids=x).logits)
    assert again.ffns[0].gated == model.config.gated_mlp
    assert again.ffns[0].act == model.ffns[0].act
    assert again.config.hidden_act == again.ffns[0].activation == changes.get("hidden_act", "relu")


def test_the_reference_generates_the_same_text():
    model, x = make().double().eval(), tokens(2, 4)
    generated = model.generate(x, max_new_tokens=12, do_sample=False)
    model.set_ffn_backend("reference")
    assert torch.equal(generated, model.generate(x, max_new_tokens=12, do_sample=False))


@triton_here
def test_triton_is_as_near_to_the_exact_model_as_dense(tmp_path):
    model = make(hidden_size=64, num_hidden_layers=1).half().eval().to(DEVICE)
    model.save_pretrained(tmp_path)
    exact, x = copy.deepcopy(model).double(), tokens(9, 16).to(DEVICE)  # by unions
    sparse = load(tmp_path, backend="triton")[0].to(DEVICE)
    with torch.no_grad():
        errors = [
            (one(input_ids=x).logits - exact(input_ids=x).logits).square().mean().sqrt()
            for one in (sparse, model)
        ]
    assert errors[0] <= 1.5 * errors[1] <= 0.02
    sparse.save_pretrained(tmp_path / "again")
    # The saved configuration names the backend.
    again = SparseLlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.ffn_backend == "triton"
    for one in (sparse, again):
        assert all(ffn.down_proj.weight.stride() == (1, 64) for ffn in one.ffns)
        assert_same(one.state_dict(), model.state_dict())


@pytest.mark.parametrize(("backend", "gated"), [("dense", False), ("reference", True)])
def test_silent_neurons_add_nothing_and_blocks_nest(backend, gated):
    model, x = make(gated_mlp=gated, ffn_backend=backend).eval(), tokens(2, 8)
    plain, without = model(input_ids=x).logits, copy.deepcopy(model)
    without.ffns[1].down_proj.weight.data[:, [3, 80]] = 0
    without.ffns[2].down_proj.weight.data[:, :40] = 0
    expected, second = without(input_ids=x).logits, np.int64(2)
    for ffn in without.ffns:
        ffn.down_proj.weight.data.zero_()
    with silence(model, 1, [3]), silence(model, second, range(40)), silence(model, 1, np.int64(80)):
        torch.testing.assert_close(model(input_ids=x).logits, expected)
        with pytest.raises(KeyError), silence(model, 0, [1]):
            raise KeyError
        for layers in ([0, 1, 2], None):
            with silence(model, layers):
                torch.testing.assert_close(model(input_ids=x).logits, without(input_ids=x).logits)
        # The inner blocks restored the outer ones.
        torch.testing.assert_close(model(input_ids=x).logits, expected)
    assert torch.equal(model(input_ids=x).logits, plain) and not torch.allclose(plain, expected)
    for error, selection, names in (
        (IndexError, ([3],), "layer 3 .*0 to 2"),
        (IndexError, (1, [84]), "neuron 84 .*0 to 83"),
        (ValueError, (None, [0]), "one layer"),
    ):
        with pytest.raises(error, match=names), silence(model, *selection):
            pass
        assert all(ffn.edit is None and not ffn.silenced for ffn in model.ffns)


def test_scaled_and_set_neurons_and_their_order():
    model, x = make(ffn_backend="reference").eval(), tokens(2, 8)
    plain, by_hand = model(input_ids=x).logits, copy.deepcopy(model)
    down = by_hand.ffns[1].down_proj
    changed = torch.ones(84)
    changed[[3, 7, 80, 81]] = torch.tensor([0.5, -2.0, 0, 0])
    # Neuron 80 is set to 0.7 and then doubled; neuron 81 scaled and then set.
    constant = 1.4 * down.weight[:, 80] - 0.3 * down.weight[:, 81]
    down.weight.data *= changed
    down.register_forward_hook(lambda module, _, y: y + constant)
    with (
        intervene(model, 1, [3, 7], scale=[0.5, -2.0]),
        intervene(model, 1, 81, scale=5),
        intervene(model, 1, [80, 81], value=[0.7, -0.3]),
        intervene(model, 1, 80, scale=2.0),
    ):
        with intervene(model, 1, 3, value=9.0):
            pass  # leaving an inner block brings back the outer one
        result = model(input_ids=x).logits
    torch.testing.assert_close(result, by_hand(input_ids=x).logits)
    assert torch.equal(model(input_ids=x).logits, plain)
    for options, names in (
        ({}, "None and None"),
        ({"scale": [1, 2, 3]}, r"\[1, 2, 3\]"),
        ({"value": float("nan")}, "nan"),
    ):
        with pytest.raises(ValueError, match=names), intervene(model, 1, [0, 1], **options):
            pass
        assert model.ffns[1].edit is None
