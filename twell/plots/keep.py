"""Where a notebook's figures go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from twell import results
from twell.plots.base import save


class Keep:
    """Saves the figures of a notebook in a folder, or nowhere.

    folder: below the repository's root, None to save nothing; source: "recorded", "live" or
    "paper", where the numbers came from (see `save`). A call returns the figure, which the notebook
    then shows and a reader can change; its label is its name.
    """

    def __init__(self, folder: str | None, source: str = "recorded") -> None:
        self.folder, self.source = folder, source

    def __call__(
        self,
        figure: Figure | None,
        name: str,
        inputs: Sequence[Path] = (),
        device: str | None = None,
        runs: pd.DataFrame | None = None,
        **parameters,
    ) -> Figure | str:
        """Save the figure under `name`, with the files, device and parameters it was drawn from.

        `runs`, rows of `results.load_runs`, stand for their logs and devices. Without a figure,
        returns the sentence that nothing is recorded for it.
        """
        if figure is None:
            return f"{name} is not drawn: nothing is recorded for it here."
        figure.set_label(name)
        if runs is not None:
            inputs = [*inputs, *map(results.log_path, runs["path"])]
            device = ", ".join(sorted(set(runs["device"])))
        if self.folder is not None:
            path = results.root() / self.folder / name
            save(figure, path, list(inputs), parameters, self.source, device)
        return figure
