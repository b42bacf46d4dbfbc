"""barrier, layout, plan, stats, caps, check and the names of a communicator; no copies of it."""

import copy
import gc
import pickle
import time

import numpy as np
from helpers import cases
from helpers.oracle import assert_bits

import epcomm

COMM = {"num_experts": 7, "num_topk": 2, "hidden": 16, "max_tokens_per_rank": 16, "dtype": "float32"}


def names(context):
    with context.comm(**COMM) as comm:
        assert comm.rank == context.rank and comm.num_ranks == context.num_ranks
        assert comm.backend == context.backend
        assert comm.caps, "no capability at all"
        comm.check()
        return comm.backend, sorted(str(cap) for cap in comm.caps)


def test_names_and_caps(ranks):
    answers = ranks.run(names)
    assert all(answer == answers[0] for answer in answers)


def layout_of(context, inputs, want):
    with context.comm(**COMM) as comm:
        result = comm.layout(inputs.topk_idx)
        for name, array in want.items():
            assert_bits(np.asarray(getattr(result, name)), array, name)


def test_layout_counts_picks_and_rows(ranks):
    spec = cases.Spec(ranks.num_ranks, 7, 2, hidden=16, routing="duplicates")
    inputs = spec.inputs()
    owners = np.array(spec.owner_list())
    per_rank = []
    for one in inputs:
        goes = np.zeros((one.topk_idx.shape[0], ranks.num_ranks), bool)
        for token, picks in enumerate(one.topk_idx.tolist()):
            for expert in picks:
                if expert >= 0:
                    goes[token, owners[expert]] = True
        picks = one.topk_idx[one.topk_idx >= 0]
        want = {
            "num_tokens_per_rank": goes.sum(axis=0).astype(np.int32),
            "num_tokens_per_expert": np.bincount(picks, minlength=7).astype(np.int32),
            "is_token_in_rank": goes,
        }
        per_rank.append({"inputs": one, "want": want})
    ranks.run(layout_of, per_rank=per_rank)


def barrier_meets(context):
    """Nobody leaves a barrier before the last one came."""
    with context.comm(**COMM) as comm:
        comm.barrier()
        late = context.num_ranks - 1
        if context.rank == late:
            time.sleep(0.4)
        came = time.clock_gettime(time.CLOCK_MONOTONIC)
        comm.barrier()
        left = time.clock_gettime(time.CLOCK_MONOTONIC)
        for _ in range(200):
            comm.barrier()
        return came, left


def test_barrier(ranks):
    answers = ranks.run(barrier_meets)
    last = max(came for came, _ in answers)
    assert all(left >= last for _, left in answers)


def counting(context):
    """`stats` counts calls, rows and bytes that moved; bytes grow with the real rows only."""
    with context.comm(**COMM) as comm:
        before = comm.stats()
        idx = np.full((4, 2), -1, np.int64)
        idx[:3, 0] = 6  # three tokens to the last rank
        out = comm.dispatch(np.ones((4, 16), np.float32), idx)
        comm.combine(out.x, out.handle)
        after = comm.stats()
        grown = {name: after[name] - before.get(name, 0) for name in after if isinstance(after[name], int)}
        assert grown["dispatches"] == 1 and grown["combines"] == 1
        last = context.rank == context.num_ranks - 1
        assert grown["rows_sent"] == (0 if last else 3), grown
        assert grown["rows_received"] == (3 * context.num_ranks if last else 0), grown
        assert (grown["bytes_sent"] == 0) if last else (grown["bytes_sent"] >= 3 * 64), grown
        rows = {(row["peer"], row["channel"]): row for row in comm.plan()}
        channels = max(channel for peer, channel in rows if peer == context.rank) + 1
        assert set(rows) >= {(peer, channel) for peer in range(context.num_ranks) for channel in range(channels)}
        assert all(row["backend"] == comm.backend and row["path"] for row in rows.values())
        for (peer, channel), row in rows.items():
            if "qpn" in row:  # over a NIC: the channel behind those of data is for control words
                assert peer != context.rank and row["kind"] == ("control" if channel == channels else "data")
                assert row["device"] and row["remote_device"] and row["qpn"] and row["remote_qpn"], row
                assert row["mtu"] in (256, 512, 1024, 2048, 4096), row


def test_stats_and_plan(ranks):
    ranks.run(counting)


def required(context):
    sizes = epcomm.Communicator.required_bytes(**COMM, num_ranks=context.num_ranks)
    return dict(sizes)


def test_required_bytes_by_purpose(two):
    one, other = two.run(required)
    assert one == other and all(value >= 0 for value in one.values())
    assert sum(one.values()) > 16 * 16 * 4 * 2


def interleaved(context, layout):
    """Two communicators alive, calls interleaved, each with its own shape."""
    first = context.comm(**COMM)
    second = context.comm(num_experts=3, num_topk=1, hidden=40, max_tokens_per_rank=8, dtype="float16")
    rng = np.random.default_rng(context.rank)
    for number in range(10):
        idx_a = rng.integers(-1, 7, (5, 2))
        idx_b = rng.integers(0, 3, (6, 1))
        a = first.dispatch(np.full((5, 16), number, np.float32), idx_a, layout=layout)
        b = second.dispatch(np.full((6, 40), number + 0.5, np.float16), idx_b)
        zb = second.combine(b.x, b.handle).x
        za = first.combine(a.x, a.handle, apply_weights=False).x
        assert (zb == np.float16(number + 0.5)).all()
        holders = (za[:, 0] / max(number, 1)).tolist()
        picks = (idx_a >= 0).sum(axis=1)
        for value, most in zip(holders, picks, strict=True):
            if number:
                assert value == most if layout == "expert" else (most > 0) <= value <= most
    second.close()
    assert first.dispatch(np.ones((5, 16), np.float32), idx_a).num_tokens >= 0
    first.close()


def test_two_communicators_interleaved(ranks):
    for layout in ("rank", "expert"):
        ranks.run(interleaved, layout=layout)


def copied(context):
    with context.comm(**COMM) as comm:
        handle = comm.dispatch(np.ones((2, 16), np.float32), np.zeros((2, 2), np.int64)).handle
        for thing in (comm, handle):
            for how in (copy.copy, copy.deepcopy, pickle.dumps):
                try:
                    how(thing)
                except TypeError as error:
                    assert type(thing).__name__ in str(error)
                else:
                    raise AssertionError(f"{how.__name__} of {thing!r}")
        gc.collect()  # a copy would take the engine with it
        return comm.dispatch(np.ones((2, 16), np.float32), handle=handle).num_tokens.item()


def test_a_communicator_cannot_be_copied(ranks):
    assert ranks.run(copied)[0] == 2 * ranks.num_ranks


def creation_with_log_level(context, levels):
    with context.environment({"EPCOMM_LOG": levels[context.rank]}):
        try:
            context.comm(**COMM)
        except epcomm.InvalidArgumentError as error:
            return str(error)
    return None


def test_a_bad_log_level_on_one_rank_is_told_on_all(two):
    """Nobody waits for the rank that has it."""
    for text in two.run(creation_with_log_level, levels=["warning", "loud"]):
        assert text is not None and "rank 1" in text and "EPCOMM_LOG='loud'" in text
