"""Reduce a trained run to small files: python -m study.keep RUN --tasks FOLDER --out DIR

DIR/runs/NAME gets configuration, provenance and log, DIR/traces/NAME.csv the activity by layer and
position, DIR/eval/NAME.csv.xz the answer to every item. Then the weights are deleted.
Of a run of `twell relufy` the original answers too, once. FOLDER has some of
the paper's seven tasks as .jsonl; without it all items are of held-out text.
"""

import argparse
import json
import lzma
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from study import analysis
from twell import corpus, results, trace
from twell.config import TrainConfig
from twell.models import load_stock
from twell.trace.tracing import same_length
from twell.train import run_text
from twell.train.text import teacher_hash

# As in twell/tasks/local; of the other tasks the query alone.
PROMPTS = dict.fromkeys(
    ("arc_easy", "arc_challenge", "piqa", "commonsense_qa_cloze"), "Question: {}\nAnswer:"
)
TASKS = [*PROMPTS, "hellaswag", "openbookqa", "winogrande", "commonsense_qa"]
CONTINUATIONS = 400, 32, 8  # items, and words of query and choice, as held_out_continuation
LAST_WORDS = 1000, 48
BATCH_TOKENS = 2**15


def task_files(folder: Path) -> dict[str, Path]:
    """Return the file of each task that the folder has."""
    found = {name: sorted(folder.glob(f"{name.removesuffix('_cloze')}*.jsonl")) for name in TASKS}
    return {name: files[0] for name, files in found.items() if files}


def questions(run: Path, files: dict[str, Path]) -> list[tuple[str, dict]]:
    """Return the items of the run's held-out text and of `task_files`, with the task's name."""
    source = TrainConfig.load(run / "config.yaml").valid_source
    texts = list(corpus.documents(source)) if source else []
    asked = {
        "continuation": corpus.continuations(texts, *CONTINUATIONS) if texts else [],
        "last_word": corpus.last_words(texts, *LAST_WORDS),
    }
    for name, file in files.items():
        lines = filter(bytes.strip, file.read_bytes().splitlines())  # text has more line ends
        asked[name] = [lm_eval_item(name, json.loads(line)) for line in lines]
    return [(name, item) for name, items in asked.items() for item in items]


def lm_eval_item(task: str, item: dict) -> dict:
    """Return an item as lm-eval asks it. Of WinoGrande each choice has a query of its own."""
    query, choices = item["query"], item["choices"]
    if task == "winogrande":
        before, _, after = query.partition("_")
        queries, choices = [before + choice for choice in choices], len(choices) * [after.strip()]
        return item | {"queries": queries, "choices": choices}
    if task == "commonsense_qa":
        letters = "ABCDE"
        lines = [f"{letter}. {one}" for letter, one in zip(letters, choices, strict=True)]
        query = "\n".join([f"Question: {query.strip()}", *lines, "Answer:"])
        return item | {"query": query, "choices": list(letters)}
    return item | {"query": PROMPTS.get(task, "{}").format(query)}


@torch.no_grad()
def scored(
    model: torch.nn.Module, sequences: Sequence[list[int]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each sequence the log-likelihood of every token, and whether it was the likeliest.

    The first token has neither. In nats, float64.
    """
    order = sorted(range(len(sequences)), key=lambda number: len(sequences[number]))
    scores: dict[int, tuple] = {}
    start = 0
    while start < len(order):
        ids = next(same_length((sequences[number] for number in order[start:]), BATCH_TOKENS))
        tokens = torch.tensor(ids, device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        logprob = chosen.double().cpu().numpy()  # of all rows: each wait for the GPU takes long
        greedy = (logits.argmax(-1) == tokens[:, 1:]).cpu().numpy()
        for row, number in enumerate(order[start : start + len(ids)]):
            scores[number] = logprob[row], greedy[row]
        start += len(ids)
    return [scores[number] for number in range(len(sequences))]


def answers(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, asked: Sequence[tuple[str, dict]]
) -> pd.DataFrame:
    """Return a row an item, in order: task, correct and by_bytes.

    correct: the right choice is the likeliest. A single choice, as the last word, is correct if
    each of its tokens is the likeliest. by_bytes: as correct, with log-likelihoods a byte.
    """
    sequences, starts = [], []
    for _, item in asked:
        queries = item.get("queries") or len(item["choices"]) * [item["query"]]
        for query, choice in zip(queries, item["choices"], strict=True):
            before = trace.encode(tokenizer, query.rstrip())
            whole = trace.encode(tokenizer, f"{query} {choice}")
            sequences.append(whole[-model.config.max_position_embeddings :])
            # A choice may be longer than the context: then all of what is left counts.
            starts.append(max(0, len(sequences[-1]) - len(whole) + len(before) - 1))
    scores = iter(zip(scored(model, sequences), starts, strict=True))
    rows = []
    for task, item in asked:
        parts = [next(scores) for _ in item["choices"]]
        sums = np.array([logprob[start:].sum() for (logprob, _), start in parts])
        bytes_of = np.array([len(choice.encode()) for choice in item["choices"]])
        gold, single = item["gold"], len(sums) == 1
        (_, greedy), start = parts[0]
        correct = greedy[start:].all() if single else sums.argmax() == gold
        by_bytes = correct if single else (sums / bytes_of).argmax() == gold
        rows.append((task, int(correct), int(by_bytes)))
    return pd.DataFrame(rows, columns=["task", "correct", "by_bytes"])


def keep_run(run: Path, out: Path, command: str) -> None:
    """Copy the small files of a run, the log compressed; the provenance has this command too."""
    folder = out / "runs" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(run / "config.yaml", folder)
    origin = results.load_provenance(run) | {"kept": results.provenance(command)}
    text = json.dumps(origin, indent=2) + "\n"
    results.write_atomically(folder / "provenance.json", text)
    results.write_atomically(folder / "log.csv.xz", lzma.compress((run / "log.csv").read_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--tasks", type=Path, help="folder of the seven tasks as .jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the small files")
    given = parser.parse_args()
    given.run = given.run.resolve()
    if (given.out / "runs" / given.run.name / "log.csv.xz").exists():
        parser.error(f"{given.out} holds a run {given.run.name}; give another --out")
    command = shlex.join(["python", "-m", "study.keep", *sys.argv[1:]])
    given.out.joinpath("traces").mkdir(parents=True, exist_ok=True)
    files = task_files(given.tasks) if given.tasks else {}
    asked = questions(given.run, files)
    tasks = ", ".join(dict.fromkeys(name for name, _ in asked)) or "none"
    print(f"tasks: {tasks}; {len(asked):,} items", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = trace.load_with_tokenizer(given.run, backend="dense")
    model = model.to(device).eval()
    tokens = run_text(given.run)
    blocks = tokens.draw(range(len(tokens))).tolist()
    if model.config.hidden_act == "relu":  # other neurons are never silent
        path = given.out / "traces" / f"{given.run.name}.csv"
        counted = trace.aggregate(model, tokenizer, blocks, max_bytes=2**62)
        analysis.kept_activity(counted).to_csv(path, index=False)

    def answer(model: torch.nn.Module, name: str) -> int:
        losses = [round(-float(logprob.mean()), 4) for logprob, _ in scored(model, blocks)]
        losses = pd.DataFrame({"task": "held_out_text", "nats": losses})  # of each block
        table = pd.concat([answers(model, tokenizer, asked), losses])
        content = lzma.compress(table.to_csv(index=False).encode())
        results.write_atomically(given.out / "eval" / f"{name}.csv.xz", content)
        return len(table)

    number = answer(model, given.run.name)
    teacher = TrainConfig.load(given.run / "config.yaml").teacher
    if teacher:
        # Folders of different teachers may have one name, and be called like the run.
        name = f"{results.model_name(teacher)}-original-{teacher_hash(teacher)[:8]}"
        if not (given.out / "eval" / f"{name}.csv.xz").exists():
            answer(load_stock(teacher, torch.float32).to(device).eval(), name)
    keep_run(given.run, given.out, command)
    shutil.rmtree(given.run / "model")
    print(f"{given.run.name}: {number:,} answers; the weights are deleted", flush=True)


if __name__ == "__main__":
    main()
