"""A stand-in for a cluster's DNS: the addresses of a Service's pods, and its named ports, as they are at the moment.

By UDP (RFC 1035, RFC 2782): ``_PORT._tcp.SERVICE`` has a record for each pod, with a name of its own and its address.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

_ADDRESS, _PLACE, _INTERNET, _NO_SUCH_NAME = 1, 33, 1, 3
_TTL_S = 1


class Names:
    """Answers until it is closed.

    Args:
        find: the addresses of a Service's pods by its name; None: there is no such Service.
        ports: of the Service by name.
        host: to listen on.
        port: to listen on; 0: a free one.
    """

    def __init__(
        self,
        find: Callable[[str], Sequence[str] | None],
        ports: Mapping[str, int],
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._find, self._ports = find, ports
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, port))
        self._socket.settimeout(0.2)
        self.port: int = self._socket.getsockname()[1]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._is_over.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            try:
                question, sender = self._socket.recvfrom(4096)
            except TimeoutError:
                continue
            self._socket.sendto(self._answer(question), sender)

    def _answer(self, question: bytes) -> bytes:
        labels, at = [], 12
        while size := question[at]:
            labels.append(question[at + 1 : at + 1 + size].decode())
            at += 1 + size
        (kind,) = struct.unpack("!H", question[at + 1 : at + 3])
        words = [word.removeprefix("_") for word in labels[: 2 if labels[0].startswith("_") else 0]]
        service = ".".join(labels[len(words) :])
        own, *_ = service.partition(".")
        is_pod = own.count("-") == 3 and own.replace("-", "").isdigit()
        found = [own.replace("-", ".")] if is_pod else self._find(service)
        answers, more = list[bytes](), list[bytes]()
        for address in found or ():
            if kind == _ADDRESS and not words:
                answers.append(_record(service, _ADDRESS, socket.inet_aton(address)))
            elif kind == _PLACE and words and words[0] in self._ports:
                pod = f"{address.replace('.', '-')}.{service}"
                place = struct.pack("!HHH", 0, 100, self._ports[words[0]]) + _name(pod)
                answers.append(_record(".".join(labels), _PLACE, place))
                more.append(_record(pod, _ADDRESS, socket.inet_aton(address)))
        flags = 0x8580 | (_NO_SUCH_NAME if found is None else 0)
        head = question[:2] + struct.pack("!HHHHH", flags, 1, len(answers), 0, len(more))
        return head + question[12 : at + 5] + b"".join((*answers, *more))


def _name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def _record(name: str, kind: int, data: bytes) -> bytes:
    return _name(name) + struct.pack("!HHIH", kind, _INTERNET, _TTL_S, len(data)) + data
