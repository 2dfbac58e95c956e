"""The order of requests that wait: classes by urgency, tenants of a class by fair shares, a tenant's own by deadline. Pure: time
is an argument, and nothing waits here.

    classes   the most urgent one with requests waiting. Ageing: a class whose oldest request has waited for `ageing_s` gets one turn in
              every nine, however much comes before it
    tenants   weighted fair queueing by tokens. Each tenant has a counter of what it was given, divided by its weight; the lowest is next.
              One that had nothing waiting begins at the level of the others, so that idleness earns no credit. A request is charged with
              the tokens that it is expected to take when its turn comes, and with the real ones when it is over
    a tenant  the earliest due; requests without a target are due `ageing_s` after they came

Counters: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), the virtual token counter. The level that newcomers begin
at is the virtual time of start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), whose bound holds: while two tenants of a class both
wait, what they are charged, divided by their weights, grows apart by no more than one request of each, however long it goes on. A turn is
never left unused while any request may take it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from router.request.job import RequestJob
from twostep.request_class import RequestClass

# Long enough for what is urgent to pass, short beside a request's own deadline.
AGEING_S = 10.0
# Turns that an aged class is passed over before it gets one.
_AGED_TURNS = 8
# What a tenant gets from other routers counts here, but slows it to an eighth of its share at most: its requests here must not starve.
_ELSEWHERE_SHARE = 7 / 8
# Counters of tenants that do not wait are dropped once they are level with the rest; above so many, the lowest are.
_MAX_COUNTERS = 4096
_FEW_COUNTERS = 64
# Tenants whose answers' lengths are remembered.
_MAX_TENANTS = 4096
# Before anything is known of a tenant: about what clients ask for.
_FIRST_GUESS_TOKENS = 256.0
# Weight of the newest answer in a tenant's mean.
_NEWEST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Shares are relative: a tenant of weight 2 gets twice the tokens of one of weight 1 while both want more than there is. The bounds are
    requests of one tenant on this router: served at once, and waiting (0: no more than all tenants' together)."""

    weights: Mapping[str, float] = field(default_factory=dict)
    max_inflight: int = 0
    max_waiting: int = 0

    def weight(self, tenant: str) -> float:
        """Returns 1 for a tenant that is not named."""
        return self.weights.get(tenant, 1.0)


EVERYBODY_ALIKE = Quota()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueueEntry:
    """One request's place in a queue. `num_tokens`: of prompt and answer, as expected; `num_prompt_tokens`: what has to be computed first.
    `due` orders a tenant's own requests; after `lapses` a turn is of no use to it. Times are those of one monotonic clock, in seconds."""

    request_class: RequestClass
    tenant: str
    num_tokens: int
    arrived: float
    due: float
    lapses: float | None = None
    num_prompt_tokens: int = 0

    @classmethod
    def of(cls, job: RequestJob, *, ageing_s: float = AGEING_S) -> QueueEntry:
        """Makes the entry of a request. Batch requests wait however long it takes, and an answer that was begun goes on."""
        ttft_s, num_prompt_tokens = job.targets.ttft_s, len(job.prompt) + len(job.resumed)
        due = job.arrived + (ageing_s if ttft_s is None else ttft_s)
        refusable = ttft_s is not None and job.request_class is not RequestClass.BATCH and not job.resumed
        return cls(
            request_class=job.request_class,
            tenant=job.tenant,
            num_tokens=num_prompt_tokens + job.expected_tokens,
            num_prompt_tokens=num_prompt_tokens,
            arrived=job.arrived,
            due=due,
            lapses=due if refusable else None,
        )


@dataclass(frozen=True, slots=True)
class QueueTurn:
    """Keeps what a turn changed besides the charge, so that it can be given back."""

    number: int
    passed_over: int
    level_before: float
    level_after: float
    aged: tuple[RequestClass, ...]  # that were passed over


class FairQueue:
    """join() or leave() an entry; first() says whose turn it is; take() charges the one that gets it, waiting or not; give_back() if
    nothing came of it, settle() with what came of it."""

    def __init__(self, quota: Quota = EVERYBODY_ALIKE, *, ageing_s: float = AGEING_S) -> None:
        self._quota = quota
        self._ageing_s = ageing_s
        self._lanes = {request_class: _Lane(quota) for request_class in sorted(RequestClass)}

    def __len__(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def __contains__(self, entry: QueueEntry) -> bool:
        return entry in self._lanes[entry.request_class].waiting

    def __iter__(self) -> Iterator[QueueEntry]:
        """Yields all entries in no particular order."""
        return itertools.chain.from_iterable(lane.waiting for lane in self._lanes.values())

    def num_waiting(self, tenant: str) -> int:
        return sum(lane.num_waiting(tenant) for lane in self._lanes.values())

    def join(self, entry: QueueEntry) -> None:
        self._lanes[entry.request_class].join(entry)

    def leave(self, entry: QueueEntry) -> None:
        """Takes it out without a turn. One that is not here is ignored."""
        self._lanes[entry.request_class].leave(entry)

    def first(self, may_go: Callable[[str], bool] = lambda tenant: True) -> QueueEntry | None:
        """Returns the entry whose turn it is, of the tenants that `may_go`: the same one until something changes."""
        lanes = self._lanes.values()
        for lane in itertools.chain((lane for lane in lanes if lane.passed_over >= _AGED_TURNS), lanes):
            entry = lane.first(may_go)
            if entry is not None:
                return entry
        return None

    def take(self, entry: QueueEntry, now: float) -> QueueTurn:
        """Gives an entry its turn, and charges its tenant; it need not have waited."""
        mine = self._lanes[entry.request_class]
        number, passed_over, before = mine.waiting.get(entry, 0), mine.passed_over, mine.level
        mine.take(entry)
        mine.passed_over = 0
        aged: list[RequestClass] = []
        for request_class, lane in self._lanes.items():
            if request_class > entry.request_class:
                oldest = lane.oldest()
                if oldest is not None and now - oldest.arrived >= self._ageing_s:
                    lane.passed_over += 1
                    aged.append(request_class)
                else:
                    lane.passed_over = 0
        return QueueTurn(number, passed_over, before, mine.level, tuple(aged))

    def give_back(self, entry: QueueEntry, turn: QueueTurn) -> None:
        """Takes back a turn that was of no use: the entry waits again, as if it had not been."""
        lane = self._lanes[entry.request_class]
        if lane.level == turn.level_after:
            lane.level = turn.level_before
        lane.passed_over = max(lane.passed_over, turn.passed_over)
        for request_class in turn.aged:
            self._lanes[request_class].passed_over = max(0, self._lanes[request_class].passed_over - 1)
        self.settle(entry, 0)
        lane.join(entry, turn.number)

    def settle(self, entry: QueueEntry, num_tokens: int) -> None:
        """Charges what an entry that is over really took, in place of what was expected of it."""
        self._lanes[entry.request_class].charge(entry.tenant, num_tokens - entry.num_tokens)

    def elsewhere(self, tokens: Mapping[tuple[RequestClass, str], int]) -> None:
        """Takes note of what tenants were given by other routers since the last call."""
        for request_class, lane in self._lanes.items():
            lane.elsewhere({tenant: count for (its_class, tenant), count in tokens.items() if its_class == request_class})

    def tokens_before(self, entry: QueueEntry) -> float:
        """Returns the tokens that will be given out before `entry`, which need not be here, gets its turn, if no others come. As in a
        fluid: all that is more urgent, its tenant's own earlier ones, and what these drag along of the others' by their shares."""
        urgent = sum(lane.num_tokens for known, lane in self._lanes.items() if known < entry.request_class)
        return urgent + self._lanes[entry.request_class].tokens_before(entry)

    def gives_way(self, entry: QueueEntry) -> QueueEntry | None:
        """Returns which one to send away when there is no place left for `entry`: the last of a less urgent class, else of the tenant
        that holds most places for its weight, if that is more than this one's would. None: `entry` itself."""
        for request_class in sorted(RequestClass, reverse=True):
            if request_class < entry.request_class:
                return None
            lane = self._lanes[request_class]
            holder = lane.largest()
            if holder is None:
                continue
            if request_class > entry.request_class:
                return lane.last(holder)
            own = (lane.num_waiting(entry.tenant) + 1) / self._quota.weight(entry.tenant)
            return lane.last(holder) if lane.num_waiting(holder) / self._quota.weight(holder) > own else None
        return None


class _Lane:
    """One class: counters of its tenants, and who waits."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self.waiting: dict[QueueEntry, int] = {}  # with the number of its coming
        self.num_tokens = 0
        self.passed_over = 0
        self.level = 0.0  # the virtual time: the highest counter that any tenant had when a turn came
        self._level_heard = 0.0
        self._tenants: dict[str, _Backlog] = {}  # those with requests waiting
        self._counters: dict[str, float] = {}
        self._most_counters = _FEW_COUNTERS  # above so many, those that say nothing are looked for
        self._numbers = itertools.count(1)
        self._by_coming: list[tuple[int, QueueEntry]] = []  # a heap, with some that have left

    def num_waiting(self, tenant: str) -> int:
        backlog = self._tenants.get(tenant)
        return 0 if backlog is None else len(backlog.entries)

    def oldest(self) -> QueueEntry | None:
        while self._by_coming and self._by_coming[0][1] not in self.waiting:
            heapq.heappop(self._by_coming)
        return self._by_coming[0][1] if self._by_coming else None

    def join(self, entry: QueueEntry, number: int = 0) -> None:
        """`number`: which it had before."""
        assert entry not in self.waiting, "an entry joins once"
        self.waiting[entry] = number = number or next(self._numbers)
        heapq.heappush(self._by_coming, (number, entry))
        self.num_tokens += entry.num_tokens
        backlog = self._tenants.get(entry.tenant)
        if backlog is None:
            backlog = self._tenants[entry.tenant] = _Backlog()
            self._counters[entry.tenant] = max(self.level, self._counters.get(entry.tenant, 0.0))
        backlog.add(entry, number)

    def leave(self, entry: QueueEntry) -> None:
        if self.waiting.pop(entry, None) is None:
            return
        self.num_tokens -= entry.num_tokens
        if len(self._by_coming) > 2 * len(self.waiting) + 16:
            self._by_coming = sorted((number, waiting) for waiting, number in self.waiting.items())
        backlog = self._tenants[entry.tenant]
        backlog.discard(entry)
        if not backlog.entries:
            del self._tenants[entry.tenant]
            self._forget_level_ones()

    def first(self, may_go: Callable[[str], bool]) -> QueueEntry | None:
        """Ties go to who has been waiting."""
        allowed = [tenant for tenant in self._tenants if may_go(tenant)]
        if not allowed:
            return None
        lowest = min(self._counters[tenant] for tenant in allowed)
        level = [self._tenants[tenant] for tenant in allowed if self._counters[tenant] == lowest]
        return (level[0] if len(level) == 1 else min(level, key=lambda backlog: backlog.oldest)).first()

    def last(self, tenant: str) -> QueueEntry:
        return self._tenants[tenant].last()

    def largest(self) -> str | None:
        """Returns the tenant that holds most places for its weight."""
        return max(self._tenants, key=lambda t: self.num_waiting(t) / self._quota.weight(t), default=None)

    def take(self, entry: QueueEntry) -> None:
        start = self._counters.get(entry.tenant, 0.0)
        if entry.tenant not in self._tenants:
            start = max(start, self.level)
        self._counters[entry.tenant] = start + entry.num_tokens / self._quota.weight(entry.tenant)
        self.level = max(self.level, start)
        self.leave(entry)
        self._forget_level_ones()

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charges a tenant more, or less, than its counter has. One that was forgotten is at the level of the others: less is nothing to
        it."""
        if tenant in self._counters or num_tokens > 0:
            self._counters[tenant] = self._counters.get(tenant, self.level) + num_tokens / self._quota.weight(tenant)
            self._forget_level_ones()

    def elsewhere(self, tokens: Mapping[str, int]) -> None:
        room = _ELSEWHERE_SHARE * (self.level - self._level_heard)
        self._level_heard = self.level
        if room <= 0.0:
            return
        for tenant, count in tokens.items():
            counter = self._counters.get(tenant, self.level)
            if tenant not in self._tenants:
                counter = max(counter, self.level)
            self._counters[tenant] = counter + max(0.0, min(count / self._quota.weight(tenant), room))
        self._forget_level_ones()

    def tokens_before(self, entry: QueueEntry) -> float:
        backlog = self._tenants.get(entry.tenant)
        own = 0 if backlog is None else sum(c.num_tokens for c in backlog.entries if c is not entry and c.due <= entry.due)
        others = sum(self._quota.weight(tenant) for tenant in self._tenants if tenant != entry.tenant)
        others_tokens = self.num_tokens - (0 if backlog is None else backlog.num_tokens)
        return own + min(others_tokens, (own + entry.num_tokens) * others / self._quota.weight(entry.tenant))

    def _forget_level_ones(self) -> None:
        """Drops counters that say nothing: a tenant that does not wait and is not above the level begins there anyway."""
        if len(self._counters) <= self._most_counters:
            return
        for tenant in [t for t, counter in self._counters.items() if t not in self._tenants and counter <= self.level]:
            del self._counters[tenant]
        idle = len(self._counters) - len(self._tenants)
        if idle > _MAX_COUNTERS:
            lowest = sorted((t for t in self._counters if t not in self._tenants), key=self._counters.__getitem__)
            for tenant in lowest[: idle - _MAX_COUNTERS // 2]:
                del self._counters[tenant]
        # Not again before there are twice as many: a tenant costs the same however many there are.
        self._most_counters = max(_FEW_COUNTERS, min(2 * len(self._counters), len(self._tenants) + _MAX_COUNTERS))


class _Backlog:
    """A tenant's own: earliest due first, of equals who came first."""

    def __init__(self) -> None:
        self.entries: dict[QueueEntry, int] = {}  # with the number of its coming
        self.num_tokens = 0
        self._heap: list[tuple[float, int, QueueEntry]] = []  # with some that have left

    @property
    def oldest(self) -> int:
        return min(self.entries.values())

    def add(self, entry: QueueEntry, number: int) -> None:
        self.entries[entry] = number
        self.num_tokens += entry.num_tokens
        heapq.heappush(self._heap, (entry.due, number, entry))

    def discard(self, entry: QueueEntry) -> None:
        del self.entries[entry]
        self.num_tokens -= entry.num_tokens
        if len(self._heap) > 2 * len(self.entries) + 16:
            self._heap = [entry for entry in self._heap if entry[2] in self.entries]
            heapq.heapify(self._heap)

    def first(self) -> QueueEntry:
        while self._heap[0][2] not in self.entries:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def last(self) -> QueueEntry:
        return max(self.entries, key=lambda entry: (entry.due, self.entries[entry]))


class OutputLengths:
    """Learns how long each tenant's answers are, by a moving mean: queueing reckons with it until an answer is there. Bounded: the
    tenant that was not seen for longest is forgotten."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def expected(self, tenant: str, max_tokens: int) -> int:
        """Returns the tokens expected of the next answer, at least one."""
        return max(1, min(max_tokens, round(self._means.get(tenant, _FIRST_GUESS_TOKENS))))

    def observe(self, tenant: str, num_tokens: int) -> None:
        mean = self._means.pop(tenant, float(num_tokens))
        self._means[tenant] = mean + _NEWEST * (num_tokens - mean)
        if len(self._means) > _MAX_TENANTS:
            self._means.popitem(last=False)
