"""Small pieces of HTML. Every value that comes from a plan passes through `esc` or `embed_json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def esc(value: object) -> Markup:
    """A value as HTML text; `Markup` stays as it is."""
    return value if isinstance(value, Markup) else Markup(escape(str(value), quote=True))


def join(parts: Iterable[str], between: str = "\n") -> Markup:
    """Pieces of HTML, one after the other."""
    return Markup(between.join(esc(p) for p in parts))


def table(
    caption: str, headers: Sequence[str], rows: Iterable[Sequence[object]], text_columns: int = 1, identity: str = ""
) -> Markup:
    """A table that scrolls sideways on its own where it is too wide; numbers stand to the right.

    Args:
        caption: what it shows.
        headers: column titles.
        rows: cells; the first one heads its row.
        text_columns: leading columns that hold text.
        identity: ``id`` of the table.
    """
    head = "".join(f'<th scope="col"{_align(i, text_columns)}>{esc(h)}</th>' for i, h in enumerate(headers))
    body = "".join(_row(row, text_columns) for row in rows)
    return Markup(
        f'<div class="scroll"><table{_id(identity)}><caption>{esc(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[object], text_columns: int) -> str:
    cells = "".join(f"<td{_align(i, text_columns)}>{esc(c)}</td>" for i, c in enumerate(row[1:], start=1))
    return f'<tr><th scope="row">{esc(row[0])}</th>{cells}</tr>'


def pairs(items: Iterable[tuple[str, object]], identity: str = "") -> Markup:
    """Names and values as a definition list."""
    inner = "".join(f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>" for name, value in items)
    return Markup(f'<dl class="pairs"{_id(identity)}>{inner}</dl>')


def _id(identity: str) -> str:
    return f' id="{esc(identity)}"' if identity else ""


def _align(column: int, text_columns: int) -> str:
    return "" if column < text_columns else ' class="number"'


def embed_json(identity: str, value: Any) -> Markup:
    """JSON for the page's script in an element that no browser runs.

    ``<``, ``>`` and ``&`` are written as escapes, so that no text can end the element.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{esc(identity)}">{text}</script>')


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    """Dotted names and leaves of nested settings, sorted."""
    for name, value in sorted(settings.items()):
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "-" if value is None else value
