"""What /ui adds to the HTTP port."""

from __future__ import annotations

from collections.abc import Callable

from sapwood_router.edges.guard import Guard
from sapwood_router.edges.http.origins import Origins
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.edges.ui.files import BARE, FOLDER, Files, lead_to_folder
from sapwood_router.edges.ui.fleet import FleetPage
from sapwood_router.edges.ui.route import explain_route
from sapwood_router.flow.pipeline import Pipeline
from sapwood_router.observe.status import RouterState


def ui_routes(
    pipeline: Pipeline, guard: Guard, origins: Origins, status: Callable[[], RouterState] | None
) -> list[Route]:
    """The routes.

    Args:
        pipeline: Knows the models.
        guard: Asks for keys, if the router does.
        origins: Under which names the page may be.
        status: How the router and its workers are; None: that, and how requests are routed, is for operators.
    """
    routes: list[Route] = [
        Ask("/", lead_to_folder, public=True),
        Ask(BARE, lead_to_folder, public=True),
        Ask(FOLDER, Files().show, public=True, is_folder=True),
        Ask("/ui/fleet", FleetPage(pipeline, guard, origins, status).show, public=True),
    ]
    if status is not None:
        routes.append(Post("/ui/route", explain_route))
    return routes
