# The tokenizer service, slim: no torch. Build from the top of the repository:
#   docker build -f docker/tokenizer.Dockerfile -t sapwood-tokenizer .
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
COPY pyproject.toml docker/requirements.py /
RUN python3 /requirements.py /pyproject.toml tokenizer otel > /requirements.txt

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
    /opt/sapwood/bin/python /build/sbom.py sapwood-tokenizer "$VERSION" > /opt/sapwood/sbom.cdx.json

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/sapwood /opt/sapwood
# hadolint ignore=DL3064
ENV PATH=/opt/sapwood/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 SAPWOOD_HOME=/models HF_HOME=/models/huggingface \
    SAPWOOD_TOKENIZER_HOST=0.0.0.0 SAPWOOD_TOKENIZER_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50052 9152
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=15s --start-period=60s --retries=3 \
    CMD ["sh", "-c", "port=${SAPWOOD_TOKENIZER_HEALTH_PORT:-50052}; exec python -m sapwood_common.serving.probe 127.0.0.1:${port%%,*}"]
ENTRYPOINT ["python", "-m", "sapwood_tokenizer"]
ARG PYTHON_IMAGE
ARG VERSION=0.2.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="sapwood-tokenizer" \
      org.opencontainers.image.description="Sapwood's tokenizer: text to tokens and back" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
