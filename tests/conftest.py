"""Settings every test shares: one thread each, one cache of captures, reproducible hypothesis runs, golden files; and
which are left out of everyday runs: further models of what others show, in long.txt, run by `pytest --long`."""

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; subprocesses inherit it
if "PYTEST_XDIST_WORKER" not in os.environ:  # the first test captures a model, the others take it from the cache
    CAPTURES = tempfile.TemporaryDirectory(prefix="fxpipe-captures-")
    os.environ["FXPIPE_CACHE"] = CAPTURES.name

import pytest
import torch
from hypothesis import settings

from tests.distributed import forks

torch.set_num_threads(1)
gc.disable()  # imports make many objects and no cycles

settings.register_profile("fxpipe", deadline=None, max_examples=25, derandomize="CI" in os.environ)
settings.load_profile("fxpipe")

GOLDEN = Path(__file__).parent / "golden"
LONG = frozenset((Path(__file__).parent / "long.txt").read_text().splitlines())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden instead of comparing")
    parser.addoption("--long", action="store_true", help="run what tests/long.txt names, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = {item.path.name for item in items}
    unknown = {name for name in LONG if name.split("/")[1].split("::")[0] in files} - {item.nodeid for item in items}
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/long.txt names what is no test: {sorted(unknown)}")
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in LONG])
        items[:] = [item for item in items if item.nodeid not in LONG]


def pytest_collection_finish() -> None:
    """What all imports have made stays, and tests leave few cycles: collections that look at all objects ever again
    were a tenth of the suite. Processes of tests begin with them, too."""
    gc.collect()
    gc.freeze()
    forks()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def no_files_of_others() -> Iterator[None]:
    """Models that the command line loaded from a test's own files go with it: captures are not cached in a process
    that has code from files newer than itself."""
    before = len(sys.modules)
    yield
    for name in [*sys.modules] if len(sys.modules) != before else ():
        if name.startswith("model_file_"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def logs_of_others() -> Iterator[None]:
    """The command line turns logs off for its process, which is that of the tests that follow."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/golden/<name>, or writes that file under --update-golden."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {path}; run pytest --update-golden and read the new file"
        assert text == path.read_text(), f"differs from {path}; pytest --update-golden accepts the new text"

    return check
