"""What a step takes, by its number of rows, learnt from the steps themselves.

    seconds = pace x shape[rows]

The pace follows everything that changes from moment to moment (other programs, longer contexts), the shape is what is
left: how much more many rows take than one. It is measured where there were steps, and lies on a line between what was
measured elsewhere. Where nothing was measured it is what is expected of some machine, so that a first draft is tried;
what was not measured for long is forgotten, so that one bad moment does not count for ever.
"""

from __future__ import annotations

MOST_ROWS = 192
EXPECTED_ROW = 0.2
"""What another row takes, in times of one row alone, as long as nothing is known."""

_PACE_WEIGHT, _SHAPE_WEIGHT = 0.2, 0.2
_LARGEST_SURPRISE = 1.5
_REACH = 3
_KNOWN_FOR = 128
_FORGET_AFTER = 2048
_REFRESH_EVERY = 64


class StepCosts:
    def __init__(self) -> None:
        self.changes = 0
        """How often `of` was made anew."""
        self._pace = 0.0
        self._steps = 0
        self._measured: dict[int, tuple[float, int]] = {}
        """Rows -> their shape, and the step when it was last measured."""
        self.most_rows = 0
        """Steps of so many can be relied on: three times what was measured, as what lies far beyond is guessed."""
        self._make()

    def of(self, rows: int) -> float:
        """A step of so many rows, at most `MOST_ROWS`, in times of one whose shape is 1."""
        return self._shape[rows]

    def knows(self, rows: int) -> bool:
        """Whether a step of so many was measured lately."""
        known = self._measured.get(rows)
        return known is not None and self._steps - known[1] < _KNOWN_FOR

    def observe(self, rows: int, seconds: float) -> None:
        if rows > MOST_ROWS or seconds <= 0.0:
            return
        self._steps += 1
        if self._pace == 0.0:
            self._pace = seconds / self._shape[rows]
        known = self._measured.get(rows)
        shape = seconds / self._pace
        if known is not None:
            # The pace takes the blame for a surprise before the shape does.
            surprise = min(max(shape / known[0], 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE)
            self._pace *= 1.0 + _PACE_WEIGHT * (surprise - 1.0)
            shape = known[0] * (1.0 + _SHAPE_WEIGHT * (surprise - 1.0))
            self._shape[rows] = shape
        self._measured[rows] = (shape, self._steps)
        if known is None or self._steps % _REFRESH_EVERY == 0:
            self._make()

    def _make(self) -> None:
        """Have the whole shape, from what was measured."""
        self.changes += 1
        oldest = self._steps - _FORGET_AFTER
        self._measured = {rows: known for rows, known in self._measured.items() if known[1] >= oldest}
        points = sorted((rows, known[0]) for rows, known in self._measured.items())
        if not points:
            points = [(1, 1.0)]
        shape = [points[0][1] * _expected(rows) / _expected(points[0][0]) for rows in range(points[0][0] + 1)]
        for rows, value in points[1:]:
            before, last = len(shape) - 1, shape[-1]
            shape += [last + (value - last) * (each - before) / (rows - before) for each in range(before + 1, rows + 1)]
        self.most_rows = min(_REACH * points[-1][0], MOST_ROWS)
        slope = _slope(points)
        last, end = shape[-1], len(shape) - 1
        shape += [last + slope * (rows - end) for rows in range(end + 1, MOST_ROWS + 1)]
        self._shape = shape


def _expected(rows: int) -> float:
    return 1.0 + EXPECTED_ROW * (rows - 1)


def _slope(points: list[tuple[int, float]]) -> float:
    """What a row beyond the most that were measured takes: as much as the ones of the upper half did."""
    rows, value = points[-1]
    for other, known in reversed(points[:-1]):
        if 2 * other <= rows or rows - other >= 8:
            return max((value - known) / (rows - other), 0.0)
    return value * EXPECTED_ROW / _expected(rows)
