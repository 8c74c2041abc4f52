"""Keep what is small of a trained run: python -m scripts.keep RUN --tasks FOLDER --out DIR

DIR/runs/NAME has configuration, provenance and log, DIR/traces/NAME.csv the activity by layer and
position, DIR/eval/NAME.csv.xz the answers to every item. The weights are then deleted. FOLDER has
arc_easy*, piqa* and hellaswag* as .jsonl; without it only held-out text is asked.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from twell import analysis, corpus, results, trace
from twell.config import TrainConfig
from twell.trace.aggregates import COMPRESSIONS
from twell.trace.counter import Counter
from twell.trace.watch import same_length, watch
from twell.train import run_text

PROMPTS = {"arc_easy": "Question: {}\nAnswer:", "piqa": "Question: {}\nAnswer:", "hellaswag": "{}"}
ITEMS = 1000  # of last words; 400 continuations, as the task held_out_continuation has
BATCH_TOKENS = 2**15


def questions(run: Path, tasks: Path | None) -> Iterator[tuple[str, dict]]:
    """Yield the items of every task, by name."""
    source = TrainConfig.load(run / "config.yaml").valid_source
    texts = list(corpus.documents(source)) if source else []
    asked = {
        "continuation": corpus.continuations(texts, 400, 32, 8) if texts else [],
        "last_word": corpus.last_words(texts, ITEMS, 48),
    }
    for name, prompt in PROMPTS.items() if tasks else ():
        (file,) = tasks.glob(f"{name}*.jsonl")
        items = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        asked[name] = [item | {"query": prompt.format(item["query"])} for item in items]
    for name, items in asked.items():
        yield from ((name, item) for item in items)


@torch.no_grad()
def scored(
    model: torch.nn.Module, sequences: Sequence[list[int]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return of each sequence the log-likelihood of every token, and whether it was the likeliest.

    The first token has neither. In nats, float64.
    """
    order = sorted(range(len(sequences)), key=lambda at: len(sequences[at]))
    answers: dict[int, tuple] = {}
    start = 0
    while start < len(order):
        batch = max(1, BATCH_TOKENS // len(sequences[order[start]]))
        ids = next(same_length((sequences[at] for at in order[start:]), batch))
        tokens = torch.tensor(ids, device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        right = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        greedy = logits.argmax(-1) == tokens[:, 1:]
        for row, at in enumerate(order[start : start + len(ids)]):
            answers[at] = right[row].double().cpu().numpy(), greedy[row].cpu().numpy()
        start += len(ids)
    return [answers[at] for at in range(len(sequences))]


def answers(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, asked: Sequence[tuple[str, dict]]
) -> pd.DataFrame:
    """Return a row an item: task, item, correct and by_bytes.

    correct: the right choice is the likeliest, of a single choice (the last word) every token;
    by_bytes: likeliest for its length in bytes.
    """
    sequences, starts = [], []
    for _, item in asked:
        before = trace.encode(tokenizer, item["query"])
        for choice in item["choices"]:
            whole = trace.encode(tokenizer, f"{item['query']} {choice}")
            sequences.append(whole[-model.config.max_position_embeddings :])
            starts.append(len(sequences[-1]) - len(whole) + len(before) - 1)
    found = iter(zip(scored(model, sequences), starts, strict=True))
    rows, numbers = [], {}
    for task, item in asked:
        parts = [next(found) for _ in item["choices"]]
        sums = np.array([loss[start:].sum() for (loss, _), start in parts])
        bytes_of = np.array([len(choice.encode()) for choice in item["choices"]])
        gold, single = item["gold"], len(sums) == 1
        (_, greedy), start = parts[0]
        correct = greedy[start:].all() if single else sums.argmax() == gold
        by_bytes = correct if single else (sums / bytes_of).argmax() == gold
        numbers[task] = numbers.get(task, -1) + 1
        rows.append((task, numbers[task], int(correct), int(by_bytes)))
    return pd.DataFrame(rows, columns=["task", "item", "correct", "by_bytes"])


class Counted(Counter):
    """Counts over sequences of one length, which the tables of activity read."""

    def histogram(self) -> np.ndarray:
        return self.active_histogram.cpu().numpy()

    def neurons(self) -> tuple[np.ndarray, None, None]:
        return self.value_histogram.sum(-1).cpu().numpy(), None, None

    def by_position(self) -> tuple[np.ndarray, np.ndarray]:
        active = self.position_active.cpu().numpy()
        return np.full(active.shape[1], self.num_tokens // active.shape[1]), active

    def overflows(self, _: int, compressions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        columns = [COMPRESSIONS.index(one) for one in compressions]
        rows, tiles = (t.cpu().numpy() for t in (self.overflow_rows, self.overflow_tiles))
        return rows[:, columns], tiles[:, columns]


def activity(model: torch.nn.Module, blocks: list[list[int]]) -> pd.DataFrame:
    """Return `analysis.kept_activity` over the validation blocks."""
    config, context = model.config, len(blocks[0])
    shape = config.num_hidden_layers, config.intermediate_size, config.vocab_size
    counted = Counted(*shape, context, device=model.device)
    watch(model, blocks, max(1, trace.BATCH_TOKENS // context), counted)
    return analysis.kept_activity(counted)


def of_blocks(model: torch.nn.Module, blocks: list[list[int]]) -> pd.DataFrame:
    """Return the mean loss of each validation block (nats), as rows of `answers`."""
    losses = [round(-float(right.mean()), 4) for right, _ in scored(model, blocks)]
    table = pd.DataFrame({"task": "held_out_text", "item": range(len(losses))})
    return table.assign(nats=losses)


def keep_run(run: Path, out: Path, command: str) -> None:
    """Copy the small files of a run, the log compressed; the provenance says what was kept how."""
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
    parser.add_argument("--tasks", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    command = shlex.join(["python", "-m", "scripts.keep", *sys.argv[1:]])
    given.out.joinpath("eval").mkdir(parents=True, exist_ok=True)
    given.out.joinpath("traces").mkdir(exist_ok=True)
    model, tokenizer = trace.load_with_tokenizer(given.run, backend="dense")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    tokens = run_text(given.run)[2]
    blocks = tokens.draw(range(len(tokens))).tolist()
    if model.config.hidden_act == "relu":  # other neurons are never silent
        path = given.out / "traces" / f"{given.run.name}.csv"
        activity(model, blocks).to_csv(path, index=False)
    asked = answers(model, tokenizer, list(questions(given.run, given.tasks)))
    table = pd.concat([asked, of_blocks(model, blocks)])
    table.to_csv(given.out / "eval" / f"{given.run.name}.csv.xz", index=False)
    keep_run(given.run, given.out, command)
    shutil.rmtree(given.run / "model")
    print(f"{given.run.name}: {len(table):,} answers; the weights are deleted", flush=True)


if __name__ == "__main__":
    main()
