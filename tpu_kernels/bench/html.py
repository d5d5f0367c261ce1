"""A decode benchmark's result as a page: table, plot and how it came about in one file."""

from __future__ import annotations

import base64
import html
import io

from rich.console import Console

from .plot import draw
from .report import render
from .results import DecodeResult

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
  body {{ font-family: sans-serif; max-width: 75rem; margin: 2rem auto; }}
  pre {{ overflow-x: auto; }}
  .caution {{ font-weight: bold; }}
</style>
<h1>{title}</h1>
<p class="caution">{caution}</p>
<pre>{table}</pre>
<img alt="throughput over batch size" width="900" src="data:image/png;base64,{plot}">
<details><summary>Everything, as JSON</summary><pre>{json}</pre></details>
</html>
"""


def page(result: DecodeResult) -> str:
    """The page, which needs no other file.

    Example:
        >>> Path("decode.html").write_text(page(result))
    """
    table = io.StringIO()
    Console(file=table, width=160).print(render(result))
    return _PAGE.format(
        title=html.escape(f"Decode of {result.config.model}: {result.device}"),
        caution=html.escape(result.caution or ""),
        table=html.escape(table.getvalue()),
        plot=base64.b64encode(draw(result)).decode(),
        json=html.escape(result.to_json()),
    )
