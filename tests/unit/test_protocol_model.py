"""The protocol of include/epcomm/README.md, in every interleaving, and each known way to break it.

The right protocol must survive all of them; each broken variant must be caught, by the rule it breaks. The second
half is what makes the first worth believing.
"""

import itertools

import pytest
from helpers.protocol_model import EVERYTHING, RECORDS, WORDS, Throughput, explore
from helpers.protocol_model_low_latency import LowLatency

pytestmark = pytest.mark.timeout(120)

PATTERNS = {
    "sequential": "D0 C0 D1 C1",
    "pairs": "D0 D1 C0 C1",
    "rolling": "D0 D1 C0 D2 C1",
    "reverse": "D0 D1 C1 C0",
}
HALVES = {
    "sequential": "S1 R1 S2 R2 S3 R3 S4 R4",
    "pairs": "S1 S2 R1 R2 S3 S4 R3 R4",
    "rolling": "S1 S2 R1 S3 R2 S4 R3 R4",
    "reverse": "S1 S2 R2 R1 S3 S4 R4 R3",
}


def calls(text):
    """Calls of a text: "D0 C0" is dispatch 0, combine 0."""
    return tuple((word[0], int(word[1:])) for word in text.split())


def throughput(ranks, text, **options):
    return explore(Throughput(ranks, calls(text), **options))


def low_latency(*texts, **options):
    return explore(LowLatency(tuple(calls(text) for text in texts), **options))


def assert_holds(result, at_least):
    """No rule is broken, and there were interleavings enough for that to mean something."""
    assert result.problem is None, "\n".join([result.problem, *result.trace])
    assert result.states >= at_least, result.states


def assert_caught(result, words):
    """The mistake is found, and for the reason expected."""
    assert result.problem is not None, f"not noticed in {result.states} states"
    assert words in result.problem, "\n".join([result.problem, *result.trace])


# Throughput mode holds.


@pytest.mark.parametrize("pattern", PATTERNS)
def test_two_ranks_every_interleaving(pattern):
    assert_holds(throughput(2, PATTERNS[pattern]), at_least=700)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_three_ranks(pattern):
    assert_holds(throughput(3, PATTERNS[pattern], eager=EVERYTHING), at_least=190)


def test_three_ranks_with_late_rows():
    """Rows that land at any time before their signal; the slowest rank may be a call behind."""
    assert_holds(throughput(3, "D0 D1 C0", eager=RECORDS), at_least=10_000)


@pytest.mark.parametrize(("text", "release", "eager"), [
    (PATTERNS["sequential"], "any", frozenset()),
    (PATTERNS["pairs"], "any", WORDS),
    (PATTERNS["rolling"], "any", RECORDS),
    ("D0 D1 D2 C0", "any", WORDS),
    ("D0 D1 D2 C2 D3 C3", "held", frozenset()),
])  # fmt: skip
def test_slow_readers_and_held_leases(text, release, eager):
    """Leases that end at any time or never: the result is then a copy, and no sender ever waits for a reader."""
    assert_holds(throughput(2, text, release=release, eager=eager), at_least=800)


def test_held_leases_of_three_ranks():
    assert_holds(throughput(3, "D0 D1 D2 C2", release="held", eager=RECORDS), at_least=1_000)
    assert_holds(throughput(3, "D0 D1 D2", release="any", eager=EVERYTHING), at_least=1_000)


@pytest.mark.parametrize(("ranks", "text", "refusals", "eager"), [
    (2, "D0 C0 D1", 2, frozenset()),
    (2, PATTERNS["pairs"], 2, WORDS),
    (2, PATTERNS["reverse"], 4, WORDS),
    (2, "D0 B1 Z1 D2", 1, WORDS),
    (3, "D0 D1", 1, RECORDS),
    (3, PATTERNS["sequential"], 2, EVERYTHING),
])  # fmt: skip
def test_refused_calls(ranks, text, refusals, eager):
    """Any ranks refuse any calls: all see it, nobody moves rows, the next call works."""
    assert_holds(throughput(ranks, text, max_refusals=refusals, eager=eager), at_least=1_000)


@pytest.mark.parametrize(("ranks", "text", "eager"), [
    (2, "D0 B1 Z1 D2", WORDS),
    (2, "D0 B1 C0 Z1 D2 C2", RECORDS),
    (3, "D0 B1 Z1", RECORDS),
])  # fmt: skip
def test_zero_copy_combine(ranks, text, eager):
    """Also where some ranks have a buffer and others push."""
    assert_holds(throughput(ranks, text, eager=eager), at_least=1_000)


@pytest.mark.parametrize(("ranks", "text", "eager"), [
    (2, "D0 A0 C0 A1", frozenset()),
    (2, "D0 X0 D1", WORDS),
    (2, "X0 B1 Z1 X2", RECORDS),
    (3, "D0 A0 C0", RECORDS),
    (3, "X0 X1", EVERYTHING),
])  # fmt: skip
def test_barriers_and_windows_of_exact_order(ranks, text, eager):
    """Calls that move no rows, and calls that fill one slot twice."""
    assert_holds(throughput(ranks, text, eager=eager), at_least=60)


def test_channels_are_not_ordered_among_themselves():
    assert_holds(throughput(2, "D0 D1 C0", channels=2), at_least=10_000)


def test_one_leasable_slot_is_enough():
    assert_holds(throughput(2, PATTERNS["pairs"], num_slots=1), at_least=700)


def test_naming_a_free_slot_is_already_the_right_to_write():
    """In throughput mode the entry record says it all; the credit is the same word said twice, and costs no wait."""
    assert_holds(throughput(2, "D0 C0 D1", variant="no_credit_wait"), at_least=300)


# Throughput mode, broken.


@pytest.mark.parametrize(("ranks", "eager"), [(2, frozenset()), (3, RECORDS)])
@pytest.mark.parametrize(("variant", "text", "options", "words"), [
    ("parity", "D0 C0 D1", {"release": "held"}, "leased as 0"),
    ("signal_before_data", "D0 C0", {}, "reads rows of epoch 0"),
    ("no_extra_slot_wait", "D0 D1 D2", {"release": "held"}, "deadlock"),
    ("no_extra_slot_reuse", "D0 D1 D2", {"release": "held"}, "leased as 0"),
    ("credit_before_last_read", "D0 D1", {}, "leased as 0"),
    ("refusal_skips_entry", "D0 C0", {"max_refusals": 1}, "deadlock"),
    ("no_done_wait", "D0 B1 Z1", {}, "buffer in epoch 2 after it changed"),
    ("", "D0 C0", {"ring": 1, "max_refusals": 1}, "overwrites that of epoch 1"),
    ("", "A0 A1", {"ring": 1}, "overwrites that of epoch 1"),
    ("no_done_wait", "X0", {}, "still reads window 0"),
])  # fmt: skip
def test_broken_protocols_are_caught(ranks, eager, variant, text, options, words):
    assert_caught(throughput(ranks, text, variant=variant, eager=eager, **options), words)


# Low latency.


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations_with_replacement(HALVES, 2)))
def test_low_latency_two_ranks_every_interleaving(first, second):
    """Two slots; each rank may receive in its own order."""
    assert_holds(low_latency(HALVES[first], HALVES[second]), at_least=1_000)


@pytest.mark.parametrize("pattern", HALVES)
def test_low_latency_three_ranks(pattern):
    assert_holds(low_latency(*[HALVES[pattern]] * 3, eager=True), at_least=900)


def test_low_latency_ranks_with_three_patterns():
    texts = [HALVES["sequential"], HALVES["rolling"], HALVES["reverse"]]
    assert_holds(low_latency(*texts, eager=True), at_least=900)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("pattern", ["pairs", "rolling"])
@pytest.mark.parametrize(("variant", "words"), [
    ("no_credits", "unread by rank"),
    ("credit_before_last_read", "unread by rank"),
    ("flag_before_rows", "reads rows of epoch 0"),
])  # fmt: skip
def test_low_latency_broken_is_caught(ranks, pattern, variant, words):
    assert_caught(low_latency(*[HALVES[pattern]] * ranks, variant=variant, eager=ranks == 3), words)


def test_low_latency_without_credits_survives_one_call_at_a_time():
    """Why the missing credit is not seen by a test that never has two calls in flight."""
    assert_holds(low_latency(HALVES["sequential"], HALVES["sequential"], variant="no_credits"), at_least=1_000)


def test_low_latency_needs_a_slot_per_call_in_flight():
    """Three send halves before a receive half: a deadlock with two slots, fine with three."""
    text = "S1 S2 S3 R1 R2 R3"
    assert_caught(low_latency(text, text), "deadlock")
    assert_holds(low_latency(text, text, num_slots=3), at_least=1_000)
