# The Kernel Depot server: API, catalog, store and durable jobs.
FROM python:3.13.9-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/kernel-depot \
    && /opt/kernel-depot/bin/pip install --no-cache-dir pip==25.3
COPY pyproject.toml README.md ./
COPY service ./service
COPY pins ./pins
COPY builds ./builds
COPY migrations ./migrations
RUN /opt/kernel-depot/bin/pip install --no-cache-dir '.[server,postgres]'

FROM python:3.13.9-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /var/lib/kernel-depot --create-home depot
COPY --from=build /opt/kernel-depot /opt/kernel-depot
ENV PATH=/opt/kernel-depot/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KERNEL_DEPOT_DATA_DIR=/var/lib/kernel-depot/data
USER 10001
WORKDIR /var/lib/kernel-depot
VOLUME ["/var/lib/kernel-depot"]
EXPOSE 8780
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8780/readyz', timeout=4)"]
ENTRYPOINT ["kernel-depot"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8780"]
