"""Signals end a command with a sentence and with nothing lost, not with a traceback."""

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

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
SAME_SIGNAL_SECONDS = 0.5  # timeout(1) and some launchers send every signal twice: that is still one
FLUSH_SECONDS = 1.0  # a pipe that nobody reads must not hold the exit
_FROM_PYTHON = 0x80  # marks the bytes that the Python-level handler writes; signal numbers are below 65
_SHOW_CURSOR = "\x1b[?25h"  # a live display hides it


class _Interrupted(KeyboardInterrupt):
    """By another signal than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


@contextmanager
def report_interruption(message: str | Callable[[], str]) -> Iterator[None]:
    """Say what is left of the interrupted work; SIGTERM and SIGHUP interrupt it as Ctrl-C does."""
    try:
        with _interrupting():
            yield
    except KeyboardInterrupt as error:
        said = message if isinstance(message, str) else message()
        with suppress(OSError):  # the terminal may be gone
            typer.echo(f"interrupted: {printable(said)}", err=True)
        number = error.number if isinstance(error, _Interrupted) else signal.SIGINT
        raise typer.Exit(stopped_by(number)) from None


@contextmanager
def _interrupting() -> Iterator[None]:
    """Signals that would end the process on the spot, and leave its children behind, are raised."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted(number)

    fatal = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_DFL]
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
    """Which signal has asked to stop, if one has."""

    def __init__(self, stop: Callable[[], None], say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self._stop = stop
        self._say = say
        self._first_at: dict[int, float] = {}  # by way of delivery
        self._terminals = _terminals()

    def take(self, byte: int) -> None:
        """A signal was delivered. The first one asks to stop, the next one ends the process.

        Both ways of delivery report each signal, one of them perhaps much later, so each is counted for
        itself: a second signal is the second one of either.
        """
        number, way = signal.Signals(byte & ~_FROM_PYTHON), byte & _FROM_PYTHON
        now = time.monotonic()
        first = self._first_at.setdefault(way, now)
        if self.received is None:
            self.received = number
            _silence([fd for fd in self._terminals if not os.isatty(fd)])  # before anybody says anything
            self._stop()
            with suppress(OSError, ValueError):  # nobody reads any more; the next signal must still be heard
                self._say(
                    f"{number.name}: finishing the phase under way, then saving everything; "
                    "once more to exit at once, without saving"
                )
        elif now - first > SAME_SIGNAL_SECONDS:
            _exit_now(number)


@contextmanager
def stop_on_signals(stop: Callable[[], None], say: Callable[[str], None]) -> Iterator[StopRequest]:
    """While open, a signal calls ``stop`` once instead of raising; a second one exits at once.

    SIGINT and SIGTERM are such signals, and SIGHUP, which comes when a terminal is closed.

    ``stop`` and ``say`` are called from a thread of its own, at once: the main thread may be in a long
    computation, which would keep a Python handler waiting, or in the middle of printing. Elsewhere than in
    the main thread, where signals cannot be handled, nothing happens; a signal that is ignored (``nohup``,
    background jobs of scripts) stays so.
    """
    request = StopRequest(stop, say)
    handled = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread() or not handled:
        yield request
        return
    incoming, outgoing = socket.socketpair()
    outgoing.setblocking(False)

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # if somebody else has taken the file descriptor that signals are written to
            outgoing.send(bytes([number | _FROM_PYTHON]))

    thread = threading.Thread(target=_listen, args=(incoming, request), name="hacrl-signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, handle) for number in handled}
    woken = signal.set_wakeup_fd(outgoing.fileno(), warn_on_full_buffer=False)
    if woken != -1:  # of an event loop: it is theirs, and our handlers suffice
        signal.set_wakeup_fd(woken)
    try:
        yield request
    finally:
        if woken == -1:
            signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        outgoing.close()  # ends the thread, which first takes what has come
        thread.join()
        incoming.close()


def _terminals() -> list[int]:
    """File descriptors that are written to and belong to a terminal."""
    found = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # replaced by something without one
            if stream.isatty():
                found.append(stream.fileno())
    return found


def _silence(terminals: list[int]) -> None:
    """They are gone: what the run says while it saves would be an error."""
    if terminals:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for terminal in terminals:
            os.dup2(nowhere, terminal)
        os.close(nowhere)


def _listen(incoming: socket.socket, request: StopRequest) -> None:
    while delivered := incoming.recv(64):
        for byte in delivered:
            if byte & ~_FROM_PYTHON in STOPPING:  # other signals with a handler come here too
                request.take(byte)


def _exit_now(number: signal.Signals) -> None:
    """No cleaning up, which whatever hangs could hold: worker processes end with their parent."""
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
