"""Puts with a signal behind each between two nodes, on 8 channels, both ways at once: 8 bytes to 64 KiB, every payload
checked when its signal is seen.
"""

from pathlib import Path

import pytest
from helpers.native import build

pytestmark = pytest.mark.rxe(quick=True)
CHANNELS = 8


@pytest.mark.parametrize("puts", [100_000, pytest.param(1_000_000, marks=[pytest.mark.rxe(quick=False),
                                                                          pytest.mark.slow])])  # fmt: skip
def test_every_payload_is_there_when_its_signal_is(place, puts):
    program = build.build("put_stress")
    with place.folder() as folder:
        logs = [f"{folder}/rank{rank}" for rank in range(2)]
        ranks = [
            place.spawn(rank, [program, "--provider", "verbs", "--paths", f"rxe{rank}:1:1", "--rank", rank,
                               "--channels", CHANNELS, "--puts", puts, "--folder", folder],
                        stdout=logs[rank], stderr=logs[rank])
            for rank in range(2)
        ]  # fmt: skip
        for process in ranks:
            process.join(puts / 100_000 * 600)
        said = [Path(log).read_text() for log in logs]
        codes = [process.poll() for process in ranks]
        for process in ranks:
            process.kill()
            process.close()
    assert codes == [0, 0], said
    for rank, text in enumerate(said):
        print(text)  # commands a post, for those who look
        assert f"rank {rank}: {puts // 2 // CHANNELS * CHANNELS} puts in" in text
