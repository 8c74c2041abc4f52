"""What the neuron inspector shows, and how it is drawn.

One or two sides (two models, or two texts) are shown at a time. Each is a `Trace`, with the model
and its `Aggregate` where there are any. `pack` turns them into one compressed block of bytes. The
widget sends it to JupyterLab, `page` writes it into an HTML file, and both run the same script: the
modules of browser/, which `npm run build` bundles there.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".side": "AGGREGATE MAX_TOKENS Side Source sides",
        ".shown": "COLOURS VIEW entries silence_each",
        ".packing": "MAX_ENTRIES PRECISE_ENTRIES leading pack",
        ".catalog": "Catalog",
        ".notes": "NOTES read_notes write_note",
        ".pages": "PAGE_BYTES page script style write_atlas",
        ".widget": "Inspector inspect",
    },
)
