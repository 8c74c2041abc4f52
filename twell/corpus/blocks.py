"""Blocks of tokens: drawn from an array in an order that a seed fixes, or read from a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from twell.corpus.sources import checked_text, package
from twell.corpus.tokens import encode


class Blocks:
    """An array of tokens cut into blocks of `context` tokens, in an order that the seed fixes.

    Draw number i (0, 1, 2, ...) is block permutation_e[i - e * len] of epoch e = i // len; every
    epoch has its own permutation. `seed=None` keeps the order of the text. Raises ValueError when
    there is no whole block.
    """

    def __init__(self, tokens: np.ndarray, context: int, seed: int | None = None):
        self.tokens, self.context, self.seed = tokens, context, seed
        self.epoch: int | None = None
        if len(self) < 1:
            raise ValueError(
                f"{len(tokens)} tokens are no block of {context}; "
                "use more text or a shorter context"
            )

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def draw(self, numbers: Iterable[int]) -> torch.Tensor:
        """Return the blocks with these draw numbers, int64 [len(numbers), context]."""
        blocks = np.stack([self._block(number) for number in numbers])
        return torch.from_numpy(blocks.astype(np.int64))

    def state(self) -> dict:
        """Return an empty state: the number of a draw is its place in the text."""
        return {}

    def restore(self, state: dict) -> None:
        """Continue at `state`."""

    def _block(self, number: int) -> np.ndarray:
        epoch, index = divmod(number, len(self))
        if self.seed is not None:
            if epoch != self.epoch:
                random = np.random.default_rng([self.seed, epoch])
                self.epoch, self.order = epoch, random.permutation(len(self))
            index = self.order[index]
        return self.tokens[index * self.context : (index + 1) * self.context]


class Stream:
    """Blocks of `context` tokens from a streamed data set; each process reads its own share.

    source: "hf:NAME[:CONFIG]", of which the split "train" is read. The first documents, with
    `valid_tokens` tokens, are held out in `valid` (1-D array). After its last document the stream
    starts again. parse_special: see `encode`. Raises ValueError or FileNotFoundError, naming the
    source, when it cannot be read or has no column "text".
    """

    def __init__(
        self,
        source: str,
        tokenizer: PreTrainedTokenizerFast,
        context: int,
        *,
        valid_tokens: int,
        process: int = 0,
        num_processes: int = 1,
        parse_special: bool = False,
    ):
        load_dataset = package("datasets", source).load_dataset
        of_process = package("datasets.distributed", source).split_dataset_by_node
        self.source, self.tokenizer, self.context = source, tokenizer, context
        self.parse_special = parse_special
        name, _, part = source.removeprefix("hf:").partition(":")
        try:
            stream = load_dataset(name, part or None, split="train", streaming=True)
        except Exception as error:  # the hub has a dozen kinds: no such name, no network, ...
            reason = str(error).splitlines()[0]
            raise FileNotFoundError(f"no data set {name!r} for {source}: {reason}") from None

        held_out, documents = [], 0
        for tokens in self._encoded(stream):
            if len(held_out) >= valid_tokens:
                break
            held_out += tokens
            documents += 1
        self.valid = np.array(held_out[:valid_tokens], dtype=np.uint32)
        share = of_process(stream.skip(documents), process, num_processes)
        if next(iter(share), None) is None:
            raise ValueError(f"{source} has no document left for training beside those held out")
        self.stream = share.repeat(None)
        self.reader = self._encoded(self.stream)
        self.rest: list[int] = []  # tokens read and not yet drawn
        self.place: dict | None = None  # restored, until a document is read

    def _encoded(self, stream) -> Iterator[list[int]]:
        for row in stream:
            if "text" not in row:
                raise ValueError(f'{self.source} has no column "text"; it has {", ".join(row)}')
            text = checked_text(row["text"], f"a document of {self.source}")
            ids = encode(self.tokenizer, text, parse_special=self.parse_special)
            yield [*ids, self.tokenizer.eos_token_id]

    def draw(self, numbers: Iterable[int]) -> torch.Tensor:
        """Return the next len(numbers) blocks, int64 [len(numbers), context], whatever the numbers."""
        size = len(list(numbers)) * self.context
        while len(self.rest) < size:
            self.rest, self.place = self.rest + next(self.reader), None
        drawn, self.rest = self.rest[:size], self.rest[size:]
        return torch.tensor(drawn).reshape(-1, self.context)

    def state(self) -> dict:
        """Return the place of this process in its share, and the tokens not yet drawn."""
        return {"place": self.place or self.stream.state_dict(), "rest": self.rest}

    def restore(self, state: dict) -> None:
        """Continue at `state`, of the same source and number of processes."""
        self.stream.load_state_dict(state["place"])  # has no effect until a document is read
        self.place = state["place"]
        self.reader, self.rest = self._encoded(self.stream), list(state["rest"])
