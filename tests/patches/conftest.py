import os

import pytest

from tests.patches.releases import unpack


def snapshot(root):
    """Every file under `root`: relative path → (content, mode)."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    """`released(version)`: a directory with that release, shared by all tests, which must not change it."""
    sites = {}

    def get(version):
        if version not in sites:
            sites[version] = tmp_path_factory.mktemp(f"sglang-{version}-")
            unpack(version, sites[version])
        return sites[version]

    return get


@pytest.fixture
def site(released, tmp_path):
    """`site(version)`: a site-packages of the test's own, hard-linked as installers do it from their cache."""

    def get(version):
        source = released(version)
        target = tmp_path / f"site-{version}"
        for path in source.rglob("*"):
            if path.is_file():
                link = target / path.relative_to(source)
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, link)
        return target

    return get
