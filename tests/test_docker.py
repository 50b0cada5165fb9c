"""The container files are pinned, unprivileged and watched."""

import re
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCKER = Path(__file__).parents[1] / "docker"


@pytest.mark.parametrize("name", ["server.Dockerfile", "worker.Dockerfile"])
def test_an_image_is_pinned_unprivileged_and_watched(name: str) -> None:
    text = (DOCKER / name).read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2
    assert all(re.search(r":\d+\.\d+\.\d+-slim", base) for base in bases)
    final = text[text.rindex("FROM ") :]
    assert re.search(r"^USER \d+$", final, re.MULTILINE)
    assert "HEALTHCHECK" in final
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((DOCKER.parent / word).exists() for word in source.split()), source


@pytest.mark.parametrize("name", ["server.Dockerfile", "worker.Dockerfile"])
def test_an_image_copies_all_that_the_package_is_built_from(name: str) -> None:
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    text = (DOCKER / name).read_text()
    for folder in packed:
        assert f"COPY {folder} ./{folder}\n" in text


def test_the_worker_image_has_no_server() -> None:
    text = (DOCKER / "worker.Dockerfile").read_text()
    assert re.search(r"pip install --no-cache-dir \.$", text, re.MULTILINE)


def test_compose_has_a_database_a_store_and_a_server_that_wait_for_each_other() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"postgres", "s3", "schema", "bucket", "server"}
    for name in ("postgres", "s3"):
        assert re.search(r":\d+\.\d+", services[name]["image"])
        assert services[name]["healthcheck"]["test"]
        assert services[name]["volumes"]
    assert services["server"]["depends_on"] == {
        "schema": {"condition": "service_completed_successfully"},
        "bucket": {"condition": "service_completed_successfully"},
    }
    assert services["server"]["build"]["dockerfile"] == "docker/server.Dockerfile"
    assert services["server"]["ports"] == ["127.0.0.1:8780:8780"]


def test_compose_sets_only_settings_that_exist() -> None:
    from kernel_depot.settings import Settings

    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    names = [
        name for name in compose["services"]["server"]["environment"] if name.startswith("KERNEL_DEPOT_")
    ]
    assert names
    assert {name.removeprefix("KERNEL_DEPOT_").lower() for name in names} <= set(Settings.model_fields)


def test_compose_carries_no_secret() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    for name in ("POSTGRES_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        for value in re.findall(rf"{name}: (.+)", text):
            assert value.startswith("${")
