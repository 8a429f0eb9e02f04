"""Private names of distributed, in one place, and what is lost without each.

They were seen in distributed 2026.1.1 to 2026.8.0. `tests/test_private_names.py` looks each up.
Nothing of distributed is imported before a function here is called.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

#: Each private name, and what no longer works without it.
LOST = {
    "distributed.shuffle._core.P2PBarrierTask": "peer-to-peer shuffles are left to the cluster",
    "distributed.Client._close": "a client that ends by itself leaves Dask's configuration",
}


def is_peer_to_peer(task: Any) -> bool:
    """Return whether a task is the barrier of a peer-to-peer shuffle."""
    from distributed.shuffle._core import P2PBarrierTask

    return type(task) is P2PBarrierTask


def end_client(client: Any, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
    """End a client, as it does itself where neither `close` nor `shutdown` is called."""
    return client._close(*args, **kwargs)  # type: ignore[no-any-return]
