"""Lets docstrings be plain text: single backticks, formulas in indented blocks, |g|^2 as it is.

Runs before napoleon, so the section headings are still Google's. Knows nothing of the package.
"""

import re

SECTION = re.compile(
    r"(Args|Arguments|Attributes|Examples?|Keyword Args|Notes?|Raises|References?"
    r"|Returns|Warnings?|Warns|Yields|See Also|Todo):$"
)
VALUES = ("attribute", "data", "property")
COLON = "\ue000"  # a character of the private use area
CODE = re.compile(r"(:[\w:+.-]+:`[^`]+`|``.+?``|`[^`]+`_{0,2})")


def indent_of(line: str) -> int:
    """Return the number of leading spaces."""
    return len(line) - len(line.lstrip(" "))


def as_text(line: str) -> str:
    """Return `line` with single backticks doubled and the other marks of reST taken literally."""
    parts = CODE.split(line)
    for index, part in enumerate(parts):
        if index % 2 == 0:
            parts[index] = re.sub(r"([|*]|(?<=\w)_(?=\W|$))", r"\\\1", part)
        elif part.startswith("`") and not part.startswith("``") and not part.endswith("_"):
            parts[index] = f"`{part}`"
    return "".join(parts)


def plain(lines: list[str]) -> list[str]:
    """Return the docstring `lines` as reST."""
    out: list[str] = []
    literal: int | None = None  # indentation of the line that a literal block hangs on
    in_section = in_doctest = False
    for number, line in enumerate(lines):
        text, indent = line.strip(), indent_of(line)
        if not text:
            in_doctest = False
            out.append("")
            continue
        if literal is not None and indent > literal:
            out.append(line)
            continue
        literal = None
        in_doctest = in_doctest or text.startswith(">>>")
        if in_doctest:
            out.append(line)
            continue
        if indent == 0:
            in_section = bool(SECTION.match(text))
        elif not in_section and number and not lines[number - 1].strip():
            out += ["::", "", line]  # an indented block of its own: a formula or a drawing
            literal = 0
            continue
        if text.endswith("::"):
            literal = indent
        out.append(line if text.startswith(".. ") else as_text(line))
    return out


def before_napoleon(app, what, name, obj, options, lines):  # noqa: ARG001
    """Rewrite `lines` in place, as autodoc wants it."""
    lines[:] = plain(lines)
    if what in VALUES and lines:
        lines[0] = lines[0].replace(":", COLON)  # napoleon would take what precedes for a type


def after_napoleon(app, what, name, obj, options, lines):  # noqa: ARG001
    """Put the hidden colons back."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def setup(app):
    """Register with Sphinx, around napoleon's own handler of priority 500."""
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    return {"parallel_read_safe": True}
