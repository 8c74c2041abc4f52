"""Where a notebook's figures go."""

from __future__ import annotations

from matplotlib.figure import Figure

from study.plots.base import save
from twell import results


class Keep:
    """Saves the figures of a notebook in a folder, or nowhere.

    folder: below the repository's root, None to save nothing. A call returns the figure, which the
    notebook then shows and a reader can change; its label is its name.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder

    def __call__(self, figure: Figure | None, name: str) -> Figure | str:
        """Save the figure under `name`; None returns the sentence that nothing is recorded."""
        if figure is None:
            return f"{name} is not drawn: nothing is recorded for it here."
        figure.set_label(name)
        if self.folder is not None:
            save(figure, results.root() / self.folder / name)
        return figure
