"""The loss around a word against slow loops."""

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories import SEED
from tests.factories.inspector import make_trace


def test_the_rise_of_the_loss_around_a_word():
    before = make_trace(SEED, num_tokens=320, context=16)[0]
    random = np.random.default_rng(SEED)
    logprob = before.logprob + random.normal(0.1, 1, 320).astype(np.float32)
    word = before.strings[17]
    groups = {where: [] for where in analysis.WHERE}
    sequences = [range(start, start + 16) for start in range(0, 320, 16)]
    for tokens in sequences:
        has = any(before.strings[token] == word for token in tokens)
        for token in tokens[1:]:
            follows = before.strings[token - 1] == word
            where = 0 if follows else 1 if has else 2
            groups[analysis.WHERE[where]].append(before.logprob[token] - logprob[token])
    table = analysis.around_word(before, logprob, word).set_index("where")
    for where, rises in groups.items():
        row = table.loc[where]
        assert row["tokens"] == len(rises)
        assert row["rise"] == pytest.approx(np.mean(rises), abs=1e-6)
        if not np.isnan(row["low"]):
            spread = 1.96 * np.std(rises) / np.sqrt(len(rises))
            assert row["high"] - row["low"] == pytest.approx(2 * spread, rel=0.5)
            assert row["low"] < row["rise"] < row["high"]
    assert table["low"].notna().sum() >= 2
    few = analysis.around_word(before.part(0, 64), logprob[:64], word)
    assert few["low"].isna().all()  # four sequences
    with pytest.raises(ValueError, match="the token 'nothing' does not occur in the text"):
        analysis.around_word(before, logprob, "nothing")
    with pytest.raises(ValueError, match="logprob has 64 tokens, the trace 320"):
        analysis.around_word(before, logprob[:64], word)


def test_the_neuron_of_a_word():
    table = pd.DataFrame({"layer": [2, 0, 1], "neuron": [7, 5, 3], "token": [" a", " b", " b"]})
    assert analysis.neuron_of(table, " b") == (0, 5)
    with pytest.raises(ValueError, match=r"token 'c' .*: raise tokens.* such as ' a', ' b'"):
        analysis.neuron_of(table, "c")
