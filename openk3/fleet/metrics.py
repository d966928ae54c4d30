"""RouterMetrics: what became of calls, and the policy's numbers, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from openk3.fleet.policy import Policy

Rows = Iterable[tuple[Mapping[str, object], float]]
STATES = ("new", "healthy", "draining", "failed")


class RouterMetrics:
    """Since the router's start. Neither keys nor texts are in it; replicas have their addresses as names."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()
        self.refused: Counter[tuple[str, int]] = Counter()
        self.retries: Counter[str] = Counter()  # by reason
        self.num_cut = 0  # streams that ended with an error because their replica was lost
        self.num_left = 0  # clients that went away
        self.waited_seconds = 0.0

    def ended(self, path: str, status: int) -> None:
        """A call that was let in is over; 499 is a client that went away."""
        self.calls[path, status] += 1
        self.num_left += status == 499

    def text(self, policy: Policy, num_open: int) -> str:
        """Everything."""
        replicas = policy.replicas
        budgets, queues = policy.budgets, policy.waiting.queues
        names = [one.name for one in budgets.classes]
        lines: list[str] = []

        def add(name: str, kind: str, help_text: str, rows: Rows) -> None:
            lines.extend((f"# HELP openk3_router_{name} {help_text}", f"# TYPE openk3_router_{name} {kind}"))
            for labels, value in rows:
                text = ",".join(f'{key}="{_escaped(str(word))}"' for key, word in labels.items())
                lines.append(f"openk3_router_{name}{'{' + text + '}' if text else ''} {value:.12g}")

        def by_route(counts: Counter[tuple[str, int]]) -> Rows:
            return [({"route": path, "status": status}, n) for (path, status), n in sorted(counts.items())]

        def by_replica(field: str) -> Rows:
            return [({"replica": name}, float(getattr(one, field))) for name, one in sorted(replicas.items())]

        add("calls_total", "counter", "Calls that were let in, by route and status.", by_route(self.calls))
        add("refused_total", "counter", "Calls that were not let in.", by_route(self.refused))
        add("calls_open", "gauge", "Calls under way or waiting.", [({}, num_open)])
        retries = [({"reason": reason}, self.retries[reason]) for reason in ("broken", "refused")]
        add("retries_total", "counter", "Calls that were sent to another replica before their first token.", retries)
        add("cut_total", "counter", "Streams whose replica was lost behind their first token.", [({}, self.num_cut)])
        add("left_total", "counter", "Clients that went away before their answer had ended.", [({}, self.num_left)])
        add(
            "waited_seconds_total", "counter", "Time that calls have waited for a replica.", [({}, self.waited_seconds)]
        )
        states = [
            ({"replica": name, "state": state}, float(one.state == state))
            for name, one in sorted(replicas.items())
            for state in STATES
        ]
        add("replica_state", "gauge", "1 for the state that a replica is in.", states)
        add("replica_requests_total", "counter", "Requests sent.", by_replica("num_sent"))
        add("replica_broken_total", "counter", "Requests that the replica broke.", by_replica("num_broken"))
        add(
            "replica_circuit_opened_total",
            "counter",
            "Times that nothing was sent for a while.",
            by_replica("num_opened"),
        )
        add("replica_open", "gauge", "Requests under way.", by_replica("num_open"))
        used = [
            ({"replica": replica, "class": name}, budgets.used(replica, kind))
            for replica in sorted(replicas)
            for kind, name in enumerate(names)
        ]
        add("tokens_open", "gauge", "Tokens under way, estimated, as budgets count them.", used)
        waiting = [({"class": name}, len(queue)) for name, queue in zip(names, queues)]
        add("waiting", "gauge", "Calls that wait for a replica.", waiting)
        places = [({"class": kind, "place": place}, n) for (kind, place), n in sorted(policy.places.items())]
        add("placed_total", "counter", "Calls with a session by where they went; home has the prefix cached.", places)
        add("sessions", "gauge", "Sessions whose place is remembered.", [({}, len(policy.placement.sessions))])
        return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
