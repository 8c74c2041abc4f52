"""Evaluates a model on tasks, and compares lm-eval's log-likelihoods with our loss."""

from __future__ import annotations

import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from lm_eval import evaluator, simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, sanitize_list

from twell import corpus, results
from twell.config import TrainConfig
from twell.evaluate.adapter import CPU_BATCH_SIZE, LM, find_device, quietly
from twell.evaluate.tasks import held_out_texts, load_tasks, task_facts, task_names
from twell.measure.providers import FP8
from twell.models import check_llama, num_weights, resolve
from twell.trace.tracing import score
from twell.train.text import evaluate as validate

# lm-eval would take the commit of the working folder, and git complains where there is none.
evaluator.get_git_commit_hash = results.commit

DTYPES = ("float32", "bfloat16", "float16", FP8)


def run(
    model: str | Path,
    tasks: str | Sequence[str] = "held_out_continuation",
    *,
    data: str | Path | None = None,
    text: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    log_samples: bool = False,
    batch_size: int | str = "auto",
    backend: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict:
    """Evaluate a model on tasks and return lm-eval's results, with where they came from (Table 6).

    model: what `twell.load` takes. tasks: names, in a sequence or with commas: "paper7" (the
    paper's seven, and CommonsenseQA as cloze beside them), "held_out_continuation", or any task or
    group of lm-eval. data: a folder with a file of {"query", "choices", "gold"} a line for each
    task, in place of the hub's data sets. text: for held_out_continuation, see `held_out_texts`.
    The other arguments are lm-eval's and `twell.load`'s. say: gets lines about the progress.

    Returns a dict for `results.write_evaluation`; data/README.md lists its fields. Raises
    ValueError or FileNotFoundError for a wrong argument, for a file that is missing or malformed,
    by name and line, and for a model without tokenizer.
    """
    start = time.perf_counter()
    names, where = task_names(tasks), find_device(device)
    _check_options(num_fewshot, limit, batch_size, dtype)
    with quietly(say) as say:
        manager, chosen, loaded = load_tasks(names, model, data, text)
        lm = LM(model, batch_size, backend=backend, dtype=dtype, device=where, say=say)
        facts = {name: task_facts(task, limit) for name, task in loaded.items()}
        for name, fact in facts.items():
            say(f"{name}: {fact['items']:,} items, {fact['data']}")
        options = {"num_fewshot": num_fewshot, "limit": limit, "log_samples": True}
        options |= {"batch_size": lm.batch_size_per_gpu, "device": str(where)}
        scores = simple_evaluate(lm, tasks=chosen, task_manager=manager, **options)
        for name, cut in lm.truncated.items():
            facts[name]["truncated"] = cut
            context = f"the context of {lm.max_length} tokens"
            say(f"{name}: {cut:,} requests were longer than {context} and lost their beginning")
        for name, samples in scores["samples"].items():
            facts[name] |= _correct(samples)
        if not log_samples:
            del scores["samples"]
    return _record(model, lm, facts, _plain(scores), start)


def _correct(samples: list[dict]) -> dict[str, str]:
    """Return "1" for each right answer and "0" for each wrong one, in the items' order."""
    marks = {sample["doc_id"]: sample.get("acc") for sample in samples}
    if not set(marks.values()) <= {0, 1}:
        return {}
    return {"correct": "".join(str(int(marks[number])) for number in sorted(marks))}


def _check_options(
    num_fewshot: int | None, limit: int | None, batch_size: int | str, dtype: str | None
) -> None:
    given = {"num_fewshot": (num_fewshot, 0), "limit": (limit, 1), "batch_size": (batch_size, 1)}
    for name, (value, least) in given.items():
        known = value is None or (name, value) == ("batch_size", "auto")
        if not known and not (isinstance(value, int) and value >= least):
            raise ValueError(f"{name} is {value!r}; it is a number, {least} or more")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}")


def _record(model: str | Path, lm: LM, facts: dict, scores: dict, start: float) -> dict:
    for group, members in scores["group_subtasks"].items():
        chances = [facts[member]["chance"] for member in members if member in facts]
        if len(chances) == len(members) and None not in chances:
            facts[group] = {"chance": sum(chances) / len(chances)}
    origin = results.provenance() | {"device": results.device_name(lm.device.type)}
    for package in ("lm_eval", "datasets"):
        origin["versions"][package] = importlib.metadata.version(package)
    return {
        "model": _describe(model, lm),
        "backend": lm.ffn_backend,
        "dtype": lm.precision,
        "tasks": facts,
        **origin,
        "seconds": round(time.perf_counter() - start, 1),
        "lm_eval": scores,
    }


def _plain(scores: dict) -> dict:
    """Return lm-eval's results as JSON, with logged samples in lm-eval's own format."""
    for sample in (one for samples in scores.get("samples", {}).values() for one in samples):
        sample["arguments"] = {
            f"gen_args_{n}": {f"arg_{m}": part for m, part in enumerate(arguments)}
            for n, arguments in enumerate(sample["arguments"])
        }
        for answers in ("resps", "filtered_resps"):
            sample[answers] = sanitize_list(sample[answers])
        sample["target"] = str(sample["target"])
    scores = json.loads(json.dumps(scores, default=handle_non_serializable))
    for config in scores["configs"].values():
        # Drop the folder in which the package is installed.
        path = config["metadata"]["config_source"]
        config["metadata"]["config_source"] = re.sub(r".*(?=(lm_eval|twell)/tasks/)", "", path)
    return scores


def _describe(model: str | Path, lm: LM) -> dict:
    folder, config, ffns = resolve(model), lm.model.config, lm.ffns
    sized = ffns[0] if ffns else config  # an original with SiLU has no such layers
    weights = sorted(folder.glob("*.safetensors"))
    tokens = getattr(config, "training_tokens", None)  # an exported model says it
    if (path := Path(model) / "config.yaml").is_file():
        tokens = TrainConfig.load(path).tokens
    return {
        "name": results.model_name(model),
        "path": str(model),
        "sha256": {file.name: results.file_hash(file) for file in weights},
        "parameters": num_weights(lm.model),
        "training_tokens": tokens,
        "context": config.max_position_embeddings,
        "hidden_act": ffns[0].activation if ffns else config.hidden_act,
        "gated_mlp": not ffns or ffns[0].gated,
        "l1_coefficient": getattr(config, "l1_coefficient", 0.0),
        "num_hidden_layers": len(ffns) or config.num_hidden_layers,
        "hidden_size": sized.hidden_size,
        "intermediate_size": sized.intermediate_size,
        "vocab_size": config.vocab_size,
    }


def rolling(
    model: str | Path,
    *,
    text: str | None = None,
    documents: int = 8,
    characters: int = 8000,
    dtype: str | None = None,
) -> tuple[pd.DataFrame, str]:
    """Compare lm-eval's rolling log-likelihood of held-out text with our loss, and packed blocks'.

    The text is the first `characters` of the first `documents` of `held_out_texts`; the second
    result describes them. A rolling loss predicts every token of a document, in windows of one
    context after the prefix token (at the start of a document) or the token before. The last window
    has as many tokens before it as fit. Packed blocks, as in training, are cut from all documents
    in a row, with an end-of-text token after each, which is predicted too. The first token of a
    block is not. Columns: loss, over (which tokens), tokens (their number), nats (mean); one thing
    changes from row to row. Raises ValueError for less than one block.
    """
    with quietly(None):
        lm = LM(model, CPU_BATCH_SIZE, dtype=dtype, device=find_device(None), add_bos_token=False)
    check_llama(model, lm.model)
    texts, description = held_out_texts(model, text)
    texts, size = [document[:characters] for document in texts[:documents]], lm.max_length
    encoded = [lm.tok_encode(document) for document in texts]
    packed = np.array([token for ids in encoded for token in [*ids, lm.eot_token_id]])
    blocks = corpus.Blocks(packed, size)
    packed_loss = validate(lm.model, blocks)["cross_entropy"]  # refuses a text that is too short
    with quietly(None):
        asked = [Instance("loglikelihood_rolling", {}, (document,), 0) for document in texts]
        theirs = -sum(lm.loglikelihood_rolling(asked))

    windows = [
        window
        for ids in encoded
        for window in get_rolling_token_windows(ids, lm.prefix_token_id, size, context_len=1)
    ]
    losses = _losses(lm, [[*before, part[-1]] for before, part in windows])
    scored = zip(losses, windows, strict=True)
    ours = np.concatenate([loss[-len(part) :] for loss, (_, part) in scored])
    in_blocks = np.full(len(packed), np.nan)
    rows = _losses(lm, blocks.draw(range(len(blocks))).tolist())
    in_blocks[: len(blocks) * size] = np.concatenate(rows)
    predicted, in_document = ~np.isnan(in_blocks), np.ones(len(packed), bool)
    in_document[np.cumsum([len(ids) + 1 for ids in encoded]) - 1] = False
    shared = predicted[in_document]
    every, some = "every token of the documents", "those that packed blocks predict"
    ends = "those, and ends of text"
    table = [
        ("lm-eval, rolling", every, len(ours), theirs / len(ours)),
        ("ours, rolling", every, len(ours), ours.mean()),
        ("ours, rolling", some, shared.sum(), ours[shared].mean()),
        ("ours, packed", some, shared.sum(), in_blocks[in_document][shared].mean()),
        ("ours, packed (the validation loss)", ends, predicted.sum(), packed_loss),
    ]
    return pd.DataFrame(table, columns=["loss", "over", "tokens", "nats"]), description


def _losses(lm: LM, sequences: list[list[int]]) -> list[np.ndarray]:
    """Return the loss of each token in nats, float64, NaN for the first of each sequence."""
    losses: list[np.ndarray] = []
    score(lm.model, sequences, 1, lambda logprob: losses.append(-logprob[0].double().cpu().numpy()))
    return losses
