"""Evaluates a model on tasks, by lm-eval's `hf` loader around it.

Batches are padded on the right without a mask, which has no effect in a causal model. A request
longer than the context loses its beginning, and is counted.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from lm_eval import api, evaluator, simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import handle_non_serializable
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from twell import results
from twell.config import TrainConfig
from twell.corpus import load_tokenizer
from twell.evaluate.tasks import load_tasks, task_facts, task_names
from twell.measure.providers import FP8, Provider
from twell.measure.sides import Linears
from twell.models import load_stock, num_weights, read_json, resolve
from twell.sparse.layer import SparseFFN
from twell.trace import load_with_tokenizer
from twell.train.relufy import RELUFIABLE

# "auto" starts here on a GPU; lm-eval halves it until it fits. Each trial runs five batches of the
# longest request, which with 1024 would be as many tokens as the paper's seven tasks have.
MAX_BATCH_SIZE = 256
CPU_BATCH_SIZE = 8  # on two cores, 32 is several times slower
# lm-eval would take the commit of the working folder, and git complains where there is none.
evaluator.get_git_commit_hash = results.commit
api.task.tqdm = api.model.tqdm = lambda items, **_: items  # bars that are full at once


def run(
    model: str | Path,
    tasks: str | Sequence[str] = "held_out_continuation",
    *,
    data: str | Path | None = None,
    text: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
) -> dict:
    """Evaluate a model on tasks and return lm-eval's results, with where they came from (Table 6).

    model: what `twell.load` takes. tasks: names, in a sequence or with commas: "paper7" (the
    paper's seven, and CommonsenseQA as cloze beside them), "held_out_continuation", or any task or
    group of lm-eval. data: a folder with a file of {"query", "choices", "gold"} a line for each
    task, in place of the hub's data sets. text: for held_out_continuation, see `held_out_texts`.
    batch_size: of requests; by default 8 on a CPU, else as many as fit. The other arguments are
    lm-eval's and `twell.load`'s.

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


# --- the loader


def _is_original(model: str | Path) -> bool:
    """Return whether a model has SiLU, as before `twell relufy`; `twell.load` refuses it."""
    fields = read_json(resolve(model) / "config.json")
    # The paper's own models have ReLU, and "silu" in their configuration.
    papers = any(name.startswith("sparsity_") for name in fields)
    is_known = fields.get("model_type") in RELUFIABLE and not papers
    return is_known and fields.get("hidden_act") == "silu"


class LM(HFLM):
    """lm-eval's loader around one of our models: fp32 log-likelihoods, requests of any length."""

    def __init__(
        self,
        model: str | Path,
        batch_size: int | None = None,
        *,
        device: torch.device,
        backend: str | None = None,
        dtype: str | None = None,
    ):
        if batch_size is None:
            batch_size = CPU_BATCH_SIZE if device.type == "cpu" else "auto"
        in_fp8 = dtype == FP8
        kind = None if dtype is None else getattr(torch, "bfloat16" if in_fp8 else dtype)
        if _is_original(model):
            if in_fp8 or backend not in (None, "dense"):
                given = FP8 if in_fp8 else f"backend {backend!r}"
                raise ValueError(f"{given} is for layers with ReLU, and {model} has 'silu'")
            loaded = load_stock(model, kind or "auto").eval()
            tokenizer = load_tokenizer(str(resolve(model)), loaded.config.vocab_size)
        else:
            loaded, tokenizer = load_with_tokenizer(model, backend=backend, dtype=kind)
        self.ffns = [part for part in loaded.modules() if isinstance(part, SparseFFN)]
        self.ffn_backend = self.ffns[0].backend if self.ffns else "dense"
        self.precision = FP8 if in_fp8 else str(loaded.dtype).removeprefix("torch.")
        # Requests of any length are scored in windows, so the tokenizer need not warn.
        tokenizer.model_max_length = VERY_LARGE_INTEGER
        super().__init__(
            loaded.to(device),
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_batch_size=MAX_BATCH_SIZE,
            max_length=loaded.config.max_position_embeddings,
            softmax_dtype=torch.float32,
        )
        if self.ffn_backend == "triton" and loaded.dtype == torch.float32:
            raise ValueError("backend 'triton' computes float32 densely; give a 16-bit dtype")
        if self.prefix_token_id is None:
            raise ValueError(
                f"the tokenizer of {model} has neither bos_token nor eos_token to begin texts with"
            )
        if in_fp8:
            Linears(loaded).become(Provider(self.ffn_backend, precision=FP8))
        loaded.config.use_cache = False  # nothing is generated from these passes
        self.truncated: Counter[str] = Counter()

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        for request in requests:
            tokens = self.tok_encode("".join(request.args))
            self.truncated[request.task_name] += len(tokens) > self.max_length + 1
        return super().loglikelihood(requests, disable_tqdm)
