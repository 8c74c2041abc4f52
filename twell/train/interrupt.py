"""Ctrl-C, or the SIGTERM of a scheduler, ends a training after the step that it is in."""

from __future__ import annotations

import os
import signal
import threading

NOTICE = b"\nstopping after this step with a checkpoint; Ctrl-C again stops at once without one\n"
ENDS = b"\nthe training is done and its model is being written; Ctrl-C again stops at once\n"
SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupt:
    """Note the first signal in `pressed`. A later Ctrl-C interrupts at once.

    A later SIGTERM does not: launchers hand it on to processes that have it already. ends: whether
    no checkpoint follows, so that the first signal has no effect.
    """

    def __init__(self, loud: bool):
        self.loud, self.pressed, self.ends, self.before = loud, False, False, []

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # signals reach this one alone
            self.before = [signal.signal(number, self._press) for number in SIGNALS]
        return self

    def __exit__(self, *_) -> None:
        for number, before in zip(SIGNALS, self.before, strict=False):
            if before is not None:  # which Python did not set, and cannot put back
                signal.signal(number, before)

    def _press(self, number: int, _: object) -> None:
        if self.pressed and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.loud and not self.pressed:
            os.write(2, ENDS if self.ends else NOTICE)  # the signal may have interrupted a print
        self.pressed = True
