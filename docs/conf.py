"""The site that `make docs` builds: the Markdown of the repository, in its own folders, so that links lead from page to
page in both. The lists of docs/README.md are the navigation; docstrings of the public names are in reference/python.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import slurmgpu

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent

project = "slurmgpu"
release = slurmgpu.__version__
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "containers/README.md", "tests/cluster/README.md"]
exclude_patterns = [".*", "build", "dist", "runs", "docs/examples/*/runs", "slurmgpu"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
smartquotes = False

# The Markdown of GitHub: its anchors, and none of MyST's own words in the text.
myst_heading_anchors = 4
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]

# Docstrings are prose with code in single backticks; torch takes seconds to import, and its names are not needed.
default_role = "code"
autodoc_mock_imports = ["torch"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"npt.DTypeLike": "DTypeLike"}
autodoc_default_options = {"members": True, "undoc-members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = f"slurmgpu {release}"
html_copy_source = False
html_show_sphinx = False

BESIDE_DOCS = ("docs/README", "CHANGELOG", "CONTRIBUTING", "containers/README", "tests/cluster/README")


def toctree(caption: str, names: list[str]) -> str:
    """A part of the navigation."""
    return "\n".join(["", "```{toctree}", f":caption: {caption}", ":hidden:", "", *names, "```", ""])


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Behind the first page: a part for each list of docs/README.md, and one of the pages elsewhere."""
    if name != root_doc:
        return
    for section in re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(), flags=re.M)[1:]:
        caption, _, lines = section.partition("\n")
        pages = re.findall(r"^- \[[^]]+\]\(([^)#]+)\.md\)", lines, re.M)
        source[0] += toctree(caption, [f"docs/{page}" for page in pages])
    source[0] += toctree("Project", list(BESIDE_DOCS))


def lead_to_first_page(app: Sphinx, failure: Exception | None) -> None:
    """What a server or a reader opens first is index.html."""
    if failure is None and app.builder.format == "html":
        text = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(text)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("build-finished", lead_to_first_page)
