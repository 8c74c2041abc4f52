"""Per-token activity of a text under a model, stored sparse.

For every token and layer a trace keeps the active neurons and their values h, signed, with what is needed to read
them: token ids and strings, positions, log-probabilities, and where model and text came from.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from twell import results
from twell.model import SparseLlamaForCausalLM
from twell.train import TrainConfig

ARRAYS = ("token_ids", "logprob", "sequence", "position", "indptr", "indices", "values")


@dataclass
class Trace:
    """T tokens under a model of L layers with N neurons each.

    token_ids int32 [T]; strings [T], the text of each token; logprob float32 [T], natural logarithm of
    p(token | tokens before it in its sequence), NaN for the first of a sequence; sequence int32 [T]; position int32 [T], from 0
    within the sequence; indptr int64 [L * T + 1]: the active neurons of token t in layer l are
    indices[indptr[l * T + t] : indptr[l * T + t + 1]], ascending, uint16, and values float32 are their h.
    A neuron is active where g != 0 (non-gated: h != 0), so that a value can be 0. `meta` says where it came from.
    Raises ValueError when the sizes do not fit together.
    """

    token_ids: np.ndarray
    strings: list[str]
    logprob: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    intermediate_size: int
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        tokens = len(self.token_ids)
        for name in ("strings", "logprob", "sequence", "position"):
            if len(getattr(self, name)) != tokens:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries; the trace has {tokens} tokens")
        rows = len(self.indptr) - 1
        if rows < 0 or (rows % tokens if tokens else rows):
            raise ValueError(f"indptr has {len(self.indptr)} entries; expected layers x {tokens} tokens + 1")
        if not len(self.indices) == len(self.values) == self.indptr[-1]:
            raise ValueError(
                f"{len(self.indices)} indices and {len(self.values)} values; indptr ends at {self.indptr[-1]}"
            )
        if len(self.indices) and self.indices.max() >= self.intermediate_size:
            raise ValueError(f"neuron {self.indices.max()} in a layer of {self.intermediate_size}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_layers(self) -> int:
        return (len(self.indptr) - 1) // max(self.num_tokens, 1)

    def layer(self, layer: int) -> scipy.sparse.csr_array:
        """The values h of one layer, [T, N] float32; what is stored is active, zeros included."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} does not exist: the trace has layers 0 to {self.num_layers - 1}")
        rows = self.indptr[layer * self.num_tokens : (layer + 1) * self.num_tokens + 1]
        inside = slice(rows[0], rows[-1])
        shape = (self.num_tokens, self.intermediate_size)
        return scipy.sparse.csr_array(
            (self.values[inside], self.indices[inside].astype(np.int32), rows - rows[0]), shape
        )

    def counts(self) -> np.ndarray:
        """Active neurons of each token in each layer, int32 [L, T]."""
        return np.diff(self.indptr).reshape(-1, self.num_tokens).astype(np.int32)

    def save(self, path: str | Path) -> None:
        """Write one compressed .npz; it appears whole or not at all."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        described = {"strings": self.strings, "intermediate_size": self.intermediate_size, "meta": self.meta}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays, described=np.frombuffer(json.dumps(described).encode(), np.uint8))
        results.write_atomically(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote. Raises ValueError naming a file that is no trace or not whole."""
        try:
            with np.load(path) as file:
                described = json.loads(file["described"].tobytes())
                return cls(**{name: file[name] for name in ARRAYS}, **described)
        except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{path} is not a trace, or it is damaged: {error}") from None


@torch.no_grad()
def trace_tokens(
    model: SparseLlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    batch: int = 32,
    meta: dict | None = None,
) -> Trace:
    """Run sequences of token ids through the model, each from position 0, and keep what fires.

    Sequences of one length that follow each other are run together, at most `batch` at a time. Raises ValueError
    for a token that the model does not have.
    """
    vocab_size, layers = model.config.vocab_size, len(model.ffns)
    active: list[list[np.ndarray]] = [[] for _ in range(3 * layers)]  # counts, indices, values of each layer
    logprobs = []
    training = model.training
    model.eval()
    hooks = [ffn.register_forward_hook(_keep_active(active[3 * n : 3 * n + 3])) for n, ffn in enumerate(model.ffns)]
    try:
        for group in _same_length(sequences, batch):
            ids = torch.tensor(group, device=model.device)
            if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
                raise ValueError(f"token {int(ids.max())} does not exist: the model has a vocabulary of {vocab_size}")
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            logprobs.append(torch.nn.functional.pad(chosen, (1, 0), value=float("nan")).reshape(-1).cpu().numpy())
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    token_ids = np.concatenate([np.asarray(s, dtype=np.int32) for s in sequences] or [np.zeros(0, np.int32)])
    lengths = [len(s) for s in sequences]
    by_part = [_concatenate([active[3 * n + part] for n in range(layers)]) for part in range(3)]
    return Trace(
        token_ids=token_ids,
        strings=token_strings(tokenizer, token_ids),
        logprob=_concatenate([logprobs]).astype(np.float32),
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=_concatenate([[np.arange(length, dtype=np.int32) for length in lengths]]).astype(np.int32),
        indptr=np.concatenate([[0], np.cumsum(by_part[0])]).astype(np.int64),
        indices=by_part[1].astype(np.uint16),
        values=by_part[2].astype(np.float32),
        intermediate_size=model.config.intermediate_size,
        meta=meta or {},
    )


def _keep_active(lists: list[list[np.ndarray]]):
    counts, indices, values = lists

    def hook(ffn, inputs, _):
        # The activations are computed once more, densely, so that a trace does not depend on the backend.
        g, h = (t.reshape(-1, ffn.intermediate_size) for t in ffn.activations(inputs[0]))
        token, neuron = (g != 0).nonzero(as_tuple=True)
        counts.append((g != 0).sum(1).cpu().numpy())
        indices.append(neuron.cpu().numpy())
        values.append(h[token, neuron].float().cpu().numpy())

    return hook


def _same_length(sequences: Sequence[Sequence[int]], batch: int):
    group: list[list[int]] = []
    for sequence in sequences:
        if len(sequence) < 1:
            raise ValueError("an empty sequence cannot be traced; give at least one token")
        if group and (len(group) == batch or len(group[0]) != len(sequence)):
            yield group
            group = []
        group.append([int(token) for token in sequence])
    if group:
        yield group


def _concatenate(lists: list[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([array for arrays in lists for array in arrays] or [np.zeros(0)])


def token_strings(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; a token that is only part of a character shows its bytes, as in <0xF0>."""
    known: dict[int, str] = {}
    for token in np.unique(np.asarray(token_ids)).tolist():
        text = tokenizer.decode([token])
        if "\ufffd" in text:
            text = _bytes_of(tokenizer.convert_ids_to_tokens(token)) or text
        known[token] = text
    return [known[int(token)] for token in token_ids]


def _bytes_of(token: str) -> str | None:
    """The bytes behind a byte-level BPE token, whose alphabet maps every byte to a printable character."""
    alphabet = _byte_alphabet()
    if any(character not in alphabet for character in token):
        return None
    return "".join(f"<0x{alphabet[character]:02X}>" for character in token)


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


def load_model(folder: str | Path) -> tuple[SparseLlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a run folder, or of a folder in Hugging Face layout."""
    folder = Path(folder)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no model: it has no config.json")
    return SparseLlamaForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def trace_text(model: SparseLlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str) -> Trace:
    """Trace a text, cut into sequences of the model's context length. Raises ValueError for an empty text."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise ValueError("the text is empty; give at least one character")
    context = model.config.max_position_embeddings
    sequences = [ids[at : at + context] for at in range(0, len(ids), context)]
    return trace_tokens(model, tokenizer, sequences, meta=results.provenance())


def trace_validation(run: str | Path) -> Trace:
    """Trace the tokens that a run's evaluation used, so that the counts are those that its log states."""
    row, _ = results.load_run(run)
    config = TrainConfig.load(Path(run) / "config.yaml")
    _, _, blocks = config.prepare_text()
    model, tokenizer = load_model(run)
    meta = results.provenance() | {"run": row["run"], "l1_coefficient": config.l1_coefficient}
    return trace_tokens(model, tokenizer, blocks.draw(range(len(blocks))).tolist(), meta=meta)
