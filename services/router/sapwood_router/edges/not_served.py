"""Paths of the APIs that clients are made for, and why they are not there: a client is told so instead of a bare 404."""

from __future__ import annotations

_NO_FILES = "files are not kept here"
_NO_AGENTS = "agents are not run here; they are programs of yours, which ask for answers"
_NO_EVENTS = "nothing here calls clients back; a response in the background is asked for by its id"
_WHY = {
    "/v1/batches": "batches are not run here; send the requests themselves, as many at once as you like",
    "/v1/messages/batches": "batches are not run here; send the requests themselves, as many at once as you like",
    "/v1/files": _NO_FILES,
    "/v1/uploads": _NO_FILES,
    "/v1/containers": _NO_FILES,
    "/v1/vector_stores": _NO_FILES,
    "/v1/skills": _NO_FILES,
    "/v1/images": "no model here makes images",
    "/v1/videos": "no model here makes videos",
    "/v1/audio": "no model here hears or speaks",
    "/v1/realtime": "no model here hears or speaks",
    "/v1/live": "no model here hears or speaks",
    "/v1/agents": _NO_AGENTS,
    "/v1/chatkit": _NO_AGENTS,
    "/v1/vaults": _NO_AGENTS,
    "/v1/decisions": _NO_AGENTS,
    "/v1/webhook_endpoints": _NO_EVENTS,
    "/v1/webhook_event_types": _NO_EVENTS,
    "/v1/safety": "requests are not looked through here",
    "/v1/content_provenance_checks": "no model here makes images",
    "/v1/projects": "there are no organizations here; `sapwood key` makes keys",
    "/v1/moderations": "no model here moderates; /classify asks a model with a head that classifies",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/evals": "evaluations are not run here; `sapwood eval` runs them",
    "/v1/assistants": "assistants and threads are not kept here; /v1/responses keeps conversations",
    "/v1/threads": "assistants and threads are not kept here; /v1/responses keeps conversations",
    "/v1/conversations": "conversations are not kept by themselves; previous_response_id goes on from a response",
    "/v1/chat/completions/": "chat completions are not kept; /v1/responses keeps its answers",
    "/v1/organization": "there are no organizations here; `sapwood key` makes keys",
    "/v1/complete": "it is Anthropic's older API; there is /v1/messages",
    "/api/pull": "models are what the workers serve; clients do not change them",
    "/api/push": "models are what the workers serve; clients do not change them",
    "/api/create": "models are what the workers serve; clients do not change them",
    "/api/copy": "models are what the workers serve; clients do not change them",
    "/api/delete": "models are what the workers serve; clients do not change them",
    "/api/blobs": "models are what the workers serve; clients do not change them",
    "/v2/classify": "there is /classify",
}


def why_not(path: str) -> str | None:
    """Why a path is not there; None: nothing is known of it."""
    for known, reason in _WHY.items():
        if path == known or path.startswith(known.rstrip("/") + "/"):
            return reason
    return None
