# The image of Stowage for linux/amd64 and linux/arm64:
#   docker buildx build --platform linux/amd64,linux/arm64 --tag REGISTRY/stowage:VERSION --push .
# The compiler runs on the builder's own platform and compiles for the target's. The binary depends on the sources, the crates of Cargo.lock,
# the compiler and Debian's linker and libc, and on no path, time or host. To pin the two base images, give them with their digests:
#   --build-arg BUILD_IMAGE=docker.io/library/rust:1.95-slim-bookworm@sha256:… --build-arg BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot@sha256:…

# RUST_VERSION of the Makefile.
ARG BUILD_IMAGE=docker.io/library/rust:1.95-slim-bookworm
# libc, libgcc and the public CAs. Of the same release of Debian as the builder, whose libc the binary is linked against.
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot

FROM --platform=$BUILDPLATFORM ${BUILD_IMAGE} AS build
ARG TARGETARCH
RUN case "$TARGETARCH" in \
      amd64) name=x86_64 package=gcc-x86-64-linux-gnu ;; \
      arm64) name=aarch64 package=gcc-aarch64-linux-gnu ;; \
      *) echo "no target for $TARGETARCH" >&2; exit 1 ;; \
    esac \
    && echo "$name-unknown-linux-gnu" > /target \
    && rustup target add "$(cat /target)" \
    && if [ "$TARGETARCH" != "$(dpkg --print-architecture)" ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends "$package" "libc6-dev-$TARGETARCH-cross" \
      && rm -rf /var/lib/apt/lists/*; \
    fi
WORKDIR /stowage
COPY Cargo.toml Cargo.lock ./
COPY benches/incremental.rs benches/
COPY src src
ENV CARGO_INCREMENTAL=0 \
    CARGO_PROFILE_RELEASE_STRIP=symbols \
    SOURCE_DATE_EPOCH=0 \
    RUSTFLAGS="--remap-path-prefix=/usr/local/cargo=/cargo --remap-path-prefix=/usr/local/rustup=/rustup" \
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=x86_64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CC_x86_64_unknown_linux_gnu=x86_64-linux-gnu-gcc \
    CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
RUN cargo build --release --locked --bin stowage --target "$(cat /target)" \
    && install -D --mode=0755 "target/$(cat /target)/release/stowage" /image/usr/local/bin/stowage \
    && touch --date=@0 /image/usr/local/bin/stowage

FROM ${BASE_IMAGE}
COPY --from=build /image /
# That of the chart's security context.
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/stowage"]
