"""Where the robots' servers are: one file a replica in a folder that clients look into.

A server is there from its admission until its drain begins. A client whose server says that it drains (close code
1012) sends its request to another one; the request is not lost, the server that drains has not begun it.
"""

import json
from pathlib import Path

from vla_rlaif.checkpoint import write_whole


def announce(folder: Path, replica: str, url: str) -> None:
    write_whole(folder / f"{replica}.json", json.dumps({"url": url}).encode())


def withdraw(folder: Path, replica: str) -> None:
    (folder / f"{replica}.json").unlink(missing_ok=True)


def live_endpoints(folder: Path) -> list[str]:
    """URLs of the servers that take requests now."""
    urls = []
    for path in sorted(folder.glob("*.json")):
        try:
            urls.append(json.loads(path.read_text())["url"])
        except FileNotFoundError:  # withdrawn since it was listed
            continue
    return urls
