"""The Dockerfile, by BuildKit's parser: what can be tested of an image without building it."""

import re
import shutil
import tomllib

import dockerfile
import yaml

from harness import ROOT, run

TARGETS = {"amd64": "x86_64-unknown-linux-gnu", "arm64": "aarch64-unknown-linux-gnu"}


def instructions(name):
    """The instructions of this name, in order."""
    return [command for command in dockerfile.parse_file(str(ROOT / "Dockerfile")) if command.cmd.upper() == name]


def arguments():
    """The defaults of the build arguments."""
    return dict(text.split("=", 1) for command in instructions("ARG") for text in command.value if "=" in text)


def copied():
    """The files of the checkout that the image is built from."""
    return [source for command in instructions("COPY") if not command.flags for source in command.value[:-1]]


def test_what_is_copied_suffices_for_cargo_and_for_included_files(tmp_path):
    for source in copied():
        target = tmp_path / source
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, target)
    # Cargo refuses a manifest with a target whose file does not exist.
    run("cargo", "metadata", "--locked", "--offline", "--no-deps", "--format-version=1", "--manifest-path", tmp_path / "Cargo.toml")
    for file in (tmp_path / "src").rglob("*.rs"):
        for included in re.findall(r'include_(?:str|bytes)!\("([^"]+)"\)', file.read_text()):
            assert (file.parent / included).exists(), f"{file.relative_to(tmp_path)} includes {included}"
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(allowed) == sorted(copied())


def test_the_compiler_is_that_of_the_makefile():
    version = re.search(r"(?m)^RUST_VERSION := (\S+)$", (ROOT / "Makefile").read_text())[1]
    assert arguments()["BUILD_IMAGE"].partition(":")[2].split("-")[0] == version
    # glibc of a later release than that of the base image would not start.
    assert re.search(r"bookworm$", arguments()["BUILD_IMAGE"])
    assert "debian12" in arguments()["BASE_IMAGE"]


def test_both_platforms_have_a_target_that_dependencies_are_checked_for():
    script = " ".join(command.value[0] for command in instructions("RUN"))
    checked = tomllib.loads((ROOT / "deny.toml").read_text())["graph"]["targets"]
    environment = " ".join(instructions("ENV")[0].value)
    for platform, target in TARGETS.items():
        assert re.search(rf"{platform}\) name={target.split('-')[0]} ", script)
        assert target in checked
        assert f"CARGO_TARGET_{target.replace('-', '_').upper()}_LINKER" in environment
    assert "cargo build --release --locked --bin stowage" in script


def test_the_image_runs_as_the_user_of_the_chart_and_names_no_moving_base():
    helpers = (ROOT / "charts" / "stowage" / "templates" / "_helpers.tpl").read_text()
    user, group = (re.search(rf"(?m)^{name}: (\d+)$", helpers)[1] for name in ("runAsUser", "runAsGroup"))
    assert instructions("USER")[-1].value == (f"{user}:{group}",)
    (entry,) = instructions("ENTRYPOINT")
    assert entry.json
    assert entry.value == ("/usr/local/bin/stowage",)
    for image in arguments().values():
        name, _, tag = image.partition(":")
        assert "." in name.split("/")[0], f"{image}: the registry is not named"
        assert tag not in ("", "latest")


def test_nothing_installs_an_image_that_the_project_does_not_own():
    values = yaml.safe_load((ROOT / "charts" / "stowage" / "values.yaml").read_text())
    assert values["controller"]["image"]["repository"] == ""
    for file in (ROOT / "webhook-config").rglob("*.yaml"):
        for image in re.findall(r"(?m)^ +image: (\S+)$", file.read_text()):
            assert image.startswith(("registry.example/", "registry.k8s.io/")), f"{file.name}: {image}"
