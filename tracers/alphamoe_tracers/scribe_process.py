"""Starts a scribe beside the traced process, and lets a launcher wait for scribes that outlive theirs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from alphamoe_tracers.wire import Channel

_NOT_INHERITED = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "LD_PRELOAD")
"""What would put a profiler into the scribe."""
_POLL_S = 0.05
_END_TIMEOUT_S = 10.0


class ScribeProcess:
    """A scribe and the two channels to it.

    It holds a shared ``flock`` on the bundle's directory for as long as it lives, see :func:`wait_for_scribes`. It has
    a session of its own, so that neither Ctrl-C nor a signal to the process group of the traced program reaches it.
    """

    def __init__(self, out: Path, *, in_process: bool = False) -> None:
        """Start it; returns at once, what is sent waits until it is up.

        Args:
            out: the bundle's directory, made if it is not there.
            in_process: serve from a thread of this process, which tests of what a scribe does find easier.

        Raises:
            OSError: the directory cannot be made or no process can be started.
        """
        data, data_end = socket.socketpair()
        control, control_end = socket.socketpair()
        self.data, self.control = Channel(data), Channel(control)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = None
        try:
            if in_process:
                _serve_in_thread(data_end, control_end)
                return
            with data_end, control_end, _locked(out) as lock:
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # read when it has ended
                fds = [data_end.fileno(), control_end.fileno()]
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "alphamoe_tracers.scribe", *map(str, fds), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    env=_environment(),
                    pass_fds=[*fds, lock],
                    start_new_session=True,
                )
        except OSError:
            self.close()
            raise

    @property
    def process_id(self) -> int | None:
        """Of the scribe, or None when it is a thread."""
        return self._process.pid if self._process is not None else None

    def how_it_ended(self) -> str:
        """Say in a few words how a scribe ended that closed its channels."""
        if self._process is None:
            return "it ended"
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its channels"
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        last = ""
        if self._errors is not None:
            self._errors.seek(0)
            last = (self._errors.read().decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return f"it exited with code {code}" + (f" ({last})" if last else "")

    def close(self) -> None:
        """Close the channels and see the scribe off; one that does not end is killed."""
        self.data.close()
        self.control.close()
        if self._process is not None:
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._errors is not None:
            self._errors.close()

    def kill(self) -> None:
        """End it at once; what it did not write is lost."""
        if self._process is not None:
            self._process.kill()


def wait_for_scribes(out: Path, timeout_s: float = 10.0) -> bool:
    """Wait until no scribe writes into a bundle any more. For launchers whose ranks ended, before they read it.

    The scribe of a rank that was killed still writes what it had got, which takes some tenths of a second.

    Args:
        out: the bundle's directory.
        timeout_s: how long to wait at most.

    Returns:
        False when one was still writing at the end of that time.
    """
    try:
        directory = os.open(out, os.O_RDONLY)
    except OSError:
        return True
    try:
        until = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks cannot tell
                return True
            else:
                return True
    finally:
        os.close(directory)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[int]:
    """Take the lock before the scribe exists; it is held as long as the scribe keeps its copy of the descriptor."""
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield lock
    finally:
        os.close(lock)


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    packages = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _serve_in_thread(data: socket.socket, control: socket.socket) -> None:
    from alphamoe_tracers.scribe import serve

    def run() -> None:
        with data, control:
            serve(Channel(data), Channel(control))

    threading.Thread(target=run, name="alphamoe-scribe", daemon=True).start()
