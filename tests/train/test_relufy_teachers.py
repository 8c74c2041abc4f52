"""Teachers as they come: their tokenizers, ties, files and settings survive, or are refused."""

import dataclasses
import functools
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.factories import SEED
from tests.factories.train import (
    BRIEF,
    FAMILIES,
    contents,
    resume,
    stop_training,
    write_pretrained,
)
from twell import corpus
from twell.corpus import load_tokenizer, tokens
from twell.sparse.training import SparseTraining
from twell.train import Student, check_folder, relufy_config, samples, train
from twell.train.build import prepare_layers

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def copied(teacher, tmp_path):
    """Return a copy of the teacher, with a change of the fields of a JSON file."""

    def with_fields(name, file=None, **fields):
        folder = shutil.copytree(teacher, tmp_path / name)
        if file:
            path = folder / file
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return folder

    return with_fields


def student_of(folder, tiny_text, out, *fields, **options):
    given = [f"source={tiny_text}", *BRIEF, "tokens=1024", "l1_stage_steps=5", *fields]
    return train(relufy_config(folder, given, lambda line: None), out, quiet=True, **options)


def test_end_and_chat_templates_are_the_teachers_own(copied, teacher, tiny_text, tmp_path):
    """Another model with the same tokenizer.json came before; its text is in the cache."""
    student_of(teacher, tiny_text, tmp_path / "one")
    other = copied("other", "tokenizer_config.json", eos_token="a")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = {"default": TEMPLATE, "tools": TEMPLATE + "."}
    tokenizer.save_pretrained(other)
    model = student_of(other, tiny_text, tmp_path / "two") / "model"
    loaded = AutoTokenizer.from_pretrained(model)
    assert loaded.eos_token == "a" and loaded.chat_template == tokenizer.chat_template
    ends = [
        relufy_config(folder, [f"source={tiny_text}", *BRIEF], lambda line: None).prepare_text()
        for folder in (teacher, other)
    ]
    assert ends[0][1].tokens.tolist() != ends[1][1].tokens.tolist()

    student_of(teacher, tiny_text, tmp_path / "two", overwrite=True)
    assert AutoTokenizer.from_pretrained(model).chat_template is None


def test_text_is_neither_cut_nor_padded(teacher, tiny_text, tmp_path):
    tokenizer = load_tokenizer(str(teacher), 320)
    expected = corpus.prepare(
        str(tiny_text), vocab_size=320, cache=tmp_path / "a", tokenizer=str(teacher)
    )
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=400, pad_token=tokenizer.eos_token)
    folder = tmp_path / "cutting"
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).backend_tokenizer.truncation  # so it is stored
    text = corpus.prepare(
        str(tiny_text), vocab_size=320, cache=tmp_path / "b", tokenizer=str(folder)
    )
    assert text.train.tolist() == expected.train.tolist()
    sentence = "one two three four five six seven"
    ids = tokens.encode(load_tokenizer(str(folder), 320), sentence)
    assert ids == tokens.encode(load_tokenizer(str(teacher), 320), sentence) and len(ids) > 5


def test_a_head_of_its_own_stays_its_own(copied, tiny_text):
    folder = copied("tied", "config.json", tie_word_embeddings=True)
    student = Student.of(
        relufy_config(folder, [f"source={tiny_text}", *BRIEF], lambda line: None),
        torch.device("cpu"),
    )
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert not torch.equal(plain.lm_head.weight, plain.model.embed_tokens.weight)
    assert torch.equal(student.student.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(student.student.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    assert not student.student.config.tie_word_embeddings


def test_a_teacher_that_changed_is_noticed(copied, tiny_text, tmp_path):
    folder, run = copied("changing"), tmp_path / "run"
    fields = [f"source={tiny_text}", *BRIEF, "tokens=5120", "l1_stage_steps=5"]
    given = relufy_config(folder, fields, lambda line: None)
    given = dataclasses.replace(given, checkpoint_every=5)
    stop_training(given, run, 5)
    before = contents(run)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data[0] += 1
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="the teacher .*changing has changed since .*run started"):
        resume(given, run)
    assert contents(run) == before
    shutil.rmtree(folder)
    copied("changing")
    resume(given, run)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_student_has_no_dropout_that_the_teacher_has_not(tiny_text, tmp_path, kind):
    """Attention's would act in the student alone, and make the teacher's prediction unreachable."""
    folder = write_pretrained(tmp_path / "model", tiny_text, kind, attention_dropout=0.5)
    given = [f"source={tiny_text}", *BRIEF, "tokens=1024", "l1_stage_steps=5"]
    student = Student.of(relufy_config(folder, given, lambda line: None), torch.device("cpu"))
    ids = torch.arange(32).reshape(1, 32)
    first, second = (student.train()(ids, ids).kl.item() for _ in range(2))
    assert first == second == student.eval()(ids, ids).kl.item()


def test_an_end_of_id_0_ends_a_sample(teacher):
    """Before, 0 counted as no end."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(teacher), load_tokenizer(teacher, 320)
    tokenizer.eos_token, asked = "a", []
    model.generate = lambda ids, **options: asked.append(model.generation_config) or ids
    for end, expected in ((0, 0), (None, tokenizer.eos_token_id), ([0, 7], [0, 7])):
        model.generation_config.eos_token_id = end
        samples._write(model, tokenizer, 8, 4, [1])
        assert asked[-1].eos_token_id == expected


def test_a_teacher_that_is_not_finite_is_refused(copied, tiny_text, tmp_path):
    folder = copied("nan")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data[3, 4] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="lm_head.weight of the teacher .*nan is not finite"):
        student_of(folder, tiny_text, tmp_path / "run")


def test_a_teacher_is_not_overwritten(teacher, tiny_text, tmp_path):
    run = student_of(teacher, tiny_text, tmp_path / "run")
    before = contents(run)
    with pytest.raises(ValueError, match="the teacher .*run/model is in .*run; give the run anot"):
        student_of(run, tiny_text, run, overwrite=True)
    assert contents(run) == before


def test_the_teacher_writes_nothing_for_a_run_that_cannot_begin(teacher, tiny_text, tmp_path):
    """Samples take an hour: what is refused, is refused before."""

    def check(config):
        check_folder(config, tmp_path / "run", resume=True)

    said = []
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        relufy_config(teacher, BRIEF, said.append, check)
    assert said == []
    other = write_pretrained(tmp_path / "mistral", tiny_text, "mistral")
    with pytest.raises(ValueError, match="threshold is 0.1, and the teacher is a mistral"):
        relufy_config(other, [*BRIEF, "threshold=0.1"], said.append)
    assert said == []


@pytest.mark.parametrize(
    "kind, compiled, again",
    [
        *((kind, False, False) for kind in FAMILIES),
        ("llama", False, True),
        ("llama", True, False),
        ("llama", True, True),
    ],
)
def test_hidden_states_are_compared_layer_by_layer(
    config, tmp_path, tiny_text, monkeypatch, kind, compiled, again
):
    """The distance, its part in the loss and its gradient; nothing is left of a pass.

    again: backward passes compute the layers again.
    """
    if compiled:
        torch.compiler.reset()
        backend = {"backend": "aot_eager"}  # inductor takes minutes
        layers = functools.partialmethod(torch.nn.Module.compile, **backend)
        monkeypatch.setattr(torch.nn.Module, "compile", layers)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, **backend))
    folder = write_pretrained(tmp_path / "model", tiny_text, kind)
    given = config("hidden_weight=0.3", "l1_coefficient=0.5", model=folder)
    given = dataclasses.replace(given, compile=compiled, checkpoint_activations=again)
    model, plain = (Student.of(given, torch.device("cpu")) for _ in range(2))
    prepare_layers(model, given, SparseTraining(model))
    ids = torch.randint(320, (3, 20), generator=torch.Generator().manual_seed(SEED))
    model.eval()(ids)
    assert not any(model.outputs)
    output = model.train()(ids, ids)
    assert not any(model.outputs)  # they would take memory until the next pass
    output.loss.backward()
    assert model.train()(ids, ids).hidden.item() == pytest.approx(output.hidden.item())

    ours, wanted = (
        one(input_ids=ids, output_hidden_states=True).hidden_states
        for one in (plain.model, plain.teacher[0].base_model)
    )
    # The last one that transformers returns has passed the final norm.
    outputs = {"ours": [], "wanted": []}
    for name, one in ("ours", plain.model), ("wanted", plain.teacher[0].base_model):
        last = one.layers[-1].register_forward_hook(
            lambda _, i, out, n=name: outputs[n].append(out)
        )
        one(input_ids=ids)
        last.remove()
    pairs = zip([*ours[1:-1], *outputs["ours"]], [*wanted[1:-1], *outputs["wanted"]], strict=True)
    far = [((a - b).norm(dim=-1) / b.norm(dim=-1)).square().mean() for a, b in pairs]
    assert len(far) == 2 and min(far) > 1e-4
    hidden = torch.stack(far).mean()
    assert output.hidden.item() == pytest.approx(hidden.item(), rel=1e-4)
    loss = output.kl + 0.5 * output.l1 + 0.3 * output.hidden
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    gradient = [p.grad.clone() for p in model.student.parameters()]
    plain.hidden_weight = 0.0
    (plain.train()(ids, ids).loss + 0.3 * hidden).backward()
    for one, other in zip(gradient, plain.student.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-3, atol=1e-6)
    torch.compiler.reset()
