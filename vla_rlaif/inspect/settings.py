"""What whoever opens the page may choose about it. Light: importing this file loads no server."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InspectSettings:
    """Every field is a flag of `vla-rlaif inspect`."""

    host: str = "127.0.0.1"  # address to listen on; beyond loopback whoever has the token can look
    port: int = 0  # 0 lets the system choose
    names: tuple[str, ...] = ()  # host names besides localhost that the page is opened under

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; ports are 0 to 65535.")
