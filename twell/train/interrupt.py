"""Ctrl-C ends a training after the step that it is in."""

from __future__ import annotations

import os
import signal
import threading

NOTICE = b"\nstopping after this step with a checkpoint; Ctrl-C again stops at once without one\n"


class Interrupt:
    """Note the first Ctrl-C in `pressed`. A second one interrupts as usual."""

    def __init__(self, loud: bool):
        self.loud, self.pressed, self.before = loud, False, None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # signals reach this one alone
            self.before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _press(self, *_) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        if self.loud:
            os.write(2, NOTICE)  # the signal may have interrupted a print
