"""For plain ``torch.distributed.checkpoint``: a storage writer and reader over our format.

`StrongroomWriter` works under ``dcp.save`` and ``dcp.async_save``, `StrongroomReader` under
``dcp.load``, on any number of ranks; coordination and planning are DCP's own then. What is
written is an ordinary checkpoint: committed at once, digested, on the run's line. Values that
are no tensors are stored as typed JSON, never pickled.

Only public bases are used, with the signatures that every torch since 2.6 calls.
"""

from strongroom.dcp.reader import StrongroomReader
from strongroom.dcp.writer import StrongroomWriter

__all__ = ["StrongroomReader", "StrongroomWriter"]
