"""Server-sent events, as OpenAI's interface sends them: bytes in, the data of whole events out."""

from __future__ import annotations

MAX_EVENT_BYTES = 2**22


class EventParser:
    """Takes the bytes of a stream as they come, cut anywhere. Holds no more than MAX_EVENT_BYTES of an event.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation; of its fields only
    `data` counts.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._is_after_return = False

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that are complete now. Raises ValueError for one that is too large."""
        if self._is_after_return and received.startswith(b"\n"):
            received = received[1:]  # the rest of a line's end that was cut in two
        if received:
            self._is_after_return = received.endswith(b"\r")
        events: list[bytes] = []
        *ended, rest = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for part in ended:
            self._add(part)
            line, self._line = bytes(self._line), bytearray()
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line == b"data":
                self._data.append(b"")
            elif not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data, self._num_bytes = [], 0
        self._add(rest)
        return events

    def _add(self, part: bytes) -> None:
        self._line += part
        self._num_bytes += len(part)
        if self._num_bytes > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
