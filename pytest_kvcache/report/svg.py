"""matplotlib figures as clean ``<svg>`` elements: no pyplot, no matplotlibrc of the user, nothing that a page must load.

Colours are stand-ins that become the page's CSS variables, so that a chart follows light, dark and print; text stays text in the
page's own font; ids are unique within the page; the same figure gives the same text.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from pytest_kvcache.report.escape import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Stand-ins that matplotlib draws with, and the CSS variable that each becomes.
INK, MUTED, GRID, BEFORE, AFTER, PAYLOAD, WAITING, BOUND = (f"#01010{n}" for n in range(1, 9))
_VARIABLES = dict(
    zip(
        (INK, MUTED, GRID, BEFORE, AFTER, PAYLOAD, WAITING, BOUND),
        ("ink", "muted", "grid", "before", "after", "payload", "waiting", "bad"),
        strict=True,
    )
)
_COLOUR = re.compile("#01010[1-8]")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}"


def canvas(width_in: float, height_in: float) -> Figure:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), facecolor="none")
    FigureCanvasSVG(figure)
    return figure


def context() -> Any:
    """Return matplotlib's own defaults with ours on top: a matplotlibrc of the user changes nothing."""
    import matplotlib

    defaults: dict[Any, Any] = {
        name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith(("backend", "interactive", "toolbar"))
    }
    ours: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "pytest-kvcache",
        "text.parse_math": False,
        "text.usetex": False,
        "axes.unicode_minus": True,
        "axes.facecolor": "none",
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": GRID,
        "grid.linewidth": 0.5,
        "text.color": INK,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "xtick.major.size": 2.5,
        "ytick.major.size": 0,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "font.size": 7.5,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
        "lines.linewidth": 1.2,
    }
    return matplotlib.rc_context({**defaults, **ours})


def to_text(figure: Figure, key: str, label: str) -> str:
    """Return the figure as one clean ``<svg>`` element; ``key`` prefixes its ids, ``label`` is what a screen reader says."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())  # noqa: S314 (matplotlib's own output of the line above)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in {"metadata", "style"}:
                parent.remove(child)
    used = {value[1:] for e in root.iter() for name, value in e.attrib.items() if name == f"{_XLINK}href"}
    used |= {found for e in root.iter() for found in re.findall(r"url\(#([^)]+)\)", e.get("clip-path", ""))}
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        for name, value in list(element.attrib.items()):
            del element.attrib[name]
            if name == "id" and value == "mark":
                element.set("class", "mark")
            if name == "id" and value not in used:
                continue
            element.set(name.removeprefix(_XLINK), _attribute(name, value, key))
        if element.tag not in {"text", "title", "tspan"} and element.text is not None:
            element.text = None
        element.tail = None
    width_px = float(root.attrib.pop("width").removesuffix("pt")) * 1.4
    for name in ("height", "version"):
        root.attrib.pop(name, None)
    root.set("style", f"max-width:{width_px:.0f}px")
    root.set("role", "img")
    root.set("aria-label", plain(label))
    title = ElementTree.Element("title")
    title.text = plain(label)
    root.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(name: str, value: str, key: str) -> str:
    if name == "id":
        return f"{key}-{value}"
    if name == f"{_XLINK}href":
        return f"#{key}-{value[1:]}"
    if name == "clip-path":
        return value.replace("url(#", f"url(#{key}-")
    if name == "style":
        value = re.sub(r"font-family:[^;]*;?\s*", "", value)
        value = re.sub(r"font:\s*(?:(?:normal|bold|\d{3})\s+)*([\d.]+px)[^;]*", r"font-size: \1", value)
        return _COLOUR.sub(lambda found: f"var(--{_VARIABLES[found.group(0)]})", value).strip()
    if name in {"d", "x", "y", "transform", "points"}:
        value = re.sub(r"\s+", " ", _NUMBER.sub(lambda found: f"{float(found.group(0)):.1f}".removesuffix(".0"), value)).strip()
        return re.sub(r" ?([MLzCQ]) ?", r"\1", value) if name == "d" else value
    return value
