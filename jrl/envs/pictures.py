"""Pictures [H, W, 3] u8 of environments written in JAX, drawn in the units of their states, numpy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_WIDTH = 240  # pixels
_FINER = 3  # pixels are drawn so many times as fine, and averaged: edges are smooth
_WHITE, _GREY, _BLACK = (255, 255, 255), (190, 190, 190), (40, 40, 40)
_COLORS = ((214, 69, 65), (38, 110, 186), (52, 152, 83), (233, 163, 38), (126, 87, 158), (0, 150, 150))
_IN_A_ROW = 4  # pictures side by side


def color(i: int) -> tuple[int, int, int]:
    """Returns the colour of agent i; after six they repeat."""
    return _COLORS[i % len(_COLORS)]


class Canvas:
    """A white picture of a rectangle of the plane, y upwards; what is drawn later covers what was drawn before.

    Args:
      low, high: its corners (x, y).
    """

    def __init__(self, low: tuple[float, float], high: tuple[float, float]):
        from PIL import Image, ImageDraw

        self._low, self._high = low, high
        self._scale = _WIDTH / (high[0] - low[0])
        height = round((high[1] - low[1]) * self._scale)
        self._image: Any = Image.new("RGB", (_WIDTH * _FINER, height * _FINER), _WHITE)
        self._pen: Any = ImageDraw.Draw(self._image)

    def _at(self, point: Sequence[float]) -> tuple[float, float]:
        unit = self._scale * _FINER
        return (float(point[0]) - self._low[0]) * unit, (self._high[1] - float(point[1])) * unit

    def disc(self, middle: Sequence[float], radius: float, fill: tuple[int, int, int]) -> None:
        """Draws a disc."""
        (x, y), r = self._at(middle), radius * self._scale * _FINER
        self._pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)

    def line(self, begin: Sequence[float], end: Sequence[float], width: float, fill: tuple[int, int, int]) -> None:
        """Draws a straight line."""
        self._pen.line((*self._at(begin), *self._at(end)), fill=fill, width=round(width * self._scale * _FINER))

    def box(self, low: Sequence[float], high: Sequence[float], fill: tuple[int, int, int]) -> None:
        """Draws an upright rectangle."""
        (left, bottom), (right, top) = self._at(low), self._at(high)
        self._pen.rectangle((left, top, right, bottom), fill=fill)

    def picture(self) -> np.ndarray:
        """Returns what was drawn."""
        return np.asarray(self._image.reduce(_FINER))


def side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Returns one picture of several, in rows of four, with a grey line between them; smaller ones get a grey rim."""
    columns, rows = min(len(pictures), _IN_A_ROW), -(-len(pictures) // _IN_A_ROW)
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    whole = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), _GREY, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (height + 2), i % columns * (width + 2)
        whole[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return whole


def faded(picture: np.ndarray) -> np.ndarray:
    """Returns a pale picture: of an agent that has left."""
    return (255 - (255 - picture.astype(np.int32)) // 4).astype(np.uint8)


# ---------------------------------------------------------------- of a task of one agent


def cartpole(state: Sequence[Any]) -> np.ndarray:
    """Draws CartPole-v1: x, x', theta, theta', of which theta leans to the right."""
    x, _, theta, _ = map(float, state)
    canvas = Canvas((-2.4, -0.5), (2.4, 1.5))
    canvas.line((-2.4, 0.0), (2.4, 0.0), 0.02, _BLACK)
    canvas.box((x - 0.3, -0.15), (x + 0.3, 0.15), _BLACK)
    canvas.line((x, 0.1), (x + math.sin(theta), 0.1 + math.cos(theta)), 0.1, (202, 152, 101))
    canvas.disc((x, 0.1), 0.06, (129, 132, 203))
    return canvas.picture()


def pendulum(state: Sequence[Any]) -> np.ndarray:
    """Draws Pendulum-v1: theta, 0 upwards and growing to the left as in Gymnasium's picture, and theta'."""
    theta = float(state[0])
    canvas = Canvas((-1.3, -1.3), (1.3, 1.3))
    end = (-math.sin(theta), math.cos(theta))
    canvas.line((0.0, 0.0), end, 0.2, (204, 77, 77))
    canvas.disc(end, 0.1, (204, 77, 77))
    canvas.disc((0.0, 0.0), 0.06, _BLACK)
    return canvas.picture()


# ---------------------------------------------------------------- of games


def discs(position: np.ndarray, landmark: np.ndarray, radius: float) -> np.ndarray:
    """Draws agents [2, A], x and y, as discs in their colours, and landmarks [2, L] as black dots.

    What is seen is [-1.5, 1.5] each way, or more where an agent is beyond.
    """
    most = max(1.5, float(np.abs(position).max()) + radius)
    canvas = Canvas((-most, -most), (most, most))
    for i, place in enumerate(position.T):
        canvas.disc(place, radius, color(i))
    for place in landmark.T:
        canvas.disc(place, radius / 3, _BLACK)
    return canvas.picture()


def board(pieces: np.ndarray) -> np.ndarray:
    """Draws a board on which players have pieces [P, rows, columns] bool, discs in their colours; row 0 is on top."""
    _, rows, columns = pieces.shape
    canvas = Canvas((0.0, 0.0), (columns, rows))
    for i in range(rows + 1):
        canvas.line((0.0, i), (columns, i), 0.03, _GREY)
    for i in range(columns + 1):
        canvas.line((i, 0.0), (i, rows), 0.03, _GREY)
    for player, row, column in np.argwhere(pieces):
        canvas.disc((column + 0.5, rows - row - 0.5), 0.4, color(player))
    return canvas.picture()
