import os
import shutil

import filelock
import pytest
import torch
import tqdm
from hypothesis import HealthCheck, settings

# No thread that watches bars: it may hold their lock while a test forks, and the fork would wait.
tqdm.tqdm.monitor_interval = 0

if not torch.cuda.is_available():
    # The kernels' tests run in Triton's interpreter. Triton reads the variable at its first import.
    os.environ["TRITON_INTERPRET"] = "1"

import twell  # noqa: E402
from tests.browser import chromium, show_live, watch  # noqa: E402
from tests.factories import SEED  # noqa: E402
from tests.factories import train as factory  # noqa: E402
from twell import inspector, trace  # noqa: E402

# Fixed cases, and more and fresh ones with TWELL_SEED or on a GPU.
fresh = "TWELL_SEED" in os.environ
settings.register_profile(
    "twell",
    derandomize=not fresh,
    max_examples=25 if fresh or torch.cuda.is_available() else 3,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("twell")


def pytest_report_header():
    return f"TWELL_SEED={SEED}"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(SEED)  # whichever tests came before


@pytest.fixture
def unwritten_memory_is_nan():
    """torch.empty gives NaN and the largest integers, so that an unwritten result fails."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder of all workers of this session: a text, its tokens, and a run of 16 steps."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "tiny"
    with filelock.FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
        if not (folder / "run").is_dir():
            folder.mkdir(exist_ok=True)
            factory.write_text(folder / "tiny.jsonl")
            patch.setenv("TWELL_CACHE", str(folder / "cache"))
            config = factory.configuration(folder / "tiny.jsonl")
            factory.train(config, folder / "unfinished", quiet=True)
            (folder / "unfinished").rename(folder / "run")
    return folder


@pytest.fixture(scope="session")
def tiny_text(tiny):
    """A file of 80 documents."""
    return tiny / "tiny.jsonl"


@pytest.fixture(scope="session")
def tiny_config(tiny):
    """A configuration that trains on it in about a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWELL_CACHE", str(tiny / "cache"))
        yield factory.configuration(tiny / "tiny.jsonl")


@pytest.fixture(scope="session")
def tiny_run(tiny, tiny_config, tmp_path_factory):
    """A finished run of it, this worker's own copy."""
    return shutil.copytree(tiny / "run", tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def model(tiny_run):
    """The tiny model with its tokenizer, and an aggregate beside it: a folder."""
    trace.aggregate_run(tiny_run, tokens=512).save(tiny_run / "aggregate.npz")
    yield tiny_run
    (tiny_run / "aggregate.npz").unlink()


@pytest.fixture(scope="module")
def pair(model):
    """The same, loaded."""
    return twell.load(model)


@pytest.fixture(scope="module")
def browser():
    with chromium() as program:
        yield program


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a page from a file; a message, a request or an error of it fails the test."""
    contexts, wrong = [], []

    def go(shown, view=None, width=1400, theme="light", wait=".tw-bar"):
        path = tmp_path / f"page{len(contexts)}.html"
        text = shown if isinstance(shown, str) else inspector.page(shown, view)
        path.write_text(text, encoding="utf-8")
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, color_scheme=theme))
        page = contexts[-1].new_page()
        wrong.append(watch(page))
        page.on("request", lambda one: one.url == path.as_uri() or wrong[0].append(one.url))
        page.goto(path.as_uri())
        page.wait_for_selector(wait, state="attached")
        return page

    yield go
    for context in contexts:
        context.close()
    assert not any(wrong)


@pytest.fixture
def live(browser):
    """Open a page with a live widget; a message or an error of it fails the test."""
    page = browser.new_page()
    wrong = watch(page)
    yield lambda widget: show_live(page, widget) or page
    page.close()
    assert not wrong
