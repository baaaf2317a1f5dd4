"""Whether the recorded ranks can wait for each other for ever, under the rules of NCCL and CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mppo.pipeline.deadlock import RankEvent, Rules, find_hang
from mppo_simulate.records import RankRecord, Recorded


@dataclass(frozen=True)
class Hang:
    """A set of rules under which the ranks hang.

    Args:
        rules: the rules.
        circle: what waits for what.
    """

    rules: Rules
    circle: str

    def describe(self) -> str:
        """The rules in words, and the circle."""
        return f"hangs with {describe_rules(self.rules)}:\n  {self.circle}"


def describe_rules(rules: Rules) -> str:
    """The rules in words."""
    parts = [
        "sends that wait for their receive" if rules.rendezvous else "buffered sends",
        "a communicator per " + ("pair of ranks" if rules.pair_communicators else "group"),
        f"{rules.queues} hardware queue" + "s" * (rules.queues > 1),
    ]
    if rules.host_waits != "nothing":
        parts.append(f"a host that waits for the {rules.host_waits} after every kernel")
    return ", ".join(parts)


def find_hangs(ranks: Sequence[RankRecord], rules: Sequence[Rules]) -> list[Hang]:
    """Let the recorded ranks run under each of the rules."""
    lists, numbers = event_lists(ranks), [one.rank for one in ranks]
    found = ((one, find_hang(lists, one, numbers)) for one in rules)
    return [Hang(one, circle) for one, circle in found if circle is not None]


def event_lists(ranks: Sequence[RankRecord]) -> list[list[RankEvent]]:
    """The records as events of the model of NCCL's rules.

    Ranks that are not simulated do the same as simulated ones. A message to or from one of them is
    an operation without a partner.
    """
    numbers = {one.rank: number for number, one in enumerate(ranks)}
    return [list(_events(one.records, numbers)) for one in ranks]


def _events(records: Sequence[Recorded], numbers: dict[int, int]) -> Iterator[RankEvent]:
    for record in records:
        until = record.until if record.until >= 0 else None
        label = record.line
        if record.kind in ("send", "receive"):
            if record.peer not in numbers:
                yield RankEvent("kernel", record.stream, label=label)
                continue
            yield RankEvent(
                record.kind, record.stream, record.group, numbers[record.peer],
                on_host=record.on_host, batch=record.batch, message=record.form, label=label,
            )  # fmt: skip
        elif record.kind == "collective":
            present = tuple(numbers[rank] for rank in record.ranks if rank in numbers)
            group = record.group, record.on_host
            yield RankEvent("collective", record.stream, group, ranks=present, message=record.form,
                        on_host=record.on_host, label=label)  # fmt: skip
        else:
            yield RankEvent(record.kind, record.stream, until=until, label=label,
                        whole_device=record.whole_device)  # fmt: skip
