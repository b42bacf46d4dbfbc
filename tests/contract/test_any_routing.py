"""Hypothesis: shapes and routings that nobody thought of, on three ranks."""

import numpy as np
from helpers import cases
from helpers.cases import Program, Spec
from helpers.oracle import RankInput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUM_RANKS = 3
EXAMPLES = 60


@st.composite
def programs(draw):
    """A communicator's shape and a few calls on it."""
    num_experts = draw(st.integers(1, 9))
    num_topk = draw(st.integers(1, num_experts))
    owners = draw(st.none() | st.lists(st.integers(0, NUM_RANKS - 1), min_size=num_experts, max_size=num_experts))
    tokens = tuple(draw(st.integers(0, 9)) for _ in range(NUM_RANKS))
    spec = Spec(
        NUM_RANKS,
        num_experts,
        num_topk,
        hidden=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from(cases.FLOATS)),
        tokens=tokens,
        weights=draw(st.booleans()),
        owners=owners,
        idx_dtype=draw(st.sampled_from(["int32", "int64"])),
        seed=draw(st.integers(0, 2**16)),
    )
    program = Program(
        spec,
        num_slots=draw(st.integers(1, 3)),
        num_channels=draw(st.sampled_from([None, 1, 2, 3])),
        max_recv_tokens=draw(st.sampled_from([None, 300])),
    )
    for number in range(draw(st.integers(1, 4))):
        inputs = []
        for one in spec.inputs(number):
            ids = [
                draw(st.lists(st.integers(-1, num_experts - 1), min_size=num_topk, max_size=num_topk))
                for _ in range(one.x.shape[0])
            ]
            ids = np.array(ids, one.topk_idx.dtype).reshape(one.topk_idx.shape)
            weights = None
            if one.topk_weights is not None:
                weights = np.where(ids < 0, np.float32(np.nan), np.nan_to_num(one.topk_weights, nan=0.5))
            inputs.append(RankInput(one.x, ids, weights))
        layout = draw(st.sampled_from(["rank", "expert"]))
        key = str(number)
        program.dispatch(
            key,
            inputs,
            layout=layout,
            expert_alignment=draw(st.sampled_from([1, 2, 5, 8])) if layout == "expert" else 1,
            capacity=draw(st.none() | st.integers(0, 30)),
            copy=draw(st.sampled_from([None, True])),
            async_op=draw(st.booleans()),
            num_sms=draw(st.sampled_from([None, 1, 2])),
        )
        if draw(st.booleans()):
            program.again(f"{key}h", key)
        for _ in range(draw(st.integers(0, 2))):
            program.combine(
                key,
                source=draw(st.sampled_from(["fresh", "leased"])),
                carried=draw(st.booleans()),
                bias=draw(st.sampled_from([None, "row", "float32", "tokens", "float32 tokens"])),
                exact_order=layout == "expert" and draw(st.booleans()),
                async_op=draw(st.booleans()),
            )
        if draw(st.booleans()):
            program.drop(key)
    return program


def test_any_routing(pools, backend):
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(programs())
    def check(program):
        cases.run(pools.get(NUM_RANKS, backend), [program], timeout_s=30)

    check()
