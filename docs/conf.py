"""Configuration of the site: `bash run docs` builds it into docs/_build/html."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # For the reference of `tfdp.keras2`.

import tfdp

project = "tfdp"
author = "The tfdp authors"
copyright = "The tfdp authors, Apache License 2.0"
release = version = tfdp.__version__

extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "package.md"]  # package.md is for package indexes

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # Notebooks hold their output; `bash run docs --execute` renews it.
nb_output_stderr = "remove"  # What TensorFlow says of the machine when it is imported.
suppress_warnings = [
    "mystnb.unknown_mime_type",
    "myst.header",  # results/tables.md is generated, and included in reports of other levels.
]

autodoc_default_options = {"members": True}
autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "code"  # Docstrings write `names` as Markdown does.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"tfdp {version}"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def mark_formulas(app, what, name, obj, options, lines):
    """Makes indented paragraphs of docstrings literal blocks, as they are in Markdown."""
    for i in reversed(range(len(lines) - 2)):
        text, blank, indented = lines[i : i + 3]
        if text[:1].strip() and not blank.strip() and indented.startswith("    "):
            lines.insert(i + 1, "")
            lines.insert(i + 2, "::")


def setup(app):
    """Adds the hook to Sphinx."""
    app.connect("autodoc-process-docstring", mark_formulas, priority=400)  # Before napoleon.
