"""A picture of what a command shows at a terminal, for docs/images.

    python scripts/terminal_picture.py docs/images/status.png --until "q or Ctrl-C" --seconds 3 -- .venv/bin/twostep status

--until, --type and --seconds are carried out in the order in which they are given; then the screen is drawn. In --type, \\n and \\xNN are
what they are in Python. Needs Pillow and DejaVu's fonts, both of which come with matplotlib.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

_SIZE, _MARGIN, _SCALE = 15, 14, 2
_LINE = 1.25
_BACK, _FRONT = (30, 30, 38), (222, 222, 226)
# Colours 0 to 7 of ECMA-48.
_COLORS = [(70, 70, 80), (240, 113, 120), (126, 211, 133), (235, 203, 107), (110, 160, 240), (200, 140, 230), (94, 204, 214), _FRONT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=80)
    parser.add_argument("--height", type=int, default=24)
    steps: dict[str, Any] = {"action": "append", "dest": "steps", "default": []}
    parser.add_argument("--until", type=lambda text: ("until", text), metavar="TEXT", help="wait until the screen shows it", **steps)
    parser.add_argument("--type", type=lambda text: ("type", text), metavar="TEXT", help="keys to press", **steps)
    parser.add_argument("--seconds", type=lambda text: ("seconds", text), metavar="S", help="let the program go on for so long", **steps)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    terminal = importlib.import_module("terminal_screen")
    with terminal.Session(args.command, width=args.width, height=args.height, env={"NO_COLOR": ""}) as session:
        for what, value in args.steps:
            if what == "until":
                session.expect(value, 120.0)
            elif what == "type":
                session.type(value.encode().decode("unicode_escape"))
            else:
                end = time.monotonic() + float(value)
                while time.monotonic() < end:
                    session.read(0.05)
        draw(session.screen, args.picture)


def draw(screen: Any, path: Path) -> None:
    """What `screen` (tests/terminal_screen.py) shows, as PNG."""
    image_module, draw_module = importlib.import_module("PIL.Image"), importlib.import_module("PIL.ImageDraw")
    plain, bold = _font("DejaVuSansMono.ttf"), _font("DejaVuSansMono-Bold.ttf")
    across, down = plain.getlength("M"), _SIZE * _SCALE * _LINE
    rows = list(screen.rows)
    while len(rows) > 1 and all(cell.char in ("", " ") for cell in rows[-1]):
        rows.pop()
    margin = _MARGIN * _SCALE
    image = image_module.new("RGB", (round(across * screen.width + 2 * margin), round(down * len(rows) + 2 * margin)), _BACK)
    canvas = draw_module.Draw(image)
    for number, row in enumerate(rows):
        for column, cell in enumerate(row):
            if cell.char.strip():
                where = (margin + column * across, margin + number * down)
                canvas.text(where, cell.char, font=bold if cell.style.bold else plain, fill=_color(cell.style))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(64).save(path, optimize=True)


def _color(style: Any) -> tuple[int, ...]:
    front = _FRONT if style.color is None else _COLORS[style.color % 8]
    return tuple((2 * part + back) // 3 for part, back in zip(front, _BACK, strict=True)) if style.dim else front


def _font(name: str) -> Any:
    folder = Path(importlib.import_module("matplotlib").get_data_path()) / "fonts" / "ttf"
    return importlib.import_module("PIL.ImageFont").truetype(str(folder / name), _SIZE * _SCALE)


if __name__ == "__main__":
    main()
