"""A job's identity, which distinguishes it from another job that reaches the same host and port."""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

_FORMAT = re.compile(rb"dcpmla job [0-9a-f]{64} (\{.{,4000}\})", re.DOTALL)


class StrangerError(ConnectionError):
    """A rank of another job, or no rank at all, is at the other end."""


@dataclass(frozen=True)
class JobIdentity:
    """A job as all of its ranks, and no others, know it.

    Attributes:
        launcher: One of dcpmla, torchrun, mpirun or srun.
        job: Slurm's job id, torchrun's run id (`--rdzv-id`) or the namespace of mpirun; empty where it has none.
        step: Slurm's step id, or empty.
        num_ranks: Number of ranks; torchrun may change it at a restart.
        nonce: Random text of rank 0 that the launcher handed to all ranks, or empty.
    """

    launcher: str
    job: str
    step: str
    num_ranks: int
    nonce: str = ""

    @property
    def digest(self) -> str:
        """The SHA-256 of all fields, in 64 hexadecimal digits."""
        return sha256(self._text().encode()).hexdigest()

    def pack(self) -> str:
        """Return a message of the digest and the readable fields."""
        return f"dcpmla job {self.digest} {self._text()}"

    def differences(self, other: "JobIdentity") -> list[str]:
        """List the fields in which another job differs, with both values."""
        here, there = asdict(self), asdict(other)
        return [f"{name} {there[name]!r} there, {here[name]!r} here" for name in here if here[name] != there[name]]

    def is_same_start(self, other: "JobIdentity") -> bool:
        """Return whether both are one job, before and after a restart that may have changed the number of ranks."""
        return replace(other, num_ranks=self.num_ranks) == self

    def _text(self) -> str:
        return json.dumps(asdict(self))


def unpack(message: bytes) -> JobIdentity:
    """Read a message of `JobIdentity.pack`.

    Raises:
        StrangerError: The message has another format, or its digest is wrong.
    """
    match = _FORMAT.fullmatch(message)
    with suppress(ValueError, TypeError, RecursionError):
        identity = JobIdentity(**json.loads(match[1] if match else b""))
        if identity.pack().encode() == message:
            return identity
    raise StrangerError(f"its identity is not a dcpmla job's: {message[:40]!r}")
