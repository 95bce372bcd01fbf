# Fetches the demo model into a volume, once. It has pip, which the model comes through, and nothing else.
#   docker build -f docker/model.Dockerfile -t sapwood-model .
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm
FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="sapwood-model" \
      org.opencontainers.image.description="Fetches Sapwood's demo model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
COPY pyproject.toml docker/requirements.py docker/constraints.txt /build/
COPY pyproject.toml hatch_build.py README.md LICENSE /src/
COPY protos /src/protos
COPY sapwood /src/sapwood
COPY services /src/services
COPY kernels /src/kernels
RUN --mount=type=secret,id=ca,required=false \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/sapwood; \
    /opt/sapwood/bin/pip install -c /build/constraints.txt '/src[cli]'; \
    mkdir /models; chown 10001:10001 /models
ENV PATH=/opt/sapwood/bin:$PATH SAPWOOD_HOME=/models HOME=/tmp
USER 10001:10001
ENTRYPOINT ["sapwood", "model", "fetch"]
CMD ["demo"]
