"""The transport beneath the calls, between ranks 0 and 1: what a put, a signal and many of them cost.

For backends whose transport host threads drive. Loops are native (`epcomm._measure`); messages lie in heap memory of
a communicator of its own, which no call uses.
"""

import statistics
from collections.abc import Callable
from typing import Any

import epcomm
from epcomm import _console, _host, _measure
from epcomm._launch import Place

SIZES = (8, 4096, 65536, 1 << 20)
CHANNELS = (1, 4)
ROW_S = 0.4  # how long a row is measured, about
MAX_MESSAGES = 20_000
_WORDS = 4096  # bytes of scratch memory for signal words
_FIRST = 5  # messages of the measurement that tells how many fit

DEFINITIONS = {
    "put": "one put until it has been carried out at the peer; median",
    "put + signal": "half a round trip of a put with a signal behind it and the peer's answer; median",
    "stream": "puts one behind the other on each channel, each channel with a thread, until all have been carried out",
    "requests per post": "work requests that a doorbell of the proxy stood for, in that row",
}


class TransportCase:
    """One rank's end. Ranks other than 0 and 1 only keep the barriers."""

    def __init__(self, place: Place, settings: dict[str, Any]) -> None:
        self._place, self._timeout_s = place, settings["timeout_s"]
        rows = 2 * max(CHANNELS)  # messages in and out, on each channel
        self._comm = epcomm.Communicator(
            num_experts=place.num_ranks, num_topk=1, hidden=max(SIZES), max_tokens_per_rank=rows, max_recv_tokens=rows,
            dtype="uint8", num_slots=1, num_channels=max(CHANNELS), backend=settings["backend"], device="cpu",
            timeout_s=self._timeout_s)
        inside: Any = self._comm
        sizes = _host.heap_bytes(inside._made.shape)
        self._scratch = sizes["control"] + sizes["staging"]
        self._backend = inside._engine.backend
        self._answered = 0

    def measure(self, what: str, size: int, channels: int, count: int) -> dict[str, float] | None:
        """Seconds of one message of `count` (``put``, ``put_signal``) or of all (``stream``); rank 0 tells."""
        self._comm.barrier()
        if self._place.rank > 1:
            return None
        first = self._place.rank == 0
        if what == "put_signal":
            # Words are monotonic: this one is used by these round trips alone.
            flow = {**self._flow(0, size), "word": self._scratch}
            seconds = _measure.round_trips(self._backend, flow, first, self._answered, count, self._timeout_s)
            self._answered += count
            return {"seconds": statistics.median(seconds) / 2} if first else None
        if not first:
            return None
        if what == "put":
            seconds = _measure.completions(self._backend, self._flow(0, size), False, count, self._timeout_s)
            return {"seconds": statistics.median(seconds)}
        before = self._proxy()
        flows = [self._flow(channel, size) for channel in range(channels)]
        told = {"seconds": _measure.stream(self._backend, flows, what == "stream_signal", count, self._timeout_s)}
        return told | {name: value - before[name] for name, value in self._proxy().items()}

    def _proxy(self) -> dict[str, float]:
        stats = getattr(self._backend, "proxy_stats", None)
        return {} if stats is None else {name: stats()[name] for name in ("commands", "posts", "requests")}

    def _flow(self, channel: int, size: int) -> dict[str, int]:
        begin = self._scratch + _WORDS
        return {"peer": 1 - self._place.rank, "channel": channel, "src": begin + channel * max(SIZES),
                "dst": begin + (max(CHANNELS) + channel) * max(SIZES), "size_bytes": size,
                "word": self._scratch + 64 * (1 + channel)}

    def close(self) -> None:
        self._comm.close()


def measure(ask: Callable[[list[Any]], list[Any]]) -> list[dict[str, Any]]:
    """Rows of a report. ``ask(["transport", what, size, channels, count])`` asks all ranks."""
    wanted = [("put", 8, 1), ("put_signal", 8, 1), ("put", 65536, 1), ("put_signal", 65536, 1)]
    wanted += [("stream_signal", 8, channels) for channels in CHANNELS]
    wanted += [("stream", size, channels) for size in SIZES for channels in CHANNELS]
    rows = []
    for what, size, channels in wanted:
        streams = what.startswith("stream")
        probe = ask(["transport", what, size, channels, _FIRST])[0]["seconds"] / (_FIRST if streams else 1)
        count = int(min(max(ROW_S / max(probe, 1e-9), 2 * _FIRST), MAX_MESSAGES))
        told = ask(["transport", what, size, channels, count])[0]
        each = told["seconds"] / (count * channels if streams else 1)
        row = {"what": what, "size_bytes": size, "channels": channels, "messages": count * channels,
               "seconds_each": each, "per_second": 1 / each if streams else None,
               "gbs": size / each / 1e9 if streams else None}
        if told.get("posts"):
            row |= {"commands_per_post": told["commands"] / told["posts"],
                    "requests_per_post": told["requests"] / told["posts"]}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print them as a table with definitions."""
    names = {"put_signal": "put + signal", "stream_signal": "stream of put + signal"}
    _console.print_table(
        "transport, from rank 0 to rank 1",
        ("what", "bytes", "channels", "messages", "us each", "messages/s", "GB/s", "requests per post"),
        [(names.get(row["what"], row["what"]), str(row["size_bytes"]), str(row["channels"]), str(row["messages"]),
          f"{row['seconds_each'] * 1e6:.2f}", "" if row["per_second"] is None else f"{row['per_second']:.0f}",
          "" if row["gbs"] is None else f"{row['gbs']:.3f}",
          f"{row['requests_per_post']:.2f}" if "requests_per_post" in row else "") for row in rows],
        right=range(1, 8))
