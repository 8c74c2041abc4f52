"""A SiLU model that learns from itself with ReLU: its loss, its L1 stages, what is saved."""

import copy
import dataclasses
import functools
import json
import re

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
    log_of,
    series,
    stop_training,
    write_config,
    write_pretrained,
)
from twell import cli, collect_l1, results
from twell.config import TrainConfig
from twell.corpus import load_tokenizer
from twell.corpus.tokens import encode
from twell.export import export
from twell.models import load
from twell.train import Student, evaluate, loop, relufy, relufy_config, samples, train


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


def test_teacher_and_losses_are_compiled_too(config, tmp_path, monkeypatch):
    """One code for all layers of a kind; batches of two sizes stay within dynamo's limit."""
    torch.compiler.reset()
    backend = {"backend": "aot_eager"}  # inductor takes minutes
    compiled = functools.partialmethod(torch.nn.Module.compile, **backend)
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, **backend))
    given = config("tokens=2560", "l1_stage_steps=5")  # 5 steps
    given = dataclasses.replace(given, micro_batch=5)  # of 16 sequences: 5, 5, 5 and 1
    called, plain = set(), relufy._losses

    def noted(*arguments):
        called.add(torch.compiler.is_compiling())
        return plain(*arguments)

    monkeypatch.setattr(relufy, "_losses", noted)
    one, other = (
        log_of(given, tmp_path / str(compile), compile=compile) for compile in (False, True)
    )
    assert called == {False, True}
    for metric in ("kl", "cross_entropy", "cross_entropy_teacher", "active_mean"):
        for split in ("train", "valid"):
            if metric in set(one[one.split == split].metric):
                numbers = series(one, metric, split), series(other, metric, split)
                np.testing.assert_allclose(*numbers, rtol=2e-4, err_msg=metric)
    model = Student.of(given, torch.device("cpu"))
    model.compile_teacher()
    layers = model.teacher[0].base_model.layers
    assert all(layer._compiled_call_impl is not None for layer in layers)
    torch.compiler.reset()


def test_balanced_students_compute_the_same(config):
    plain, balanced = (
        Student.of(config(f"balance_every={n}"), torch.device("cpu")).eval() for n in (0, 1)
    )
    ids = torch.randint(320, (2, 20), generator=torch.Generator().manual_seed(SEED))
    results = plain(ids).kl.item(), balanced(ids).kl.item()
    assert results[0] == pytest.approx(results[1], rel=1e-4) and results[0] > 1e-3
    columns = [ffn.down_proj.weight.norm(dim=0) for ffn in balanced.ffns]
    assert all(torch.allclose(column, column[0].expand_as(column)) for column in columns)


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
    ends = range(30, 200, 10)
    shares = active.loc[ends].to_numpy()
    aim, change = 0.98 * 0.2, np.diff(shares, prepend=shares[:1])
    aimed = np.maximum((shares + change) / aim, 1e-9)  # an extrapolated share may be below 0
    factors = 1.5 ** np.clip(np.log(aimed) / np.log(1.25), -3, 3)
    coming = shares + change * np.where(shares > aim, 1, 5)
    factors[(shares > aim) != (coming > aim)] = 1
    assert factors.min() < 0.9 and factors.max() > 1.5
    later = coefficient.loc[[step + 5 for step in ends]].to_numpy()
    assert later / [2e-3, *later[:-1]] == pytest.approx(factors, rel=1e-3)
    loss = series(log, "kl") + series(log, "l1_coefficient") * series(log, "l1")
    late = loss.index.get_level_values("step") > 20
    assert series(log, "loss")[late].to_numpy() == pytest.approx(loss[late].to_numpy(), rel=1e-3)
    # Both models' losses on the same held-out text.
    assert "kl" in set(log[log.split == "valid"].metric)
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


def test_the_card_of_an_export_names_the_original(trained, tmp_path):
    card = (export(trained, tmp_path / "out", text="Words.") / "README.md").read_text()
    assert (
        "license" not in card and "Text: Words. It began as `teacher`, and learnt from it" in card
    )


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(config, tmp_path):
    given = config("tokens=15360", "l1_stage_steps=5", "active_share=0.2", "hidden_weight=0.5")
    given = dataclasses.replace(given, checkpoint_every=10)
    whole = train(given, tmp_path / "whole", quiet=True)
    stop_training(given, tmp_path / "stopped", 20)
    resumed = train(given, tmp_path / "stopped", resume=True, quiet=True)
    logs = [results.load_run(folder)[1] for folder in (whole, resumed)]
    for metric in ("kl", "loss", "hidden", "active_mean", "l1_coefficient"):
        assert series(logs[0], metric).equals(series(logs[1], metric)), metric
    models = [load(folder)[0].state_dict() for folder in (whole, resumed)]
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())


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
    with pytest.raises(ValueError, match="here only a SparseLlamaForCausalLM will do"):
        export(run, tmp_path / "out", text="Words.")
    with pytest.raises(ValueError, match=f"the teacher is a {kind}; only the configuration of a L"):
        train(config("threshold=0.1", model=folder), tmp_path / "other", quiet=True)


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
    assert len(lines) == 94 and any("the teacher writes 94 texts" in line for line in said)
    assert any(re.fullmatch(r"1 of 6 batches of texts, \d:\d\d:\d\d left", line) for line in said)
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
    folder, said = write_pretrained(tmp_path / "model", tiny_text, bos_token_id=5), []
    fields = [*BRIEF, "sampled_tokens=3000", "sampled_chat=true", "tokens=1024"]
    with pytest.raises(ValueError, match="sampled_chat is true, .* has no chat template: leave"):
        relufy_config(folder, fields, said.append)
    tokenizer = load_tokenizer(str(folder), 320)
    for template, words in (
        ("{{ messages[0].content }}", "no header before a user's words: leave sampled_chat out"),
        ("{{ 40 * 'U: ' }}{{ messages[0].content }}", "context is 32; the header .* has .* tokens"),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        with pytest.raises(ValueError, match=words):
            relufy_config(folder, fields, said.append)
    twice = copy.deepcopy(tokenizer)  # which begins every text with its token, as the template does
    begins = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    twice.backend_tokenizer.post_processor = begins
    twice.bos_token, twice.chat_template = (
        "<|endoftext|>",
        "{{ bos_token }}U: {{ messages[0].content }}",
    )
    header = samples.chat_header(twice)
    ids = samples._first(twice, header)
    assert header == "U: " and ids.count(twice.bos_token_id) == 1 and ids[0] == twice.bos_token_id
    tokenizer.chat_template = "U: {{ messages[0].content }}<|endoftext|>"
    tokenizer.save_pretrained(folder)
    given = relufy_config(folder, fields, said.append)
    texts = [json.loads(line)["text"] for line in open(given.source, encoding="utf-8")]
    assert len(texts) == len(set(texts)) == 94
    assert all(text.startswith("U: ") for text in texts)
    # An end of text does not end a conversation, and is one again when it is read.
    assert "<|endoftext|>" in "".join(text[3:] for text in texts)
    ids = given.prepare_text()[1].tokens.tolist()  # of all but each 20th
    assert ids.count(tokenizer.eos_token_id) > 94 - 94 // 20
    assert ids[:2] == encode(tokenizer, "U: ")[:2]
    # The same teacher's texts are another file.
    plain = relufy_config(folder, [*fields[:-2], "tokens=1024"], said.append)
    assert plain.source != given.source
    with pytest.raises(ValueError, match="sampled_chat is true, and the teacher writes nothing"):
        relufy_config(folder, [*fields, f"source={tiny_text}"], said.append)
    assert results.load_run(train(given, tmp_path / "run", quiet=True))[0]["complete"]


def test_other_weights_in_the_same_folder_write_anew(tmp_path, tiny_text, monkeypatch):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path))
    monkeypatch.setattr(samples, "SAMPLED", 16)
    sources = []
    for scale in (0.2, 0.3):
        folder = write_pretrained(tmp_path / "model", tiny_text, initializer_range=scale)
        fields = [*BRIEF, "sampled_tokens=512"]
        sources.append(relufy_config(folder, fields, lambda line: None).source)
    assert sources[0] != sources[1]


@pytest.mark.parametrize("share", [0.25, 0.005])  # repeated, cut
def test_a_share_of_the_text_is_written(config, monkeypatch, tmp_path, share):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path))
    plain = config().prepare_text()[1].tokens
    mixed = config("sampled_tokens=300", f"sampled_share={share}")
    file = str(tmp_path / mixed.samples)  # in the cache
    alone = dataclasses.replace(mixed, source=file, valid_source=file, samples=None)
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
    with pytest.raises(FileNotFoundError, match="elsewhere.* is missing, .*set TWELL_CACHE to"):
        mixed.prepare_text()


@pytest.mark.parametrize("fields", [{"sampled_share": 0.5}, {"samples": "a.jsonl"}])
def test_a_share_needs_a_teacher(tmp_path, tiny_text, fields):
    given = TrainConfig(source=str(tiny_text), tokens=4096, warmup_steps=0, **fields)
    with pytest.raises(ValueError, match="only `twell relufy` has a teacher, which writes them"):
        train(given, tmp_path / "run", quiet=True)
    stream = dataclasses.replace(given, source="hf:a", samples="a.jsonl", sampled_share=0.5)
    chat = dataclasses.replace(given, samples=None, sampled_share=0.0, sampled_chat=True)
    with pytest.raises(ValueError, match="sampled_chat is true; only `twell relufy` has a teacher"):
        train(chat, tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match="of a stream, such as hf:a, no share is sampled"):
        train(stream, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("source", [[], ["source=hf:text"]])
def test_a_share_needs_a_source_that_is_no_stream(teacher, source):
    with pytest.raises(
        ValueError, match="sampled_share is 0.5: .*(stream|all text).*; leave it out"
    ):
        relufy_config(teacher, [*BRIEF, *source, "sampled_share=0.5"], lambda line: None)


# --- what is said, and refused --------------------------------------------------------------------


def test_a_relu_model_is_said_to_be_one(tmp_path, tiny_text):
    folder, said = write_pretrained(tmp_path / "model", tiny_text, hidden_act="relu"), []
    fields = [f"source={tiny_text}", *BRIEF, "tokens=1024"]
    given = relufy_config(folder, fields, said.append)
    assert any("has ReLU already" in line for line in said)
    assert any("no GPU was found" in line for line in said) != torch.cuda.is_available()
    parameters = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(folder).parameters())
    sizes = f"teacher {4 * parameters / 2**30:.2f} GiB"
    assert any(sizes in line and "logits 0.02 GiB" in line for line in said)
    log = results.load_run(train(given, tmp_path / "run", quiet=True))[1]
    assert abs(series(log, "kl", "valid").iloc[0]) < 1e-6


@pytest.mark.parametrize(
    "field, message",
    [
        ("hidden_size=64", "hidden_size is that of the teacher .*; leave it out"),
        ("tokenizer=other", "tokenizer is that of the teacher"),
        ("samples=a.jsonl", "samples is what the teacher wrote, .*; leave it out"),
        ("sampled_share=0.95", "sampled_share is 0.95; it has to be a share, from 0 to 0.9"),
        ("l1_growth=1", "l1_growth is 1.0; it has to be above 1, and 100 at most"),
        ("active_share=1.5", "active_share is 1.5; it has to be a share, from 0 to 1"),
        ("l1_stage_steps=7", "l1_stage_steps 7 is no multiple of log_every 5"),
        (
            "l1_coefficient=0",
            "active_share is 0.1, and l1_coefficient 0; give an l1_coefficient above",
        ),
        ("threshold=-1", "threshold is -1.0"),
    ],
)
def test_fields_that_do_not_fit(config, field, message):
    with pytest.raises(ValueError, match=message):
        config(field)


def test_damaged_models_are_refused(config, tmp_path, tiny_text):
    folder = write_pretrained(tmp_path / "model", tiny_text)
    given, weights = config("tokens=1024", model=folder), folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="model: damaged weights: .*; put back a whole copy"):
        train(given, tmp_path / "run", quiet=True)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="no tokenizer at .*model"):
        config("tokens=1024", model=folder)


def test_a_tokenizer_of_another_model_is_refused_before_anything_is_written(tmp_path, tiny_text):
    folder = write_pretrained(tmp_path / "model", tiny_text, vocab_size=300)
    with pytest.raises(ValueError, match="has 320 entries; vocab_size 300 does not hold them"):
        relufy_config(folder, BRIEF, lambda line: pytest.fail(line))


def test_a_slow_run_says_how_long_it_takes(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "SLOW", 0)
    train(config("tokens=2560"), tmp_path / "run")
    lines = re.findall(r"step 1 took \d+ s: about \d:\d\d:\d\d left", capsys.readouterr().out)
    assert len(lines) == 1 - torch.cuda.is_available()


def test_sizes_are_those_of_the_teacher(config, tmp_path):
    other = dataclasses.replace(config("tokens=1024"), intermediate_size=64)
    with pytest.raises(ValueError, match="intermediate_size is 64, and 96 in the teacher .*relufy"):
        train(other, tmp_path / "run", quiet=True)


def test_other_architectures_are_refused_by_name(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a gpt2 model; relufy knows llama, mistral, qwen2, qw"):
        relufy_config(tmp_path)


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
