"""Many machines, one server, on Ray Serve.

    client ──HTTP──► ingress: server/ over RemoteExecutor ──Job, by Ray Serve──► replica: AsyncLLM
                        ▲                                                           │
                        └──── a link: tokens, cache events, numbers ────────────────┘

application.py    the application: ingresses and replicas; models.py: of which models; autoscaling.py: how many
ingress.py        the web application of the single server, over `RemoteExecutor`s
remote.py         the executor of a model that runs elsewhere; remote_models.py: of several
dispatcher.py     requests on their way through replicas; nothing is lost
router.py         Ray's request router; routing_view.py: what it goes by
peers.py          links to replicas; link_server.py: the replicas' side; link.py: what a link is
replica.py        a loaded model, as a Ray Serve deployment; replica_core.py: what it is apart from Ray
share.py          what a replica takes of its machine; forwarder.py: a job on it
totals.py         all replicas together; collector.py: /metrics; views.py: the page; everywhere.py: what is asked of all
messages.py       everything that is sent
"""

from typing import Any


def build(args: dict[str, Any]) -> Any:
    """For `serve run cllm.cluster:build config=FILE`, `serve deploy` and KubeRay."""
    from cllm.cluster.application import build as build_application

    return build_application(args)
