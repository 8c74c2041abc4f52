"""A SiLU model that learns from itself with ReLU: its loss, its L1 stages, what is saved."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from tokenizers import processors
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.factories import SEED
from tests.factories.train import (
    BRIEF,
    FAMILIES,
    contents,
    launch,
    series,
    write_config,
    write_pretrained,
)
from twell import cli, collect_l1, results
from twell.config import TrainConfig
from twell.corpus import load_tokenizer
from twell.corpus.tokens import encode
from twell.models import load
from twell.train import Student, evaluate, relufy, relufy_config, samples, train


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_loss_is_the_divergence_from_the_original(
    config, tmp_path, tiny_text, kind, monkeypatch
):
    monkeypatch.setattr(relufy, "CHUNK", 7)  # no divisor of the tokens
    folder = write_pretrained(tmp_path / "model", tiny_text, kind)
    model = Student.of(config("l1_coefficient=0.5", model=folder), torch.device("cpu"))
    dense = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: weight.clone() for name, weight in dense.state_dict().items()}
    ids = torch.randint(320, (3, 20), generator=torch.Generator().manual_seed(SEED))
    output = model.train()(ids, ids, l1_scale=0.1)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.student.named_parameters()}

    student = model.student
    student.zero_grad()
    with torch.no_grad():
        wanted = torch.log_softmax(dense(ids).logits.double(), -1)
    with collect_l1(student) as terms:
        hidden = student.base_model(ids).last_hidden_state
    logprob = torch.log_softmax(student.lm_head(hidden).double(), -1)
    kl = (wanted.exp() * (wanted - logprob)).sum(-1).mean()
    cross_entropy = F.nll_loss(logprob[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    l1 = terms.mean()
    loss = kl + 0.1 * 0.5 * l1
    loss.backward()
    for name, expected in ("kl", kl), ("cross_entropy", cross_entropy), ("l1", l1), ("loss", loss):
        assert getattr(output, name).item() == pytest.approx(expected.item(), rel=1e-5), name
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)
    assert model.eval()(ids).kl.item() == pytest.approx(kl.item(), rel=1e-5)
    # Nothing but the activation differs at the start, and the teacher is no part of the module.
    assert all(
        torch.equal(weight, before[n]) for n, weight in model.teacher[0].state_dict().items()
    )
    assert not any(name.startswith("teacher") for name in model.state_dict())


@pytest.fixture(scope="module")
def trained(teacher, tiny_text, tmp_path_factory):
    """A run of the command, and its configuration."""
    folder = tmp_path_factory.mktemp("relufied") / "run"
    words = "tokens=102400 l1_coefficient=2e-3 l1_zero_steps=20 l1_growth=1.5 l1_stage_steps=10 "
    words += "active_share=0.2"
    fields = [f"source={tiny_text}", *BRIEF[:-1], *words.split()]
    assert cli.main(["relufy", str(teacher), *fields, "--out", str(folder)]) == 0
    return folder


def test_it_learns_and_gets_as_sparse_as_wanted(trained):
    row, log = results.load_run(trained)
    assert row["complete"] and row["active_share"] == 0.2
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
    original, loss = AutoModelForCausalLM.from_pretrained(row["teacher"]), []
    for ids in TrainConfig.load(trained / "config.yaml").prepare_text()[2].draw(range(16)):
        loss.append(original(ids[None], labels=ids[None]).loss.item())
    logged = series(log, "cross_entropy_teacher", "valid")
    assert logged.to_numpy() == pytest.approx(np.mean(loss), rel=1e-4)


def test_the_result_is_a_model_like_any_other(trained, teacher):
    model, tokenizer = load(trained)
    stock = LlamaForCausalLM.from_pretrained(
        trained / "model", config=LlamaConfig.from_pretrained(trained / "model")
    )
    ids = torch.tensor([tokenizer("bain da fo kun").input_ids])
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, stock(ids).logits, atol=1e-5)
        original = AutoModelForCausalLM.from_pretrained(teacher)
        assert not torch.allclose(model(ids).logits, original(ids).logits, atol=1e-2)
    assert model.config.hidden_act == "relu" and model.config.num_key_value_heads == 1
    assert len(tokenizer) == 320


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"tie_word_embeddings": True}),  # has biases
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_other_families_keep_their_class(config, tmp_path, tiny_text, kind, changes):
    folder = write_pretrained(tmp_path / "model", tiny_text, kind, **changes)
    given = dataclasses.replace(config("tokens=2048", model=folder), precision="bf16")
    run = train(given, tmp_path / "run", quiet=True)
    kl = series(results.load_run(run)[1], "kl", "valid")
    assert kl.iloc[-1] < kl.iloc[0]
    saved = AutoModelForCausalLM.from_pretrained(run / "model")
    assert all(getattr(saved.config, name) == value for name, value in changes.items())
    assert saved.config.model_type == kind and saved.config.hidden_act == "relu"
    names = set(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    assert set(saved.state_dict()) == names
    with pytest.raises(ValueError, match=f"threshold is 0.1, and the teacher is a {kind}"):
        config("threshold=0.1", model=folder)


def test_what_a_llama_has_stays(config, tmp_path, tiny_text):
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    fields = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    folder = write_pretrained(tmp_path / "model", tiny_text, rope_parameters=scaled, **fields)
    run = train(config("tokens=2048", model=folder), tmp_path / "run", quiet=True)
    saved = load(run)[0]
    assert all(getattr(saved.config, name) == value for name, value in fields.items())
    assert saved.config.rope_parameters == scaled
    assert saved.ffns[0].up_proj.bias is not None
    loss = series(results.load_run(run)[1], "cross_entropy", "valid").iloc[-1]
    blocks = config("tokens=2048", model=folder).prepare_text()[2]
    assert evaluate(saved, blocks)["cross_entropy"] == pytest.approx(loss, rel=1e-4)


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
    assert config("threshold=0", model=run).threshold == 0


# --- text that the teacher writes -----------------------------------------------------------------


def test_without_a_source_the_teacher_writes(teacher, monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path))
    monkeypatch.setattr(samples, "SAMPLED", 16)
    fields, said = [*BRIEF, "sampled_tokens=3000"], []
    whole = relufy_config(teacher, fields, said.append)
    lines = [json.loads(line) for line in open(whole.source, encoding="utf-8")]
    assert len(lines) == 94 and any("1 of 6 batches" in line for line in said)
    texts = "".join(line["text"] for line in lines)
    assert len(texts) > 3000 and len(set(texts)) > 5
    # Stopped in its third batch, or at its end, with half a line, it goes on to the same file.
    file, text = results.Path(whole.source), open(whole.source, encoding="utf-8").read()
    part = file.with_suffix(".part")
    for lines in (2 * 16 + 3, 2 * 16 - 1, 94 - 1, 94):
        part.write_text("".join(text.splitlines(keepends=True)[:lines]) + '{"te')
        file.unlink()
        assert relufy_config(teacher, fields, said.append) == whole
        assert file.read_text(encoding="utf-8") == text and not part.exists()
    run = train(dataclasses.replace(whole, tokens=1024), tmp_path / "run", quiet=True)
    assert results.load_run(run)[0]["complete"]


def test_samples_are_drawn_from_the_probabilities_of_the_teacher(tmp_path, tiny_text, monkeypatch):
    monkeypatch.setattr(samples, "TEMPERATURE", 0.6)
    folder = write_pretrained(tmp_path / "model", tiny_text, bos_token_id=5)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        load_tokenizer(str(folder), 320),
    )
    model.generation_config.repetition_penalty = 9.0
    tokenizer.bos_token_id = 5
    torch.manual_seed(SEED)
    ids = samples._write(model, tokenizer, 4, 12, [5])
    torch.manual_seed(SEED)
    expected = torch.full((4, 1), 5)
    with torch.no_grad():
        for _ in range(12):
            probabilities = torch.softmax(model(expected).logits[:, -1] / 0.6, -1)
            expected = torch.cat([expected, torch.multinomial(probabilities, 1)], 1)
    assert not (expected == tokenizer.eos_token_id).any() and torch.equal(ids, expected[:, 1:])


def test_the_teacher_writes_conversations(tmp_path, tiny_text, monkeypatch):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path))
    folder = write_pretrained(tmp_path / "model", tiny_text, bos_token_id=5)
    fields = [*BRIEF, "sampled_tokens=3000", "sampled_chat=true", "tokens=1024"]
    tokenizer = load_tokenizer(str(folder), 320)
    for template, words in (
        (None, "no chat template"),
        ("{{ messages[0].content }}", "no chat template with a header"),
        ("{{ 40 * 'U: ' }}{{ messages[0].content }}", "context is 32; the header .* has .* tokens"),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        with pytest.raises(ValueError, match=words):
            relufy_config(folder, fields, lambda line: None)
    tokenizer.chat_template = "U: {{ messages[0].content }}<|endoftext|>"
    tokenizer.save_pretrained(folder)
    given = relufy_config(folder, fields, lambda line: None)
    texts = [json.loads(line)["text"] for line in open(given.source, encoding="utf-8")]
    assert len(texts) == len(set(texts)) == 94
    assert all(text.startswith("U: ") for text in texts)
    # An end of text does not end a conversation, and becomes that token when it is read.
    assert "<|endoftext|>" in "".join(text[3:] for text in texts)
    ids = given.prepare_text()[1].tokens.tolist()  # without each 20th text
    assert ids.count(tokenizer.eos_token_id) > 94 - 94 // 20
    assert ids[:2] == encode(tokenizer, "U: ")[:2]
    plain = relufy_config(folder, [*fields[:-2], "tokens=1024"], lambda line: None)
    assert plain.source != given.source


def test_a_chat_header_begins_once(tiny_text, tmp_path):
    """Both the tokenizer and the template put a begin-of-text token first."""
    tokenizer = load_tokenizer(str(write_pretrained(tmp_path / "model", tiny_text)), 320)
    begin = ("<|endoftext|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[begin]
    )
    tokenizer.bos_token = begin[0]
    tokenizer.chat_template = "{{ bos_token }}U: {{ messages[0].content }}"
    assert samples.chat_header(tokenizer) == "U: "
    ids = samples._first(tokenizer, "U: ")
    assert ids[0] == begin[1] and ids.count(begin[1]) == 1


@pytest.mark.parametrize("share", [0.25, 0.005])  # repeated, cut
def test_a_share_of_the_text_is_written(config, monkeypatch, tmp_path, share):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path))
    plain = config().prepare_text()[1].tokens
    mixed = config("sampled_tokens=300", f"sampled_share={share}")
    file = str(tmp_path / mixed.samples)  # in the cache
    alone = dataclasses.replace(
        mixed, source=file, valid_source=file, samples=None, sampled_share=0.0
    )
    written = alone.prepare_text()[1].tokens  # none is held out
    text = mixed.prepare_text()[1].tokens
    rest = text[len(plain) :]
    assert abs(len(rest) / len(text) - share) < 1e-3 and (len(rest) > len(written)) == (share > 0.1)
    assert (text[: len(plain)] == plain).all()
    assert (rest == written[np.arange(len(rest)) % len(written)]).all()
    train(dataclasses.replace(mixed, tokens=1024), tmp_path / "run", quiet=True)
    assert TrainConfig.load(tmp_path / "run" / "config.yaml").samples == mixed.samples
    # A machine that writes other texts at a time has another text by the same name.
    monkeypatch.setattr(samples, "SAMPLED", 2)
    assert config("sampled_tokens=300", f"sampled_share={share}") == mixed
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="elsewhere.* is missing"):
        mixed.prepare_text()


# --- what is said, and refused --------------------------------------------------------------------


def test_a_relu_model_is_said_to_be_one(tmp_path, tiny_text):
    folder, said = write_pretrained(tmp_path / "model", tiny_text, hidden_act="relu"), []
    fields = [f"source={tiny_text}", *BRIEF, "tokens=1024"]
    given = relufy_config(folder, fields, said.append)
    assert any("has ReLU already" in line for line in said)
    log = results.load_run(train(given, tmp_path / "run", quiet=True))[1]
    assert abs(series(log, "kl", "valid").iloc[0]) < 1e-6


@pytest.mark.parametrize(
    "field, message",
    [
        ("hidden_size=64", "hidden_size follows from the teacher"),
        ("tokenizer=other", "tokenizer follows"),
        ("rope_theta=5e5", "rope_theta follows"),
        ("samples=a.jsonl", "samples follows"),
        ("activation=drelu", "activation follows"),
        ("context=128", "context is 128; .* reads at most 64"),
        ("fit_tokens=383", "fit_tokens is 383; fewer than 384, 4 for each neuron"),
        ("l1_stage_steps=7", "l1_stage_steps 7 is no multiple of log_every 5"),
        ("l1_coefficient=0", "active_share is 0.1, and l1_coefficient 0"),
        ("sampled_chat=true", "sampled_chat is true, and the teacher writes nothing"),
        ("source=hf:text sampled_share=0.5", "sampled_share is 0.5; it needs a source"),
    ],
)
def test_fields_that_do_not_fit(teacher, tiny_text, field, message):
    names = [word.partition("=")[0] for word in field.split()]
    given = [f"source={tiny_text}", *BRIEF]
    given = [word for word in given if word.partition("=")[0] not in names]
    with pytest.raises(ValueError, match=message):
        relufy_config(teacher, [*given, *field.split()], lambda line: None)


def test_other_models_are_refused_before_anything_is_written(tmp_path, tiny_text):
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="is a gpt2 model; relufy knows llama, mistral"):
        relufy_config(tmp_path / "gpt2")
    folder = write_pretrained(tmp_path / "small", tiny_text, vocab_size=300)
    with pytest.raises(ValueError, match="has 320 entries; vocab_size 300"):
        relufy_config(folder, BRIEF, lambda line: pytest.fail(line))


def test_damaged_models_are_refused(config, tmp_path, tiny_text):
    folder = write_pretrained(tmp_path / "model", tiny_text)
    given, weights = config("tokens=1024", model=folder), folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="model cannot be loaded: Safetensor.*; put back a whole copy"):
        train(given, tmp_path / "run", quiet=True)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="no tokenizer at .*model"):
        config("tokens=1024", model=folder)


def test_a_run_of_another_teacher_is_left_alone(config, trained, tmp_path, tiny_text):
    before = contents(trained)
    other = write_pretrained(tmp_path / "other", tiny_text)
    with pytest.raises(ValueError, match="holds a run of another configuration: .*teacher was"):
        train(config(model=other), trained, resume=True, quiet=True)
    assert contents(trained) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_losses_of_one(config, tmp_path, kind):
    given = config("tokens=4096", "l1_stage_steps=5", "hidden_weight=0.5")
    given = dataclasses.replace(
        given, micro_batch=3, log_every=2, l1_stage_steps=2, fit_tokens=1152
    )
    write_config(given, tmp_path / "config.yaml")
    one = results.load_run(train(given, tmp_path / "one", quiet=True))[1]
    two, model = launch(tmp_path, "two", kind)
    for metric in ("kl", "cross_entropy", "l1", "hidden", "active_mean", "l1_coefficient"):
        numbers = series(one, metric), series(two, metric)
        np.testing.assert_allclose(*numbers, rtol=3e-4, err_msg=metric)
    expected = load(tmp_path / "one")[0].state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-4, msg=name)
