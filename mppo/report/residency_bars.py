"""Drawing of who is where in which phase: a bar of GPU memory and one of host memory per phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HUES = {"actor": "Blues", "critic": "Oranges", "ref": "Greens", "reward_model": "RdPu"}
_SHADES = {"parameters": 0.75, "gradients": 0.35, "optimizer": 0.55}
_OTHERS = {"passes": "#d62728", "engine": "#9467bd", "contexts": "#7f7f7f"}
GIB = 1 << 30


@dataclass(frozen=True)
class PhaseBars:
    """Memory of a rank in a phase, in bytes by name: a role and a part ("actor optimizer"); on the
    GPU also "passes", "engine" and "contexts"."""

    phase: str
    device: Mapping[str, int]
    host: Mapping[str, int]


def draw_residency(title: str, bars: Sequence[PhaseBars], gpu_bytes: int, path: Path) -> None:
    """Draw the phases in order of time from top to bottom, the GPU's memory to the right (its total
    as a line), the host's to the left."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.45 * len(bars)), layout="constrained")
    axis = figure.subplots()
    shown: dict[str, str] = {}
    for row, one in enumerate(bars):
        for parts, sign in ((one.device, 1), (one.host, -1)):
            left = 0.0
            for name, size in parts.items():
                shown.setdefault(name, _colour(name))
                width = sign * size / GIB
                axis.barh(-row, width, left=left, color=shown[name], edgecolor="white", height=0.7,
                          hatch="///" if sign < 0 else None, linewidth=0.5)  # fmt: skip
                left += width
    axis.axvline(0, color="black", linewidth=1)
    axis.axvline(gpu_bytes / GIB, color="black", linewidth=1, linestyle="--")
    axis.set_yticks([-row for row in range(len(bars))], [one.phase for one in bars])
    axis.set_xlabel("GiB of a GPU to the right (dashed: its memory), of the host to the left")
    axis.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axis.set_title(title, fontsize=9, loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    _legend(axis, shown)
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=150)


def _legend(axis, shown: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in shown.items()]
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.18),
                ncols=5, frameon=False, fontsize=8)  # fmt: skip


def _colour(name: str) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    role, _, part = name.partition(" ")
    if role not in _HUES:
        return _OTHERS[name]
    return to_hex(colormaps[_HUES[role]](_SHADES[part]))
