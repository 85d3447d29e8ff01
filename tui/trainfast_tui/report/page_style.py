"""The style of a report's page: one set of colours on paper, one in the dark, which its pictures have too."""

from __future__ import annotations

LIGHT_COLOURS = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#59636e",
    "rule": "#d1d9e0",
    "primary": "#1d5fbf",
    "secondary": "#8a3fa8",
    "accent": "#0b7285",
    "success": "#2b7a2b",
    "warning": "#9a5b00",
    "error": "#c0232c",
}
DARK_COLOURS = {
    "paper": "#14171c",
    "ink": "#e6e9ee",
    "muted": "#9aa4b0",
    "rule": "#3a424c",
    "primary": "#6ea8ff",
    "secondary": "#d79bf0",
    "accent": "#55c7d9",
    "success": "#6fcf6f",
    "warning": "#f0b45a",
    "error": "#ff7b81",
}


def _colours(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


COLOUR_RULES = (
    f":root{{{_colours(LIGHT_COLOURS)}}}@media (prefers-color-scheme:dark){{:root{{{_colours(DARK_COLOURS)}}}}}"
)
"""The colours by name, of the page and of each picture in it."""
STYLE_SHEET = "\n".join(
    [
        ":root{color-scheme:light dark}",
        COLOUR_RULES,
        "body{max-width:62rem;margin:2rem auto;padding:0 1rem;background:var(--paper);color:var(--ink);"
        "font:16px/1.5 system-ui,sans-serif}",
        "h1{font-size:1.6rem}h2{font-size:1.25rem;margin-top:2.2rem;border-bottom:1px solid var(--rule)}"
        "h3{font-size:1.05rem}",
        ".wide{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;font-size:.9rem}",
        "th,td{text-align:left;vertical-align:top;padding:.3rem .7rem;border-bottom:1px solid var(--rule)}"
        "th{color:var(--muted);font-weight:600}.figure{text-align:right;font-variant-numeric:tabular-nums}"
        "td.figure{white-space:nowrap}",
        "figure{margin:1.2rem 0}figcaption{font-weight:600}img{width:100%;height:auto}",
        "details{margin:.6rem 0}summary{cursor:pointer}pre{overflow-x:auto;padding:.8rem;border:1px solid var(--rule)}",
    ]
)
