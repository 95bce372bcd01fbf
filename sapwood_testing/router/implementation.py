"""Which gRPC server the fakes use."""

from __future__ import annotations

import os

from sapwood_common.serving.server import Implementation


def implementation(service: str) -> Implementation:
    """What ``SAPWOOD_<SERVICE>_GRPC_SERVER`` says, as for the service itself."""
    return "grpcio" if os.environ.get(f"SAPWOOD_{service.upper()}_GRPC_SERVER") == "grpcio" else "sapwood"
