"""Configuration of the documentation: Sphinx with furo, MyST and autodoc."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "elastane"
author = "the elastane contributors"
project_copyright = author
version = release = version_of("elastane")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "plain_docstrings",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"elastane {release}"

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# The build fetches nothing, so names of other packages can't be looked up. Ours all must resolve.
nitpicky = True
nitpick_ignore = [("py:class", "EvaluationFunction")]  # an alias, spelled out where it is used
nitpick_ignore_regex = [
    (r"py:.*", r"(?!elastane\b)[\w.]*\b(torch|numpy|np|nn|matplotlib|click|rich|lightning)\b.*"),
    (r"py:.*", r"(transformers|accelerate)\..*"),
    (r"py:.*", r"(collections|contextlib|enum|os|pathlib|socket|types|typing|dataclasses)\..*"),
    (r"py:class", r"elastane\.\w+(\.\w+)*\.T"),  # type variables
    (r"py:class", r"dict\[str"),  # one argument of a generic that autodoc cuts at its comma
    (r"py:.*", r"(Path|Tensor|Any|Self|TextIO|Figure|Axes|DataLoader|Dataset|Optimizer|Module)"),
]
