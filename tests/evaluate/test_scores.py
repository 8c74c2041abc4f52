"""A record has lm-eval's results and says where they came from; a mistake is one clear line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import LlamaForCausalLM

import twell
from study import analysis
from tests.factories.evaluate import SEVEN, brute_force
from tests.factories.train import write_pretrained
from twell import evaluate, results
from twell.__main__ import main
from twell.evaluate.scores import LM
from twell.sparse.float8 import Float8Linear

EIGHT = [*SEVEN, "commonsense_qa_cloze"]


def choose(model, tokenizer, prompt, choices):
    first = tokenizer(prompt).input_ids
    whole = [tokenizer(f"{prompt} {choice}").input_ids for choice in choices]
    return int(np.argmax([brute_force(model, first, ids[len(first) :]) for ids in whole]))


def test_a_run_from_files_and_from_the_hub(both_sources, tiny_run):
    folder = both_sources(np.random.default_rng(7))  # others may have equally likely choices
    record = evaluate.run(tiny_run, "paper7", data=folder)
    scores, facts = record["lm_eval"]["results"], record["tasks"]
    assert set(scores) == {*EIGHT, "paper7"} and "samples" not in record["lm_eval"]
    # accuracies, from the model alone
    model, tokenizer = twell.load(tiny_run)
    for task, prompt in {"arc_easy": "Question: {}\nAnswer:", "openbookqa": "{}"}.items():
        lines = (folder / f"{task}_test.jsonl").read_text().splitlines()
        items = [json.loads(line) for line in lines]
        chosen = [choose(model, tokenizer, prompt.format(i["query"]), i["choices"]) for i in items]
        right = [one == item["gold"] for one, item in zip(chosen, items, strict=True)]
        assert scores[task]["acc,none"] == np.mean(right)
        assert facts[task]["correct"] == "".join("01"[one] for one in right)
        chance = np.mean([1 / len(item["choices"]) for item in items])
        assert facts[task]["chance"] == pytest.approx(chance) and facts[task]["items"] == 6

    # the mean of the seven, without the cloze variant beside them
    seven = [scores[task]["acc,none"] for task in SEVEN]
    assert scores["paper7"]["acc,none"] == pytest.approx(np.mean(seven))
    chance = np.mean([facts[task]["chance"] for task in SEVEN])
    assert facts["paper7"] == {"chance": pytest.approx(chance)}

    weights = tiny_run / "model" / "model.safetensors"
    assert record["model"]["sha256"] == {weights.name: results.file_hash(weights)}
    expected = {"name": tiny_run.name, "context": 32, "l1_coefficient": 1e-2}
    expected |= {"training_tokens": 8192, "parameters": sum(p.numel() for p in model.parameters())}
    assert expected.items() <= record["model"].items()
    assert (record["backend"], record["dtype"]) == ("dense", "float32")
    digest = results.file_hash(folder / "piqa_test.jsonl")[:16]
    assert facts["piqa"]["data"] == f"piqa_test.jsonl, sha256 {digest}"
    assert any(fact.get("truncated") for fact in facts.values())

    # the same from the hub, and computed sparsely
    hub = evaluate.run(tiny_run, "paper7", backend="reference")
    assert hub["lm_eval"]["results"] == scores and hub["backend"] == "reference"
    assert hub["tasks"]["arc_easy"]["data"] == "hub: allenai/ai2_arc ARC-Easy"


WRONG = [
    ({"tasks": "arc_hard", "data": "."}, "'arc_hard'"),
    ({"tasks": "piqa"}, "data of piqa"),
    ({"tasks": "piqa", "data": "two"}, r"piqa\*\.jsonl; .* several"),
    ({"backend": "triton"}, "backend 'triton' .* float32"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_a_wrong_argument_is_refused(tiny_run, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    Path("two").mkdir()
    for number in (1, 2):
        Path(f"two/piqa_{number}.jsonl").write_text("{}")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        evaluate.run(tiny_run, **options)


def test_the_command_prints_the_scores(tiny_run, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(f"{'ba de kun'.split()[n % 3]} w{n}" for n in range(200)))
    command = ["evaluate", str(tiny_run), "--limit", "3", "--backend", "reference"]
    command += ["--dtype", "bfloat16", "--source", "text.txt"]
    capfd.readouterr()
    assert main(command) == 0
    out, error = capfd.readouterr()
    task = "held_out_continuation"
    assert out.startswith("| task | metric |")
    path = f"build/eval/tiny-{task}-reference-bfloat16-limit-3.json"
    assert all(name in out for name in ("acc_norm", "acc_mutual_info")) and path in error
    (record,) = results.load_evaluations("build/eval")
    assert record["backend"] == "reference" and "samples" not in record["lm_eval"]
    assert record["lm_eval"]["n-samples"][task]["effective"] == 3
    assert analysis.evaluations([record])["chance"].tolist() == [0.25] * 3
    assert main(command) == 2 and "already holds an evaluation" in capfd.readouterr().err


CPU = torch.device("cpu")


def requests_of(pairs, names=("some",)):
    made = [(names[min(n // 5, len(names) - 1)], n, 1) for n in range(len(pairs))]
    pairs = zip(pairs, made, strict=True)
    return [Instance("loglikelihood", {}, pair, 0, name) for pair, name in pairs]


WAYS = [("reference", 7, None), ("dense", 1, "FP8")]


@pytest.mark.parametrize(("backend", "batch_size", "dtype"), WAYS)
def test_log_likelihoods_are_those_of_the_model(tiny_run, random, backend, batch_size, dtype):
    lm = LM(tiny_run, batch_size, device=CPU, backend=backend, dtype=dtype)
    kind = torch.bfloat16 if dtype == "FP8" else None
    model, tokenizer = twell.load(tiny_run, backend=backend, dtype=kind)
    assert lm.model.dtype == model.dtype
    assert lm.precision == (dtype or "float32")
    if dtype == "FP8":
        twell.quantize_(model)
        for ffn in model.ffns:
            ffn.down_proj = Float8Linear.of(ffn.down_proj)

    def some(number):
        return " ".join(random.choice("ba dun fain ge ho kun".split(), number))

    asked = [("", some(3)), ("ba", " " + some(1)), ("ba de", " ba"), ("ba de", " dun")]
    asked += [(some(4), " " + some(2)), (some(60), " " + some(2)), (some(50), " " + some(2))]
    answers = lm.loglikelihood(requests_of(asked, ("short", "long")))
    for (context, continuation), (logprob, greedy) in zip(asked, answers, strict=True):
        before = tokenizer(context).input_ids or [tokenizer.bos_token_id]
        after = tokenizer(context + continuation).input_ids[len(before) if context else 0 :]
        expected = pytest.approx(brute_force(model, before, after), rel=1e-5)
        assert logprob == expected, (context, continuation)
        assert isinstance(greedy, bool)
    assert +lm.truncated == {"long": 2}


def test_the_original_of_a_relufied_model(tiny_text, tmp_path):
    folder = write_pretrained(tmp_path / "model", tiny_text)
    record = evaluate.run(folder, text=str(tiny_text), limit=3)
    expected = {"hidden_act": "silu", "num_hidden_layers": 2, "intermediate_size": 96}
    assert expected.items() <= record["model"].items() and record["backend"] == "dense"
    assert type(LM(folder, 2, device=CPU).model) is LlamaForCausalLM
    for options, named in (({"backend": "reference"}, "'reference'"), ({"dtype": "FP8"}, "FP8")):
        with pytest.raises(ValueError, match=named):
            evaluate.run(folder, **options)
