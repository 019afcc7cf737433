"""What every test shares: GPU tests skip with a reason where there is no GPU, and the environment is left as found."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_configure() -> None:
    """Be told to stop as at a terminal: ``nohup`` and a shell's ``&`` start a program, and all that it starts, deaf.

    What was to be ignored still does not end the tests, but the programs that they start do not inherit it.
    """
    for number, heard in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, lambda *_: None),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, heard)


def _cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device; `make gpu-check` runs this on a GPU machine"))


# pytest's own, and what torch sets once when its compiler is first imported.
NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


@pytest.fixture(autouse=True)
def _environment_left_as_found() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    yield
    after = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left the environment changed: {sorted(changed)}"


@pytest.fixture
def shared() -> Path:
    """The folder of real traces and data sets that may lie beside a checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED.name}/ with the real traces does not lie beside this checkout")
    return SHARED
