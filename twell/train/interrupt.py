"""Ctrl-C, or the SIGTERM of a scheduler, ends a training at the next row of its log."""

from __future__ import annotations

import os
import signal
import threading

NOTICE = b"\nstopping at the next row of the log, or at the end; Ctrl-C again stops at once\n"
SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupt:
    """Note the first signal in `pressed`. A second Ctrl-C interrupts at once.

    A second SIGTERM does not: launchers send it again to processes that have it already.
    """

    def __init__(self, loud: bool):
        self.loud, self.pressed, self.before = loud, False, []

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self.before = [signal.signal(number, self._press) for number in SIGNALS]
        return self

    def __exit__(self, *_) -> None:
        for number, before in zip(SIGNALS, self.before, strict=False):
            if before is not None:  # None: not set from Python, so it cannot be restored
                signal.signal(number, before)

    def _press(self, number: int, _: object) -> None:
        if self.pressed and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.loud and not self.pressed:
            os.write(2, NOTICE)  # print is not reentrant
        self.pressed = True
