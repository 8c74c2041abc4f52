"""A SiLU model that learns from itself with ReLU: its loss, its steering, what is saved."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.factories import SEED
from tests.factories import train as factory
from tests.factories.models import change_config
from tests.factories.train import BRIEF, contents, resume, series, stop_training, write_pretrained
from twell import cli, collect_l1, results
from twell.config import TrainConfig
from twell.models import load
from twell.sparse.training import SparseTraining
from twell.train import Student, relufy, relufy_config, train
from twell.train.loop import prepare_layers
from twell.train.steer import Steering


def ids_of(*shape):
    return torch.randint(320, shape, generator=torch.Generator().manual_seed(SEED))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind, compiled, again", [("qwen3", False, False), ("llama", True, True)])
def test_the_loss_and_its_gradient(config, tmp_path, tiny_text, monkeypatch, kind, compiled, again):
    """Divergence, L1 term and the distance of hidden states, against their definitions.

    again: backward passes compute the layers again.
    """
    monkeypatch.setattr(relufy, "CHUNK", 7)  # no divisor of the tokens
    torch.compiler.reset()
    folder = write_pretrained(tmp_path / "model", tiny_text, kind)
    given = config("hidden_weight=0.3", "l1_coefficient=0.5", model=folder)
    given = dataclasses.replace(given, compile=compiled, checkpoint_activations=again)
    model, plain = (Student(given, torch.device("cpu")) for _ in range(2))
    prepare_layers(model, given, SparseTraining(model))
    ids = ids_of(3, 20)
    model.eval()(ids)
    output = model.train()(ids, ids, l1_scale=0.1)
    assert not any(model.outputs)  # they would take memory until the next pass
    output.loss.backward()

    student, dense = plain.student, AutoModelForCausalLM.from_pretrained(folder)
    ours, wanted = [], []
    for one, outputs in (student, ours), (dense, wanted):
        for layer in one.base_model.layers:
            layer.register_forward_hook(lambda _, i, out, to=outputs: to.append(out))
    with torch.no_grad():
        target = torch.log_softmax(dense(ids).logits.double(), -1)
    with collect_l1(student) as terms:
        logits = student.lm_head(student.base_model(ids).last_hidden_state)
    logprob = torch.log_softmax(logits.double(), -1)
    ours, wanted = torch.stack(ours), torch.stack(wanted)
    expected = {
        "kl": (target.exp() * (target - logprob)).sum(-1).mean(),
        "cross_entropy": F.nll_loss(logprob[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
        "l1": terms.mean(),
        "hidden": ((ours - wanted).norm(dim=-1) / wanted.norm(dim=-1)).square().mean(),
    }
    loss = expected["kl"] + 0.1 * 0.5 * expected["l1"] + 0.3 * expected["hidden"]
    for name, value in (expected | {"loss": loss}).items():
        assert value > 1e-4 and getattr(output, name).item() == pytest.approx(
            value.item(), rel=1e-4
        )
    loss.backward()
    for one, other in zip(model.student.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)
    kl = model.eval()(ids).kl.item()
    assert kl == pytest.approx(expected["kl"].item(), rel=1e-5)
    # The teacher is neither trained nor saved.
    assert not any(name.startswith("teacher") for name in model.state_dict())
    torch.compiler.reset()


@pytest.fixture(scope="module")
def trained(teacher, tiny_text, tmp_path_factory):
    """A run of the command."""
    folder = tmp_path_factory.mktemp("relufied") / "run"
    words = "tokens=102400 l1_coefficient=2e-3 l1_zero_steps=20 l1_growth=1.5 l1_stage_steps=10 "
    words += "active_share=0.2"
    fields = [f"source={tiny_text}", *BRIEF[:-1], *words.split()]
    assert cli.main(["relufy", str(teacher), *fields, "--out", str(folder)]) == 0
    return folder


def test_it_learns_and_gets_as_sparse_as_wanted(trained):
    row, log = results.load_run(trained)
    kl, active = series(log, "kl"), series(log, "active_mean").groupby("step").mean() / 96
    # ReLU alone is learnt first. Then the L1 term rises until a fifth of the neurons is active.
    assert kl.iloc[3] < 0.7 * kl.iloc[0]
    assert active.iloc[3] > 0.4 and 0.15 < active.iloc[-1] < 0.21
    coefficient = series(log, "l1_coefficient").droplevel("layer")  # of the steps before a row
    assert coefficient.loc[:30].to_numpy() == pytest.approx(2e-3)  # a stage with the term
    assert coefficient.nunique() > 5
    loss = series(log, "kl") + series(log, "l1_coefficient") * series(log, "l1")
    late = loss.index.get_level_values("step") > 20
    assert series(log, "loss")[late].to_numpy() == pytest.approx(loss[late].to_numpy(), rel=1e-3)
    # Both models' losses on the same held-out text.
    original, losses = AutoModelForCausalLM.from_pretrained(row["teacher"]), []
    for ids in TrainConfig.load(trained / "config.yaml").prepare_text()[2].draw(range(16)):
        losses.append(original(ids[None], labels=ids[None]).loss.item())
    logged = series(log, "cross_entropy_teacher", "valid")
    assert logged.to_numpy() == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_threshold_is_part_of_the_model(config, tmp_path):
    shares = []
    for threshold in (0.0, 0.3):
        folder = tmp_path / str(threshold)
        run = train(config("tokens=1024", f"threshold={threshold}"), folder, quiet=True)
        log = results.load_run(run)[1]
        shares.append(series(log, "active_mean", "valid").iloc[:2].mean())
        assert load(run)[0].ffns[0].threshold == threshold
    assert shares[1] < 0.9 * shares[0]
    # A run is a model too, whose threshold the next one keeps.
    assert config(model=run).threshold == 0.3 and config(model=run).teacher == str(run / "model")
    again = Student(config(model=run), torch.device("cpu")).eval()
    assert abs(again(ids_of(2, 16)).kl.item()) < 1e-6
    before = contents(run)
    with pytest.raises(ValueError, match="the teacher .*model is in "):
        train(config(model=run), run, overwrite=True)
    assert contents(run) == before


def test_a_student_has_no_dropout(config, tiny_text, tmp_path):
    """It would act in the student alone, and make the teacher's prediction unreachable."""
    folder = write_pretrained(tmp_path / "model", tiny_text, "qwen2", attention_dropout=0.5)
    student = Student(config(model=folder), torch.device("cpu"))
    ids = torch.arange(32).reshape(1, 32)
    first, second = (student.train()(ids, ids).kl.item() for _ in range(2))
    assert first == second == student.eval()(ids, ids).kl.item()


def test_models_and_fields_that_do_not_fit(config, teacher, tmp_path, tiny_text):
    for field, message in (
        ("hidden_size=64", "hidden_size"),
        ("context=128", "context is 128; .* at most 64"),
        ("l1_stage_steps=7", "l1_stage_steps 7 .* log_every 5"),
    ):
        given = {word.partition("=")[0]: word for word in [f"source={tiny_text}", *BRIEF, field]}
        with pytest.raises(ValueError, match=message):
            relufy_config(teacher, [*given.values()])
    factory.write_pretrained(tmp_path / "gpt2", tiny_text, "gpt2")
    with pytest.raises(ValueError, match="is a gpt2 model"):
        relufy_config(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="give source="):
        relufy_config(write_pretrained(tmp_path / "plain", tiny_text))
    change_config(hidden_act="relu2")(tmp_path / "plain")
    with pytest.raises(ValueError, match="has relu2, which is sparse already"):
        relufy_config(tmp_path / "plain", [f"source={tiny_text}"])
    small = config(model=write_pretrained(tmp_path / "small", tiny_text, vocab_size=300))
    with pytest.raises(ValueError, match="has 320 entries; vocab_size 300"):
        train(small, tmp_path / "run", quiet=True)
    folder = write_pretrained(tmp_path / "model", tiny_text)
    given, weights = config("tokens=1024", model=folder), folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="model cannot be loaded"):
        train(given, tmp_path / "run", quiet=True)


def test_a_teacher_that_changed_is_noticed(config, teacher, trained, tmp_path):
    folder, run = shutil.copytree(teacher, tmp_path / "changing"), tmp_path / "run"
    fields = "tokens=5120", "l1_stage_steps=5"
    given = dataclasses.replace(config(*fields, model=folder), checkpoint_every=5)
    stop_training(given, run, 5)
    before = contents(run)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data[0] += 1
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="teacher's weights"):
        resume(given, run)
    with pytest.raises(ValueError, match="another configuration: .*teacher was"):
        resume(config(model=folder), trained)
    assert contents(run) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_losses_of_one(config, tmp_path, kind):
    given = config("tokens=4096", "l1_stage_steps=5", "hidden_weight=0.5")
    changes = {"micro_batch": 3, "log_every": 2, "l1_stage_steps": 2}
    given = dataclasses.replace(given, **changes)
    factory.write_config(given, tmp_path / "config.yaml")
    one = results.load_run(train(given, tmp_path / "one", quiet=True))[1]
    two, model = factory.launch(tmp_path, "two", kind)
    for metric in ("kl", "cross_entropy", "l1", "hidden", "active_mean", "l1_coefficient"):
        numbers = series(one, metric), series(two, metric)
        np.testing.assert_allclose(*numbers, rtol=3e-4, err_msg=metric)
    expected = load(tmp_path / "one")[0].state_dict()
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "shares, factors",
    [
        ([0.5, 0.5], [1.5**3, 1.5**3]),  # too many: at most three factors a stage
        ([0.4, 0.25], [1.5**3, 1.0]),  # falls below the aim in the next stage
        ([0.1, 0.125], [1 / 1.5**3, 1.0]),  # comes back within five stages
        ([0.05, 0.051], [1 / 1.5**3, 1 / 1.5**3]),  # comes back too slowly
        (8 * [0.001], [*5 * [1 / 1.5**3], 1e-3 * 1.5**15, 1.0, 1.0]),  # at a thousandth it ends
    ],
)
def test_the_coefficient_waits_for_activity_on_its_way(shares, factors):
    fields = "active_share=0.2 l1_growth=1.5 l1_stage_steps=10 l1_zero_steps=10".split()
    steered, found = Steering(TrainConfig.load("relufy", fields), None), []
    for stage, share in enumerate(shares, 2):
        before = steered.factor
        for step in range(10 * stage - 9, 10 * stage + 1):
            steered.after(step, share * steered.config.intermediate_size)
        found.append(steered.factor / before)
    assert found == pytest.approx(factors) and steered.value == 1e-3 * steered.factor


def test_without_l1_the_threshold_rises_until_few_are_active(config, tmp_path, eager):
    """In compiled layers too, which have to see each new threshold."""
    words = "active_share=0.1 l1_coefficient=0 threshold=0.05 l1_stage_steps=5 tokens=30720"
    given = dataclasses.replace(config(*words.split()), compile=True)
    run = train(given, tmp_path / "whole", quiet=True)
    log = results.load_run(run)[1]
    thresholds = series(log, "threshold").droplevel("layer")
    assert thresholds.iloc[0] == pytest.approx(0.05) and thresholds.nunique() > 5
    assert "l1_coefficient" not in set(log["metric"])
    shares = series(log, "active_mean", "valid").groupby("step").mean() / 96
    assert shares.iloc[0] > 0.3 and 0.07 < shares.iloc[-1] < 0.115
    # The model has the threshold of the last row.
    model = load(run)[0]
    assert {ffn.threshold for ffn in model.ffns} == {model.config.activation_threshold}
    assert model.config.activation_threshold == pytest.approx(thresholds.iloc[-1], rel=1e-4)
