# docker build -t ferry . && docker run --rm ferry ferry run
FROM debian:12
COPY . /src/ferry
RUN /src/ferry/scripts/container && rm -rf /src/ferry/build /var/lib/apt/lists/*
ENV PATH=/opt/ferry/bin:$PATH
