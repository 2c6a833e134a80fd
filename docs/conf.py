"""Configuration of the site: `bash run docs` builds it into docs/_build/html."""

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
suppress_warnings = [
    "mystnb.unknown_mime_type",
    "myst.header",  # results/tables.md is generated, and included in reports of other levels.
]

autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "code"  # Docstrings write `names` as Markdown does.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"tfdp {version}"
html_static_path: list[str] = []
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
