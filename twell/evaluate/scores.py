"""Evaluates a model on tasks."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from lm_eval import evaluator, simple_evaluate
from lm_eval.utils import handle_non_serializable

from twell import results
from twell.config import TrainConfig
from twell.evaluate.adapter import LM
from twell.evaluate.tasks import load_tasks, task_facts, task_names
from twell.models import num_weights, resolve

# lm-eval would take the commit of the working folder, and git complains where there is none.
evaluator.get_git_commit_hash = results.commit

def run(
    model: str | Path,
    tasks: str | Sequence[str] = "held_out_continuation",
    *,
    data: str | Path | None = None,
    text: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | str = "auto",
    backend: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
) -> dict:
    """Evaluate a model on tasks and return lm-eval's results, with where they came from (Table 6).

    model: what `twell.load` takes. tasks: names, in a sequence or with commas: "paper7" (the
    paper's seven, and CommonsenseQA as cloze beside them), "held_out_continuation", or any task or
    group of lm-eval. data: a folder with a file of {"query", "choices", "gold"} a line for each
    task, in place of the hub's data sets. text: for held_out_continuation, see `held_out_texts`.
    The other arguments are lm-eval's and `twell.load`'s.

    Returns a dict for `results.write_evaluation`; data/README.md lists its fields. Raises
    ValueError or FileNotFoundError for a wrong argument, for a file that is missing or malformed,
    by name and line, and for a model without tokenizer.
    """
    start = time.perf_counter()
    names = task_names(tasks)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, chosen, loaded = load_tasks(names, model, data, text)
    lm = LM(model, batch_size, backend=backend, dtype=dtype, device=where)
    facts = {name: task_facts(task, limit) for name, task in loaded.items()}
    options = {"num_fewshot": num_fewshot, "limit": limit, "log_samples": True}
    options |= {"batch_size": lm.batch_size_per_gpu, "device": str(where)}
    scores = simple_evaluate(lm, tasks=chosen, task_manager=manager, **options)
    for name, samples in scores.pop("samples").items():
        facts[name] |= _correct(samples) | {"truncated": lm.truncated[name]}
    return _record(model, lm, facts, _plain(scores), start)


def _correct(samples: list[dict]) -> dict[str, str]:
    """Return "1" for each right answer and "0" for each wrong one, in the items' order."""
    marks = {sample["doc_id"]: sample.get("acc") for sample in samples}
    if not set(marks.values()) <= {0, 1}:
        return {}
    return {"correct": "".join(str(int(marks[number])) for number in sorted(marks))}


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
    """Return lm-eval's results as JSON."""
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
