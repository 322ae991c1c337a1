"""The command line, a thin layer over the library.

Knows options and messages; what a command does is the library's, imported when it runs, so that
``elastane --help`` loads neither torch nor matplotlib.
"""

from elastane.cli.group import main

__all__ = ["main"]
