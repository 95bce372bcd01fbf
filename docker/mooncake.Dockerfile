# Mooncake Store, of the compose file's profile mooncake: its master, and a client that lends memory. From the top of the repository:
#   docker build -f docker/mooncake.Dockerfile -t sapwood-mooncake .
# Behind a proxy with a CA of its own: --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c
FROM ${PYTHON_IMAGE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update; apt-get install -y --no-install-recommends libcurl4 libibverbs1 libnuma1; rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/mooncake/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
COPY docker/constraints.txt docker/sbom.py /build/
ARG VERSION=0.2.0
RUN --mount=type=secret,id=ca,required=false --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/mooncake; \
    pip install mooncake-transfer-engine-non-cuda -c /build/constraints.txt; \
    pip uninstall -y pip; \
    python3 /build/sbom.py sapwood-mooncake "$VERSION" > /opt/mooncake/sbom.cdx.json
USER 10001:10001
EXPOSE 50051 8080 9003
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=15s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 50051), 5)"]
ENTRYPOINT ["mooncake_master"]
CMD ["--logtostderr=true", "--enable_http_metadata_server=true", "--http_metadata_server_host=0.0.0.0"]
ARG PYTHON_IMAGE
ARG VERSION=0.2.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="sapwood-mooncake" \
      org.opencontainers.image.description="Mooncake Store, for Sapwood's workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
