"""Transports, which move experts between ranks: one file per transport, imported when first used.

Optional packages are imported by the constructor, whose error names the extra to install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb_core._lazy import lazy
from eplb_core.loading.transport import Caps as Caps
from eplb_core.loading.transport import ReadBatch as ReadBatch
from eplb_core.loading.transport import ReadState as ReadState
from eplb_core.loading.transport import Region as Region
from eplb_core.loading.transport import Status as Status
from eplb_core.loading.transport import Transport as Transport

if TYPE_CHECKING:
    from eplb_core.loading.transports.cuda_ipc import CudaIpc as CudaIpc
    from eplb_core.loading.transports.cuda_ipc import IpcMemory as IpcMemory
    from eplb_core.loading.transports.faulty import Faulty as Faulty
    from eplb_core.loading.transports.local import DeferredCopy as DeferredCopy
    from eplb_core.loading.transports.local import LocalCopy as LocalCopy
    from eplb_core.loading.transports.mooncake import Mooncake as Mooncake
    from eplb_core.loading.transports.nixl import Nixl as Nixl
    from eplb_core.loading.transports.shared_memory import SharedMemory as SharedMemory
    from eplb_core.loading.transports.two_sided.torch_distributed import TorchDistributed as TorchDistributed

_HOME_OF = {
    "CudaIpc": "cuda_ipc",
    "DeferredCopy": "local",
    "Faulty": "faulty",
    "IpcMemory": "cuda_ipc",
    "LocalCopy": "local",
    "Mooncake": "mooncake",
    "Nixl": "nixl",
    "SharedMemory": "shared_memory",
    "TorchDistributed": "two_sided.torch_distributed",
}

__all__ = sorted([*_HOME_OF, "Caps", "ReadBatch", "ReadState", "Region", "Status", "Transport"])
if not TYPE_CHECKING:  # else any name would be right
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
