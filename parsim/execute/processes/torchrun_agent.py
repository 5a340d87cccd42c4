"""`python -m parsim.execute.processes.torchrun_agent ARGUMENTS OF TORCHRUN`: agents that meet where only the run can.

torchrun's own store listens on every interface of the first machine. This rendezvous ("parsim") keeps torchrun's agents and
restarts, and puts their keys into the store of `parsim.execute.processes.rendezvous`. That store is bound to the address that
is named, under the token of the run (PARSIM_TOKEN).

Leaves out: machines that join later. As under torchrun's `static`, all of them are there from the beginning. Also left out are
restarts of several machines: each agent counts its own, so the ranks of one can be in another attempt than those of others.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from parsim.execute.processes.rendezvous import TOKEN_VARIABLE, bound_store

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "parsim"
"""Value of --rdzv-backend."""
TIMEOUT_S = 600
"""How long machines wait for one another, unless --rdzv-conf says otherwise (timeout=SECONDS)."""


def rendezvous_of(parameters: RendezvousParameters) -> RendezvousHandler:
    """Where the agents of a launch meet: --rdzv-endpoint HOST:PORT, --nnodes, and in --rdzv-conf `rank`, the number of this
    machine. Raises ExecutionError as `bound_store`.
    """
    from torch.distributed import PrefixStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    host, _, port = parameters.endpoint.rpartition(":")

    class BoundRendezvous(StaticTCPRendezvous):
        """torchrun's static one, in a bound store; the ranks have a store of their own."""

        def get_backend(self) -> str:
            return BACKEND

        @property
        def use_agent_store(self) -> bool:
            return False

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                token = os.environ.get(TOKEN_VARIABLE, "")
                self._store = bound_store(parameters.endpoint, token, self.rank, self.world_size, self.timeout)
            store = PrefixStore(self.run_id, self._store)
            place = RendezvousStoreInfo(self.master_addr, self.master_port)
            return RendezvousInfo(store, self.rank, self.world_size, place)

    timeout_s, rank = int(parameters.get("timeout", TIMEOUT_S)), int(parameters.get("rank", 0))
    handler: RendezvousHandler = BoundRendezvous(host, int(port or 0), rank, parameters.max_nodes, parameters.run_id, timeout_s)
    return handler


def main() -> None:
    """torchrun, with the rendezvous "parsim" beside its own."""
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, rendezvous_of)
    run.main(sys.argv[1:])


if __name__ == "__main__":
    main()
