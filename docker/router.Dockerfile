# The router service, slim: no torch, no tokenizer files. Build from the top of the repository:
#   docker build -f docker/router.Dockerfile -t sapwood-router .
# Behind a proxy with a CA of its own: --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

# The sources as a wheel. This stage is the same in every image's file, so it is built once for all of them.
FROM ${PYTHON_IMAGE} AS sapwood
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/build
COPY pyproject.toml hatch_build.py README.md LICENSE /src/
COPY protos /src/protos
COPY sapwood /src/sapwood
COPY services /src/services
COPY kernels /src/kernels
RUN --mount=type=secret,id=ca,required=false --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    /opt/build/bin/pip wheel --no-deps --wheel-dir /wheel /src

# Of pyproject.toml only what is installed: changes of the rest install nothing again.
FROM ${PYTHON_IMAGE} AS requirements
# "router otel kubernetes" for --kubernetes-service: 60 MB more.
ARG EXTRAS="router otel"
COPY pyproject.toml docker/requirements.py /
# hadolint ignore=SC2086
RUN python3 /requirements.py /pyproject.toml $EXTRAS > /requirements.txt

FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/sapwood
# Dependencies first: this layer changes only with them.
COPY --from=requirements /requirements.txt /build/
COPY docker/constraints.txt /build/
RUN --mount=type=secret,id=ca,required=false --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    /opt/sapwood/bin/pip install -r /build/requirements.txt -c /build/constraints.txt
COPY --from=sapwood /wheel /wheel
COPY docker/sbom.py /build/
ARG VERSION=0.2.0
RUN /opt/sapwood/bin/pip install --no-deps /wheel/*.whl; \
    /opt/sapwood/bin/pip uninstall -y pip setuptools; \
    find /opt/sapwood -name tests -type d -prune -exec rm -rf {} +; \
    /opt/sapwood/bin/python /build/sbom.py sapwood-router "$VERSION" > /opt/sapwood/sbom.cdx.json

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/sapwood /opt/sapwood
RUN mkdir /store && chown 10001:10001 /store
ENV PATH=/opt/sapwood/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 \
    SAPWOOD_ROUTER_HOST=0.0.0.0 SAPWOOD_ROUTER_LOG_FORMAT=json \
    SAPWOOD_ROUTER_STORE=memory
USER 10001:10001
EXPOSE 50051 8000 9150
STOPSIGNAL SIGTERM
# Healthy once it can answer: it has reached the tokenizer and a worker.
HEALTHCHECK --interval=5s --timeout=15s --start-period=60s --retries=3 \
    CMD ["sh", "-c", "port=${SAPWOOD_ROUTER_HEALTH_PORT:-50051}; exec python -m sapwood_common.serving.probe 127.0.0.1:${port%%,*}"]
ENTRYPOINT ["python", "-m", "sapwood_router"]
ARG PYTHON_IMAGE
ARG VERSION=0.2.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="sapwood-router" \
      org.opencontainers.image.description="Sapwood's router: gRPC and the OpenAI API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
