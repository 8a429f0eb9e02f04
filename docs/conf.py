"""Build the documents by Sphinx: `make docs`."""

import gpuscheduler

project = "gpuscheduler"
author = "gpuscheduler developers"
version = release = gpuscheduler.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
numpydoc_show_class_members = False
autodoc_typehints = "none"

html_theme = "pydata_sphinx_theme"
html_title = project
