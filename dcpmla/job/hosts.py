"""The hosts of a job whose ranks this command starts itself (`Hosts`), and the variables of a rank."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from dcpmla.fields import Count, Rule, check_fields, option_label, optional, rules_of, whole
from dcpmla.job.launcher import PARENT

_PORT = 29500  # torchrun's default, too
# Ranks share the cores, as under torchrun; a store that is lost would have torch log its stack.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a job, this one among them. A launcher's ranks need none of these fields.

    Attributes:
        nnodes: Number of hosts. Run the same command on each, with its own `--node-rank`; each starts -tp / N ranks.
        node_rank: Number of this host, from 0.
        master_addr: Name or address of host 0, where the ranks meet; all hosts reach it. Required for several hosts.
        master_port: Port of host 0 where the ranks meet, by default 29500 for several hosts, and a free one for one.
    Raises:
        ValueError: A field breaks its rule, `node_rank` is not below `nnodes`, or several hosts have no `master_addr`.
    """

    nnodes: Count = 1
    node_rank: Annotated[int, whole(0)] = 0
    master_addr: str | None = None
    master_port: Annotated[int | None, optional(Rule("a port in [1, 65535]", whole(1, 65535).holds))] = None

    def __post_init__(self) -> None:
        check_fields(rules_of(Hosts), vars(self), option_label)
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank (--node-rank) is {self.node_rank}; it must be below nnodes (--nnodes) {self.nnodes}"
            )
        if self.nnodes > 1 and not self.master_addr:
            raise ValueError(
                f"master_addr (--master-addr) is missing, but nnodes (--nnodes) is {self.nnodes}; give the name or "
                "address of host 0, the same on all hosts"
            )

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port where the ranks meet; port 0 is any that is free."""
        return self.master_addr or "127.0.0.1", self.master_port or (_PORT if self.nnodes > 1 else 0)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError unless each host gets equally many of the job's ranks."""
        if num_ranks % self.nnodes:
            raise ValueError(
                f"tensor_parallel_size (-tp) is {num_ranks}; it must be a multiple of nnodes (--nnodes) {self.nnodes}, "
                "because each host has as many ranks"
            )

    def variables(self, num_ranks: int, port: int) -> Iterator[dict[str, str]]:
        """Yield torchrun's variables for each rank of this host, the id of this process as that of its parent, and
        defaults.

        Args:
            num_ranks: Number of the job's ranks.
            port: Port of the ranks' store.
        """
        num_local = num_ranks // self.nnodes
        shared = {
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_local,
            "MASTER_ADDR": self.address[0],
            "MASTER_PORT": port,
            PARENT: os.getpid(),
            **{name: os.environ.get(name, default) for name, default in _DEFAULTS.items()},
        }
        for local_rank in range(num_local):
            own = {"RANK": self.node_rank * num_local + local_rank, "LOCAL_RANK": local_rank}
            yield {name: str(value) for name, value in (shared | own).items()}
