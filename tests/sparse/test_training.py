import copy
import random

import pytest
import torch
from torch import nn

from tests.sparse.steps import ON_CPU, Stack, calibrated, roomy, step
from twell import SparseTraining
from twell.sparse import training as sparse_training
from twell.sparse.layer import SparseFFN
from twell.sparse.training import ATTEMPTS, RECENT, capacities

# --- nothing is lost


def test_rooms_rise_by_half_at_most():
    assert capacities(5632) == (
        *(32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
        5632,
    )
    assert capacities(96) == (32, 48, 64, 96) and capacities(100) == (32, 48, 64, 96, 100)
    assert capacities(32) == (32,) and capacities(20) == (20,) and capacities(1) == (1,)


def run_stack(fake, heavy, prepare=lambda sparse: sparse, steps=6):
    """Train in a loop of two micro-batches; `heavy` has the (step, micro-batch) that need 70
    entries more.
    """
    torch.manual_seed(5)
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data = torch.randn(steps, 2, 40, 32)
    attempts, capacities = [], []
    with prepare(SparseTraining(model)) as sparse:
        for number in range(steps):
            attempts.append(0)
            for attempt in sparse.attempts():
                assert attempt == attempts[-1]
                attempts[-1] += 1
                optimizer.zero_grad()
                for micro in range(2):
                    fake.extra = 70 if (number, micro) in heavy else 0
                    with torch.autocast("cpu", torch.bfloat16):
                        y = model(data[number, micro])
                    (
                        y.float().square().mean() + 1e-3 * sum(ffn.l1.mean() for ffn in model.ffns)
                    ).backward()
            optimizer.step()
            capacities.append(sparse.capacity)
    left = [
        *model.state_dict().values(),
        *(t for ffn in model.ffns for t in ffn.stats.take()),
        torch.get_rng_state(),
    ]
    return attempts, capacities, left


@ON_CPU
def test_a_repeated_step_is_the_step_with_room_from_the_start(fake):
    attempts, capacities, expected = run_stack(fake, (), roomy)
    natural = max(needed for *_, needed in fake.calls)
    assert attempts == [1] * 6 and 1 <= natural < 32 / 1.5, (
        natural
    )  # so that only what is added here is too much
    assert expected[0].isfinite().all() and expected[-2].sum() == 6 * 2 * 40
    for heavy in ({(2, 1)}, {(0, 0), (3, 1)}, {(4, 0), (4, 1)}):
        fake.calls.clear()
        attempts, capacities, left = run_stack(fake, heavy)
        first = min(heavy)[0]
        assert attempts == [
            2 if number == first else 1 for number in range(6)
        ]  # then there is room
        # The first layer's need decides: those after it saw NaN, for which all 256 neurons are
        # active.
        assert max(needed for *_, needed in fake.calls) == 256 + 70
        assert capacities == [32] * first + [192 if 128 < 1.5 * (natural + 70) else 128] * (
            6 - first
        )
        assert all(torch.equal(a, b) for a, b in zip(left, expected, strict=True))


@ON_CPU
def test_layers_that_are_too_small_one_after_another(fake):
    sparse = SparseTraining(Stack())
    wants, counts = [33, 100, 180], []

    def attempt():
        # What comes after the first layer without enough room is of no use: here, everything.
        for ffn, want, size in zip(sparse.layers, wants, (256, 256, 192), strict=True):
            ffn.observer.needed = torch.tensor(
                want if all(n <= sparse.capacity for n in wants[: wants.index(want)]) else size
            )
        counts.append(sparse.capacity)

    for _ in sparse.attempts():
        attempt()
    assert counts == [32, 64, 192] and sparse.summary()["repeated_steps"] == 2
    # Never more than a few: the last has room for everything, each layer for its own neurons.
    sparse, seen = SparseTraining(Stack((256,) * 8)), []
    for _ in sparse.attempts():
        seen.append([ffn.capacity for ffn in sparse.layers])
        sparse.layers[0].observer.needed = torch.tensor(min(sparse.capacity + 1, 256))
    assert [room[0] for room in seen] == [32, 64, 128, 256] and len(seen) == ATTEMPTS
    # What everything was needed for is known then: the next step has the room that it takes, and
    # not all.
    sparse, wants, counts = SparseTraining(Stack((1024,) * 3)), [33, 65, 129], []
    for _ in sparse.attempts():
        counts.append(sparse.capacity)
        for ffn, want in zip(sparse.layers, wants, strict=True):
            ffn.observer.needed = torch.tensor(want)
    assert counts == [32, 64, 128, 1024] and sparse.capacity == 256
    mixed = roomy(SparseTraining(Stack((256, 100))))
    for _ in mixed.attempts():
        assert [ffn.capacity for ffn in mixed.layers] == [256, 100]
    with pytest.raises(
        AssertionError, match="a layer needs a capacity of 257 and has the largest, 256"
    ):
        step(mixed, 257, 0)


# --- which layers are sparse, and with how much room


def test_a_layer_becomes_sparse_and_dense_again_by_its_activity():
    sparse = SparseTraining(calibrated(Stack((4096, 4096), backend="auto"), 100.0, None))
    assert sparse.active and sparse.sparse == [False, False]

    def until(number, wanted, most=100):
        for count in range(1, most + 1):
            step(sparse, number, 1)
            assert sparse.sparse[1] is False  # a calibration without the field: never
            if sparse.sparse[0] == wanted:
                return count
        return None

    assert until(120, True) is None and sparse.activity[0] == 120
    assert until(91, True) is None  # between: stays dense
    assert until(80, True) == 1 + next(n for n in range(99) if 80 + 11 * (7 / 8) ** (n + 1) < 90)
    assert until(99, False) is None  # between: stays sparse
    assert until(3000, False) == 1
    assert until(60, True) > 8  # one step's peak is remembered for some
    assert until(101, False) > 8  # smoothed
    assert sparse.summary() == {
        "capacity": sparse.capacity,
        "sparse_layers": 0,
        "repeated_steps": sparse.repeated,
    }


def test_layers_are_told_in_attempts_only():
    model = calibrated(Stack((256, 256, 128), backend="auto"), 100.0, 0.0, 100.0)
    model.ffns[1].backend = "triton"
    sparse = SparseTraining(model, path="hybrid")

    def state():
        return [(ffn.train_path, ffn.observer.watch_capacity) for ffn in model.ffns]

    for number in (300, 10, 300, 10, 10):
        assert state() == [(None, False)] * 3
        for _ in sparse.attempts():
            paths = ["hybrid" if at else None for at in sparse.sparse]
            assert state() == [(path, True) for path in paths] and paths[1] == "hybrid"
            for ffn in model.ffns:
                ffn.observer.needed = torch.tensor(min(number, ffn.intermediate_size))
        assert all(ffn.observer.needed is None for ffn in model.ffns)
    model.ffns[1].backend = "dense"  # changed under way
    for _ in sparse.attempts():
        assert state()[1] == (None, False)
    with sparse:
        pass
    assert not sparse.active and list(sparse.attempts()) == [0] and state() == [(None, False)] * 3


def test_room_follows_the_most_of_recent_steps():
    sparse = SparseTraining(Stack((4096, 4096)))
    assert step(sparse, 100, 400) == 3 and sparse.capacity == 768  # 100 -> 192; 400 -> 768
    assert step(sparse, 500, 500) == 1 and sparse.capacity == 768
    assert step(sparse, 100, 600) == 1 and sparse.capacity == 1024  # before it is too little
    for _ in range(RECENT - 1):
        assert step(sparse, 342, 20) == 1 and sparse.capacity == 1024
    assert step(sparse, 342, 20) == 1 and sparse.capacity == 1024  # 342 -> 768, one below: stays
    for _ in range(RECENT - 1):
        assert step(sparse, 341, 20) == 1 and sparse.capacity == 1024
    step(sparse, 341, 20)
    assert sparse.capacity == 512  # 341 -> 512, two below
    fresh = SparseTraining(Stack((4096,)))
    step(fresh, 1000)
    for number in range(RECENT):
        assert fresh.capacity == 1536, number
        step(fresh, 10)
    assert fresh.capacity == 32 and fresh.summary()["repeated_steps"] == 1


def test_layers_that_become_sparse_have_room_for_what_they_need_then():
    sparse = SparseTraining(calibrated(Stack((4096, 4096), backend="auto"), 2000.0, 2000.0))
    step(sparse, 4000, 4000)
    assert (
        sparse.sparse == [False, False] and sparse.capacity == 32
    )  # no layer is sparse: nothing needs room
    for _ in range(40):
        assert (
            step(sparse, 200, 3000) == 1
        )  # the first becomes sparse in time, and its past of 4000 needs no room
    assert sparse.sparse == [True, False] and sparse.capacity == 384
    for _ in range(40):
        assert step(sparse, 200, 600) == 1
    assert sparse.sparse == [True, True] and sparse.capacity == 1024


def test_layers_without_a_pass_change_nothing():
    sparse = SparseTraining(calibrated(Stack((256, 256), backend="auto"), 100.0, 100.0))
    assert (
        step(sparse, None, 50) == 1
        and sparse.activity == [None, 50]
        and sparse.sparse == [False, True]
    )
    for _ in range(20):
        step(sparse, 300, None)
    assert sparse.activity == [300, 50] and sparse.sparse == [False, True]
    before = sparse.state()
    assert step(sparse, None, None) == 1 and sparse.state() == before


def test_processes_decide_by_the_maximum_over_all():
    seen, other = [], torch.tensor([20, 500])

    def reduce(numbers):
        assert numbers.dtype == torch.int64 and numbers.shape == (2,)
        seen.append(numbers.tolist())
        return torch.maximum(numbers, other)

    sparse = SparseTraining(Stack((1024, 1024)), reduce=reduce)
    assert step(sparse, 30, None) == 2 and sparse.capacity == 768
    assert seen == [[30, -1]] * 2 and sparse.activity == [30, 500]


def test_state_is_all_that_choices_depend_on(tmp_path):
    numbers = random.Random()
    model = calibrated(Stack((1024, 1024, 1024), backend="auto"), 80.0, 120.0, 50.0)
    model.ffns[2].backend = "triton"
    one = SparseTraining(model)
    script = [[max(1, int(numbers.gauss(100, 30))) for _ in range(3)] for _ in range(200)]
    script[50] = [900, 900, 900]
    for number, needed in enumerate(script):
        step(one, *needed)
        if number % 37 == 20:
            torch.save(one.state(), tmp_path / "state.pt")
            other = SparseTraining(model)
            other.restore(torch.load(tmp_path / "state.pt", weights_only=True))
            assert other.state() == one.state() and other.summary() == one.summary()
            one, other = other, copy.deepcopy(one)
            for later in script[number + 1 :]:
                step(other, *later)
            expected = other.state()
    assert one.state() == expected and one.summary()["repeated_steps"] > 0
    with pytest.raises(ValueError, match="the state is of 3 layers; the model has 2"):
        SparseTraining(Stack((64, 64))).restore(one.state())


# --- what it costs, and what goes wrong


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
    model = Stack((64, 64), backend=case if case in ("dense", "reference") else "triton")
    if case == "never":
        model = calibrated(Stack((64, 64), backend="auto"), None, 0.0)
    if case == "no kernels":
        for ffn in model.ffns:
            ffn.backend = "auto"
        calibrated(model, 64.0, 64.0)
        monkeypatch.setattr(
            sparse_training,
            "backend_status",
            lambda: {"triton": "the package triton is not installed"},
        )
    if case == "other modules":
        model = nn.Linear(3, 3)

    def reduce(_):
        raise AssertionError("processes have nothing to tell")

    sparse = SparseTraining(model, path=None if case == "path" else "union", reduce=reduce)
    if case == "closed":
        sparse.close()
    for _ in range(3):
        attempts = 0
        for _ in sparse.attempts():
            attempts += 1
            for ffn in sparse.layers:
                assert ffn.train_path is None and not ffn.observer.watch_capacity
                ffn.observer.needed = torch.tensor(60)
        assert attempts == 1
    assert not sparse.active and reads == [] and sparse.summary()["sparse_layers"] == 0


def test_unknown_paths_are_refused():
    with pytest.raises(
        ValueError, match="path 'rowwise' is unknown; use 'union', 'hybrid' or None"
    ):
        SparseTraining(Stack((64,)), path="rowwise")


@ON_CPU
@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_an_attempt_that_is_left_leaves_nothing_behind(fake, attempt, late):
    model = Stack((256, 256))
    sparse = SparseTraining(model)
    step(sparse, 4, 5)
    before = sparse.state()
    left = sparse.attempts()
    with pytest.raises(InterruptedError):
        for number in left:
            for ffn in model.ffns:
                assert torch.equal(ffn.observer.needed, torch.tensor(-1))
                ffn.observer.needed = torch.tensor(200)
            if number == attempt:
                raise InterruptedError
    assert sparse.state() == before | ({"capacity": 256, "repeated": 1} if attempt else {})
    if not late:
        left.close()
        assert all(ffn.train_path is None and not ffn.observer.watch_capacity for ffn in model.ffns)
    # Steps after it count for themselves, also if the one that was left ends in their midst, as a
    # traceback may have it.
    for _ in sparse.attempts():
        assert all(ffn.observer.needed == -1 and ffn.train_path == "union" for ffn in model.ffns)
        left.close()
        assert all(ffn.train_path == "union" and ffn.observer.watch_capacity for ffn in model.ffns)
        for ffn in model.ffns:
            ffn.observer.needed = torch.tensor(10)
    assert sparse.activity == [4 + 6 / 8, 5 + 5 / 8]
    assert all(ffn.train_path is None and not ffn.observer.watch_capacity for ffn in model.ffns)


@ON_CPU
def test_gradients_that_nothing_checks_are_dense(fake):
    model = Stack((256, 256))
    sparse = SparseTraining(model)

    def backward():
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.randn(40, 32))
        y.float().square().sum().backward()
        return y

    for _ in sparse.attempts():
        backward()
        break  # the loop is gone, and with it the attempt
    assert len(fake.calls) == 2
    assert backward().isfinite().all() and len(fake.calls) == 2


@ON_CPU
def test_processes_of_a_group_decide_together(fake, monkeypatch):
    """Two models that train beside each other have a group each."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        group, asked = distributed.new_group([0]), []
        all_reduce = distributed.all_reduce
        monkeypatch.setattr(
            distributed,
            "all_reduce",
            lambda *t, group, **o: asked.append(group) or all_reduce(*t, group=group, **o),
        )
        for given in (group, None):
            model = Stack((64, 64))
            sparse = SparseTraining(model, group=given)
            for _ in sparse.attempts():
                with torch.autocast("cpu", torch.bfloat16):
                    model(torch.randn(8, 32)).float().sum().backward()
        assert asked[0] is group and asked[-1] is None and set(asked) == {group, None}
        with pytest.raises(ValueError, match="reduce and group are both given"):
            SparseTraining(model, reduce=lambda numbers: numbers, group=group)
    finally:
        distributed.destroy_process_group()


@ON_CPU
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_layers_with_adapters_train_densely_and_learn(fake, backend):
    """Without a repeated step, whatever the capacity; the others train sparsely."""
    model = Stack((256, 256))
    first, second = (module for module in model.modules() if isinstance(module, SparseFFN))
    for ffn in (first, second):
        ffn.backend = backend
    adapter = nn.Linear(32, first.intermediate_size)
    first.up_proj.register_forward_hook(lambda module, args, y: y + adapter(args[0]))
    sparse = SparseTraining(model)
    sparse.capacity = 32
    for _ in range(3):
        for _ in sparse.attempts():
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(40, 32)).float().square().sum().backward()
    assert sparse.summary()["sparse_layers"] == (1 if backend == "triton" else sum(sparse.sparse))
    assert not sparse.sparse[0] and sparse.repeated == 0
    assert adapter.weight.grad.abs().sum() > 0 and first.train_path is None
