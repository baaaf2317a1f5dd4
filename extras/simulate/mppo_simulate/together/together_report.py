"""The text report on ranks that are simulated together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mppo.pipeline.deadlock import Rules
from mppo_simulate.records import RankRecord
from mppo_simulate.together.findings import Findings

_SHOWN = 5
"""Number of findings of a kind that the report shows."""


def describe_record(record: RankRecord) -> str:
    """One line on what a rank did."""
    kinds = Counter(one.kind for one in record.records)
    groups = {one.group for one in record.records if one.group}
    return (
        f"rank {record.rank}: {kinds['collective']:,} collectives, {kinds['send']:,} sends and "
        f"{kinds['receive']:,} receives in {len(groups)} groups; {kinds['stream_wait']:,} waits of "
        f"streams, {kinds['host_wait']:,} of the host"
    )


def describe_findings(
    findings: Findings, records: Sequence[RankRecord], rules: Sequence[Rules]
) -> str:
    """Mismatches, races and hangs; one line for each kind without any."""
    ranks = len(records)
    hangs = [hang.describe() for hang in findings.hangs]
    parts = [
        _kind("communications that do not match", [m.describe() for m in findings.mismatches],
              f"communications: those of {ranks} ranks match"),
        _kind("races between streams", findings.races,
              "streams: every access to memory is ordered after the one before it"),
        _kind("ranks that wait for ever", hangs,
              f"waits: all ranks reach the end under {len(rules)} sets of rules"),
    ]  # fmt: skip
    if findings.mismatches:
        parts[2] = "waits: not checked, since communications do not match"
    return "\n".join(parts)


def _kind(title: str, findings: Sequence[str], none: str) -> str:
    if not findings:
        return none
    left = len(findings) - _SHOWN
    more = [f"... and {left} more"] if left > 0 else []
    return "\n".join([f"{title}: {len(findings)}", *findings[:_SHOWN], *more])
