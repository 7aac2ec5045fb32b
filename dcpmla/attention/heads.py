"""Which heads a rank holds the weights of: its own, or those of its whole DCP group."""

from dataclasses import dataclass

from dcpmla.parallel.mesh import DCPMesh


@dataclass(frozen=True)
class HeldHeads:
    """Neighbouring heads that one rank's weight covers, in TP order.

    Attributes:
        first: the first of them, counted over the model's heads.
        count: how many they are.
        own: those among them whose values this rank hands to o_proj.
    """

    first: int
    count: int
    own: slice

    def rows(self, rows_per_head: int) -> slice:
        """Their rows of a model's whole weight, in which each head has rows_per_head."""
        return slice(self.first * rows_per_head, (self.first + self.count) * rows_per_head)


def held_heads(mesh: DCPMesh, heads_per_rank: int, whole_group: bool) -> HeldHeads:
    """The heads of this rank, or with whole_group those of all ranks of its DCP group."""
    first_own = mesh.tp_rank * heads_per_rank
    if not whole_group:
        return HeldHeads(first_own, heads_per_rank, slice(0, heads_per_rank))
    behind = mesh.dcp_rank * heads_per_rank  # heads of the group's ranks before this one
    return HeldHeads(first_own - behind, mesh.dcp_size * heads_per_rank, slice(behind, behind + heads_per_rank))
