# A worker. VARIANT=cpu (default) or cuda. Build from the top of the repository:
#   docker build -f docker/worker.Dockerfile -t sapwood-worker .
#   docker build -f docker/worker.Dockerfile --build-arg VARIANT=cuda -t sapwood-worker:cuda .
# torch is taken from docker/wheels if a wheel of the variant lies there, else from TORCH_INDEX.
# Behind a proxy with a CA of its own: --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92
ARG VARIANT=cpu
# "mooncake" for --storage mooncake:// and --kv-transfer mooncake: 140 MB more; "nixl" for --storage nixl:// and --kv-transfer nixl: 130 MB more.
ARG EXTRAS=""

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

FROM ${PYTHON_IMAGE} AS base-cpu
ARG PYTHON_IMAGE
LABEL org.opencontainers.image.base.name="${PYTHON_IMAGE}"
ENV SAPWOOD_WORKER_DEVICE=cpu

# On first use flashinfer compiles kernels with nvcc and ninja, and Triton their launchers with gcc and Python.h. Both load what
# they compiled, so it goes where a volume is: /tmp is mounted noexec.
FROM ${CUDA_IMAGE} AS base-cuda
ARG CUDA_IMAGE
LABEL org.opencontainers.image.base.name="${CUDA_IMAGE}"
ENV SAPWOOD_WORKER_DEVICE=cuda FLASHINFER_WORKSPACE_BASE=/kernels TRITON_CACHE_DIR=/kernels/triton
# Archives of `sapwood kernels build`, for each kind of GPU one: what is in them is not compiled.
COPY docker/kernels /opt/kernels
ENV SAPWOOD_WORKER_KERNELS=/opt/kernels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ gcc ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Of pyproject.toml only what is installed: changes of the rest install nothing again.
# hadolint ignore=DL3006
FROM base-${VARIANT} AS requirements
ARG VARIANT
ARG EXTRAS
COPY pyproject.toml docker/requirements.py /
# hadolint ignore=SC2086
RUN case "$VARIANT" in cpu) extra=worker;; cuda) extra=gpu;; esac; \
    python3 /requirements.py /pyproject.toml "$extra" otel > /requirements.txt; \
    if [ -n "$EXTRAS" ]; then python3 /requirements.py /pyproject.toml $EXTRAS > /extras.txt; else touch /extras.txt; fi

# hadolint ignore=DL3006
FROM base-${VARIANT} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
ARG VARIANT
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl
RUN python3 -m venv /opt/sapwood
# torch and what it needs: by far the largest, so it comes first.
COPY docker/constraints.txt /build/
RUN --mount=type=secret,id=ca,required=false --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=docker/wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    case "$VARIANT" in \
        cpu) index="$TORCH_INDEX/cpu"; wheel=$(find /wheels -name 'torch-*.whl' ! -name '*+cu*' | head -n 1);; \
        cuda) index="$TORCH_INDEX/cu130"; wheel=$(find /wheels -name 'torch-*+cu*.whl' | head -n 1);; \
    esac; \
    if [ -n "$wheel" ]; then /opt/sapwood/bin/pip install "$wheel" -c /build/constraints.txt; \
    else /opt/sapwood/bin/pip install "$TORCH" --index-url "$index"; fi
COPY --from=requirements /requirements.txt /build/
RUN --mount=type=secret,id=ca,required=false --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    /opt/sapwood/bin/pip install -r /build/requirements.txt -c /build/constraints.txt
COPY --from=requirements /extras.txt /build/
RUN --mount=type=secret,id=ca,required=false --mount=type=cache,target=/root/.cache/pip \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    if [ -s /build/extras.txt ]; then /opt/sapwood/bin/pip install -r /build/extras.txt -c /build/constraints.txt; fi
COPY --from=sapwood /wheel /wheel
COPY docker/sbom.py /build/
ARG VERSION=0.2.0
RUN /opt/sapwood/bin/pip install --no-deps /wheel/*.whl; \
    /opt/sapwood/bin/pip uninstall -y pip; \
    /opt/sapwood/bin/python /build/sbom.py "sapwood-worker-$VARIANT" "$VERSION" > /opt/sapwood/sbom.cdx.json

# hadolint ignore=DL3006
FROM base-${VARIANT}
ARG EXTRAS
# What Mooncake's library is linked with.
# hadolint ignore=DL3008
RUN case " $EXTRAS " in *" mooncake "*) apt-get update && apt-get install -y --no-install-recommends \
    libcurl4 libibverbs1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*;; esac
COPY --from=build /opt/sapwood /opt/sapwood
# Where volumes are mounted: for pages of the KV cache, and for kernels compiled on first use.
RUN mkdir /kv /kernels && chown 10001:10001 /kv /kernels
ENV PATH=/opt/sapwood/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 SAPWOOD_HOME=/models HF_HOME=/models/huggingface HOME=/tmp \
    SAPWOOD_WORKER_HOST=0.0.0.0 SAPWOOD_WORKER_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50061 9161
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=15s --start-period=300s --retries=3 \
    CMD ["sh", "-c", "port=${SAPWOOD_WORKER_HEALTH_PORT:-50061}; exec python -m sapwood_common.serving.probe 127.0.0.1:${port%%,*}"]
ENTRYPOINT ["python", "-m", "sapwood_worker"]
ARG VARIANT
ARG VERSION=0.2.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="sapwood-worker" \
      org.opencontainers.image.description="A Sapwood worker: scheduler, KV cache and model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      dev.sapwood.variant="${VARIANT}"
