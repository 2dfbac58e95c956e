"""Keeps numbers from swinging: remembers what was needed, and limits how often anything turns round.

Less is believed once it has been enough for a whole cool-down: what is kept is the largest need of that time. A number that has turned from
growing to shrinking, or back, does not turn again within a cool-down of that.
"""

from __future__ import annotations

from twostep.autoscaler.memory import Course, Need


def remember(needs: tuple[Need, ...], need: Need, cool_down_s: float) -> tuple[Need, ...]:
    """The needs that still matter: of the last cool-down, and not outdone by a later one."""
    kept = tuple(old for old in needs if need.at_s - old.at_s <= cool_down_s and not _outdoes(need, old))
    return (*kept, need)


def _outdoes(new: Need, old: Need) -> bool:
    return new.prefill >= old.prefill and new.decode >= old.decode and new.total >= old.total


def may_move(course: Course | None, before: int, after: int, now_s: float, cool_down_s: float) -> bool:
    """Returns whether a number may go from `before` to `after` now."""
    way = (after > before) - (after < before)
    if course is None or not way or course.way in (0, way):
        return True
    return course.turned_s is None or now_s - course.turned_s >= cool_down_s


def moved(course: Course | None, before: int, after: int, now_s: float) -> Course:
    """How it has been going after that move."""
    course = course or Course()
    way = (after > before) - (after < before)
    if not way or way == course.way:
        return course
    return Course(way=way, turned_s=now_s if course.way else course.turned_s)
