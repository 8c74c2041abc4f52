import pytest
import torch
from torch import distributed, nn

from tests.factories.sparse import Stack, on_cpu, step
from twell import SparseTraining
from twell.sparse import training as sparse_training
from twell.sparse.training import ATTEMPTS, RECENT


def need(sparse, *numbers):
    """Let layers need so many entries."""
    for ffn, number in zip(sparse.layers, numbers, strict=True):
        ffn.outbox.needed = torch.tensor(number)


def told(sparse):
    return [(ffn.train_path, ffn.outbox.watch_capacity) for ffn in sparse.layers]


def roomy(sparse):
    """With the largest capacity from the start."""
    sparse.restore(sparse.state() | {"capacity": sparse.capacities[-1]})
    return sparse


def attempts_of(sparse, needs):
    """The capacities of a step's attempts, in which the layers need `needs(capacity)`."""
    counts = []
    for _ in sparse.attempts():
        counts.append(sparse.capacity)
        need(sparse, *needs(sparse.capacity))
    return counts


# --- nothing is lost


@on_cpu
def test_layers_that_are_too_small_one_after_another():
    sparse, right = SparseTraining(Stack()), (33, 100, 180)

    def needs(capacity):
        """After the first layer that overflowed, layers need everything."""
        fits = [all(n <= capacity for n in right[:place]) for place in range(3)]
        return [
            n if fit else size for fit, n, size in zip(fits, right, (256, 256, 192), strict=True)
        ]

    assert attempts_of(sparse, needs) == [32, 64, 192]
    assert sparse.summary()["repeated_steps"] == 2
    # The last of a few attempts has the largest capacity.
    sparse = SparseTraining(Stack((256,) * 8))
    counts = attempts_of(sparse, lambda capacity: (min(capacity + 1, 256), *[-1] * 7))
    assert counts == [32, 64, 128, 256] and len(counts) == ATTEMPTS
    # The needs are known then: the next step has the capacity that it takes, and not all.
    sparse = SparseTraining(Stack((1024,) * 3))
    assert attempts_of(sparse, lambda capacity: (33, 65, 129)) == [32, 64, 128, 1024]
    assert sparse.capacity == 256
    mixed = roomy(SparseTraining(Stack((256, 100))))
    for _ in mixed.attempts():
        assert [ffn.capacity for ffn in mixed.layers] == [256, 100]
    with pytest.raises(AssertionError, match="257 and has 256"):
        step(mixed, 257, 0)


@on_cpu
def test_a_repeated_attempt_draws_and_counts_as_the_first(fake):
    """Gradients, the random state and the counters are those of a step with room for all."""
    results = []
    for large in (True, False):
        fake.calls.clear()
        torch.manual_seed(0)
        model = Stack()
        sparse = SparseTraining(model)
        if large:
            roomy(sparse)
        else:
            fake.heavy = {1}
        x, attempts = torch.randn(40, 32), 0
        for _ in sparse.attempts():
            attempts += 1
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                model(x).float().square().mean().backward()
        assert attempts == (1 if large else 2)
        counts = [one for ffn in model.ffns for one in ffn.stats.take()]
        gradients = [p.grad for p in model.parameters()]
        results.append([torch.get_rng_state(), *counts, *gradients])
    assert all(map(torch.equal, *results)) and results[0][1].any()


# --- which layers are sparse, and with which capacity


def test_a_layer_becomes_sparse_and_dense_again_by_its_activity():
    sparse = SparseTraining(Stack((4096, 4096), "auto", (100.0, 0.0)))
    assert sparse.active and sparse.sparse == [False, False]

    def until(number, expected):
        for count in range(1, 101):
            step(sparse, number, 1)
            assert sparse.sparse[1] is False  # by its calibration never
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


def test_a_calibration_of_inference_alone_leaves_training_to_the_times_that_ship():
    sparse = SparseTraining(Stack((4096,), "auto", (None,)))
    step(sparse, 100)
    assert sparse.sparse == [True]


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


# --- layers that cannot be sparse, and processes


@pytest.mark.parametrize("case", ["dense", "never", "path", "no kernels", "no layers"])
def test_without_a_layer_that_could_be_sparse_nothing_is_read(monkeypatch, case):
    backend, training = "dense" if case == "dense" else "triton", ()
    if case in ("never", "no kernels"):
        backend, training = "auto", (0.0, 0.0) if case == "never" else (64.0, 64.0)
    model = nn.Linear(3, 3) if case == "no layers" else Stack((64, 64), backend, training)
    if case == "no kernels":
        status = {"triton": "the package triton is not installed"}
        monkeypatch.setattr(sparse_training, "backend_status", lambda: status)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("nothing to read"))
    sparse = SparseTraining(model, path=None if case == "path" else "union")
    for attempt in sparse.attempts():
        assert attempt == 0 and told(sparse) == [(None, False)] * len(sparse.layers)
        need(sparse, *[60] * len(sparse.layers))
    assert not sparse.active and sparse.summary()["sparse_layers"] == 0


def test_each_attempt_reads_the_device_once(monkeypatch):
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(1) or tolist(t))
    assert step(SparseTraining(Stack((256, 256, 64))), 5, 100, 3) == 2 and len(reads) == 2


@on_cpu
def test_processes_decide_by_their_maximum(fake, monkeypatch):
    seen, other = [], torch.tensor([20, 500])

    def all_reduce(numbers, op):
        assert op == distributed.ReduceOp.MAX
        seen.append(numbers.tolist())
        numbers.copy_(torch.maximum(numbers, other))

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(distributed, "all_reduce", all_reduce)
        sparse = SparseTraining(Stack((1024, 1024)))
        assert step(sparse, 30, None) == 2 and sparse.capacity == 768
        assert seen == [[30, -1]] * 2 and sparse.activity == [30, 500]
    finally:
        distributed.destroy_process_group()
    with pytest.raises(ValueError, match="'rowwise'"):
        SparseTraining(Stack(), path="rowwise")


# --- attempts that end early


@on_cpu
@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_an_attempt_that_is_left_leaves_nothing_behind(attempt, late):
    sparse = SparseTraining(Stack((256, 256)))
    step(sparse, 4, 5)
    before, left = sparse.state(), sparse.attempts()
    with pytest.raises(InterruptedError):
        for number in left:
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
