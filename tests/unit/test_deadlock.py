"""Ranks that wait for each other for ever, under the rules of streams and communicators."""

from __future__ import annotations

import pytest

from mppo.pipeline.deadlock import RankEvent, Rules, find_hang

FREE = Rules(rendezvous=False, queues=32)


def send(peer: int, group: str = "g", **more) -> RankEvent:
    return RankEvent("send", group=group, peer=peer, **more)


def receive(peer: int, group: str = "g", **more) -> RankEvent:
    return RankEvent("receive", group=group, peer=peer, **more)


def together(ranks: tuple[int, ...], group: str, **more) -> RankEvent:
    return RankEvent("collective", group=group, ranks=ranks, **more)


def wait(until: int) -> RankEvent:
    return RankEvent("stream_wait", until=until)


KERNEL = RankEvent("kernel")


def test_blocking_sends_to_each_other_need_a_buffer():
    lists = [[send(peer), wait(0), receive(peer), wait(2)] for peer in (1, 0)]
    hang = find_hang(lists, Rules(queues=32))
    assert hang is not None
    assert "rank 0: send in g" in hang
    assert "rank 1: send in g" in hang
    assert find_hang(lists, FREE) is None


@pytest.mark.parametrize(
    ("groups", "batch", "hangs"), [("gg", 0, True), ("gh", 0, False), ("gg", 1, False)]
)
def test_two_directions_of_one_communicator_hang_unless_they_are_one_operation(
    groups, batch, hangs
):
    there, back = groups
    lists = [
        [send(1, there, batch=batch), receive(1, back, batch=batch)],
        [send(0, back, batch=batch), receive(0, there, batch=batch)],
    ]
    assert bool(find_hang(lists, Rules(queues=32))) == hangs


def test_pairs_of_a_group_that_share_a_communicator_hang_in_a_circle():
    lists = [[send(1), send(2)], [send(2), receive(0)], [receive(0), receive(1)]]
    assert find_hang(lists, Rules(queues=32)) is None
    assert find_hang(lists, Rules(queues=32, pair_communicators=False)) is not None


def test_a_stream_that_waits_holds_up_the_others_in_its_hardware_queue():
    side = RankEvent("stream_wait", stream="side", until=0)
    lists = [
        [receive(1, "down"), side, send(1, "up")],
        [receive(0, "up"), wait(0), send(0, "down")],
    ]
    assert find_hang(lists, Rules(queues=32)) is None
    assert find_hang(lists, Rules(queues=1)) is not None


@pytest.mark.parametrize(
    ("posted_early", "host_waits", "hangs"),
    [(True, "device", True), (True, "stream", False), (False, "device", False)],
)
def test_a_wait_for_the_device_also_waits_for_receives_that_are_posted(
    posted_early, host_waits, hangs
):
    """The other rank answers what this rank's kernel computes."""
    early, late = ([receive(1, "down")] * here for here in (posted_early, not posted_early))
    first = [*early, KERNEL, send(1, "up"), *late]
    first += [wait(first.index(receive(1, "down"))), KERNEL]
    second = [receive(0, "up"), wait(0), KERNEL, send(0, "down")]
    assert bool(find_hang([first, second], Rules(queues=32, host_waits=host_waits))) == hangs


def test_a_wait_for_the_device_at_one_place():
    everything = RankEvent("host_wait", whole_device=True)
    lists = [
        [receive(1, "down"), everything, KERNEL, send(1, "up")],
        [receive(0, "up"), wait(0), send(0, "down")],
    ]
    hang = find_hang(lists, Rules(queues=32))
    assert hang is not None
    assert "rank 0: host_wait" in hang


@pytest.mark.parametrize("on_host", [False, True])
def test_collectives_of_two_groups_in_different_orders_hang_if_each_is_awaited(on_host):
    both = (0, 1)
    kind = "host_wait" if on_host else "stream_wait"

    def one_by_one(*groups: str) -> list[RankEvent]:
        events = []
        for group in groups:
            events.append(together(both, group, on_host=on_host))
            events.append(RankEvent(kind, until=len(events) - 1))
        return events

    assert find_hang([one_by_one("a", "b"), one_by_one("b", "a")], FREE) is not None
    assert find_hang([one_by_one("a", "b"), one_by_one("a", "b")], FREE) is None


def test_communications_on_the_host_wait_for_no_stream():
    """A host that waits for another one does not wait for its device."""
    hosts = together((0, 1), "world", on_host=True)
    lists = [
        [receive(1), wait(0), hosts, RankEvent("host_wait", until=2)],
        [hosts, RankEvent("host_wait", until=0), send(0)],
    ]
    assert find_hang(lists, Rules()) is None
    lists[0].insert(2, RankEvent("host_wait"))
    lists[0][-1] = RankEvent("host_wait", until=3)
    assert find_hang(lists, Rules()) is not None


def test_a_circle_names_the_first_and_last_event_of_every_rank():
    def lists_of(kernels: int) -> list[list[RankEvent]]:
        return [[receive(peer), wait(0), *[KERNEL] * kernels, send(peer)] for peer in (1, 0)]

    few, many = (find_hang(lists_of(count), FREE, ranks=(16, 20)) for count in (0, 9))
    assert few == many
    assert many is not None
    for rank in ("rank 16", "rank 20"):
        assert f"{rank}: send in g" in many
        assert f"{rank}: receive in g" in many


def test_communications_without_partner_are_named():
    assert find_hang([[send(1, label="line 3")], []], FREE) == (
        "rank 0: send in g (line 3) has no partner"
    )
    lists = [[together((0, 1), "a")] * 2, [together((0, 1), "a")]]
    assert find_hang(lists, FREE) == (
        "group a: numbers of collectives differ between ranks: {0: 2, 1: 1}"
    )


def test_sums_of_two_roles_that_meet_are_named():
    both = (0, 1)
    lists = [
        [together(both, "norm", message=role, label=role) for role in order]
        for order in (("actor", "critic"), ("critic", "actor"))
    ]
    hang = find_hang(lists, Rules())
    assert hang is not None
    assert "(critic) meets rank 0: collective in norm (actor)" in hang
    assert find_hang([lists[0], lists[0]], Rules()) is None


def test_messages_are_paired_by_their_order_alone():
    lists = [
        [send(1, message="x", label="x"), send(1, message="y", label="y")],
        [receive(0, message="y", label="y"), receive(0, message="x", label="x")],
    ]
    assert find_hang(lists, FREE) == (
        "rank 0: send in g (x) is received by rank 1: receive in g (y)"
    )
