import pytest
import torch
from torch import distributed, nn

from tests.factories.sparse import Stack, on_cpu, roomy, step
from twell import SparseTraining
from twell.sparse import training as sparse_training
from twell.sparse.observe import Collector
from twell.sparse.training import ATTEMPTS, RECENT, capacities


def need(sparse, *numbers):
    """Let layers need so many entries."""
    for ffn, number in zip(sparse.layers, numbers, strict=True):
        ffn.outbox.needed = torch.tensor(number)


def told(sparse):
    return [(ffn.train_path, ffn.outbox.watch_capacity) for ffn in sparse.layers]


def backward(model):
    with torch.autocast("cpu", torch.bfloat16), Collector(model.ffns) as terms:
        y = model(torch.randn(40, 32))
    (y.float().square().mean() + 1e-3 * sum(l1.mean() for _, l1 in terms.terms)).backward()
    return y


# --- nothing is lost


def test_capacities_rise_by_half_at_most():
    sizes = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    assert capacities(5632) == (*sizes, 5632)
    assert capacities(96) == (32, 48, 64, 96) and capacities(100) == (32, 48, 64, 96, 100)
    assert capacities(32) == (32,) and capacities(20) == (20,) and capacities(1) == (1,)


@on_cpu
def test_layers_that_are_too_small_one_after_another():
    sparse, counts = SparseTraining(Stack()), []
    for _ in sparse.attempts():
        # After the first layer that overflowed, layers need everything.
        fits = [all(n <= sparse.capacity for n in (33, 100, 180)[:place]) for place in range(3)]
        cases = zip(fits, (33, 100, 180), (256, 256, 192), strict=True)
        need(sparse, *(number if fit else size for fit, number, size in cases))
        counts.append(sparse.capacity)
    assert counts == [32, 64, 192] and sparse.summary()["repeated_steps"] == 2
    # The last of a few attempts has the largest capacity, each layer that of its own neurons.
    sparse, counts = SparseTraining(Stack((256,) * 8)), []
    for _ in sparse.attempts():
        counts.append(sparse.layers[0].capacity)
        need(sparse, min(sparse.capacity + 1, 256), *[-1] * 7)
    assert counts == [32, 64, 128, 256] and len(counts) == ATTEMPTS
    # The needs are known then: the next step has the capacity that it takes, and not all.
    sparse, counts = SparseTraining(Stack((1024,) * 3)), []
    for _ in sparse.attempts():
        counts.append(sparse.capacity)
        need(sparse, 33, 65, 129)
    assert counts == [32, 64, 128, 1024] and sparse.capacity == 256
    mixed = roomy(SparseTraining(Stack((256, 100))))
    for _ in mixed.attempts():
        assert [ffn.capacity for ffn in mixed.layers] == [256, 100]
    with pytest.raises(AssertionError, match="needs a capacity of 257 and has the largest, 256"):
        step(mixed, 257, 0)
    with pytest.raises(ValueError, match="the state is of 2 layers; the model has 3"):
        sparse.restore(mixed.state())


# --- which layers are sparse, and with which capacity


def test_a_layer_becomes_sparse_and_dense_again_by_its_activity():
    sparse = SparseTraining(Stack((4096, 4096), "auto", (100.0, None)))
    assert sparse.active and sparse.sparse == [False, False]

    def until(number, expected):
        for count in range(1, 101):
            step(sparse, number, 1)
            assert sparse.sparse[1] is False  # a calibration without the field: never
            if sparse.sparse[0] == expected:
                return count
        return None

    assert until(120, True) is None and sparse.activity[0] == 120
    assert until(91, True) is None  # between: stays dense
    assert until(80, True) == 1 + next(n for n in range(99) if 80 + 11 * (7 / 8) ** (n + 1) < 90)
    assert until(99, False) is None  # between: stays sparse
    assert until(3000, False) == 1
    assert until(60, True) > 8  # one step's peak is remembered for some
    assert until(101, False) > 8  # smoothed
    assert sparse.summary()["sparse_layers"] == 0


def test_layers_are_told_in_attempts_only():
    model = Stack((256, 256, 128), "auto", (100.0, 0.0, 100.0))
    model.ffns[1].backend = "triton"
    sparse = SparseTraining(model, path="hybrid")
    for number in (300, 10, 300, 10, 10):
        assert told(sparse) == [(None, False)] * 3
        for _ in sparse.attempts():
            paths = ["hybrid" if chosen else None for chosen in sparse.sparse]
            assert told(sparse) == [(path, True) for path in paths] and paths[1] == "hybrid"
            need(sparse, *(min(number, ffn.intermediate_size) for ffn in model.ffns))
        assert all(ffn.outbox.needed is None for ffn in model.ffns)
    model.ffns[1].backend = "dense"  # changed between steps
    for _ in sparse.attempts():
        assert told(sparse)[1] == (None, False)
    with sparse:
        pass
    assert not sparse.active and list(sparse.attempts()) == [0]
    assert told(sparse) == [(None, False)] * 3


def test_the_capacity_follows_the_most_of_recent_steps():
    sparse = SparseTraining(Stack((4096, 4096)))
    for needed, attempts, capacity in (
        ((100, 400), 3, 768),  # 100 -> 192; 400 -> 768
        ((500, 500), 1, 768),
        ((100, 600), 1, 1024),  # before it is too little
        *[((342, 20), 1, 1024)] * RECENT,  # 342 -> 768, one below: stays
        *[((341, 20), 1, 1024)] * (RECENT - 1),
        ((341, 20), 1, 512),  # two below
    ):
        assert (step(sparse, *needed), sparse.capacity) == (attempts, capacity)
    fresh = SparseTraining(Stack((4096,)))
    step(fresh, 1000)
    for _ in range(RECENT):
        assert fresh.capacity == 1536
        step(fresh, 10)
    assert fresh.capacity == 32 and fresh.summary()["repeated_steps"] == 1


# --- reads of the device, and processes


@pytest.fixture
def reads(monkeypatch):
    """Counts everything that waits for the device."""
    counted = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)

        def counting(self, *arguments, _name=name, _original=original, **options):
            counted.append(_name)
            return _original(self, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, counting)
    return counted


def test_one_number_a_layer_is_read_once_an_attempt(reads):
    sparse = SparseTraining(Stack((256, 256, 64)))
    assert step(sparse, 5, 100, 3) == 2 and reads == ["tolist"] * 2
    reads.clear()
    assert step(sparse, 5, 100, None) == 1 and reads == ["tolist"]


@pytest.mark.parametrize(
    "case", ["dense", "reference", "never", "path", "closed", "no kernels", "other modules"]
)
def test_without_a_layer_that_could_be_sparse_nothing_is_read(reads, monkeypatch, case):
    backend, training = "triton", ()
    if case in ("dense", "reference"):
        backend = case
    elif case in ("never", "no kernels"):
        backend, training = "auto", (None, 0.0) if case == "never" else (64.0, 64.0)
    model = nn.Linear(3, 3) if case == "other modules" else Stack((64, 64), backend, training)
    if case == "no kernels":
        status = {"triton": "the package triton is not installed"}
        monkeypatch.setattr(sparse_training, "backend_status", lambda: status)

    def reduce(_):
        raise AssertionError("processes have nothing to tell")

    sparse = SparseTraining(model, path=None if case == "path" else "union", reduce=reduce)
    if case == "closed":
        sparse.close()
    for _ in range(3):
        attempts = 0
        for _ in sparse.attempts():
            attempts += 1
            assert told(sparse) == [(None, False)] * len(sparse.layers)
            need(sparse, *[60] * len(sparse.layers))
        assert attempts == 1
    assert not sparse.active and reads == [] and sparse.summary()["sparse_layers"] == 0


@on_cpu
def test_processes_of_a_group_decide_by_their_maximum(fake, monkeypatch):
    """Two models that train beside each other have a group each."""
    seen, other = [], torch.tensor([20, 500])

    def reduce(numbers):
        assert numbers.dtype == torch.int64 and numbers.shape == (2,)
        seen.append(numbers.tolist())
        return torch.maximum(numbers, other)

    sparse = SparseTraining(Stack((1024, 1024)), reduce=reduce)
    assert step(sparse, 30, None) == 2 and sparse.capacity == 768
    assert seen == [[30, -1]] * 2 and sparse.activity == [30, 500]
    asked, all_reduce = [], distributed.all_reduce

    def asking(*tensors, group, **options):
        asked.append(group)
        return all_reduce(*tensors, group=group, **options)

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        group = distributed.new_group([0])
        monkeypatch.setattr(distributed, "all_reduce", asking)
        for given in (group, None):
            model = Stack((64, 64))
            for _ in SparseTraining(model, group=given).attempts():
                backward(model)
        assert asked[0] is group and asked[-1] is None and set(asked) == {group, None}
        with pytest.raises(ValueError, match="reduce and group are both given"):
            SparseTraining(model, reduce=reduce, group=group)
    finally:
        distributed.destroy_process_group()
    with pytest.raises(ValueError, match="path 'rowwise' is unknown; use 'union', 'hybrid' or"):
        SparseTraining(model, path="rowwise")


# --- attempts that end early, and layers that stay dense


@on_cpu
@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_an_attempt_that_is_left_leaves_nothing_behind(attempt, late):
    sparse = SparseTraining(Stack((256, 256)))
    step(sparse, 4, 5)
    before, left = sparse.state(), sparse.attempts()
    with pytest.raises(InterruptedError):
        for number in left:
            assert all(torch.equal(ffn.outbox.needed, torch.tensor(-1)) for ffn in sparse.layers)
            need(sparse, 200, 200)
            if number == attempt:
                raise InterruptedError
    assert sparse.state() == before | ({"capacity": 256, "repeated": 1} if attempt else {})
    if not late:
        left.close()
        assert told(sparse) == [(None, False)] * 2
    # Later steps count for themselves, also if the one that was left ends in their midst, as a
    # traceback may have it.
    for _ in sparse.attempts():
        assert all(ffn.outbox.needed == -1 for ffn in sparse.layers)
        left.close()
        assert told(sparse) == [("union", True)] * 2
        need(sparse, 10, 10)
    assert sparse.activity == [4 + 6 / 8, 5 + 5 / 8] and told(sparse) == [(None, False)] * 2
