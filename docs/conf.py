"""Sphinx builds the documentation from this folder: ``make docs``."""

from importlib import metadata

project = "fair-calibration"
author = "the fair-calibration authors"
release = metadata.version("fair-calibration")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"fair-calibration {release}"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"  # fields that are described as attributes are not listed again
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "literal"
