"""Events between a layer's step on a GPU and copies of the layer's memory (`LayerEvents`)."""

from dataclasses import dataclass, field

import torch


@dataclass
class LayerEvents:
    """Events of one layer.

    Attributes:
        loads: Ends of copies into its memory that its next step waits for.
        starts: Where its attention begins in the steps launched since the list was emptied: by then the layers before
            it have written their memory; None if nobody reads them.
    """

    loads: list[torch.cuda.Event] = field(default_factory=list)
    starts: list[torch.cuda.Event] | None = None

    def begin(self) -> None:
        """Let the current stream wait for copies into the layer's memory, before its attention is launched."""
        while self.loads:
            self.loads.pop().wait()
        if self.starts is not None:
            self.starts.append(torch.cuda.current_stream().record_event())
