import copy
import pickle
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from tests.models.factories import (
    DEVICE,
    VOCAB,
    assert_same,
    calibration,
    gradients,
    make,
    needs_triton,
    rounding,
    tokens,
)
from twell.models import SparseLlamaForCausalLM, l1_by_layer, load


def test_logits_and_checkpoints_are_those_of_transformers_llama(tmp_path):
    model = make().eval()
    model.save_pretrained(tmp_path)
    stock = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert stock.config.hidden_act == "relu"
    x = tokens(3, 20)
    assert torch.equal(model(input_ids=x).logits, stock(input_ids=x).logits)
    assert dict(model.named_parameters()).keys() == dict(stock.named_parameters()).keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is SparseLlamaForCausalLM
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == again.config.to_dict()
    assert_same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "changes", [{"gated_mlp": False}, {"hidden_act": "silu"}, {"mlp_bias": True}]
)
def test_other_layers_survive_saving(tmp_path, changes):
    model = make(**changes).eval()
    model.save_pretrained(tmp_path)
    again = SparseLlamaForCausalLM.from_pretrained(tmp_path).eval()
    x = tokens(2, 9)
    assert torch.equal(model(input_ids=x).logits, again(input_ids=x).logits)
    assert again.ffns[0].gated == model.config.gated_mlp


def test_new_weights_have_the_configured_spread():
    model = make(initializer_range=0.02, hidden_size=128, intermediate_size=512)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert 0.018 < parameter.std().item() < 0.022, name


def test_pickles_of_the_former_module_load():
    stored = b"ctwell.model\nSparseLlamaForCausalLM\n."
    assert pickle.loads(stored) is SparseLlamaForCausalLM


# --- the loss


def test_loss_is_cross_entropy_plus_l1_in_training_alone():
    model = make()
    x = tokens(4, 16)
    hidden = []
    hooks = [
        ffn.register_forward_hook(lambda f, i, _: hidden.append(f.activations(i[0])[1]))
        for ffn in model.ffns
    ]
    output = model(input_ids=x, labels=x)
    for hook in hooks:
        hook.remove()
    l1 = torch.stack([h.abs().sum(-1) for h in hidden]).mean()
    torch.testing.assert_close(output.l1, l1)
    logits, targets = output.logits[:, :-1].reshape(-1, VOCAB), x[:, 1:].reshape(-1)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(output.cross_entropy, expected)
    torch.testing.assert_close(output.loss, expected + 0.03 * l1)
    model.eval()
    output = model(input_ids=x, labels=x)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.l1, l1)
    without = model(input_ids=x)
    assert without.loss is None and without.cross_entropy is None and without.l1 is None


def test_coefficient_and_scale_weight_the_l1_term():
    model = make(l1_coefficient=0.3)
    x = tokens(2, 10)
    output = model(input_ids=x, labels=x, l1_scale=0.5)
    torch.testing.assert_close(output.loss, output.cross_entropy + 0.5 * 0.3 * output.l1)
    torch.testing.assert_close(output.l1, l1_by_layer(model).mean())


@pytest.mark.parametrize("value", [-1.0, [0.1, 0.0, 0.3]])
def test_a_coefficient_that_is_no_number_of_0_or_more_is_refused(value):
    message = re.escape(f"l1_coefficient is {value}; it has to be a finite number, 0 or more")
    with pytest.raises(ValueError, match=message):
        make(l1_coefficient=value)


def test_shifted_labels_count_where_they_are_given():
    model = make().double()
    x = tokens(2, 8)
    shifted = torch.nn.functional.pad(x[:, 1:], (0, 1), value=-100)
    given = {"labels": torch.full_like(x, -100), "shift_labels": shifted}
    plain = model(input_ids=x, labels=x)
    torch.testing.assert_close(model(input_ids=x, **given).loss, plain.loss)
    torch.testing.assert_close(model(input_ids=x, **given, num_items_in_batch=14).loss, plain.loss)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_compiles_in_one_graph(training):
    model, x = make().train(training), tokens(2, 8)
    mask = torch.ones_like(x).index_fill(1, torch.tensor([0]), 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = {"input_ids": x, "attention_mask": mask, "use_cache": False}
    if training:
        inputs |= {"labels": x, "num_items_in_batch": torch.tensor(14)}
    result, expected = compiled(**inputs), model(**inputs)
    torch.testing.assert_close(result.logits, expected.logits)
    if training:
        torch.testing.assert_close(result.loss, expected.loss)
        torch.testing.assert_close(result.l1, expected.l1)


# --- backends


def test_reference_backend_gives_the_same_text_and_gradients():
    model = make().double()
    x = tokens(2, 12)
    model(input_ids=x, labels=x).loss.backward()
    dense = gradients(model)
    model.zero_grad()
    model.set_ffn_backend("reference")
    model(input_ids=x, labels=x).loss.backward()
    torch.testing.assert_close(gradients(model), dense, rtol=1e-8, atol=1e-10)
    model.eval()
    generated = model.generate(x[:, :4], max_new_tokens=12, do_sample=False)
    model.set_ffn_backend("dense")
    assert torch.equal(generated, model.generate(x[:, :4], max_new_tokens=12, do_sample=False))
    assert generated.shape[1] > 4


@needs_triton
def test_triton_backend_is_as_near_to_the_exact_model_as_dense(tmp_path):
    model = make(hidden_size=64).half().eval().to(DEVICE)
    model.save_pretrained(tmp_path)
    exact = copy.deepcopy(model).double()
    sparse = load(tmp_path, backend="triton")[0].to(DEVICE)
    assert all(ffn.down_proj.weight.stride() == (1, 64) for ffn in sparse.ffns)
    x = tokens(4, 16).to(DEVICE)
    with torch.no_grad():
        right = exact(input_ids=x).logits
        error = rounding(model(input_ids=x).logits, right)
        assert rounding(sparse(input_ids=x).logits, right) <= 1.5 * error <= 0.02
        # Both round: of two equally likely tokens they may write either, but no less likely one.
        written = sparse.generate(x[:1, :5], max_new_tokens=4, do_sample=False)
        right = exact(input_ids=written[:, :-1]).logits[:, 4:]
        chosen = right.gather(-1, written[:, 5:, None])[..., 0]
        assert written.shape[1] > 5 and (right.amax(-1) - chosen <= 10 * error).all()
    sparse.save_pretrained(tmp_path / "again")
    # The saved configuration names the backend.
    again = SparseLlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.ffn_backend == "triton"
    assert again.ffns[0].down_proj.weight.stride() == (1, 64)
    assert_same(again.state_dict(), model.state_dict())


def test_a_calibration_can_be_given():
    model = make()
    given = calibration()
    model.set_ffn_backend("auto", given)
    assert all(ffn.calibration is given for ffn in model.ffns)
    model.set_ffn_backend("dense")
    model.set_ffn_backend("auto")
    assert all(ffn.calibration is given for ffn in model.ffns)


@needs_triton
def test_auto_computes_what_dense_does_and_trains():
    model = make(hidden_size=64).half().eval().to(DEVICE)
    x = tokens(4, 7).to(DEVICE)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(input_ids=x).logits
        error = rounding(model(input_ids=x).logits, exact)
        model.set_ffn_backend("auto", calibration(hidden_size=64))
        assert rounding(model(input_ids=x).logits, exact) <= 1.5 * error <= 0.02
        cache = model(input_ids=x[:, :5]).past_key_values  # a prompt, then token by token
        for n in (5, 6):
            step = model(input_ids=x[:, n : n + 1], past_key_values=cache).logits
            assert rounding(step[:, 0], exact[:, n]) <= 3 * error
    model.train()(input_ids=x, labels=x).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
