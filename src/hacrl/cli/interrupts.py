"""Handle signals: end a command with a message instead of a traceback, and save a run before it stops."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import typer

from hacrl.cli.exit_codes import stopped_by
from hacrl.plain_text import printable

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
SAME_SIGNAL_SECONDS = 0.5  # timeout(1) and some launchers send every signal twice; such a pair counts once
FLUSH_SECONDS = 1.0  # flushing to a pipe that is not read would block the exit
_FROM_PYTHON = 0x80  # marks bytes written by the Python-level handler; signal numbers are below 65
_SHOW_CURSOR = "\x1b[?25h"  # a live display hides it


class _Interrupted(KeyboardInterrupt):
    """Interrupted by another signal than SIGINT."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


@contextmanager
def report_interruption(message: str | Callable[[], str]) -> Iterator[None]:
    """Print a message and exit if the work is interrupted by Ctrl-C, SIGTERM or SIGHUP."""
    try:
        with _interrupting():
            yield
    except KeyboardInterrupt as error:
        text = message if isinstance(message, str) else message()
        with suppress(OSError):  # the terminal may be closed
            typer.echo(f"interrupted: {printable(text)}", err=True)
        number = error.number if isinstance(error, _Interrupted) else signal.SIGINT
        raise typer.Exit(stopped_by(number)) from None


@contextmanager
def _interrupting() -> Iterator[None]:
    """Raise signals that would otherwise kill the process at once and leave its child processes running."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted(number)

    fatal = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        fatal = []
    for number in fatal:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in fatal:
            signal.signal(number, signal.SIG_DFL)


class StopRequest:
    """Receives signals: the first one requests a stop, the next one ends the process."""

    def __init__(self, stop: Callable[[], None], report: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self._stop = stop
        self._report = report
        self._first_at: dict[int, float] = {}  # by delivery path
        self._terminals = _terminals()

    def receive(self, byte: int) -> None:
        """Handle a delivered signal, given as its number and the mark of its delivery path.

        Both delivery paths report every signal, and one of them may be much later. So a second signal is the
        second one of the same path.
        """
        number, path = signal.Signals(byte & ~_FROM_PYTHON), byte & _FROM_PYTHON
        now = time.monotonic()
        first = self._first_at.setdefault(path, now)
        if self.received is None:
            self.received = number
            _redirect_to_null(
                [fd for fd in self._terminals if not os.isatty(fd)]
            )  # before anything is printed
            self._stop()
            with suppress(
                OSError, ValueError
            ):  # a failed print must not keep the next signal from being handled
                self._report(
                    f"{number.name}: finishing the current phase, then saving everything; "
                    "a second signal exits at once, without saving"
                )
        elif now - first > SAME_SIGNAL_SECONDS:
            _exit_now(number)


@contextmanager
def stop_on_signals(stop: Callable[[], None], report: Callable[[str], None]) -> Iterator[StopRequest]:
    """Within the context, the first signal calls ``stop`` instead of raising, and a second one exits at once.

    The signals are SIGINT, SIGTERM and SIGHUP (a closed terminal). ``stop`` and ``report`` are called at once
    from a separate thread: a Python handler would wait while the main thread is in a long computation.
    Signals that the process ignores (``nohup``, background jobs) stay ignored. Outside of the main thread,
    where signals cannot be handled, the context does nothing.
    """
    request = StopRequest(stop, report)
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread() or not handled:
        yield request
        return
    incoming, outgoing = socket.socketpair()
    outgoing.setblocking(False)

    def handle(number: int, frame: FrameType | None) -> None:
        # A second delivery path: an event loop may have replaced the wakeup file descriptor.
        with suppress(OSError):
            outgoing.send(bytes([number | _FROM_PYTHON]))

    thread = threading.Thread(target=_listen, args=(incoming, request), name="hacrl-signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, handle) for number in handled}
    other_fd = signal.set_wakeup_fd(outgoing.fileno(), warn_on_full_buffer=False)
    if other_fd != -1:  # an event loop uses it; the Python handlers suffice
        signal.set_wakeup_fd(other_fd)
    try:
        yield request
    finally:
        if other_fd == -1:
            signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        outgoing.close()  # ends the thread after it has handled all delivered signals
        thread.join()
        incoming.close()


def _terminals() -> list[int]:
    """Return the file descriptors of stdout and stderr that belong to a terminal."""
    found = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream may have been replaced
            if stream.isatty():
                found.append(stream.fileno())
    return found


def _redirect_to_null(terminals: list[int]) -> None:
    """Discard output to closed terminals: printing while the run is saved would raise an error."""
    if terminals:
        null = os.open(os.devnull, os.O_WRONLY)
        for terminal in terminals:
            os.dup2(null, terminal)
        os.close(null)


def _listen(incoming: socket.socket, request: StopRequest) -> None:
    while delivered := incoming.recv(64):
        for byte in delivered:
            if byte & ~_FROM_PYTHON in STOP_SIGNALS:  # other signals that have a handler arrive here too
                request.receive(byte)


def _exit_now(number: signal.Signals) -> None:
    """Exit without cleaning up, which might hang; worker processes end with their parent."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_SECONDS)
    os._exit(stopped_by(number))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream.isatty():
                stream.write(_SHOW_CURSOR)
            stream.flush()
