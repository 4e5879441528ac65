"""Ray Serve's request router for replicas: the policy of `cllm.routing`, in the process of each ingress."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cllm.cluster.messages import ReplicaJob
from cllm.cluster.routing_view import Address, RoutingView, shared_view, tell_replicas


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Jobs go where the policy says; a call without a job, to any replica."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._model: str = kwargs["model"]

    @property
    def _view(self) -> RoutingView | None:
        """None in a process that is not an ingress."""
        return shared_view(self._model)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        found = {replica.replica_id.unique_id: _address(replica.routing_stats) for replica in replicas}
        tell_replicas(self._model, {name: address for name, address in found.items() if address is not None})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if (view := self._view) is not None:
            view.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Otherwise Ray asks again without a pause, and nothing else runs, while no replica can take the request.
            pending_request.routing_context.should_backoff = True
        job = pending_request.args[0] if pending_request is not None and pending_request.args else None
        view = self._view
        if not isinstance(job, ReplicaJob) or job.route is None or view is None:
            return [[random.choice(candidate_replicas)]] if candidate_replicas else []
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen = view.choose(job.route, by_name)
        return [] if chosen is None else [[by_name[chosen]]]


def _address(stats: dict[str, Any]) -> Address | None:
    """None: the replica has not said it yet."""
    if "port" not in stats:
        return None
    return Address(stats["host"], stats["port"], bytes.fromhex(stats["secret"]))
