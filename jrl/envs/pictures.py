"""Pictures [H, W, 3] u8 of environments written in JAX, drawn with numpy in the units of their states."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_WIDTH = 240  # pixels
_FINER = 3  # supersampling factor, for smooth edges
_WHITE, _GREY, _BLACK = (255, 255, 255), (190, 190, 190), (40, 40, 40)
_COLORS = ((214, 69, 65), (38, 110, 186), (52, 152, 83), (233, 163, 38), (126, 87, 158), (0, 150, 150))
_IN_A_ROW = 4  # pictures per row


def color(i: int) -> tuple[int, int, int]:
    """Returns the colour of agent i; colours repeat after six."""
    return _COLORS[i % len(_COLORS)]


class Canvas:
    """A white picture of a rectangle of the plane, y upwards; later shapes cover earlier ones.

    Args:
      low, high: corners (x, y).
    """

    def __init__(self, low: tuple[float, float], high: tuple[float, float]):
        from PIL import Image, ImageDraw

        self._low, self._high = low, high
        self._scale = _WIDTH / (high[0] - low[0])
        height = round((high[1] - low[1]) * self._scale)
        self._image: Any = Image.new("RGB", (_WIDTH * _FINER, height * _FINER), _WHITE)
        self._pen: Any = ImageDraw.Draw(self._image)

    def _to_pixels(self, point: Sequence[float]) -> tuple[float, float]:
        unit = self._scale * _FINER
        return (float(point[0]) - self._low[0]) * unit, (self._high[1] - float(point[1])) * unit

    def disc(self, middle: Sequence[float], radius: float, fill: tuple[int, int, int]) -> None:
        """Draws a disc."""
        (x, y), r = self._to_pixels(middle), radius * self._scale * _FINER
        self._pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)

    def line(self, begin: Sequence[float], end: Sequence[float], width: float, fill: tuple[int, int, int]) -> None:
        """Draws a straight line."""
        self._pen.line(
            (*self._to_pixels(begin), *self._to_pixels(end)), fill=fill, width=round(width * self._scale * _FINER)
        )

    def box(self, low: Sequence[float], high: Sequence[float], fill: tuple[int, int, int]) -> None:
        """Draws an upright rectangle."""
        (left, bottom), (right, top) = self._to_pixels(low), self._to_pixels(high)
        self._pen.rectangle((left, top, right, bottom), fill=fill)

    def picture(self) -> np.ndarray:
        """Returns the picture."""
        return np.asarray(self._image.reduce(_FINER))


def side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Returns several pictures as one, in rows of four with grey lines between; smaller pictures get a grey border."""
    columns, rows = min(len(pictures), _IN_A_ROW), -(-len(pictures) // _IN_A_ROW)
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    whole = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), _GREY, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (height + 2), i % columns * (width + 2)
        whole[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return whole


def fade(picture: np.ndarray) -> np.ndarray:
    """Returns a pale copy of a picture, for an agent that has left."""
    return (255 - (255 - picture.astype(np.int32)) // 4).astype(np.uint8)


# ---------------------------------------------------------------- single-agent tasks


def cartpole(state: Sequence[Any]) -> np.ndarray:
    """Draws CartPole-v1: x, x', theta (positive to the right), theta'."""
    x, _, theta, _ = map(float, state)
    canvas = Canvas((-2.4, -0.5), (2.4, 1.5))
    canvas.line((-2.4, 0.0), (2.4, 0.0), 0.02, _BLACK)
    canvas.box((x - 0.3, -0.15), (x + 0.3, 0.15), _BLACK)
    canvas.line((x, 0.1), (x + math.sin(theta), 0.1 + math.cos(theta)), 0.1, (202, 152, 101))
    canvas.disc((x, 0.1), 0.06, (129, 132, 203))
    return canvas.picture()


def pendulum(state: Sequence[Any]) -> np.ndarray:
    """Draws Pendulum-v1: theta (0 upwards, growing to the left as in Gymnasium's picture), theta'."""
    theta = float(state[0])
    canvas = Canvas((-1.3, -1.3), (1.3, 1.3))
    end = (-math.sin(theta), math.cos(theta))
    canvas.line((0.0, 0.0), end, 0.2, (204, 77, 77))
    canvas.disc(end, 0.1, (204, 77, 77))
    canvas.disc((0.0, 0.0), 0.06, _BLACK)
    return canvas.picture()


# ---------------------------------------------------------------- games


def discs(position: np.ndarray, landmark: np.ndarray, radius: float) -> np.ndarray:
    """Draws agents [2, A], x and y, as coloured discs, and landmarks [2, L] as black dots.

    The picture covers [-1.5, 1.5] each way, or more if an agent is outside.
    """
    most = max(1.5, float(np.abs(position).max()) + radius)
    canvas = Canvas((-most, -most), (most, most))
    for i, place in enumerate(position.T):
        canvas.disc(place, radius, color(i))
    for place in landmark.T:
        canvas.disc(place, radius / 3, _BLACK)
    return canvas.picture()


def board(pieces: np.ndarray) -> np.ndarray:
    """Draws a board with the players' pieces [P, rows, columns] bool as coloured discs; row 0 is on top."""
    _, rows, columns = pieces.shape
    canvas = Canvas((0.0, 0.0), (columns, rows))
    for i in range(rows + 1):
        canvas.line((0.0, i), (columns, i), 0.03, _GREY)
    for i in range(columns + 1):
        canvas.line((i, 0.0), (i, rows), 0.03, _GREY)
    for player, row, column in np.argwhere(pieces):
        canvas.disc((column + 0.5, rows - row - 0.5), 0.4, color(player))
    return canvas.picture()
