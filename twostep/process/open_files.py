"""How many files and connections this process may have open at a time."""

from __future__ import annotations

import resource

from twostep.errors import SetupError

# Models, logs, Redis, workers, metrics, event loops.
_OWN = 512


def make_room(num_connections: int, flag: str) -> None:
    """For so many connections, beside what every process has open: raises the soft limit as far as the hard one allows. Raises SetupError
    where that is too little: at the limit nothing works any more, not even what has nothing to do with connections."""
    needed = num_connections + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SetupError(
            f"this process may have {hard} files open, and {flag} asks for {needed}; give less, or raise the limit (ulimit -Hn)"
        )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"this process may have {soft} files open, {flag} asks for {needed}, and the limit cannot be raised ({error}); give less, or "
            f"start it with `ulimit -n {needed}`"
        ) from error
