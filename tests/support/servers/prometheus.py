"""A real Prometheus that reads pages of metrics for a test."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen


class Prometheus:
    """Reads every half second; ``with`` starts and ends it.

    Args:
        targets: ``static_configs``: addresses and labels.
        directory: for what it keeps.
    """

    def __init__(self, targets: Sequence[Mapping[str, Any]], directory: Path) -> None:
        jobs = [{"job_name": "slipway", "static_configs": targets}]
        config = {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": jobs}
        (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._directory = directory

    def __enter__(self) -> Prometheus:
        place, listen = self._directory, f"--web.listen-address={self._address}"
        files = f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/tsdb"
        with (place / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(["prometheus", *files, listen], stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(240)

    def query(self, expression: str) -> list[float]:
        """Return the values of what an expression selects; nothing while it starts."""
        try:
            with urlopen(
                f"http://{self._address}/api/v1/query?{urlencode({'query': expression})}", timeout=10
            ) as answer:
                found = json.load(answer)["data"]["result"]
        except (ConnectionError, URLError) as error:
            is_starting = not isinstance(error, HTTPError) or error.code == 503
            assert is_starting, f"{expression}: {error}"
            return []
        return [float(each["value"][1]) for each in found]
