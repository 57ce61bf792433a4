"""What the server carries beside us: requests that are not ours, and what stays held when nothing runs or waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_kvcache.analysis.levels import Window
from pytest_kvcache.analysis.payload import Payload
from pytest_kvcache.quantities import Missing, Reading, Value

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

GRACE_S = 2.0
_FEWEST = 3
# A server counts a request a little before and after its client does; a second around each sample covers that.
_AROUND_S = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)


def beyond_ours(wall_s: Floats, busy: Floats, load: Payload) -> Floats:
    """Return by how many requests the server was busier than we kept it, at each moment; NaN where it does not say."""
    import numpy as np

    if not len(wall_s):
        return np.empty(0)
    most = np.max([load.live(wall_s + shift) for shift in _AROUND_S], axis=0)
    extra: Floats = np.maximum(busy - most, 0.0)
    return extra


def other_running(wall_s: Floats, extra: Floats, window: Window) -> Value:
    """Return the most requests beyond ours that at least three samples of the load show."""
    import numpy as np

    there = extra[(wall_s >= window.since_s - 1.0) & np.isfinite(extra)]
    if not len(there):
        return Missing("the server does not say how many requests run")
    if len(there) < _FEWEST:
        return Missing(f"{len(there)} samples are too few to tell other traffic from ours")
    return Reading(
        float(np.sort(there)[-_FEWEST]), "requests", f"running on the server and not ours, seen in {_FEWEST} of {len(there)} samples or more"
    )


def leak(wall_s: Floats, used: Floats, running: Floats, waiting: Floats, last_end_s: float, unit: str, grace_s: float = GRACE_S) -> Value:
    """Return what stayed held after the last request ended, in ``unit``. It is a leak once it has lasted ``grace_s``; before that nobody can tell.

    Gauges of one moment belong together: what is held beside ``running`` 0 and ``waiting`` 0 belongs to no request.
    """
    import numpy as np

    if not unit:
        return Missing("the engine does not say what it holds")
    told = np.isfinite(used) & np.isfinite(running)
    after = np.flatnonzero(told & (wall_s >= last_end_s))
    if not len(after):
        return Missing("no sample was taken after the last request ended")
    idle = (running <= 0) & (np.nan_to_num(waiting) <= 0)
    last = int(after[-1])
    if not idle[last]:
        return Missing("the server was still busy when the last sample was taken")
    since = last
    for index in after[::-1]:
        if not idle[index]:
            break
        since = int(index)
    watched = float(wall_s[last] - wall_s[since])
    # what fell to zero in between was given back: the least of the idle time is what stayed
    least = float(used[[i for i in after if i >= since]].min())
    if least <= 0:
        return Reading(0.0, unit, f"held while nothing ran or waited, least of {watched:.1f} s", float(wall_s[last]))
    if watched < grace_s:
        return Missing(f"{least:,.0f} {unit} were held {watched:.1f} s after the end, and a leak shows after {grace_s:g} s only")
    return Reading(least, unit, f"held for {watched:.1f} s while nothing ran or waited", float(wall_s[last]))
