FROM python:3.13.9-slim-trixie AS build
WORKDIR /src
COPY pyproject.toml constraints-build.txt constraints-image.txt README.md LICENSE ./
RUN pip install --no-cache-dir --require-hashes --no-deps --requirement constraints-build.txt \
    && python -m venv --without-pip /opt/d2lpm
COPY router router
COPY workers workers
COPY bench bench
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip --python /opt/d2lpm/bin/python install --no-cache-dir --require-hashes --no-deps \
        --requirement constraints-image.txt \
    && pip --python /opt/d2lpm/bin/python install --no-cache-dir --no-deps /wheels/*.whl

# The final image has neither pip nor a compiler, and writes no files: the root file system may be read-only.
FROM python:3.13.9-slim-trixie
COPY --from=build /opt/d2lpm /opt/d2lpm
ENV PATH=/opt/d2lpm/bin:$PATH PYTHONUNBUFFERED=1 D2LPM_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000 9000
# Where these variables, which override a file, change the port or add a certificate, the check follows. It does not verify
# the certificate: that names the router as its clients know it.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import os, ssl, urllib.request; scheme = 'https' if 'D2LPM_TLS_CERT' in os.environ else 'http'; port = os.environ.get('D2LPM_PORT', '8000'); urllib.request.urlopen(f'{scheme}://127.0.0.1:{port}/health', timeout=2, context=ssl._create_unverified_context())"]
ENTRYPOINT ["d2lpm"]
CMD ["serve"]
