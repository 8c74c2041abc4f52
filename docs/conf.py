"""Settings of Sphinx for `make site`, which runs on the whole repository."""

import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project = html_title = "twell"
html_show_copyright = False
html_show_sourcelink = html_copy_source = False

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["README.md", "docs/**.md", "data/README.md", "data/checkpoints/*/README.md"]
include_patterns += ["kernels/README.md"]
smartquotes = False
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_search_summary = False  # summaries are fetched, which browsers refuse for files
pygments_style = "friendly"
pygments_dark_style = "monokai"

# The pages are GitHub's Markdown: what MyST reads beyond it would change their text.
myst_heading_anchors = 6
myst_enable_extensions = ["html_image", "dollarmath"]
myst_disable_syntax = ["myst_block_break", "myst_line_comment", "myst_role", "myst_target"]
suppress_warnings = ["toc.not_included"]

html_math_renderer = "mathml"  # needs no script, which Sphinx would load from a network
INDEX = Path(__file__).with_name("index.md")


def contents() -> str:
    """Return the links of index.md as the site's table of contents, a tree a section."""
    trees = ['\n<p><a href="atlas/index.html">An atlas of the shipped model</a></p>\n']
    for section in INDEX.read_text(encoding="utf-8").split("\n## ")[1:]:
        caption, _, text = section.partition("\n")
        pages = re.findall(r"^- \[(.+?)\]\((.+?)\.md\)", text, re.M)
        lines = [f"{title} </docs/{page}>".replace("docs/../", "") for title, page in pages]
        head = ["```{toctree}", ":hidden:", f":caption: {caption}", ""]
        trees.append("\n".join([*head, *lines, "```", ""]))
    return "\n".join(trees)


def setup(app):
    def write(translator, node):
        displayed = isinstance(node, nodes.math_block)
        translator.body.append(tex2mathml(node.astext(), as_block=displayed))
        raise nodes.SkipNode

    def extend(app, page, source):
        source[0] = re.sub(r"\[([^\]]+)\]\(\.\.[\w/]+\)", r"\1", source[0])  # links to folders
        if page == root_doc:
            source[0] += contents()

    app.add_html_math_renderer("mathml", (write, None), (write, None))
    app.connect("source-read", extend)
