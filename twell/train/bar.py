"""A bar that shows on a terminal how far a training is, before PyTorch is loaded."""

import os
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LOGGED = {"CI", "JPY_PARENT_PID", "MAKELEVEL"}  # set where output goes to a log, or is shared
PERIOD = 0.5  # seconds between updates: to read a loss waits for the GPU


class TrainingBar(Progress):
    """One line on a terminal, of the first process. Lines printed meanwhile stand above it.

    No thread draws it: a process that is forked meanwhile could wait for the thread's lock.
    """

    def __init__(self, shown: bool = True):
        errors = sys.stderr is not None and sys.stderr.isatty()
        options = {"console": Console(), "auto_refresh": False, "expand": True, "transient": True}
        step, now = TextColumn("{task.description}"), TextColumn("{task.fields[now]}")
        super().__init__(step, BarColumn(None), now, redirect_stderr=errors, **options)
        watched = os.environ.get("RANK", "0") == "0" and not LOGGED & os.environ.keys()
        terminal = sys.stdout is not None and sys.stdout.isatty() and self.console.is_interactive
        self.disable = not (shown and watched and terminal)
        self.task, self.next = self.add_task("loading PyTorch", total=None, now=""), 0.0

    def phase(self, name: str) -> None:
        """Name what happens now, at once."""
        self.update(self.task, description=name, refresh=True)

    def step(self, step: int, steps: int, describe: Callable[[int], str]) -> None:
        """Show a step of as many with its description, unless another was shown just before."""
        if not self.disable and time.monotonic() >= self.next:
            self.update(self.task, completed=step, total=steps, now=describe(step))
            self.phase(f"step {step}/{steps}")
            self.next = time.monotonic() + PERIOD
