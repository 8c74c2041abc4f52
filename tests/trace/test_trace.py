"""A trace's sizes, its parts, its file."""

import subprocess
import sys

import numpy as np
import pytest

from tests.trace.activity import random_activity, random_trace
from twell.trace import ARRAYS, Trace


def test_layers_and_counts_keep_active_neurons_of_value_zero():
    trace, active = random_trace()
    assert trace.num_layers == 2 and trace.num_tokens == 7
    assert np.array_equal(trace.counts().reshape(14), active.sum(1))
    for layer in range(2):
        mask = active[7 * layer : 7 * layer + 7]
        stored = trace.layer(layer)
        assert stored.shape == (7, 300) and stored.nnz == mask.sum()
        expected = np.where(np.arange(300) % 5, np.arange(300), 0) * mask
        assert np.array_equal(stored.toarray(), expected)
    with pytest.raises(IndexError, match="layer 2 does not exist"):
        trace.layer(2)


def test_saved_and_loaded(tmp_path):
    trace, _ = random_trace()
    trace.strings[0] = "👩‍👧<b>\n"
    trace.meta["l1_coefficient"] = 0.5
    path = tmp_path / "t.npz"
    trace.save(path)
    again = Trace.load(path)
    assert again.strings == trace.strings and again.meta == trace.meta
    assert again.intermediate_size == 300
    for name in ARRAYS:
        assert np.array_equal(getattr(again, name), getattr(trace, name))
    whole = path.read_bytes()
    for damaged in (b"", b"PK", whole[:300], whole[:-40], b"not a zip at all"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"t\.npz is not a trace, or it is damaged"):
            Trace.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strings": ["a"]}, "strings has 1 entries; the trace has 7 tokens"),
        ({"indptr": np.zeros(9, np.int64)}, "indptr has 9 entries"),
        ({"values": np.zeros(3, np.float32)}, "3 values; indptr ends at"),
        ({"intermediate_size": 2}, "in a layer of 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, words):
    trace, _ = random_trace()
    with pytest.raises(ValueError, match=words):
        Trace(**vars(trace) | change)


def test_reading_a_file_loads_no_torch(tmp_path):
    path = tmp_path / "t.npz"
    random_trace()[0].save(path)
    code = "import sys; from twell.trace import Aggregate, Trace; Trace.load(sys.argv[1])"
    code += "; print({'torch', 'transformers'} & {*sys.modules})"
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_part_is_these_tokens(seed):
    trace = random_activity(seed, (9, 9, 5))
    for start, stop in ((0, 23), (4, 17), (9, 9), (22, 23), (0, 0)):
        part = trace.part(start, stop)
        assert part.strings == trace.strings[start:stop] and part.num_tokens == stop - start
        assert np.array_equal(part.position, trace.position[start:stop])
        assert part.num_layers == (2 if stop > start else 0)
        assert np.array_equal(part.counts(), trace.counts()[: part.num_layers, start:stop])
        assert (part.indices.dtype, part.values.dtype) == (np.uint16, np.float32)
        for layer in range(part.num_layers):
            h, expected = part.layer(layer), trace.layer(layer)[start:stop]
            assert np.array_equal(h.toarray(), expected.toarray())
            assert np.array_equal(h.indices, expected.indices)
    with pytest.raises(ValueError, match="tokens 4 to 24 are no part of a trace of 23"):
        trace.part(4, 24)
