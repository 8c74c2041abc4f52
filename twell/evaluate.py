"""Downstream tasks: EleutherAI's lm-eval on our models, with data from the Hugging Face hub or from local files.

Prompts, scoring and metrics are lm-eval's. Three folders of task definitions stand beside its own:

    tasks/both     `paper7`, the group of the paper's seven tasks, and `held_out_continuation`, which needs no data set: the true
                   continuation of a held-out passage among four, made from text that comes with the model's run
    tasks/hub      what lm-eval does not have: CommonsenseQA scored like the other tasks
    tasks/local    the seven and that one for files on disk, with the prompts and metrics of lm-eval's own definitions

Its `hf` loader runs the model, whichever backend computes the layers. Batches are padded on the right and have no mask, which
a causal model does not notice; a request that is longer than the context loses its beginning, and `run` counts these.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.metadata
import io
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from twell import corpus, results
from twell.config import TrainConfig
from twell.models import SparseLlamaForCausalLM, load_config
from twell.trace import load_with_tokenizer
from twell.train.validation import evaluate as validate

try:
    import datasets
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0].replace("_", "-")
    raise ModuleNotFoundError(
        f"evaluation needs the package {package}: pip install 'twell[evaluate]'"
    ) from None

# lm-eval records the commit of the working folder, of which git complains aloud where there is none; this one is the code's.
evaluator.get_git_commit_hash = results.commit

TASKS = Path(__file__).parent / "tasks"
OF_OURS = {"held_out_continuation"}  # no task of lm-eval's is needed for these
HELD_OUT = "held_out.jsonl"  # a model's folder may have text that it was not trained on, {"text": ...} a line
BESIDE = {"paper7": ["commonsense_qa_cloze"]}  # evaluated with it, and no part of its mean
# Where "auto" starts on a GPU; lm-eval halves it until it fits. Its trial is five batches of the longest request: with 1024
# that would be as many tokens as the paper's seven tasks have.
MAX_BATCH_SIZE = 256
# With 7 M parameters on two cores as fast as 16; 32 was several times slower: the logits of a batch are new memory each time.
CPU_BATCH_SIZE = 8
DTYPES = ("float32", "bfloat16", "float16")


def run(
    model: str | Path,
    tasks: str | Sequence[str] = "held_out_continuation",
    *,
    data: str | Path | None = None,
    text: str | None = None,
    limit: int | None = None,
    batch_size: int | str = "auto",
    backend: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict:
    """Evaluate a model on tasks and return lm-eval's results, whole, with where they came from (Table 6).

    Args:
        model: what `twell.load` takes.
        tasks: names, in a sequence or with commas: "paper7" (the paper's seven, and CommonsenseQA as cloze beside them),
            "held_out_continuation", or any task or group of lm-eval.
        data: a folder with a file of {"query", "choices", "gold"} a line for each task, in place of the hub's data sets.
        text: for held_out_continuation, see `held_out_texts`.
        limit: only so many items of each task, from its start.
        batch_size: requests of a batch; "auto": the most that fit a GPU, 8 on a CPU.
        backend, dtype: as in `twell.load`, the type by its name; None: the model's own.
        device: None: a GPU where there is one.
        say: told of progress, a line at a time.
    Returns a dict for `results.write_evaluation`: model (with the SHA-256 of its weights), backend, dtype, tasks (for each the
    chance level, the mean of 1 / number of choices, with the data it had and the requests that were cut), lm_eval (its
    results without per-sample logs), and provenance. Log-likelihoods are summed in fp32 for any dtype. lm-eval seeds the
    random numbers of Python, numpy and torch. Raises ValueError
    or FileNotFoundError for an unknown task, for a file that is missing or malformed, by name and line, for a model without tokenizer,
    for a device that is not there and for a type that the backend does not compute in.
    """
    names = [name.strip() for name in tasks.split(",")] if isinstance(tasks, str) else list(tasks)
    names += [name for given in names for name in BESIDE.get(given, []) if name not in names]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"the task {twice[0]!r} is given twice")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it is a number of items, 1 or more")
    if batch_size != "auto" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise ValueError(
            f"batch_size is {batch_size!r}; it is a number of requests, 1 or more, or 'auto'"
        )
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    where, start = _device(device), time.perf_counter()
    if batch_size == "auto" and where.type == "cpu":
        batch_size = CPU_BATCH_SIZE
    with _quietly(say) as say:
        manager, chosen, loaded = _load_tasks(names, model, data, text)
        lm = _LM(model, batch_size, backend=backend, dtype=dtype, device=where, say=say)
        facts = {name: _facts(task, limit) for name, task in loaded.items()}
        for name, fact in facts.items():
            say(f"{name}: {fact['items']:,} items, {fact['data']}")
        found = simple_evaluate(
            lm,
            tasks=chosen,
            task_manager=manager,
            limit=limit,
            batch_size=batch_size,
            device=str(where),
            log_samples=False,
        )
        for name, cut in lm.truncated.items():
            facts[name]["truncated"] = cut
            say(
                f"{name}: {cut:,} requests were longer than the context of {lm.max_length} tokens and lost their beginning"
            )
    found = json.loads(json.dumps(found, default=handle_non_serializable))
    for group, members in found["group_subtasks"].items():
        chances = [facts[member]["chance"] for member in members if member in facts]
        if len(chances) == len(members) and None not in chances:
            facts[group] = {"chance": sum(chances) / len(chances)}
    for config in found["configs"].values():
        config["metadata"]["config_source"] = _within_package(config["metadata"]["config_source"])
    origin = results.provenance()
    origin["versions"] |= {
        name: importlib.metadata.version(name) for name in ("lm_eval", "datasets")
    }
    return {
        "model": _describe(model, lm.model),
        "backend": lm.model.config.ffn_backend,
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "tasks": facts,
        **origin,
        "device": results.device_name(where.type),
        "seconds": round(time.perf_counter() - start, 1),
        "lm_eval": found,
    }


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        usable = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"device {name!r} cannot be used here; {usable} can") from None


def _describe(model: str | Path, loaded: SparseLlamaForCausalLM) -> dict:
    folder, config = load_config(model)
    fields = "hidden_act gated_mlp l1_coefficient num_hidden_layers hidden_size intermediate_size vocab_size".split()
    run = Path(model) / "config.yaml"
    # A model that was exported says it itself.
    tokens = (
        TrainConfig.load(run).tokens if run.is_file() else getattr(config, "training_tokens", None)
    )
    return {
        "name": results.model_name(model),
        "path": str(model),
        "sha256": {
            file.name: results.file_hash(file) for file in sorted(folder.glob("*.safetensors"))
        },
        "parameters": loaded.num_parameters(),
        "training_tokens": tokens,
        "context": config.max_position_embeddings,
    } | {field: getattr(config, field) for field in fields}


def _within_package(path: str) -> str:
    """The path of a task's definition from its package on, without where that is installed."""
    for package in ("lm_eval/tasks/", "twell/tasks/"):
        before, found, after = path.partition(package)
        if found:
            return found + after
    return path


@contextlib.contextmanager
def _quietly(say: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Hold back what lm-eval prints, and give a `say` that is heard all the same."""
    stdout, stderr, logger = sys.stdout, sys.stderr, logging.getLogger("lm_eval")

    def aloud(line: str) -> None:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            if say is not None:
                say(line)

    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield aloud
    finally:
        logger.setLevel(level)


# --- the model ------------------------------------------------------------------------------------------


class _LM(HFLM):
    """lm-eval's loader around one of our models: log-likelihoods in fp32, progress, and requests of any length."""

    def __init__(
        self,
        model: str | Path,
        batch_size: int | str,
        *,
        device: torch.device,
        backend: str | None = None,
        dtype: str | None = None,
        add_bos_token: bool | None = None,
        say: Callable[[str], None] | None = None,
    ):
        kind = None if dtype is None else getattr(torch, dtype)
        loaded, tokenizer = load_with_tokenizer(model, backend=backend, dtype=kind)
        super().__init__(
            loaded.to(device),
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_batch_size=MAX_BATCH_SIZE,
            max_length=loaded.config.max_position_embeddings,
            softmax_dtype=torch.float32,
            add_bos_token=add_bos_token,
        )
        if loaded.config.ffn_backend == "triton" and loaded.dtype == torch.float32:
            raise ValueError(
                "backend 'triton' computes in bfloat16 or float16, and the model is float32; give a dtype"
            )
        if self.prefix_token_id is None:
            raise ValueError(
                f"the tokenizer of {model} has neither bos_token nor eos_token, which texts begin with"
            )
        loaded.config.use_cache = False  # nothing is generated from these passes
        self.say, self.truncated = say, Counter()

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        self.asked_by = [request.task_name for request in requests]
        if self.say:
            self.set_cache_hook(_Progress(len(requests), self.say))
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ):
        """As lm-eval's, which stops at a continuation longer than the context: that one is scored in parts, each with as
        much as fits of what is before it."""
        size = self.max_length
        parts, whose = [], []
        for number, (words, context, continuation) in enumerate(requests):
            if (
                override_bs is None and len(context) + len(continuation) > size + 1
            ):  # not the windows of a long text
                self.truncated[self.asked_by[number]] += 1
            if not continuation:
                raise ValueError(f"{words[1]!r} after {words[0][-40:]!r} has no token of its own")
            for at in range(0, len(continuation), size):
                parts.append((words, context + continuation[:at], continuation[at : at + size]))
                whose.append(number)
        answers = [(0.0, True)] * len(requests)
        found = super()._loglikelihood_tokens(parts, disable_tqdm=True, override_bs=override_bs)
        for number, (logprob, greedy) in zip(whose, found, strict=True):
            answers[number] = answers[number][0] + logprob, answers[number][1] and greedy
        return answers


class _Progress:
    """Stands where lm-eval may keep a cache of answers, since that is told of each one."""

    def __init__(self, total: int, say: Callable[[str], None]):
        self.total, self.say, self.done = total, say, 0
        self.start = self.shown = time.perf_counter()

    def add_partial(self, kind: str, request: tuple, answer: Any) -> None:
        self.done += 1
        now = time.perf_counter()
        if now - self.shown > 5 and self.done > self.total // 50:
            speed = self.done / (now - self.start)
            minutes, seconds = divmod(int(max(self.total - self.done, 0) / speed), 60)
            # the longest come first
            self.say(
                f"{self.done:,} of {self.total:,} requests  {speed:,.0f}/s  at most {minutes}:{seconds:02d} left"
            )
            self.shown = now


# --- tasks ----------------------------------------------------------------------------------------------


def _load_tasks(
    names: list[str], model: str | Path, data: str | Path | None, text: str | None
) -> tuple[TaskManager, list, dict[str, Task]]:
    """What simple_evaluate takes, and every task by its name. `metadata` is how lm-eval hands arguments to custom data sets."""
    if data is not None and not Path(data).is_dir():
        raise FileNotFoundError(
            f"{data} is no folder; --data is the folder with a file for each task"
        )
    manager = TaskManager(
        include_path=[TASKS / "both", TASKS / ("hub" if data is None else "local")],
        include_defaults=data is None and not set(names) <= OF_OURS,  # 14,000 definitions: seconds
        metadata={"model": str(model), "data": data and str(data), "text": text},
    )
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        known = "lm-eval has no such task or group"
        if data is not None:
            known = f"with local data there are {', '.join(manager.all_tasks)}"
        raise ValueError(f"unknown task {unknown[0]!r}: {known}")
    chosen, tasks = [], {}
    for name in names:
        try:
            loaded = manager.load(name)
        except Exception as error:
            if data is not None or name in OF_OURS:
                raise
            reason = " ".join(str(error).split())  # offline, gone, moved: the hub has a dozen kinds
            raise FileNotFoundError(
                f"the data of {name} cannot be had ({type(error).__name__}: {reason}); --data gives local files"
            ) from None
        tasks |= loaded["tasks"]
        chosen += (
            [loaded["groups"][name]]
            if name in loaded.get("groups", {})
            else loaded["tasks"].values()
        )
    return manager, chosen, tasks


def _facts(task: Task, limit: int | None) -> dict:
    docs = task.eval_docs
    items = min(limit or len(docs), len(docs))
    chance = None
    if task.OUTPUT_TYPE == "multiple_choice":
        chance = float(np.mean([1 / len(task.doc_to_choice(docs[at])) for at in range(items)]))
    data = (
        docs.info.description
        if task.config.custom_dataset
        else f"hub: {task.DATASET_PATH} {task.DATASET_NAME or ''}"
    )
    return {"items": items, "chance": chance, "data": data.strip(), "truncated": 0}


def local_docs(
    data: str, file: str, num_choices: int | None = None, blank: str | None = None, **_: Any
) -> dict[str, datasets.Dataset]:
    """Read a task's items from the one file in the folder `data` whose name fits the pattern `file`; for lm-eval.

    Each line is {"query": text, "choices": [text, ...], "gold": index of the right one}. Raises FileNotFoundError or ValueError,
    by file and line, for what is not such an item, has not `num_choices` choices, or has no `blank` in its query.
    """
    found = sorted(Path(data).glob(file))
    if len(found) != 1:
        seen = f"several: {', '.join(path.name for path in found)}" if found else "none"
        raise FileNotFoundError(f"{data} has to hold one file {file}; it holds {seen}")
    items = []
    for number, line in enumerate(
        found[0].read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), 1
    ):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError:  # UnicodeDecodeError is one
            expected = '{"query": ..., "choices": [...], "gold": 0}'
            raise ValueError(
                f"{found[0]}, line {number} is not JSON: write {expected} a line"
            ) from None
        if problem := _problem(item, num_choices, blank):
            raise ValueError(f"{found[0]}, line {number}: {problem}")
        for text in (item["query"], *item["choices"]):
            corpus.checked_text(text, f"{found[0]}, line {number}")
        items.append({name: item[name] for name in ("query", "choices", "gold")})
    if not items:
        raise ValueError(f"{found[0]} is empty; expected an item a line")
    return _dataset(items, f"{found[0].name}, sha256 {results.file_hash(found[0])[:16]}")


def _problem(item: Any, num_choices: int | None, blank: str | None) -> str | None:
    """What is wrong with an item of a local file, if anything is."""

    def is_text(value: Any) -> bool:
        return isinstance(value, str) and bool(value.strip())

    if not isinstance(item, dict) or not {"query", "choices", "gold"} <= set(item):
        return 'expected an object with "query", "choices" and "gold"'
    query, choices, gold = item["query"], item["choices"], item["gold"]
    if not is_text(query):
        return f'"query" is {query!r}; expected a text'
    if not (isinstance(choices, list) and len(choices) > 1 and all(map(is_text, choices))):
        return f'"choices" is {choices!r}; expected a list of two or more texts'
    if num_choices not in (None, len(choices)):
        return f"{len(choices)} choices; this task has {num_choices}"
    if type(gold) is not int or not 0 <= gold < len(choices):
        return (
            f'"gold" is {gold!r}; expected the index of the right choice, 0 to {len(choices) - 1}'
        )
    if blank is not None and blank not in query:
        return f'"query" has no {blank!r} for the blank'
    return None


def _dataset(items: list[dict], description: str) -> dict[str, datasets.Dataset]:
    return {
        "test": datasets.Dataset.from_list(
            items, info=datasets.DatasetInfo(description=description)
        )
    }


def before_blank(doc: dict) -> list[str]:
    """WinoGrande: the text up to the blank, with each choice in the blank's place; for lm-eval."""
    return [doc["query"][: doc["query"].index("_")] + choice for choice in doc["choices"]]


def after_blank(doc: dict) -> str:
    """WinoGrande: the text behind the blank; for lm-eval."""
    return doc["query"][doc["query"].index("_") + 1 :].strip()


# --- held-out text --------------------------------------------------------------------------------------


def held_out_texts(model: str | Path, text: str | None = None) -> tuple[list[str], str]:
    """Return documents that a model was not trained on, and what they are, in words.

    `text`, a source as corpus/sources.py describes, where it is given; else the file held_out.jsonl of the model's folder, where there is
    one; of a run's folder, what the run held out for validation; of any other model, the documents of the embedded corpus "sotu"
    that training on it holds out: nothing here knows what such a model has seen. Raises FileNotFoundError where a source is gone.
    """
    folder = Path(model)
    if text is None and (folder / HELD_OUT).is_file():
        text = str(folder / HELD_OUT)
    if text is not None:
        return list(corpus.documents(text)), f"the texts of {text}"
    if not (folder / "config.yaml").is_file():
        texts = [document for part, document in corpus.split("sotu") if part == "valid"]
        return (
            texts,
            f"every {corpus.HOLD_OUT_EVERY}th address of sotu (whether it is unseen text, the model's card says)",
        )
    config = TrainConfig.load(folder / "config.yaml")
    try:
        if config.source.startswith("hf:"):
            tokenizer, _, blocks = config.prepare_text()
            ends = np.flatnonzero(blocks.tokens == tokenizer.eos_token_id)
            texts = [
                tokenizer.decode(ids, skip_special_tokens=True)
                for ids in np.split(blocks.tokens, ends)
            ]
        elif config.valid_source is not None:
            texts = list(corpus.documents(config.valid_source))
        else:
            texts = [document for part, document in corpus.split(config.source) if part == "valid"]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; {folder} held out a part of it; --source gives another"
        ) from None
    source = f"of {config.source}" if config.valid_source is None else f"in {config.valid_source}"
    return texts, f"what the run {folder.name} held out {source}"


def held_out_docs(
    model: str,
    text: str | None,
    num_items: int,
    context_words: int,
    continuation_words: int,
    **_: Any,
) -> dict[str, datasets.Dataset]:
    """Make the items of held_out_continuation from `held_out_texts`; for lm-eval. The same texts give the same items.

    Documents are cut into passages of context_words + continuation_words words that do not overlap, and num_items of them are
    drawn (all, where there are fewer). Each is asked once, with the continuations of three others beside its own. Raises
    ValueError when there are fewer than four continuations.
    """
    texts, description = held_out_texts(model, text)
    passages = []
    for document in texts:
        words = [match.span() for match in re.finditer(r"\S+", document)]
        length = context_words + continuation_words
        for at in range(0, len(words) - length + 1, length):
            split = at + context_words
            passages.append(
                (
                    document[words[at][0] : words[split - 1][1]],
                    document[words[split][0] : words[at + length - 1][1]],
                )
            )
    if len({continuation for _, continuation in passages}) < 4:
        raise ValueError(
            f"{description}: too short for held_out_continuation, which needs four passages of {context_words} words "
            f"and {continuation_words} that follow them"
        )
    random, items = np.random.default_rng(0), []
    for at in random.permutation(len(passages))[:num_items]:
        query, right = passages[at]
        choices = [right]
        while len(choices) < 4:
            other = passages[random.integers(len(passages))][1]
            if other not in choices:
                choices.append(other)
        gold = int(random.integers(4))
        choices[0], choices[gold] = choices[gold], choices[0]
        items.append({"query": query, "choices": choices, "gold": gold})
    return _dataset(items, f"passages of {len(texts)} documents: {description}")


@torch.no_grad()
def token_losses(model: SparseLlamaForCausalLM, tokens: Sequence[int]) -> np.ndarray:
    """Return the cross-entropy of each token given those before it, float64 [len(tokens) - 1], in nats."""
    ids = torch.tensor(tokens, device=model.device)
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
    return F.cross_entropy(logits, ids[1:], reduction="none").double().cpu().numpy()


def rolling(
    model: str | Path,
    *,
    text: str | None = None,
    documents: int = 8,
    characters: int = 8000,
    backend: str | None = None,
    device: str | None = None,
) -> tuple[pd.DataFrame, str]:
    """Compare lm-eval's rolling log-likelihood of held-out text with our loss, and with the validation loss on packed blocks.

    The text is the first `characters` of the first `documents` of `held_out_texts`; the second result says what they are. Both
    rolling losses predict every token of a document: windows of one context each, that begin with the prefix token (for the first
    of a document) or the token before, and the last of which has as much before it as fits. Packed blocks, as in training,
    are cut from all documents in a row with an end-of-text token after each: that is predicted too, the first token
    of a block is not, and what is before a token in its block can be of another document.

    Result columns: loss, over (which tokens), tokens (how many), nats (mean). From row to row one thing changes: who computes,
    which tokens count, what stands before them, and whether ends of text count. Raises ValueError for less than one block.
    """
    with _quietly(None):
        lm = _LM(
            model, CPU_BATCH_SIZE, backend=backend, device=_device(device), add_bos_token=False
        )
    texts, description = held_out_texts(model, text)
    texts = [document[:characters] for document in texts[:documents]]
    encoded, size, end = (
        [lm.tok_encode(document) for document in texts],
        lm.max_length,
        lm.eot_token_id,
    )

    packed = np.array([token for ids in encoded for token in [*ids, end]])
    blocks = corpus.Blocks(packed, size)
    packed_loss = validate(lm.model, blocks)[
        "cross_entropy"
    ]  # first: it says so when the text is too short

    with _quietly(None):
        asked = [Instance("loglikelihood_rolling", {}, (document,), 0) for document in texts]
        theirs = -sum(lm.loglikelihood_rolling(asked))
    ours = []
    for ids in encoded:
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            before = (ids[:at] or [lm.prefix_token_id])[-(size + 1 - len(part)) :]
            ours.append(token_losses(lm.model, [*before, *part])[-len(part) :])
    ours = np.concatenate(ours)

    in_blocks = np.full(len(packed), np.nan)
    for at in range(0, len(blocks) * size, size):
        in_blocks[at + 1 : at + size] = token_losses(lm.model, packed[at : at + size])
    of_document = np.ones(len(packed), bool)
    of_document[np.cumsum([len(ids) + 1 for ids in encoded]) - 1] = False
    both = ~np.isnan(in_blocks[of_document])
    predicted = int((~np.isnan(in_blocks)).sum())
    every, shared = "every token of the documents", "those that packed blocks predict"
    table = [
        ("lm-eval, rolling", every, len(ours), theirs / len(ours)),
        ("ours, rolling", every, len(ours), ours.mean()),
        ("ours, rolling", shared, both.sum(), ours[both].mean()),
        ("ours, packed", shared, both.sum(), in_blocks[of_document][both].mean()),
        ("ours, packed (the validation loss)", "those, and ends of text", predicted, packed_loss),
    ]
    return pd.DataFrame(table, columns=["loss", "over", "tokens", "nats"]), description
