# Debian's Prometheus in the place of the image that the compose file names: built in the folder that holds the binary.
FROM python:3.12.12-slim-bookworm
COPY prometheus /usr/bin/prometheus
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
