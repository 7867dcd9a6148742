"""What whoever opens the page may choose about it. Light: importing this file loads no server."""

from dataclasses import dataclass

HOST, PORT = "127.0.0.1", 8765


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """Every field is a flag of `vla-rlaif label DATA --ui`."""

    host: str = HOST  # address to listen on; beyond loopback whoever has the token can label
    port: int = PORT  # 0 lets the system choose, and then a page does not survive a restart
    names: tuple[str, ...] = ()  # host names besides localhost that the page is opened under
    repeat: float = 0.1  # share of the questions that ask for a labelled pair again, to measure agreement
    lease_s: float = 300.0  # a pair that nobody answers for so long goes to somebody else
    fps: float = 5.0  # frames a second at speed 1; there is one frame a decision
    cameras: tuple[str, ...] = ()  # to show; all of them by default

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; ports are 0 to 65535.")
        if not 0 < self.fps <= 60:
            raise ValueError(f"fps is {self.fps}; it must be above 0 and at most 60.")
