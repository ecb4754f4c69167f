"""Settings of the site: `make docs` builds it, offline, with warnings as errors.

The source folder is the repository, so that links between README, docs/ and benchmarks/ are the
same files here and there.
"""

import dpflash

project = "dpflash"
author = "The dpflash authors"
copyright = author
release = version = dpflash.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "benchmarks/**.md",
]
exclude_patterns = ["benchmarks/suite_pages.md"]

myst_heading_anchors = 3
# Some pages are linked to by other pages only, not by the site's contents.
suppress_warnings = ["toc.not_included"]

default_role = "literal"
smartquotes = False
napoleon_custom_sections = ["Guarantees"]
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
autodoc_mock_imports = ["lightning", "trl"]
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"dpflash {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
# The site's address without a path leads to its first page.
html_additional_pages = {"index": "to_first_page.html"}
html_copy_source = False
html_show_sphinx = False


def _only_what_callers_pass(app, what, name, obj, options, signature, returns):
    """Return the signature without the parameter that catches unknown keywords."""
    if signature:
        signature = signature.replace("=UNSET", "=...").replace(", **unknown)", ")")
    return signature, returns


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _only_what_callers_pass)
