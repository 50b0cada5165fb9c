# The Kernel Depot worker: the thin client of a GPU node. The NVIDIA container runtime brings the driver.
FROM python:3.13.9-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/kernel-depot \
    && /opt/kernel-depot/bin/pip install --no-cache-dir pip==25.3
COPY pyproject.toml README.md ./
COPY service ./service
COPY pins ./pins
COPY builds ./builds
COPY migrations ./migrations
RUN /opt/kernel-depot/bin/pip install --no-cache-dir .

FROM python:3.13.9-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /var/cache/kernel-depot --create-home depot
COPY --from=build /opt/kernel-depot /opt/kernel-depot
ENV PATH=/opt/kernel-depot/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KERNEL_DEPOT_CACHE=/var/cache/kernel-depot/node \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /var/cache/kernel-depot
VOLUME ["/var/cache/kernel-depot"]
# Healthy means: the cache holds everything of its bundle, without asking the server.
HEALTHCHECK --interval=60s --timeout=20s --start-period=10m --retries=3 \
    CMD ["kernel-depot", "sync", "--offline"]
ENTRYPOINT ["kernel-depot"]
CMD ["sync"]
