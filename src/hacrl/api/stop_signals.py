"""Save a run of the Python interface before Ctrl-C or SIGTERM ends it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_SECONDS = 0.5  # timeout(1) and some launchers send every signal twice; such a pair counts once
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)  # handlers that nobody has set


class ReceivedSignal:
    """The first signal that was received within :func:`stop_on_first_signal`, if any."""

    number: signal.Signals | None = None

    def deliver(self, message: str) -> None:
        """Let the signal have its usual effect: Ctrl-C raises KeyboardInterrupt with the message."""
        if self.number is signal.SIGINT:
            raise KeyboardInterrupt(message)
        if self.number is not None:
            signal.raise_signal(self.number)


@contextmanager
def stop_on_first_signal(stop: Callable[[], None], report: Callable[[str], None]) -> Iterator[ReceivedSignal]:
    """Within the context, the first signal calls ``stop`` and reports; the next one has its usual effect.

    A program's own signal handlers are left alone, and so are ignored signals. Outside of the main thread,
    where signals cannot be handled, the context does nothing.
    """
    received = ReceivedSignal()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = {number: handler for number, handler in before.items() if handler in _DEFAULTS}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    first_at = 0.0

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if received.number is not None:
            if time.monotonic() - first_at > SAME_SIGNAL_SECONDS:
                restore()
                signal.raise_signal(number)
            return
        received.number, first_at = signal.Signals(number), time.monotonic()
        stop()
        # In a thread of its own: the handler may have interrupted a print, which is not reentrant.
        threading.Thread(target=tell, args=(received.number.name,), daemon=True).start()

    def tell(name: str) -> None:
        with suppress(OSError, ValueError):  # the terminal may be closed
            report(
                f"{name}: finishing the current phase, then saving everything; "
                "a second signal ends at once, without saving"
            )

    for number in before:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        restore()
