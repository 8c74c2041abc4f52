"""What the neuron inspector shows, and how it is drawn.

One or two sides (two models, or two texts) are shown at a time. Each is a `Trace`, with the model
and its `Aggregate` where there are any. `pack` turns them into one compressed block of bytes. The
widget sends it to JupyterLab, `page` writes it into an HTML file, and both run the same script.

    side        a side, from a model, a trace or their files
    shown       the state of a view: presets, selected entries, the figure
    packing     a passage as bytes
    catalog     all neurons of a model as bytes: cards, searches
    notes       one's own notes on neurons, in a file beside the model
    pages       the page, the atlas, and the script and style that they share with the widget
    widget      the widget (anywidget)
    browser/    ES modules, CSS and the frame of a page; npm run build writes their bundles
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".side": "AGGREGATE MAX_TOKENS Side Source sides",
        ".shown": "COLOURS VIEW drawn entries presets",
        ".packing": "MAX_ENTRIES PRECISE_ENTRIES leading pack",
        ".catalog": "Catalog",
        ".notes": "NOTES read_notes write_note",
        ".pages": "PAGE_BYTES page script style write_atlas",
        ".widget": "Inspector inspect",
    },
)
