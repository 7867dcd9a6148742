"""What an operator may choose about serving, and about asking a server. Light: importing this file loads no backend."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Every field is a flag of `vla-rlaif serve`."""

    host: str = "127.0.0.1"  # address to listen on; any but loopback needs tokens
    port: int = 8000  # 0 lets the system choose
    insecure: bool = False  # listen beyond loopback without tokens
    cameras: Mapping[str, str] = field(default_factory=dict)  # camera of the policy -> key in the request
    state_keys: tuple[str, ...] = ("observation/state",)  # concatenated in this order
    prompt_key: str = "prompt"
    default_prompt: str | None = None  # for robots that send no prompt
    any_prompt: bool = False  # pass on prompts that the policy was not trained on
    max_batch: int = 32  # requests in one call of the policy
    fixed_batch: bool = False  # always call with max_batch rows: then no bit of an action depends on the load
    max_wait_ms: float = 5.0  # a request waits at most this long for others to share a call with
    max_queue: int = 256  # waiting requests; one more is answered "overloaded" at once
    deadline_ms: float = 1000.0  # from receipt to reply; a request may ask for less with its key deadline_ms
    max_connections: int = 1024
    max_message_bytes: int = 8 * 2**20
    write_timeout_s: float = 5.0  # a robot that does not take its reply for so long is disconnected
    ping_interval_s: float = 10.0
    ping_timeout_s: float = 10.0  # a robot that does not answer a ping for so long is disconnected
    stall_s: float = 30.0  # /healthz fails when one call of the policy takes longer
    drain_s: float = 20.0  # after SIGTERM the process is gone within this time
    noise_scale: float = 0.0  # 0 is the deterministic mode; 1 samples as training does
    seed: int = 0  # of the noise; a robot's stream also depends on its name and on the decision

    def __post_init__(self) -> None:
        least: dict[str, float] = {"port": 0, "max_wait_ms": 0, "noise_scale": 0, "seed": 0}
        least |= dict.fromkeys(("max_batch", "max_queue", "max_connections", "max_message_bytes"), 1)
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted {value} or more.")
        above_zero = ("deadline_ms", "write_timeout_s", "ping_interval_s", "ping_timeout_s", "stall_s", "drain_s")
        for name in above_zero:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, wanted a positive number.")
        if self.port > 65535:
            raise ValueError(f"port is {self.port}, the last one is 65535.")
        if self.max_batch > self.max_queue:
            raise ValueError(f"max_batch {self.max_batch} can never fill from a queue of max_queue {self.max_queue}.")
        if not self.state_keys:
            raise ValueError("state_keys names no key; the policy reads the robot's state.")


@dataclass(frozen=True, kw_only=True)
class ServedSettings:
    """How a policy server is asked. The names are for servers that do not tell theirs; `vla-rlaif serve` does."""

    timeout_s: float = 60.0  # from a request to its action; the first ones may have to wait for a compiler
    connect_s: float = 30.0  # until the server is ready
    token_file: Path | None = None  # its first line is sent as the API key
    cameras: Mapping[str, str] = field(default_factory=dict)  # camera of the env -> key in the request
    state_key: str = "observation/state"
    prompt_key: str = "prompt"

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_s"):
            if not 0 < vars(self)[name] < float("inf"):
                raise ValueError(f"{name} is {vars(self)[name]}, wanted a positive number of seconds.")


def require_guard(settings: ServeSettings, tokens: tuple[str, ...]) -> None:
    """Robots on a network need tokens: whoever reaches the port steers what the robots get."""
    if any(len(token) < 16 for token in tokens):
        raise ValueError("a token has fewer than 16 characters; make one with `openssl rand -hex 32`.")
    if not tokens and not settings.insecure and not _is_loopback(settings.host):
        raise ValueError(
            f"host {settings.host} can be reached from other machines, and there are no tokens: give a --token-file "
            "(one token a line), or --insecure if the network is closed."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
