"""Settings of Sphinx for `make site`; scripts/build_site.py gathers the pages and calls it."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project = html_title = "twell"
html_show_copyright = False
html_show_sourcelink = html_copy_source = False

extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["extra"]
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

# The notebooks were executed by `make reproduce`.
nb_execution_mode = "off"
nb_merge_streams = True
nb_output_stderr = "remove"

html_math_renderer = "mathml"  # needs no script, which Sphinx would load from a network


def setup(app):
    def write(translator, node):
        displayed = isinstance(node, nodes.math_block)
        translator.body.append(tex2mathml(node.astext(), as_block=displayed))
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", (write, None), (write, None))
