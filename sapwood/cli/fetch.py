"""The models of a cluster, fetched before its services start."""

from __future__ import annotations

from sapwood.cli.model import fetch_model
from sapwood.cli.services import Services
from sapwood_common.models.model_files import is_elsewhere
from sapwood_common.models.packaged import PACKAGED_MODELS


def fetch_models(services: Services) -> None:
    """Fetches the model's missing files, so that all services start from the same local files.

    Raises:
        CliError: There is no such model, or it cannot be fetched.
    """
    worker, tokenizer = services.worker, services.tokenizer
    weights = worker.config.load_format != "dummy"
    fetched = fetch_model(worker.config.model, worker.config.revision, weights=weights)
    if is_elsewhere(worker.config.model):
        worker.given.update(fetched.settings)
    if is_elsewhere(tokenizer.config.model) or tokenizer.config.model in PACKAGED_MODELS:
        fetched = fetch_model(tokenizer.config.model, tokenizer.config.revision, weights=False)
        tokenizer.given.update(fetched.settings)
