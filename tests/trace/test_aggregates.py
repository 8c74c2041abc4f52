"""An aggregate's file, and sizes that do not fit together."""

import numpy as np
import pytest

from tests.trace.activity import LENGTHS, aggregate_of, random_activity, random_trace
from twell.trace import Aggregate


@pytest.fixture
def counted(seed):
    return aggregate_of(random_activity(seed, LENGTHS))


def test_saved_and_loaded(tmp_path, counted):
    counted.strings[0] = "👩‍👧<b>\n"
    counted.save(tmp_path / "a.npz")
    again = Aggregate.load(tmp_path / "a.npz")
    for name, value in vars(counted).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(again, name), value), name
            assert getattr(again, name).dtype == value.dtype, name
        else:
            assert getattr(again, name) == value
    assert (tmp_path / "a.npz").read_bytes() == again.pack()


def test_damaged_and_other_files_are_refused(tmp_path, counted):
    path, whole = tmp_path / "a.npz", counted.pack()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (b"", b"PK", whole[:300], whole[:-40], b"not a zip at all", flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.npz is not an aggregate, or it is damaged"):
            Aggregate.load(path)
    random_trace()[0].save(path)
    with pytest.raises(ValueError, match=r"a\.npz is not an aggregate"):
        Aggregate.load(path)


def test_sizes_that_do_not_fit_are_refused(counted):
    with pytest.raises(ValueError, match=r"max_abs has the shape \(2, 3\); expected \(2, 600\)"):
        Aggregate(**vars(counted) | {"max_abs": np.zeros((2, 3))})
    with pytest.raises(ValueError, match="occurrences counts 0 tokens; the sequences have 592"):
        Aggregate(**vars(counted) | {"occurrences": counted.occurrences * 0})
    histogram = counted.active_histogram * 0
    words = "active_histogram counts 0 tokens; the sequences have 592"
    with pytest.raises(ValueError, match=words):
        Aggregate(**vars(counted) | {"active_histogram": histogram})
