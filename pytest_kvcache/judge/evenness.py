"""The gate on balance: replicas, engine ranks and the cards of a server, with the pair that differs most and the highest over the mean."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcache import units
from pytest_kvcache.analysis.balance import GPUS, Spread
from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.conditions import FAIL, INCONCLUSIVE, PASS
from pytest_kvcache.judge.wording import beside, gate, missing, readings, show
from pytest_kvcache.quantities import Missing, Reading
from pytest_kvcache.records import GateRecord

LEAST_APART = 1 << 30
"""Cards that lie less than 1 GiB apart are alike: contexts and communication buffers differ by as much."""


def balanced(
    analyses: Sequence[Analysis],
    max_spread: float = 0.2,
    max_idle_while_waiting: float = 0.2,
    max_over_mean: float = 1.5,
    max_card_over_mean: float = 1.1,
) -> GateRecord:
    """Judge how evenly servers, ranks and cards are used. Not applicable to one server with one rank of which fewer than two cards were seen.

    Mean usages may lie ``max_spread`` of the pool apart; requests may wait on one member while another has none for ``max_idle_while_waiting`` of the
    load's time; where there is a live request for each on average, the busiest may have ``max_over_mean`` times the mean of them; and the fullest
    card may have ``max_card_over_mean`` times the mean memory in use of the cards, or less than 1 GiB more than the emptiest. The second and the
    third FAIL where their lower 95 % bound over eighths of the load is beyond the limit, and are INCONCLUSIVE where only the mean is: chance does
    that to fair turns in a short load.
    """
    name, quantity = "balanced", "usage.spread"
    limit = f"at most {units.show(max_spread, 'ratio')} of the pool apart"
    found = readings(analyses, quantity)
    limits = (max_idle_while_waiting, max_over_mean, max_card_over_mean)
    uneven = [(a, text) for a in analyses if (text := _uneven(a, *limits, surely=True))]
    perhaps = [(a, text) for a in analyses if (text := _uneven(a, *limits, surely=False))]
    cards = [(one, a) for a in analyses if (one := a.balance.of("gpu.used_bytes", GPUS)) is not None]
    if isinstance(found, Missing) and found.cannot_happen and cards:
        return _cards_alone(analyses, cards, max_card_over_mean)
    if isinstance(found, Missing) and not uneven:
        return missing(name, quantity, found, analyses, bound=max_spread, bound_text=limit)
    if isinstance(found, Missing):
        decisive, spread, text, verdict = uneven[0][0], None, f"how far usages lie apart is not known: {found.reason}", PASS
    else:
        decisive, spread = sorted(found, key=lambda pair: pair[1].number())[-1]
        verdict = PASS if spread.number() <= max_spread else FAIL
        usages = decisive.balance.of("usage")
        over = f", highest over mean {usages.over_mean.number():.2f}" if usages is not None and isinstance(usages.over_mean, Reading) else ""
        text = f"{spread.source}: {show(spread)} apart{over}, {limit} ({beside(decisive)})"
    if uneven:
        decisive = uneven[0][0] if verdict == PASS else decisive
        verdict, text = FAIL, f"{uneven[0][1]}; {text}"
    elif perhaps and verdict == PASS:
        decisive, why = perhaps[0]
        verdict, text = INCONCLUSIVE, f"{why}, in so few stretches that chance may have done it: a longer load tells; {text}"
    return gate(name, quantity, verdict, text, analyses, decisive=decisive, value=spread, bound=max_spread, bound_text=limit, beside=beside(decisive))


def _cards_alone(analyses: Sequence[Analysis], cards: Sequence[tuple[Spread, Analysis]], limit: float) -> GateRecord:
    """Judge the cards of one server with one rank, which has no usages to compare, in the window in which they lie farthest apart."""
    spread, decisive = max(cards, key=lambda pair: (_apart(pair[0], limit), pair[0].gap.number()))
    least = units.show(LEAST_APART, "bytes")
    near = spread.gap.number() < LEAST_APART
    return gate(
        "balanced",
        "balance.gpu_over_mean",
        FAIL if _apart(spread, limit) else PASS,
        f"{spread.text}, " + (f"less than {least} apart" if near else f"at most {limit:.2f}"),
        analyses,
        decisive=decisive,
        value=spread.over_mean,
        bound=limit,
        bound_text=f"at most {limit:.2f}",
        beside=beside(decisive),
    )


def _apart(cards: Spread, limit: float) -> bool:
    return cards.gap.number() >= LEAST_APART and isinstance(cards.over_mean, Reading) and cards.over_mean.number() > limit


def _uneven(analysis: Analysis, max_idle_while_waiting: float, max_over_mean: float, max_card_over_mean: float, *, surely: bool) -> str:
    """Return how unevenly the requests of one window lie and the memory of its cards, "" where they do not: usage may be low everywhere all the same.

    ``surely`` takes the lower 95 % bound of what varies with time, which chance in a short load does not reach.
    """
    found = []
    idling, live, cards = analysis.balance.idling, analysis.balance.of("live"), analysis.balance.of("gpu.used_bytes", GPUS)
    if not isinstance(idling, Missing) and (idling.surely if surely else idling.share) > max_idle_while_waiting:
        found.append(f"{idling.text}, at most {units.show(max_idle_while_waiting, 'ratio')}")
    enough = live is not None and sum(live.members.values()) >= len(live.members)
    over = analysis.balance.live_surely if surely else live.over_mean if live is not None else None
    if live is not None and enough and isinstance(over, Reading) and over.number() > max_over_mean:
        found.append(f"{live.text}, at most {max_over_mean:.2f}")
    if cards is not None and _apart(cards, max_card_over_mean):
        found.append(f"{cards.text}, at most {max_card_over_mean:.2f}")
    return "; ".join(found)
